"""Options and helpers that several commands share."""

from __future__ import annotations

import json
import shlex
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from inspect import Parameter, Signature
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Self, get_type_hints

import typer
from rich.console import Console, RenderableType
from rich.live import Live
from rich.markup import escape

from specbench_ss.errors import UserError, known_words
from specbench_ss.options import bounds_of
from specbench_ss.redaction import redacted_words
from specbench_ss.runs.run_options import FINDINGS, RunOptions, fields_of, flag

if TYPE_CHECKING:  # pandas takes half a second
    from specbench_ss.results.analysis import Results
    from specbench_ss.results.findings import Check


def interrupted(rest: str) -> typer.Exit:
    """Print the line on an interrupted command, and return the exception to raise. rest: the end of that line."""
    print(f"\nssbench: interrupted{rest}", file=sys.stderr)
    return typer.Exit(130)


def to_go_on(out: Path, hidden: Callable[[list[str]], list[str]] = redacted_words) -> str:
    """Return '; to resume: COMMAND' if there is something to resume, else ''. hidden: removes secrets from words."""
    if not (out.is_dir() and any(p.suffix != ".tmp" for p in out.iterdir())):
        return ""
    arguments = hidden(sys.argv[1:])
    if "--resume" not in arguments:
        arguments.append("--resume")
    if not any(word == "--out" or word.startswith("--out=") for word in arguments):
        arguments += ["--out", str(out)]
    return f"; to resume: {shlex.join(['ssbench', *arguments])}"


def print_warning(text: object) -> None:
    """Print a warning to standard error."""
    print(f"ssbench: warning: {text}", file=sys.stderr)


def print_text(console: Console, text: str, style: str = "") -> None:
    """Print text as it is, without markup; lines are not broken."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def print_json(content: Any) -> None:
    """Print JSON for other programs, in ASCII, which every terminal and pipe takes."""
    print(json.dumps(content, indent=1))


def typer_option(name: str, kind: type[Any] = RunOptions, panel: str | None = None) -> Any:
    """Return typer's declaration of a dataclass's field. panel: in place of the field's own.

    The fields of a trainer's options have metadata help and flag alone; their bounds are shown in the help.
    """
    field, bounds = fields_of(kind)[name], bounds_of(kind).get(name)
    about, help = field.metadata, str(field.metadata.get("help", ""))
    if "panel" not in about:
        flags = [about["flag"]] if "flag" in about else []
        return typer.Option(*flags, help=f"{help} ({bounds})" if bounds else help, rich_help_panel=panel)
    if about["position"]:
        return typer.Argument(metavar=about["metavar"], help=help)
    least, most = bounds.ends if bounds else (None, None)
    short = [about["short"]] if about["short"] else []
    flags = [flag(name), *short] if field.type in (bool, "bool") else []
    shown = about["panel"] if panel is None else panel
    ends: dict[str, Any] = {"parser": about["parser"]} if about["parser"] else {"min": least, "max": most}
    return typer.Option(*flags, **ends, metavar=about["metavar"], help=help, rich_help_panel=shown or None)


def parameters(kind: type[Any], panel: str | None = None) -> list[Parameter]:
    """Return a dataclass's fields as parameters that typer reads."""
    hints, made = get_type_hints(kind), list[Parameter]()
    for f in (f for f in fields(kind) if f.init):
        default = Parameter.empty if f.default is MISSING else f.default
        hint, declared = hints[f.name], typer_option(f.name, kind, panel)
        made.append(Parameter(f.name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, declared]))
    return made


def take_options(command: Callable[..., Any], options: type[Any], more: Sequence[Parameter] = ()) -> None:
    """Give a command, which takes a context and keywords, the fields of a dataclass as its options in typer's eyes."""
    ctx = Parameter("ctx", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    own = [ctx, *parameters(options), *more]
    command.__annotations__ = {p.name: p.annotation for p in own} | {"return": None}
    command.__signature__ = Signature(own)  # type: ignore[attr-defined]


Plugin = Annotated[list[str] | None, typer_option("plugin")]
FailOn = Annotated[str | None, typer_option("fail_on")]
Settings = Annotated[list[str] | None, typer_option("set", panel="")]
Tasks = Annotated[str | None, typer_option("tasks", panel="")]
ChatTemplate = Annotated[str | None, typer_option("chat_template", panel="")]
TrustRemoteCode = Annotated[bool, typer_option("trust_remote_code", panel="")]
MODEL: str = fields_of(RunOptions)["model"].metadata["help"]


def read(text: str | None) -> tuple[str, ...]:
    """Return the names of the findings; None gives none. Raises UserError for an unknown or blank one."""
    names = () if text is None else tuple(part.strip() for part in text.split(","))
    for name in names:
        if not name:
            raise UserError(f"--fail-on has a blank where a finding is expected: {', '.join(FINDINGS)}")
        if name not in FINDINGS:
            raise UserError(f"--fail-on: there is no finding {name!r}{known_words(name, FINDINGS)}")
    return names


def found(made: Sequence[Check], names: Sequence[str]) -> list[str]:
    """Return the requested findings of a run, one text for each check: its first line and the number of others."""
    why = []
    for check in made:
        own = ("not-checked",) if check.state == "not checked" else (check.name, *check.findings)
        name = next((name for name in own if name in names), None)
        if name and check.state != "ok":
            more = f", and {len(check.lines) - 1} more" if len(check.lines) > 1 else ""
            why.append(f"{name} ({check.lines[0] if check.lines else check.sentence}{more})")
    return why


def fail(results: Results, requested: str | None) -> None:
    """Exit with code 1 and one line with the reason if a run has one of these findings."""
    names = read(requested)
    if not names:
        return

    why = found(results.checks, names)
    if why:
        print(f"ssbench: --fail-on: {' '.join('; '.join(why).split())}", file=sys.stderr)
        raise typer.Exit(1)


REDRAW_S = 0.5  # a live display is drawn again at most this often


class LiveView(ABC):
    """Live display on a terminal with its warnings; a context manager."""

    def __init__(self, console: Console) -> None:
        self.console, self._drawn = console, 0.0
        self.live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self.live.start()
        self.draw()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.live.stop()

    @abstractmethod
    def view(self) -> RenderableType:
        """Return the current display."""

    def draw(self) -> None:
        """Draw the display on a terminal."""
        if self.console.is_terminal:
            self.live.update(self.view(), refresh=True)
        self._drawn = time.monotonic()

    def draw_soon(self) -> None:
        """Draw the display unless it was drawn a moment ago."""
        if time.monotonic() - self._drawn >= REDRAW_S:
            self.draw()

    def on_warning(self, text: str) -> None:
        """Print a warning, which stays on the screen."""
        self.console.print(f"[yellow]warning:[/] {escape(text)}", highlight=False, soft_wrap=True)
