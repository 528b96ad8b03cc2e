"""The `ssbench` command. Imports nothing heavy: `ssbench --help` answers at once."""

from __future__ import annotations

import os
import sys
import threading
import time
import warnings
from functools import cache
from typing import Annotated, NoReturn

import typer

from specbench_ss import __version__, registry
from specbench_ss.commands import (
    check,
    compare,
    doctor,
    export,
    import_specbench,
    judge,
    methods,
    models,
    new_method,
    paper,
    reference,
    report,
    run,
    suites,
    train,
    tune,
    watch,
)
from specbench_ss.commands.shared import literal
from specbench_ss.deferred_imports import deferred_imports
from specbench_ss.error_place import place_of
from specbench_ss.errors import UserError, error_text

LEFT_S = 2.0  # for threads to end after the command

app = typer.Typer(
    name="ssbench",
    help="Which speculative-decoding method pays on your model, prompts and hardware, and why.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run")(run.command)
app.command("tune")(tune.command)
app.command("methods")(methods.command)
app.command("check")(check.command)
app.command("new-method")(new_method.command)
app.command("judge")(judge.command)
app.command("doctor")(doctor.command)
app.command("report")(report.command)
app.command("watch")(watch.command)
app.command("compare")(compare.command)
app.command("export")(export.command)
app.command("import-specbench")(import_specbench.command)
app.command("reference")(reference.command)
app.command("paper")(paper.command)
app.add_typer(models.app, name="models")
app.add_typer(suites.app, name="suites")
app.add_typer(train.app, name="train")


def _own_names() -> set[str]:
    """Names of the commands that are not a plugin's."""
    return {str(c.name) for c in app.registered_commands} | {str(g.name) for g in app.registered_groups}


@cache
def _add_plugin_commands() -> None:
    """Commands that come with a plugin, as `datastore` comes with the method `rest`."""
    for name, found in registry.load_commands(_own_names()).items():
        if isinstance(found, typer.Typer):
            app.add_typer(found, name=name)
        else:
            app.command(name)(found)


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


def console() -> NoReturn:
    """Run the command line and exit, even if plugin threads are alive."""
    code = 1
    try:
        code = main()
    finally:
        threading.Thread(target=_end, args=(code,), daemon=True).start()
    sys.exit(code)


def _end(code: int) -> None:
    """End the process where threads keep it alive for LEFT_S seconds after the main thread, and name them."""
    threading.main_thread().join()
    time.sleep(LEFT_S)
    left = [thread.name for thread in threading.enumerate() if not thread.daemon and thread.is_alive()]
    if left:
        print(f"ssbench: these threads did not end and are left: {', '.join(left)}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main(args: list[str] | None = None) -> int:
    """Run the command line; what the user can mend is one line on stderr and exit code 2."""
    registry.clear_file_methods()
    with deferred_imports(), warnings.catch_warnings():
        warnings.showwarning = _print_warning
        try:
            _add_plugin_commands()
            code = literal(typer.main.get_command(app))(args=args, prog_name="ssbench", standalone_mode=False)
        except UserError as error:
            return _fail(str(error))
        except typer.TyperException as error:
            return _fail(error.format_message(), error.exit_code)
        except (KeyboardInterrupt, typer.Abort):
            return _fail("interrupted", 130)
        except (Exception, SystemExit):
            raise
        except BaseException as error:  # of a plugin: nothing here raises another kind
            return _fail(f"{error_text(error)}{place_of(error, of_any=True)}")
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int = 2) -> int:
    """One line on stderr, whatever the message holds; none where the help has said it all."""
    if message:
        print(f"ssbench: {' '.join(message.split())}", file=sys.stderr)
    return code
