"""Plugins by name, and options as text."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Literal

import pytest

from specbench_ss import registry
from specbench_ss.bench.build_config import method_specs
from specbench_ss.cli.main import main
from specbench_ss.engine.decoder import Decoder, DecodeState
from specbench_ss.engine.tree import DraftTree
from specbench_ss.errors import UserError
from specbench_ss.options import METHOD_ALIASES, MethodSpec, options_text, parse_options


@dataclass(frozen=True, slots=True)
class Options:
    k: int = field(default=4, metadata={"help": "drafted tokens"})
    rate: float = 0.5
    prune: bool = True
    shape: Literal["wide", "deep"] = "wide"
    limit: int | None = None
    weights: Path | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError("k must be at least 1")


class Plain(Decoder):
    name, summary = "plain", "drafts nothing"
    Options = Options

    def propose(self, state: DecodeState) -> DraftTree:
        return DraftTree.root_only(state.root)


NOT_A_METHOD = object()


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Registered methods, name -> value; filled in by the test."""
    values = {"plain": f"{__name__}:Plain"}

    def fake(group: str) -> list[EntryPoint]:
        return [EntryPoint(name, value, group) for name, value in values.items()] if "methods" in group else []

    monkeypatch.setattr(registry, "entry_points", fake)
    monkeypatch.setattr(
        EntryPoint, "load", lambda self: globals()[self.attr] if self.module == __name__ else _fail(self)
    )
    return values


def _fail(point: EntryPoint) -> None:
    raise ImportError(f"no module named {point.module}\nand a second line")


def test_every_kind_of_option_is_read() -> None:
    given = {
        "k": "2",
        "rate": "0.25",
        "prune": "off",
        "shape": "deep",
        "limit": "none",
        "weights": "a/b",
        "note": "x=y",
    }
    parsed = parse_options(Options, given, "method 'm'")
    assert parsed == Options(2, 0.25, False, "deep", None, Path("a/b"), "x=y")
    assert parse_options(Options, {"limit": "7"}, "m").limit == 7


def test_options_text_reads_back() -> None:
    options = Options(k=2, prune=False, weights=Path("w"))
    given = dict(part.split("=", 1) for part in options_text(options).split(", "))
    assert parse_options(Options, given, "m") == options


def test_the_project_registers_its_own() -> None:
    assert {"ar", "medusa", "ss"} <= set(registry.names(registry.METHODS))
    assert {"apps", "specbench"} <= set(registry.names(registry.SUITES))
    assert "html" in registry.names(registry.REPORTS)


def test_a_method_is_found_and_configured(plugins: dict[str, str]) -> None:
    assert registry.method_class("plain") is Plain
    assert registry.method_options(MethodSpec.parse("plain[k=2]")) == Options(k=2)


def test_unknown_name_suggests_a_known_one(plugins: dict[str, str]) -> None:
    with pytest.raises(UserError, match=r"no method 'plian' \(did you mean plain\?\); known: plain"):
        registry.method_class("plian")


@pytest.mark.parametrize(("alias", "name"), METHOD_ALIASES.items())
def test_an_alias_is_the_registered_method(alias: str, name: str) -> None:
    assert MethodSpec.parse(f"{alias}[nodes=2]").label == f"{name}[nodes=2]"
    assert name in registry.names(registry.METHODS) and alias not in registry.names(registry.METHODS)


def test_settings_take_aliases_and_a_misspelt_one_is_suggested() -> None:
    (_, spec) = method_specs("prompt-lookup", ["prompt-lookup.length=3"])
    assert spec == MethodSpec("pld", {"length": "3"})
    with pytest.raises(UserError, match=r"did you mean prompt-lookup\?"):
        registry.method_class("promt-lookup")


def test_no_method_takes_an_alias_for_its_name() -> None:
    class Taken(Plain):
        name = "draft-model"

    assert "another name of method 'sd'" in registry.method_problem(Taken, "draft-model")


def test_broken_plugin_is_named_and_stops_nothing_else(plugins: dict[str, str]) -> None:
    plugins["broken"] = "nowhere:Nothing"
    with pytest.warns(registry.PluginWarning, match="method 'broken' does not load: ImportError: no module") as caught:
        assert registry.load_all(registry.METHODS) == {"plain": Plain}
    assert all("\n" not in str(w.message) for w in caught)


def test_wrong_base_class_is_refused(plugins: dict[str, str]) -> None:
    plugins["odd"] = f"{__name__}:NOT_A_METHOD"
    with pytest.raises(UserError, match="not a subclass of Decoder"):
        registry.method_class("odd")


@pytest.mark.parametrize("line", ["methods", "check plain", "run --methods ar --dry-run --limit 1", "train -h"])
def test_no_command_is_stopped_by_a_broken_plugin(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command, real = line.split(), registry.entry_points

    def with_broken(group: str) -> list[EntryPoint]:
        own = [EntryPoint("plain", f"{__name__}:Plain", group)] if "methods" in group else []
        return [*real(group=group), *own, EntryPoint("broken", "nowhere:Nothing", group)]

    monkeypatch.setattr(registry, "entry_points", with_broken)
    monkeypatch.setattr("specbench_ss.cli.check._passes", lambda *_: True)
    load = EntryPoint.load
    monkeypatch.setattr(EntryPoint, "load", lambda self: Plain if self.name == "plain" else load(self))
    assert main(command) == 0
    told = capsys.readouterr().err
    assert ("'broken' does not load" in told) == (command[0] in ("methods", "train"))
