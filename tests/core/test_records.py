"""JSON data as types: what fits is read, what does not is reported with its field; NaN is not JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import pytest

from specbench_ss import user_files


@dataclass(frozen=True, slots=True)
class Part:
    b: int


class Optional(msgspec.Struct):
    b: int = 0


class Whole(msgspec.Struct):
    a: list[Part] = []
    c: dict[str, Optional] = {}
    kind: Literal["x", "y"] = "x"
    number: float | None = None


@pytest.mark.parametrize(
    ("data", "kind", "problem"),
    [
        (1, int, ""),
        (1, float, ""),
        (1.5, int, "it is not a whole number"),
        (True, int, "it is not a whole number"),
        (True, float, "it is not a number"),
        (3, str | None, "it is not a text or null"),
        (None, str | None, ""),
        ({"a": [{"b": 1}, {}]}, Whole, "it lacks a[1].b"),
        ({"a": [{"b": "x"}]}, Whole, "a[0].b is not a whole number"),
        ({"c": {"k": {"b": "x"}}}, Whole, "c[...].b is not a whole number"),
        ({"a": {}}, Whole, "a is not a list"),
        ({"kind": "z"}, Whole, "kind cannot be 'z'"),
        ({"kind": 3}, Whole, "kind is not a text"),
        ({"more": [], "a": []}, Whole, ""),
        ({}, Part, "it lacks b"),
        ([], Part, "it is not an object"),
    ],
)
def test_data_is_kept_against_a_type_and_the_field_is_named(data: Any, kind: Any, problem: str) -> None:
    for read in (lambda: user_files.convert(data, kind), lambda: user_files.decoder(kind)(json.dumps(data).encode())):
        try:
            read()
        except ValueError as error:
            assert str(error) == problem
        else:
            assert not problem


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "{} {}",
        "\xff",
        '{"more": ' + "[" * 100_000,
        '{"number": NaN}',
        '{"more": -Infinity}',
        '{"more": "\\ud800", "n": 1e999}',
    ],
)
def test_what_is_no_json_is_refused(text: str) -> None:
    for read in (user_files.decoder(Whole), user_files.parse):
        with pytest.raises(ValueError, match="^it is not JSON$"):
            read(text.encode("latin-1"))


def test_a_number_too_large_is_refused_and_named() -> None:
    with pytest.raises(ValueError, match="^number: "):
        user_files.decoder(Whole)(b'{"number": 1e999}')


def test_half_of_a_surrogate_pair_is_read_as_python_writes_it() -> None:
    written = json.dumps({"a": "caf\udce9", "b": 1}).encode()
    assert user_files.decoder(dict[str, Any])(written) == {"a": "caf\udce9", "b": 1}
    assert user_files.decoder(Part)(written) == Part(1)
    assert user_files.parse(written)["a"] == "caf\udce9"
