"""What only lists or explains answers at once: docs/design/light-commands.md."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "transformers", "numpy", "scipy", "pandas", "peft", "accelerate")
CPU_SECONDS = 0.6
LISTING = ("methods", "suites", "--help", "", "train --help")
DRIVER = """
import sys
from specbench_ss.cli import main
code = main(sys.argv[1:])
print("exit", code)
print([name for name in {heavy} if name in sys.modules], file=sys.stderr)
"""


def environment(compiled: Path) -> dict[str, str]:
    """With a place for bytecode, which an installed package has."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPYCACHEPREFIX": str(compiled)}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bytecode")


@pytest.mark.parametrize("line", LISTING)
def test_no_heavy_module_is_loaded(line: str, compiled: Path) -> None:
    command = [sys.executable, "-c", DRIVER.format(heavy=HEAVY), *line.split()]
    done = subprocess.run(command, env=environment(compiled), capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr.splitlines()[-1] == "[]", done.stderr
    said = done.stdout.splitlines()  # without arguments the help is shown, and the code is that of a mistake
    assert said[-1] == ("exit 0" if line else "exit 2") and len(said) > 4


def test_what_compiled_code_imports_is_imported() -> None:
    """In a process of its own, in which nothing has loaded torch: safetensors asks for it while it reads a header."""
    command = [sys.executable, "-m", "specbench_ss", "models", "check", "lab", "medusa"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "\nworks: " in done.stdout, done.stderr + done.stdout


@pytest.mark.parametrize("line", ["methods", "suites", "--help"])
def test_it_takes_little_time_of_the_processor(line: str, compiled: Path) -> None:
    """The least of several runs: what else the machine does at the time adds to a process's own time.

    On a slow or busy machine the limit is a multiple of what the library for command lines takes there by itself.
    """
    allowed = max(
        CPU_SECONDS, 4 * _cpu_seconds([sys.executable, "-c", "import typer.rich_utils, typer.main"], compiled)
    )
    taken: list[float] = []
    while len(taken) < 8 and min(taken, default=allowed) >= allowed:
        taken.append(_cpu_seconds([sys.executable, "-m", "specbench_ss", *line.split()], compiled))
    assert min(taken) < allowed, taken


def _cpu_seconds(command: list[str], compiled: Path) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, env=environment(compiled), capture_output=True, timeout=120, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_a_method_that_uses_torch_at_once_is_listed_all_the_same(tmp_path: Path) -> None:
    plugin = tmp_path / "eager.py"
    plugin.write_text(
        "import torch\nfrom torch import Tensor\nfrom specbench_ss.decoding.decoder import Decoder\n"
        "from specbench_ss.decoding.tree import DraftTree\nONE: Tensor = torch.ones(1)\n"
        "class Eager(Decoder):\n    name, summary = 'eager', 'imports at once'\n"
        "    def propose(self, state):\n        return DraftTree.root_only(state.root)\n"
    )
    command = [sys.executable, "-m", "specbench_ss", "methods", "--plugin", str(plugin)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "eager      imports at once" in done.stdout and "pld " in done.stdout
