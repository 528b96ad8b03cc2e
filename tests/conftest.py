"""Fixtures that several tests share."""

from __future__ import annotations

import gc
import os
import shutil
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # the controller of xdist runs no test and needs no torch
    from specbench_ss.conformance import Check
    from specbench_ss.engine.target import Target

collect_ignore = ["plugin_pkg"]  # its test needs the package to be installed: tests/methods/test_plugin.py
MakeRun = Callable[..., Path]
MEMORY = Path("/dev/shm")
ROOM = 4 << 30  # bytes; the files of all tests are a tenth of it


def pytest_configure() -> None:
    """Keep temporary files in memory where it has room: to remove a folder takes a disk 3 ms, and there are thousands.

    Nothing is changed for those who chose a place themselves.
    """
    if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Those that take long come first, so that none of them is left to one process when the others are done.

    Of a test that is marked as `few`, the quick suite has some cases alone.
    """
    cases = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("few"):
            cases[item.nodeid.partition("[")[0]].append(item)
    left_out = set[pytest.Item]()
    if cases and os.environ.get("SSBENCH_THOROUGH", "") in ("", "0"):
        for every in cases.values():
            left_out |= {*every}.difference(_spread(every))
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def _spread(every: list[pytest.Item]) -> list[pytest.Item]:
    """Return as many cases as the mark states, the first among them.

    Their distances are those of a golden section, so that where two parameters have cases, both vary.
    """
    mark = every[0].get_closest_marker("few")
    return sorted(every, key=lambda item: every.index(item) * 0.618034 % 1)[: mark.args[0] if mark else None]


def pytest_collection_finish() -> None:
    """Freeze imported objects, so that later garbage collections need not scan a million of them."""
    gc.collect()
    gc.freeze()


def _without_native_kernels() -> Iterator[None]:
    """Use torch's operators, as without g++."""
    from specbench_ss.engine.layers import cpu

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "supports", lambda *_: False)
        yield


torch_kernels = pytest.fixture(_without_native_kernels, name="torch_kernels")
torch_kernels_in_module = pytest.fixture(_without_native_kernels, scope="module", name="torch_kernels_in_module")


@pytest.fixture(autouse=True, scope="session")
def everywhere() -> Iterator[None]:
    """Spare all tests what costs time, or differs from machine to machine.

    A run that ends gives all objects back to the collector, which takes the next one a third of a second. A disk that
    is waited for costs a fabricated run a hundred waits; a descriptor must be an open one. The load is that of the
    other tests, and would be observed for half a second. Tables are as wide as where nobody states how wide a terminal
    is: xdist shows its processes.
    """

    def fsync(descriptor: int) -> None:
        os.fstat(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", lambda: None)
        patch.setattr(os, "fsync", fsync)
        patch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
        patch.delenv("COLUMNS", raising=False)
        yield


@pytest.fixture(scope="session")
def lab() -> Target:
    """The lab's base. A test that changes the target loads its own."""
    from specbench_ss.models.load import load_target

    return load_target("lab", dtype="float32", device="cpu")


@pytest.fixture
def few_checks(monkeypatch: pytest.MonkeyPatch) -> tuple[Check, ...]:
    """`ssbench check` tries these alone, for tests of what it states and not of the checks."""
    from specbench_ss.conformance import kit

    few = tuple(check for check in kit.CHECKS if check.name in ("draft", "rows", "greedy", "description"))
    monkeypatch.setattr(kit.CheckRunner.results, "__defaults__", (few,))
    return few


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Ctrl-C is received, as at a terminal: a shell that starts the tests in the background has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def float32_on_cpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--dtype auto` is float32 on a CPU, as on every processor where logits are close."""
    if request.node.get_closest_marker("dtype_of_processor") is None:
        monkeypatch.setattr("specbench_ss.models.cpu_dtype.dtype_of_processor", lambda *_: ("float32", "in tests"))


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """make_run(labels=..., questions=..., failing=...) writes a run directory and returns its path."""
    from tests.fabricated import fabricate

    def make(**changes: Any) -> Path:
        return fabricate(tmp_path / f"run{len(list(tmp_path.iterdir()))}", **changes)

    return make
