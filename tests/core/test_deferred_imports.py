"""Modules that take long to import wait for their first use; from then on nobody sees that they waited."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any

import pytest

from specbench_ss.deferred_imports import deferred_imports

PACKAGE = {
    "__init__.py": "RUNS.append('whole')\nfrom heavy import part\nfrom heavy.part import Thing\nVALUE = 3\n",
    "part.py": "import heavy\nRUNS.append('part')\nclass Thing: pass\n",
    "later.py": "RUNS.append('later')\n",
}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Which modules of the package `heavy` have run, in order."""
    (tmp_path / "heavy").mkdir()
    for name, text in PACKAGE.items():
        (tmp_path / "heavy" / name).write_text(text)
    seen: list[str] = []
    monkeypatch.setattr(builtins, "RUNS", seen, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    yield seen
    for name in [name for name in sys.modules if name.partition(".")[0] == "heavy"]:
        del sys.modules[name]


def module(text: str) -> dict[str, Any]:
    """The names of a module of this text."""
    names: dict[str, Any] = {"__name__": "importer"}
    exec(text, names)
    return names


def test_it_runs_when_something_of_it_is_used_and_every_importer_has_it_then(runs: list[str]) -> None:
    with deferred_imports(["heavy"]):
        one = module("import heavy\ndef use(): return heavy.VALUE")
        two = module("import heavy as short")
        assert runs == [] and "heavy" not in sys.modules
        assert one["use"]() == 3
        assert runs == ["whole", "part"]
        assert one["heavy"] is two["short"] is sys.modules["heavy"]
        assert type(one["heavy"]) is ModuleType


@pytest.mark.parametrize(
    "text",
    ["import heavy.part", "from heavy.part import Thing", "from heavy import part", "from heavy import Thing"],
)
def test_no_part_of_it_runs_twice(runs: list[str], text: str) -> None:
    with deferred_imports(["heavy"]):
        module("import heavy")
        module(text)
        module("import heavy\nassert heavy.Thing is heavy.part.Thing")
    assert runs == ["whole", "part"]


def test_a_submodule_that_it_does_not_import_is_imported_as_ever(runs: list[str]) -> None:
    with deferred_imports(["heavy"]):
        module("import heavy")
        module("import heavy.later\nassert heavy.later and heavy.VALUE == 3")
    assert runs == ["whole", "part", "later"]


def test_import_statements_are_as_ever_after_the_first_use_and_after_the_command(runs: list[str]) -> None:
    before = builtins.__import__
    with deferred_imports(["heavy"]):
        used = module("import heavy")
        assert used["heavy"].VALUE == 3
        assert builtins.__import__ is before
    with deferred_imports(["json"]):
        assert builtins.__import__ is not before
        assert module("import json")["json"] is sys.modules["json"]  # imported already
    assert builtins.__import__ is before


def test_what_waits_still_when_the_command_has_ended_works(runs: list[str]) -> None:
    with deferred_imports(["heavy"]):
        left = module("import heavy\nalias = [heavy]")
    assert runs == []
    assert left["alias"][0].VALUE == 3 and left["alias"][0].part.Thing is sys.modules["heavy"].Thing


def test_what_it_lacks_and_what_is_not_installed_are_told_as_ever(runs: list[str]) -> None:
    with deferred_imports(["heavy", "not_there_at_all"]):
        names = module("import heavy, not_there_at_all")
        with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
            names["not_there_at_all"].anything  # noqa: B018
        with pytest.raises(AttributeError, match="'heavy' has no attribute 'nothing'"):
            names["heavy"].nothing  # noqa: B018


def test_threads_that_use_it_at_once_all_have_it(runs: list[str]) -> None:
    with deferred_imports(["heavy"]):
        names = module("import heavy\ndef use(): return heavy.VALUE")
        values: list[int] = []
        threads = [Thread(target=lambda: values.append(names["use"]())) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert values == [3] * 8 and runs == ["whole", "part"]
