"""Plugins by name, and options as text."""

from __future__ import annotations

from dataclasses import dataclass, field, make_dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Literal

import pytest

from specbench_ss import registry
from specbench_ss.cli.main import main
from specbench_ss.engine.decoder import Decoder, State
from specbench_ss.engine.tree import DraftTree
from specbench_ss.errors import UserError
from specbench_ss.options import MethodSpec, describe_options, options_text, parse_options


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

    def propose(self, state: State) -> DraftTree:
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


@pytest.mark.parametrize("text,value", [("on", True), ("TRUE", True), ("yes", True), ("off", False), ("False", False)])
def test_switches(text: str, value: bool) -> None:
    assert parse_options(Options, {"prune": text}, "m").prune is value


def test_options_text_reads_back() -> None:
    options = Options(k=2, prune=False, weights=Path("w"))
    given = dict(part.split("=", 1) for part in options_text(options).split(", "))
    assert parse_options(Options, given, "m") == options


@pytest.mark.parametrize(
    "given,words",
    [
        ({"kk": "1"}, "no option 'kk' (did you mean k?)"),
        ({"k": "two"}, "option k='two' is not int"),
        ({"k": "0"}, "k must be at least 1"),
        ({"prune": "maybe"}, "is not on|off"),
        ({"shape": "tall"}, "is not wide|deep"),
        ({"limit": "many"}, "is not int or none"),
    ],
)
def test_bad_options_are_one_line(given: dict[str, str], words: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_options(Options, given, "method 'm'")
    assert words in str(caught.value)
    assert str(caught.value).startswith("method 'm'")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["nan", "inf", "-Infinity", "1e999"])
@pytest.mark.parametrize("kind", [float, float | None])
def test_a_number_that_is_not_finite_is_refused(text: str, kind: Any) -> None:
    options = make_dataclass("Options", [("x", kind, 0.0)], frozen=True)
    with pytest.raises(UserError, match=f"^m: option x='{text}' is not a finite number"):
        parse_options(options, {"x": text}, "m")


def test_described_options() -> None:
    first, *_, last = describe_options(Options)
    assert (first.name, first.type, first.default, first.help) == ("k", "int", "4", "drafted tokens")
    assert (last.name, last.type) == ("note", "text")


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


def test_broken_plugin_is_named_and_stops_nothing_else(plugins: dict[str, str]) -> None:
    plugins["broken"] = "nowhere:Nothing"
    with pytest.warns(registry.PluginWarning, match="method 'broken' does not load: ImportError: no module") as caught:
        assert registry.load_all(registry.METHODS) == {"plain": Plain}
    assert all("\n" not in str(w.message) for w in caught)


def test_wrong_base_class_is_refused(plugins: dict[str, str]) -> None:
    plugins["odd"] = f"{__name__}:NOT_A_METHOD"
    with pytest.raises(UserError, match="not a subclass of Decoder"):
        registry.method_class("odd")


def test_listing_loads_nothing(plugins: dict[str, str]) -> None:
    plugins["broken"] = "nowhere:Nothing"
    assert registry.names(registry.METHODS) == ["broken", "plain"]


class Abstract(Decoder):
    name, summary = "abstract", "lacks propose"


class Nameless(Plain):
    name = None  # type: ignore[assignment]


class Optionless(Plain):
    name = "optionless"
    Options = dict  # type: ignore[assignment]


class Spaced(Plain):
    name = "my method"


class All(Plain):
    name = registry.ALL


@dataclass(frozen=True)
class Needed:
    k: int


@dataclass(frozen=True)
class Listed:
    ks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Refusing:
    def __post_init__(self) -> None:
        raise KeyError("never")


class NeededOption(Plain):
    name = "neededoption"
    Options = Needed  # type: ignore[assignment]


class ListedOption(Plain):
    name = "listedoption"
    Options = Listed  # type: ignore[assignment]


class RefusingOptions(Plain):
    name = "refusingoptions"
    Options = Refusing  # type: ignore[assignment]


@pytest.mark.parametrize(("kind", "name"), [(Spaced, "my method"), (All, "all")])
def test_a_name_that_the_command_line_cannot_tell_from_others_is_refused(kind: type[Decoder], name: str) -> None:
    assert f"a method cannot be called {name!r}" in registry.method_problem(kind, name)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("NeededOption", "its option k has no default"),
        ("ListedOption", "its option ks is .*, which cannot be given as text"),
        ("RefusingOptions", "its Options cannot be made: KeyError: 'never'"),
        ("Abstract", "it is abstract: it lacks propose"),
        ("Nameless", "it has no name"),
        ("Optionless", "its Options is no dataclass"),
        ("Plain", "its `name` is 'plain'"),
    ],
)
def test_a_method_that_nothing_can_be_decoded_with_is_named_and_stops_nothing_else(
    plugins: dict[str, str], kind: str, said: str
) -> None:
    plugins[kind.lower() if kind != "Plain" else "other"] = f"{__name__}:{kind}"
    with pytest.warns(registry.PluginWarning, match=said):
        assert registry.load_all(registry.METHODS) == {"plain": Plain}


def test_a_plugin_that_ends_the_process_at_import_is_named(
    plugins: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins["quits"] = "nowhere:Nothing"
    monkeypatch.setattr(f"{__name__}._fail", lambda point: exit(3))
    with pytest.warns(registry.PluginWarning, match="method 'quits' does not load: SystemExit: 3"):
        assert registry.load_all(registry.METHODS) == {"plain": Plain}


@pytest.mark.parametrize("line", ["methods", "check plain", "run --methods ar --dry-run --limit 1", "train -h"])
def test_no_command_is_stopped_by_a_broken_plugin(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command, real = line.split(), registry.entry_points

    def with_broken(group: str) -> list[EntryPoint]:
        own = [EntryPoint("plain", f"{__name__}:Plain", group)] if "methods" in group else []
        return [*real(group=group), *own, EntryPoint("broken", "nowhere:Nothing", group)]

    monkeypatch.setattr(registry, "entry_points", with_broken)
    monkeypatch.setattr("specbench_ss.cli.check._holds", lambda *_: True)
    load = EntryPoint.load
    monkeypatch.setattr(EntryPoint, "load", lambda self: Plain if self.name == "plain" else load(self))
    assert main(command) == 0
    told = capsys.readouterr().err
    assert ("'broken' does not load" in told) == (command[0] in ("methods", "train"))
