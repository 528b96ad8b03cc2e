"""Shrink a case that breaks a law to the smallest one that still breaks it."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from specbench_ss.error_place import place_of
from specbench_ss.errors import first_line
from specbench_ss.testing.law import FIRST, Case, Law, LawBroken, OutOfTime, Subject, Untested
from specbench_ss.testing.watched_decoder import Unanswered
from specbench_ss.time_limit import TimeIsOver, time_limit

PATIENCE_S = 5.0  # for all the smaller cases of one that breaks a law


def holds(law: Law, subject: Subject, timeout: float | None = None) -> LawBroken | None:
    """Try every case of a law. Return the violation with the smallest example, or None where the law holds.

    timeout: seconds after which a trial breaks the law, since it has not ended; no smaller example is then looked for.
    Raises Untested if there were cases, and nothing to test in any of them.
    """
    tested = False
    for case in law.cases(subject):
        over = f"no end within {timeout:g} s" if timeout is not None else ""
        try:
            with time_limit(timeout, partial(_stuck, law, subject, over)):
                problem = attempt(law, subject, case)
        except TimeIsOver as error:
            return LawBroken(law, subject, case, f"{over}{place_of(error, of_any=True)}")
        except Untested as reason:
            subject.untested[str(reason)] = None
            continue
        tested = True
        if problem:
            return LawBroken(law, subject, *smallest(law, subject, case, problem, timeout))
    if subject.untested and not tested:
        raise Untested
    return None


def _stuck(law: Law, subject: Subject, over: str) -> str:
    return f"law {law.name!r}, {subject}: {over}, and it cannot be interrupted"


def attempt(law: Law, subject: Subject, case: Case) -> str:
    """Return what is wrong in this case, or '' for nothing. Any exception counts as wrong."""
    try:
        return law.test(subject, case)
    except (OutOfTime, Untested):
        raise
    except (Exception, SystemExit) as error:  # whatever a method may raise
        raised = error.__cause__ if isinstance(error, Unanswered) and error.__cause__ else error
        return f"{first_line(raised)}{place_of(raised, of_any=True)}"


def smallest(law: Law, subject: Subject, case: Case, problem: str, timeout: float | None = None) -> tuple[Case, str]:
    """Return the smallest case found that still breaks the law, and what is wrong there. The search has PATIENCE_S."""
    subject.until, found = time.monotonic() + PATIENCE_S, True
    try:
        while found:
            found = False
            for smaller in _smaller(case, law.exact_length):
                wrong = ""
                with (
                    contextlib.suppress(Untested),
                    time_limit(timeout, partial(_stuck, law, subject, "no end of a smaller trial")),
                ):
                    wrong = attempt(law, subject, smaller)
                if wrong:
                    case, problem, found = smaller, wrong, True
                    break
    except (OutOfTime, TimeIsOver):
        pass
    finally:
        subject.until = math.inf
    return case, problem


def _smaller(case: Case, exact_length: bool) -> Iterator[Case]:
    """Yield smaller cases, the boldest first."""
    n, prompt = case.max_new_tokens, case.prompt
    for fewer in dict.fromkeys((1, n // 2, n - 1)):
        if 0 < fewer < n:
            yield replace(case, max_new_tokens=fewer)
    plain = (FIRST,) * len(prompt)
    if prompt != plain:
        yield replace(case, prompt=plain)
    if exact_length:
        return
    half, parts = len(prompt) // 2, list[tuple[int, ...]]()
    if half > 1:
        parts += [prompt[half:], prompt[:half]]
    parts += [prompt[:i] + prompt[i + 1 :] for i in range(len(prompt))] if len(prompt) > 2 else []
    for part in parts:  # prompts of one token are a law of their own
        yield replace(case, prompt=part)
