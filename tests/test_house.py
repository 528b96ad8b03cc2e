"""The rules of the layout, docs/design/core.md: each is one test."""

from __future__ import annotations

import ast
import os
import subprocess
from collections.abc import Iterator
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

import networkx
import pytest

ROOT = Path(__file__).parents[1]
MOST_BYTES = 62 << 20  # of tracked files: machines with a GPU are sent 64 MiB, wheels and results among them
OUTSIDE = ("methods", "suites", "reports")  # linked into the package as specbench_ss.methods, .suites, .reports
WINGS: dict[str, set[str]] = {  # wing -> the wings that it may import from, in addition modules of specbench_ss/ itself
    "stats": set(),
    "engine": set(),
    "models": {"engine"},
    "runs": {"stats", "engine", "models"},
    "results": {"stats", "engine", "models", "runs"},
    "training": {"engine", "models", "runs"},
    "conformance": {"stats", "engine", "models", "runs", "results"},
    "bench": {"stats", "engine", "models", "runs"},
    "tuning": {"stats", "engine", "models", "runs", "results", "bench"},
}


def modules() -> dict[str, Path]:
    """Dotted name -> file, of the whole package."""
    files = [p for folder in ("specbench_ss", *OUTSIDE) for p in (ROOT / folder).rglob("*.py")]
    inside = [
        p.relative_to(ROOT)
        for p in files
        if p.relative_to(ROOT).parts[:2] not in {("specbench_ss", o) for o in OUTSIDE}
    ]
    return {_dotted(p): ROOT / p for p in inside}


def _dotted(path: Path) -> str:
    parts = path.with_suffix("").parts
    parts = parts if parts[0] == "specbench_ss" else ("specbench_ss", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def _import_nodes(file: Path) -> list[ast.ImportFrom | ast.Import]:
    return [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom | ast.Import)]


def imports(file: Path, known: dict[str, Path]) -> Iterator[str]:
    """The package's modules that a file imports, wherever it does so, for types alone included."""
    for node in _import_nodes(file):
        if isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                inner = f"{node.module}.{name.name}"
                yield inner if inner in known else node.module
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


@cache
def arrows() -> list[tuple[str, str]]:
    """(importing module, imported module)."""
    known = modules()
    return [(one, other) for one, file in known.items() for other in imports(file, known) if other in known]


def test_there_is_no_import_circle() -> None:
    circles = [sorted(c) for c in networkx.strongly_connected_components(networkx.DiGraph(arrows())) if len(c) > 1]
    assert not circles


def test_the_core_has_no_method_suite_or_report() -> None:
    outside = tuple(f"specbench_ss.{name}" for name in OUTSIDE)
    assert not [(a, b) for a, b in arrows() if not a.startswith(outside) and b.startswith(outside)]


def test_a_name_without_underscore_under_methods_is_a_method() -> None:
    """The home of a method or of a trainer: `block_drafters` has dflash and peagle, whose trainers have their own."""
    families = {path.stem for path in (ROOT / "methods").iterdir() if not path.stem.startswith(("_", "."))}
    homes = {
        point.value.split(".")[2].partition(":")[0]
        for group in ("specbench_ss.methods", "specbench_ss.trainers")
        for point in entry_points(group=group)
        if point.value.startswith("specbench_ss.methods.")
    }
    assert families == homes


def test_packages_of_methods_are_a_docstring_line() -> None:
    for file in (ROOT / "methods").rglob("__init__.py"):
        body = ast.parse(file.read_text()).body
        assert len(body) == 1 and isinstance(body[0], ast.Expr) and body[0].end_lineno == 1, file


def test_a_wing_has_only_those_below_it() -> None:
    """Commands and the public API have all wings; no wing has the commands."""

    def wing(module: str) -> str:
        return module.split(".")[1] if module.count(".") > 0 else ""

    found = {(wing(a), wing(b)) for a, b in arrows() if wing(a) in WINGS and wing(b) in {*WINGS, "cli"}}
    assert not [(a, b) for a, b in found if a != b and b not in WINGS[a]]


def test_commands_alone_print_with_rich() -> None:
    found = {one for one, file in modules().items() for name in imports(file, {}) if name.partition(".")[0] == "rich"}
    assert found and all(one.startswith("specbench_ss.cli.") for one in found)


def test_the_tree_can_be_sent_to_a_machine_without_a_network() -> None:
    """With room for the wheels that are missing there: benchmarks/gpu/README.md."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False).stdout.split(b"\0")
    files = [ROOT / os.fsdecode(name) for name in listed if name]
    if not files:
        pytest.skip("this is no checkout")
    sizes = {file: file.lstat().st_size for file in files if file.is_symlink() or file.exists()}
    largest = [str(file.relative_to(ROOT)) for file in sorted(sizes, key=lambda file: -sizes[file])[:5]]
    assert sum(sizes.values()) < MOST_BYTES, largest
