"""Registration of this checkout with Python without a network, and a check for missing packages.

    python benchmarks/gpu/ready.py SITE DEVICE

SITE, a folder of PYTHONPATH, gets the package's metadata: name, version and entry points from pyproject.toml. Nothing
is built, so setuptools and pip are not needed. Exit code 2 if a required package, the methods of this checkout or the
device is missing.
"""

from __future__ import annotations

import configparser
import contextlib
import importlib
import io
import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OPTIONAL = {  # optional packages -> what is left out without them
    "plotly": "charts on the pages of experiments",
    "pydivsufsort": "the method rest",
    "rouge-score": "quality of summaries",
    "sacrebleu": "quality of translations",
    "sqlglot": "quality of SQL",
    "tenacity": "downloads",
}


def note(site: Path, project: dict[str, Any]) -> None:
    """Write the package's metadata into the folder, as `pip install -e .` does."""
    found = re.search(r'__version__ = "(.+)"', (ROOT / "specbench_ss" / "version.py").read_text())
    number = found[1] if found else "0"
    folder = site / f"{project['name'].replace('-', '_')}-{number}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {number}\n")
    points = configparser.ConfigParser(delimiters=("=",))
    points.optionxform = str  # type: ignore[assignment, method-assign]  # names keep their capitals
    points.read_dict({"console_scripts": project["scripts"], **project["entry-points"]})
    with (folder / "entry_points.txt").open("w") as file:
        points.write(file)


def packages(project: dict[str, Any]) -> tuple[list[str], list[str], list[str]]:
    """Return missing required packages, missing optional ones, and those older than required."""
    missing, optional, old = list[str](), list[str](), list[str]()
    for text in project["dependencies"]:
        name, _, least = text.partition(">=")
        try:
            installed = version(name)
        except PackageNotFoundError:
            (optional if name in OPTIONAL else missing).append(name)
            continue
        if _numbers(installed) < _numbers(least):
            old.append(f"{name} {installed} (for {least})")
    return missing, optional, old


def problem(device: str, missing: list[str]) -> str:
    """Return the reason in one line why nothing can be measured here; '' for none."""
    if missing:
        return f"required packages are missing: {', '.join(missing)}; benchmarks/gpu/wheels.sh downloads them"
    try:
        torch = importlib.import_module("torch")
        importlib.import_module("transformers")
        ours = importlib.import_module("specbench_ss")
        importlib.import_module("specbench_ss.models.load")
        with contextlib.redirect_stdout(io.StringIO()):
            importlib.import_module("specbench_ss.cli.main").main(["suites"])
    except Exception as error:  # a broken installation fails in any way
        return f"cannot be imported here: {type(error).__name__}: {' '.join(str(error).split())}"
    if ROOT not in Path(str(ours.__file__)).resolve().parents:
        return f"specbench_ss is imported from {ours.__file__}, not from this checkout: unset PYTHONPATH"
    if not entry_points(group="specbench_ss.methods", name="ar"):
        return "the methods of this checkout are not registered: is SITE on PYTHONPATH?"
    if device.startswith("cuda") and not torch.cuda.is_available():
        return f"no CUDA device: torch {torch.__version__} (CUDA {torch.version.cuda}) sees none"
    return ""


def main() -> int:
    """Register, check, and print the versions."""
    site, device = Path(sys.argv[1]), sys.argv[2]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    note(site, project)
    importlib.invalidate_caches()
    missing, optional, old = packages(project)
    if reason := problem(device, missing):
        print(f"ssbench: {reason}", file=sys.stderr)
        return 2
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    print(
        f"{name}, torch {torch.__version__}, transformers {transformers.__version__}, Python {sys.version.split()[0]}"
    )
    for package in optional:
        print(f"without {package}, left out: {OPTIONAL[package]}")
    if old:
        print(f"older than pyproject.toml asks for: {', '.join(old)}")
    return 0


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text.partition("+")[0])[:3]))


if __name__ == "__main__":
    sys.exit(main())
