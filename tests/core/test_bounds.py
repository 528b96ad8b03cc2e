"""Bounds that options declare in their types: checked however the options are made, and shown as text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import pytest
from annotated_types import Ge, Gt, Interval, Le, Lt, MultipleOf

from specbench_ss import registry
from specbench_ss.cli.shared import typer_option
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.errors import UserError
from specbench_ss.options import Bounded, describe_options, options_problem, parse_options
from specbench_ss.training.trainer import TrainConfig


@dataclass(frozen=True, slots=True)
class Options(Bounded):
    owner: ClassVar[str] = "made"
    both: Annotated[int, Ge(1), Le(4096)] = 3
    least: Annotated[int, Ge(-1)] = 0
    most: Annotated[int, Le(1234567)] = 0
    above: Annotated[float, Gt(0)] = 1.0
    share: Annotated[float, Interval(gt=0, le=1)] = 1.0
    below: Annotated[float, Ge(0), Lt(1)] = 0.5
    finite: Annotated[float, Ge(0), Lt(math.inf)] = 1.0
    maybe: Annotated[float, Gt(0), Lt(math.inf)] | None = None
    free: int = 0

    def check_together(self) -> None:
        """Two of them."""
        if self.both == 7 and self.free == 7:
            raise UserError("made: not both 7")


@dataclass(frozen=True)
class Plain:
    """As a plugin may write its options."""

    k: Annotated[int, Ge(1), Le(8)] = 4


WORDS = {
    "both": "1 to 4096",
    "least": "at least -1",
    "most": "at most 1234567",
    "above": "above 0",
    "share": "above 0 and at most 1",
    "below": "0 or more and below 1",
    "finite": "a number of at least 0",
    "maybe": "a number above 0",
}
WRONG: list[tuple[str, Any]] = [
    ("both", 0), ("both", 4097), ("least", -2), ("most", 1234568), ("above", 0.0), ("above", math.nan), ("share", 0.0),
    ("share", 1.01), ("below", -0.1), ("below", 1.0), ("finite", -1.0), ("finite", math.inf), ("maybe", 0.0),
    ("maybe", math.nan),
]  # fmt: skip
RIGHT: list[tuple[str, Any]] = [
    ("both", 1), ("both", 4096), ("least", -1), ("most", 1234567), ("above", 1e-9), ("share", 1.0), ("below", 0.0),
    ("finite", 0.0), ("maybe", None), ("maybe", 2.0), ("free", -5),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_value_beyond_its_bounds_is_refused_in_words(name: str, value: Any) -> None:
    with pytest.raises(UserError) as caught:
        Options(**{name: value})
    assert str(caught.value) == f"made: {name} must be {WORDS[name]}, not {value}"


@pytest.mark.parametrize(("name", "value"), RIGHT)
def test_a_value_at_its_bound_is_taken(name: str, value: Any) -> None:
    assert getattr(Options(**{name: value}), name) == value


def test_values_that_do_not_go_together_are_refused_after_the_bounds() -> None:
    with pytest.raises(UserError, match="not both 7"):
        Options(both=7, free=7)


def test_a_plain_dataclass_is_kept_to_its_bounds_when_it_is_read_from_text() -> None:
    assert parse_options(Plain, {"k": "8"}, "method 'plain'") == Plain(8)
    with pytest.raises(UserError, match="^method 'plain': k must be 1 to 8, not 9$"):
        parse_options(Plain, {"k": "9"}, "method 'plain'")


def test_bounds_are_shown_next_to_the_type() -> None:
    shown = {option.name: option.type for option in describe_options(Options)}
    assert shown["both"] == "int, 1 to 4096" and shown["below"] == "float, 0 or more and below 1"
    assert shown["maybe"] == "float, a number above 0 or none" and shown["free"] == "int"


def test_bounds_are_shown_in_the_help_of_a_training() -> None:
    assert typer_option("k", Plain).help.endswith("(1 to 8)")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: SamplingParams(-1.0), "temperature must be a number of at least 0, not -1.0"),
        (lambda: SamplingParams(math.inf), "temperature must be a number of at least 0, not inf"),
        (lambda: SamplingParams(top_p=0.0), "top_p must be above 0 and at most 1, not 0.0"),
        (lambda: SamplingParams(top_k=-1), "top_k must be at least 0, not -1"),
        (lambda: TrainConfig(..., (), lr=0.0), "--lr must be a number above 0, not 0.0"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_method_declares_its_bounds_too(make: Any, words: str) -> None:
    with pytest.raises(UserError) as caught:
        make()
    assert str(caught.value) == words


def test_bounds_of_a_union_are_those_of_its_numbers() -> None:
    @dataclass(frozen=True)
    class Options:
        x: Annotated[int, Ge(1)] | Literal["auto"] = "auto"

    assert options_problem(Options) == ""
    assert parse_options(Options, {"x": "auto"}, "m").x == "auto" and parse_options(Options, {"x": "3"}, "m").x == 3
    with pytest.raises(UserError, match="x must be at least 1, not 0"):
        parse_options(Options, {"x": "0"}, "m")


def test_a_mark_that_nobody_checks_is_a_problem() -> None:
    @dataclass(frozen=True)
    class Options:
        y: Annotated[int, MultipleOf(8)] = 8

    @dataclass(frozen=True)
    class BeyondItself:
        x: Annotated[int, Ge(1)] = 0

    assert "declares MultipleOf" in options_problem(Options)
    assert "x must be at least 1, not 0" in options_problem(BeyondItself)


def test_options_of_trainers_that_size_weights_are_bounded() -> None:
    """Every whole number has a largest value, apart from counts of steps and what the model bounds."""
    free = {"alpha_ramp", "mask_token_id", "n_msa_layers", "prune_layer", "ramp", "segment"}
    for name, trainer in registry.load_all(registry.TRAINERS).items():
        for option in describe_options(trainer.Options):
            if "int" in option.type and option.name not in free:
                assert " to " in option.type or "at most" in option.type, f"{name}: {option.name} is {option.type}"
