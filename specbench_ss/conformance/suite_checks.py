"""Checks of suites: `ssbench suites check NAME`.

Results rely on these properties: equal questions each time, limits that take the first ones, scores within [0, 1].
"""

from __future__ import annotations

import inspect
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from specbench_ss.errors import UserError, first_line
from specbench_ss.suite import Question, Suite, SuiteData, SuiteRequest

GARBAGE = (
    "",
    " \n",
    "xq zv 918273645",
    "\x00\ufffd",
    "```",
    "\\boxed{",
    "\\boxed{1e999999999}",
    "####",
    "word " * 60,
)  # the worst outputs of models
SCORED = 3  # questions of each task that the scorer is tested on


class SuiteCheckFailed(AssertionError):  # noqa: N818
    """Raised for a suite that breaks a check. Its text names the check and the smallest example that was found."""


@dataclass(frozen=True, slots=True)
class SuiteCheck:
    """A check: its name, and the requirement as a phrase."""

    name: str
    text: str
    test: Callable[[Subject], None]


@dataclass(frozen=True, slots=True)
class Subject:
    """A suite under test. request: what is asked of it, with the data that it is tried on."""

    kind: type[Suite]
    request: SuiteRequest

    def load(self, **changes: Any) -> SuiteData:
        """Load the suite by a new instance, with these changes to what is asked of it."""
        return self.kind().load(replace(self.request, **changes))

    def questions(self, **changes: Any) -> tuple[Question, ...]:
        """Return what `load` does, its questions alone."""
        return self.load(**changes).questions


def _expect(passed: bool, what: str) -> None:
    if not passed:
        raise SuiteCheckFailed(what)


def _description(subject: Subject) -> None:
    kind = subject.kind
    for attribute in ("name", "summary"):
        _expect(isinstance(getattr(kind, attribute, None), str), f"the class has no text {attribute!r}")
    _expect(isinstance(getattr(kind, "categories", None), tuple), "the class has no tuple `categories` (its tasks)")
    _expect(not inspect.signature(kind).parameters, "the class needs arguments")


def _questions(subject: Subject) -> None:
    data = subject.load()
    _expect(bool(data.questions), "it has no questions")
    _expect(data.name == subject.kind.name, f"its data has the name {data.name!r}")
    _expect(data.max_new_tokens >= 1 and bool(data.edition), "it has no edition, or max_new_tokens is 0")
    twice = [name for name, n in Counter(q.id for q in data.questions).items() if n > 1]
    _expect(not twice, f"the id {twice[:1]} occurs twice")
    for q in data.questions:
        _expect(bool(q.id) and isinstance(q.id, str), f"the id {q.id!r} is not a text")
        _expect(bool(q.turns) and all(isinstance(t, str) and t.strip() for t in q.turns), f"{q.id}: a turn is empty")
        _expect(len(q.references) in (0, len(q.turns)), f"{q.id}: not one entry of references for each turn")


def _same(subject: Subject) -> None:
    first, second = subject.load(), subject.load()
    _expect(first.content_hash == second.content_hash, "two loads give questions with different hashes")


def _limit(subject: Subject) -> None:
    for few, many in ((1, 2), (2, 0)):
        some, more = subject.questions(limit=few), subject.questions(limit=many)
        counted = Counter(q.category for q in some)
        _expect(max(counted.values(), default=0) <= few, f"a limit of {few} gives {dict(counted)}")
        for category in {q.category for q in more}:
            first = [q for q in more if q.category == category][: counted[category]]
            taken = [q for q in some if q.category == category]
            _expect(first == taken, f"{category}: a limit does not take the first questions")
            _expect(bool(first), f"{category}: a limit of {few} takes no question")
    _refused(subject, "a negative limit", limit=-1)


def _categories(subject: Subject) -> None:
    present = list(dict.fromkeys(q.category for q in subject.questions(limit=1)))
    declared = subject.kind.categories
    strange = [name for name in present if declared and name not in declared]
    _expect(not strange or subject.request.data is not None, f"{strange} is not among its `categories`")
    for name in present:
        found = {q.category for q in subject.questions(limit=1, categories=(name,))}
        _expect(found == {name}, f"a request for {name!r} returns {sorted(found)}")
    _refused(subject, "an unknown task", categories=("no-such-task",))


def _data(subject: Subject) -> None:
    _refused(subject, "a missing file", data=Path("/no/such/file.jsonl"))


def _refused(subject: Subject, what: str, **changes: Any) -> None:
    """Raise SuiteCheckFailed unless loading raises a UserError of one line."""
    try:
        subject.load(**changes)
    except UserError as error:
        _expect("\n" not in str(error), f"{what}: the message has more than one line")
    except Exception as error:
        raise SuiteCheckFailed(f"{what} raises {first_line(error)}, not a UserError") from error
    else:
        raise SuiteCheckFailed(f"{what} is not rejected with a UserError")


