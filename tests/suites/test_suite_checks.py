"""The checks for suites: each broken one is found and named. And NAME:FILE."""

from __future__ import annotations

import itertools
import socket
from typing import Any

import pytest

from specbench_ss.conformance.suite_checks import SuiteCheckFailed, check_suite
from specbench_ss.errors import UserError
from specbench_ss.suite import Question, Suite, SuiteData, SuiteRequest
from specbench_ss.suites.base import select

COUNTER = itertools.count()


class Good(Suite):
    """A third party's suite that passes all checks."""

    name, summary, categories = "good", "a suite of two tasks", ("a", "b")

    def questions(self) -> list[Question]:
        return [Question(f"{c}{i}", c, (f"Say {c} {i} times.",), ((c * 9,),), "own") for c in "ab" for i in range(3)]

    def load(self, request: SuiteRequest) -> SuiteData:
        if request.data is not None:
            raise UserError(f"cannot read {request.data}")
        return SuiteData(self.name, "own", select(self.questions(), request.categories, request.limit))

    def score(self, question: Question, turn: int, answer: str) -> float | None:
        return float(answer == question.references[turn][0])


def changed(**parts: Any) -> type[Suite]:
    return type("Bad", (Good,), parts)


def numbered(self: Good) -> list[Question]:
    return [Question(f"n{next(COUNTER)}", "a", ("Hi",))]


def unlimited(self: Good, request: SuiteRequest) -> SuiteData:
    return Good.load(self, SuiteRequest(request.categories, max(request.limit or 0, 0), request.data))


def calls_home(self: Good, request: SuiteRequest) -> SuiteData:
    socket.getaddrinfo("localhost", 80)
    return Good.load(self, request)


BAD = {
    "description": changed(categories=["a"]),
    "questions": changed(questions=lambda self: [Question("x", "a", ("Hi",)), Question("x", "a", ("Ho",))]),
    "same": changed(questions=numbered),
    "limit": changed(load=unlimited),
    "categories": changed(questions=lambda self: [Question("x", "c", ("Hi",)), Question("y", "c", ("Ho",))]),
    "data": changed(load=lambda self, request: Good.load(self, SuiteRequest(request.categories, request.limit))),
    "range": changed(score=lambda self, question, turn, answer: len(answer)),
    "best": changed(score=lambda self, question, turn, answer: 0.5),
}


def test_a_good_suite_passes_all_checks() -> None:
    check_suite(Good)


@pytest.mark.parametrize("check", BAD)
def test_a_failed_check_is_named(check: str) -> None:
    with pytest.raises(SuiteCheckFailed, match=f"^{check}: "):
        check_suite(BAD[check])


def test_a_suite_that_opens_a_connection_is_stopped() -> None:
    with pytest.raises(SuiteCheckFailed, match="uses the network"):
        check_suite(changed(load=calls_home))
