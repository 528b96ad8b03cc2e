"""Options and helpers that several commands share."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from specbench_ss.errors import UserError, known_words
from specbench_ss.registry import load_plugin
from specbench_ss.results.analysis import Results
from specbench_ss.results.checks import Check


def interrupted(rest: str) -> typer.Exit:
    """Print the line that says how to go on, and return the exception to raise. rest: the rest of that line."""
    print(f"\nssbench: interrupted{rest}", file=sys.stderr)
    return typer.Exit(130)


def to_go_on(out: Path, hidden: Callable[[list[str]], list[str]] = list) -> str:
    """Return '; to go on: COMMAND' where there is something to go on with, else ''. hidden: words without secrets."""
    begun = out.is_dir() and any(p.suffix != ".tmp" for p in out.iterdir())
    return f"; to go on: {resume_line(out, hidden)}" if begun else ""


def resume_line(out: Path, hidden: Callable[[list[str]], list[str]] = list) -> str:
    """Return this command line with --resume and with --out, the folder that it wrote to."""
    arguments = hidden(sys.argv[1:])
    if "--resume" not in arguments:
        arguments.append("--resume")
    if not any(word == "--out" or word.startswith("--out=") for word in arguments):
        arguments += ["--out", str(out)]
    return shlex.join(["ssbench", *arguments])


def _load(ctx: typer.Context, given: Any) -> Any:
    """Register the methods of the files before the command begins.

    Returns a tuple of `PluginFile`; an option callback.
    """
    if ctx.resilient_parsing:
        return given
    return tuple(load_plugin(Path(file)) for file in dict.fromkeys(given or ()))


Plugin = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE.py",
        help="Python file that defines methods of your own. May be given several times.",
        callback=_load,
    ),
]


MODEL = (
    "Target model: lab (it comes with ssbench), smollm2 (after `ssbench models fetch smollm2`), the folder or hub id "
    "of a Hugging Face causal language model, or a GGUF file."
)
DTYPE = (
    "Number format of the model's weights and arithmetic. float16-weights: weights rounded to float16, arithmetic in "
    "float32, on CPUs. auto: bfloat16 on a GPU; on a CPU it is measured, and of float32, float16-weights and bfloat16 "
    "the first is taken that is nearly as fast as the fastest (the lab: float32)."
)
DEVICE = "Device to run on: auto (a GPU where there is one), cpu, cuda or cuda:N."
DEVICES = f"{DEVICE} `cuda:0,cuda:1` or `cuda:all` divides the model's layers over several GPUs of this machine."
ENGINE = (
    "How steps are made. eager: operator by operator. graph: passes of few rows are recorded once as CUDA graphs and "
    "replayed, so that no launch is waited for. They are held against eager ones: a few small trees when the model is "
    "loaded, and every recording once when it is made. auto: graph on one CUDA device where the model stands that, and "
    "eager elsewhere and for several requests side by side."
)
CHAT_TEMPLATE = "Chat template to use instead of the tokenizer's own: plain, vicuna, llama-2, or a Jinja file."
TRUST = "Allow Python code that comes with the model to run. Only for models whose authors you trust."
CATEGORIES = "Ask only the questions of these tasks of the suite."
SET = "Set one option of a method, for every variant of it. May be given several times."
DRY_RUN = "Check everything, say what would be run, and stop."


KINDS = (
    "failed", "mismatch", "biased", "untestable", "impossible", "void", "unstable", "disturbed", "near-tie", "length",
    "unjudged", "incomplete", "warnings",
)  # fmt: skip
NOT_CHECKED = "not-checked"  # whatever could not be checked
NAMES = (*KINDS, NOT_CHECKED)


def read(text: str | None) -> tuple[str, ...]:
    """Return the names of the findings; None gives none. Raises UserError for an unknown or blank one."""
    names = () if text is None else tuple(part.strip() for part in text.split(","))
    for name in names:
        if not name:
            raise UserError(f"--fail-on has a blank where a finding is expected: {', '.join(NAMES)}")
        if name not in NAMES:
            raise UserError(f"--fail-on: there is no finding {name!r}{known_words(name, NAMES)}")
    return names


def _checked(text: str | None) -> str | None:
    """Return the text: an option callback, so that a mistake is found before anything is done."""
    read(text)
    return text


FailOn = Annotated[
    str | None,
    typer.Option(
        "--fail-on",
        metavar="A,B",
        help=f"Findings that end the command with exit code 1, after everything is written: {', '.join(NAMES)}.",
        callback=_checked,
    ),
]


def found(made: Sequence[Check], names: Sequence[str]) -> list[str]:
    """Return what was asked for and found, one text for each check."""
    return [
        f"{NOT_CHECKED if check.state == 'not checked' else check.name} ({_details(check)})"
        for check in made
        if (check.name in names and check.state in ("wrong", "warning"))
        or (NOT_CHECKED in names and check.state == "not checked")
    ]


def _details(check: Check) -> str:
    """Return the first line of what was found, and how many there are besides."""
    rest = len(check.lines) - 1
    return (check.lines[0] if check.lines else check.sentence) + (f", and {rest} more" if rest > 0 else "")


def fail(results: Results, asked: str | None) -> None:
    """Exit with code 1 and one line that says why, where a run has one of these findings."""
    names = read(asked)
    if not names:
        return

    why = found(results.checks, names)
    if why:
        print(f"ssbench: --fail-on: {' '.join('; '.join(why).split())}", file=sys.stderr)
        raise typer.Exit(1)


def take_options(command: Callable[..., None], options: type[Any]) -> None:
    """Give a command, which takes a context and keywords, the fields of a dataclass as its options in typer's eyes."""
    hints = get_type_hints(options, include_extras=True)
    own = [
        Parameter(f.name, Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name]) for f in fields(options)
    ]
    ctx = Parameter("ctx", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    command.__annotations__ = {"ctx": typer.Context, **hints, "return": None}
    command.__signature__ = Signature([ctx, *own])  # type: ignore[attr-defined]
