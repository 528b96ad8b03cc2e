"""The options of a run: one field each, from which command line, YAML file and `run()` derive."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
import typer
from annotated_types import Ge

from specbench_ss import run
from specbench_ss.cli.main import main
from specbench_ss.cli.run import command
from specbench_ss.cli.shared import take_options
from specbench_ss.errors import UserError
from specbench_ss.runs.config import RunConfig
from specbench_ss.runs.run_options import (
    COMMAND,
    FILE,
    MODEL_MODES,
    PYTHON,
    SERVER,
    CommandOptions,
    RunOptions,
    fields_of,
    given_options,
    keywords,
    names,
    option,
)


def flags(function: Any) -> set[str]:
    """The options of a command, as fields are called."""
    app = typer.Typer(add_completion=False)
    app.command()(function)
    return {p.opts[0].lstrip("-").replace("-", "_") for p in typer.main.get_command(app).params} - {"help"}


def test_every_option_comes_from_a_field() -> None:
    known = set(fields_of(RunOptions))
    assert flags(command) == known == set(names(RunOptions, COMMAND))
    shown = {"verbose", "quiet", "json"}  # forms of the output
    assert known - set(names(RunOptions, FILE)) == {"config", *shown}
    assert set(inspect.signature(run).parameters) == set(names(RunOptions, PYTHON))
    assert known - set(names(RunOptions, PYTHON)) == {"config", "dry_run", "open", "fail_on", *shown}
    for name in known:
        value = None if name == "set" else "x"
        for place in (FILE, PYTHON):
            if name in names(RunOptions, place):
                assert set(given_options(RunOptions, {name: value}, place, "here")) <= {name}
            else:
                with pytest.raises(UserError, match=f"here: no option '{name}'"):
                    given_options(RunOptions, {name: value}, place, "here")


def test_a_configuration_has_the_defaults_of_the_options() -> None:
    asked, config = RunOptions(), RunConfig(methods=())
    for name in {f.name for f in fields(RunConfig)} & set(fields_of(RunOptions)):
        assert getattr(config, name) in (getattr(asked, name), ()), name


@dataclass(frozen=True)
class More(RunOptions):
    """With an option that is not there yet."""

    colour: Annotated[int, Ge(2)] = option(3, "Colour of the answers.", panel="Where to")


def test_a_new_field_is_a_new_option_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[More] = []

    def paint(ctx: typer.Context, **given: Any) -> None:
        seen.append(More(**given))

    take_options(paint, More)
    app = typer.Typer(add_completion=False)
    app.command()(paint)
    typer.main.get_command(app)(args=["--colour", "7"], standalone_mode=False)
    assert seen[0].colour == 7 and seen[0].model == "lab"
    typer.main.get_command(app)(args=["--help"], standalone_mode=False)
    assert "[x>=2]" in capsys.readouterr().out
    assert given_options(More, {"colour": 5}, FILE, "run.yaml") == {"colour": 5}
    assert keywords(More, "methods").parameters["colour"].default == 3
    with pytest.raises(UserError, match="--colour must be at least 2, not 1"):
        More(colour=1)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"endpoint": "http://h/v1", "quantize": "int8"}, "--quantize does not go with --endpoint"),
        ({"executor": "ray", "trace": True}, "--trace does not go with --executor ray"),
        ({"executor": "ray", "label": "a"}, "--label does not go with --executor ray"),
        ({"methods": "ar", "concurrency": [1, 2]}, "--concurrency needs --endpoint"),
        ({"methods": "ar", "workers": 2}, "--workers needs --executor ray"),
        ({"endpoint": "http://h/v1", "methods": "ar"}, "--methods does not go with --endpoint"),
    ],
)
def test_an_option_of_another_mode_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        RunOptions(**given_options(RunOptions, given, PYTHON, "run()")).check_modes()


def test_options_of_both_runs_go_to_the_one_or_the_other_or_to_both() -> None:
    given = {"methods": "ar", "servers": "s.yaml", "nodes": 4, "concurrency": [2], "limit": 3, "workers": 2}
    options = RunOptions(**given_options(RunOptions, given, FILE, "run.yaml"))
    assert options.has_both and not RunOptions(servers=Path("s.yaml")).has_both
    here, there = options.part(MODEL_MODES), options.part((SERVER,))
    assert here.as_given() == {"methods": "ar", "nodes": 4, "limit": 3, "workers": 2}
    assert there.as_given() == {"servers": Path("s.yaml"), "concurrency": "2", "limit": 3}
    there.check_modes()
    with pytest.raises(UserError, match="--workers needs --executor ray"):
        here.check_modes()


def test_options_that_several_commands_have_are_the_same() -> None:
    from specbench_ss.cli.paper import PaperOptions
    from specbench_ss.cli.train import TrainOptions
    from specbench_ss.cli.tune import TuneOptions

    kinds: list[type[CommandOptions]] = [PaperOptions, TrainOptions, TuneOptions]
    for name in ("model", "chat_template", "device", "seed"):
        assert {fields_of(kind)[name].default for kind in (*kinds, RunOptions)} == {getattr(RunOptions, name)}
    assert main(["tune", "ss", "--budget", "nan"]) == 2


def test_numbers_of_numpy_are_taken_and_numbers_too_large_are_one_line() -> None:
    given = given_options(
        RunOptions, {"limit": np.int64(3), "temperature": np.float32(0.5), "stop": []}, PYTHON, "run()"
    )
    options = RunOptions(**given)
    assert options.limit == 3 and options.temperature == 0.5 and options.stop is None
    with pytest.raises(UserError, match="temperature"):
        RunOptions(temperature=10**400)