def _scored(subject: Subject) -> Iterator[tuple[Suite, Question, int, Sequence[str]]]:
    """Yield a suite, a question, a turn, and the references of the turn."""
    suite = subject.kind()
    for question in suite.load(replace(subject.request, limit=SCORED)).questions:
        for turn in range(len(question.turns)):
            yield suite, question, turn, question.references[turn] if question.references else ()


def _range(subject: Subject) -> None:
    for suite, question, turn, references in _scored(subject):
        for answer in (*GARBAGE, *references):
            _expect_score(suite, question, turn, answer)


def _expect_score(suite: Suite, question: Question, turn: int, answer: str) -> float | None:
    """Return the score of an answer. Raises SuiteCheckFailed where it is no score, or another one the second time."""
    place = f"{question.id}, turn {turn + 1}, answer {answer[:40]!r}"
    try:
        found, again = (suite.score(question, turn, answer) for _ in range(2))
    except Exception as error:
        raise SuiteCheckFailed(f"{place}: the scorer raises {first_line(error)}") from error
    _expect(found is None or (isinstance(found, int | float) and 0 <= found <= 1), f"{place}: the score is {found!r}")
    _expect(found == again, f"{place}: the score is {found!r}, then {again!r}")
    return found


def _best(subject: Subject) -> None:
    for suite, question, turn, references in _scored(subject):
        place = f"{question.id}, turn {turn + 1}"
        perfect = [_expect_score(suite, question, turn, reference) for reference in references]
        worst = [_expect_score(suite, question, turn, answer) for answer in GARBAGE]
        if not any(score is not None for score in (*perfect, *worst)):
            continue
        _expect(None not in (*perfect, *worst), f"{place}: some outputs have a score, others have none")
        rival = max(score for score in worst if score is not None)
        for reference, score in zip(references, perfect, strict=True):
            shown = reference[:40]
            _expect(
                score is not None and score > rival, f"{place}: the reference {shown!r} scores {score}, garbage {rival}"
            )


def _calibration(subject: Subject) -> None:
    found = subject.kind().calibration(replace(subject.request, limit=1)).questions
    _expect(bool(found), "it has no calibration questions")
    _expect(max(Counter(q.category for q in found).values()) == 1, "calibration() ignores the limit of 1")


def _network(subject: Subject) -> None:
    with no_network():
        subject.load()


@contextmanager
def no_network() -> Iterator[None]:
    """Raise SuiteCheckFailed for every look-up of an address and every connection in the block."""

    def refused(*_: Any, **__: Any) -> Any:
        raise SuiteCheckFailed("loading uses the network; only `fetch` may")

    with mock.patch.object(socket.socket, "connect", refused), mock.patch.object(socket, "getaddrinfo", refused):
        yield


SUITE_CHECKS: tuple[SuiteCheck, ...] = (
    SuiteCheck("description", "name, summary and `categories` (its tasks) exist; no arguments", _description),
    SuiteCheck("network", "loading uses no network", _network),
    SuiteCheck("questions", "ids are unique, turns are not empty, references match the turns", _questions),
    SuiteCheck("same", "two loads return equal questions", _same),
    SuiteCheck("limit", "a limit takes the first questions of each task", _limit),
    SuiteCheck("categories", "a request for a task returns that one; unknown tasks are rejected", _categories),
    SuiteCheck("data", "a missing file is rejected in one line", _data),
    SuiteCheck("range", "scores are None or in [0, 1], and reproducible", _range),
    SuiteCheck("best", "a reference scores higher than garbage; a question has scores for all outputs or none", _best),
    SuiteCheck("calibration", "questions for tuning exist", _calibration),
)


def suite_results(kind: type[Suite], request: SuiteRequest) -> Iterator[tuple[SuiteCheck, str]]:
    """Yield every check with its failure, or ''. Raise UserError if the suite cannot be loaded."""
    subject = Subject(kind, request)
    with no_network() if not _of_hub(request) else mock.patch.dict({}):
        subject.load()
    for check in SUITE_CHECKS:
        if check.name == "network" and _of_hub(request):
            continue  # the user named a data set of the hub
        try:
            check.test(subject)
        except SuiteCheckFailed as failure:
            yield check, str(failure)
        except Exception as error:
            yield check, first_line(error)
        else:
            yield check, ""


def _of_hub(request: SuiteRequest) -> bool:
    return str(request.data or "").startswith("hub:")


def check_suite(kind: type[Suite], *, data: str | Path | None = None, lab: bool = False) -> None:
    """Test a suite by the checks of docs/suites.md. Raise SuiteCheckFailed for the first that fails.

    data: what it reads its questions from, None for its own data. lab: ask it for the questions of a lab model.
    """
    for check, failure in suite_results(kind, SuiteRequest(data=None if data is None else Path(data), lab=lab)):
        if failure:
            raise SuiteCheckFailed(f"{check.name}: {failure} (required: {check.text})")
