"""Commands of `ssbench`, each imported when it is called."""

from __future__ import annotations

import sys
import warnings
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer.core import TyperGroup

from specbench_ss import __version__, registry
from specbench_ss.errors import UserError, printable

COMMANDS = {  # line in `ssbench --help`; the module in specbench_ss.cli has its name, but for FUNCTIONS
    "run": "Decode a suite's questions with several methods and rank them by speedup.",
    "tune": "Choose a method's options for this model and device by measured speed, and write them to a file.",
    "methods": "List the decoding methods and their options.",
    "check": "Check that methods pass the conformance checks, on tiny random models on the CPU.",
    "new-method": "Write a plugin package with a small decoding method, its test and a README.",
    "judge": "Let a model rate a run's answers from 1 to 10.",
    "doctor": "Show this machine's device, versions and measured limits.",
    "report": "Write the report of a run, of the latest one by default, or of several side by side.",
    "compare": "Compare two runs: settings, speedups with confidence intervals, regressions.",
    "parity": "Compare a drafter in this process with the same drafter in a served engine, prompt by prompt.",
    "export": "Write a run in the format of another tool.",
    "import-specbench": "Score answer files of Spec-Bench, EAGLE or Medusa again.",
    "paper": "Measure a table or figure of the papers and show the published numbers next to ours.",
    "models": "List the named models or published drafters, download a model, check it with a method, or convert a "
    "drafter for vLLM.",
    "suites": "List the suites, show their questions, download their data, or check one.",
    "train": "Train a drafter for your model on your conversations.",
}
FUNCTIONS = {
    "import-specbench": ("export", "import_specbench"),
    "new-method": ("methods", "new_method"),
}  # a command that is not alone in its module


def literal(command: Any) -> Any:
    """Make the help texts of a click command, its parameters and its commands show every bracket literally.

    Flags are shown without a type.
    """
    for part in (command, *command.params):
        if getattr(part, "help", None):
            part.help = escape(part.help)
        if getattr(part, "is_flag", False):
            part.metavar = ""
    for inner in getattr(command, "commands", {}).values():
        literal(inner)
    return command


class LazyGroup(TyperGroup):
    """Commands of `ssbench`: those of COMMANDS, and those that plugins register as entry points."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that is called, imported; `--help` shows the one-line commands of COMMANDS."""
        name, found, rest = super().resolve_command(ctx, args)
        return name, literal(_imported(name)) if name in COMMANDS else found, rest

    def invoke(self, ctx: Any) -> Any:
        """Import and run the command. An interruption becomes Abort, since typer would exit without a line."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Abort from None


def _imported(name: str) -> Any:
    module_name, function = FUNCTIONS.get(name, (name.replace("-", "_"), "command"))
    module = import_module(f"specbench_ss.cli.{module_name}")
    return _click_command(name, getattr(module, "app", None) or getattr(module, function))


def _click_command(name: str, found: Any) -> Any:
    """Return the click command of a function or of a `typer.Typer` group."""
    group = typer.Typer(add_completion=False)
    group.callback()(lambda: None)
    _add(group, name, found)
    return typer.main.get_command(group).commands[name]  # type: ignore[attr-defined]


def _add(group: typer.Typer, name: str, found: Any) -> None:
    if isinstance(found, typer.Typer):
        group.add_typer(found, name=name)
    else:
        group.command(name)(found)


app = typer.Typer(
    name="ssbench",
    cls=LazyGroup,
    help="Compare speculative-decoding methods on your model, prompts and hardware.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _summary in COMMANDS.items():
    app.command(_name, help=_summary)(lambda: None)


@cache
def _ssbench() -> Any:
    """Return the click command, with commands that come with a plugin, as `datastore` comes with the method `rest`."""
    for name, found in registry.load_commands(COMMANDS).items():
        _add(app, name, found)
    return literal(typer.main.get_command(app))


def _version(asked: bool) -> None:
    if asked:
        print(f"ssbench {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def _print_warning(message: Warning | str, *_: object, **__: object) -> None:
    print(f"ssbench: warning: {message}", file=sys.stderr)


def main(args: list[str] | None = None) -> int:
    """Run the command line; what the user can mend is one line on stderr and exit code 2 or 4 (`RunStopped`)."""
    registry.clear_file_methods()
    with warnings.catch_warnings():
        warnings.showwarning = _print_warning
        try:
            code = _ssbench()(args=args, prog_name="ssbench", standalone_mode=False)
        except UserError as error:
            return _fail(str(error), error.exit_code)
        except typer.TyperException as error:
            return _fail(error.format_message(), error.exit_code)
        except (KeyboardInterrupt, typer.Abort):
            return _fail("interrupted", 130)
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int) -> int:
    """Print one line on stderr; nothing if the help was printed."""
    if message:
        print(f"ssbench: {printable(' '.join(message.split()))}", file=sys.stderr)
    return code
