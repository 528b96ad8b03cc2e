"""Metric pass@1: an output passes if its code passes the tests of its question (docs/design/code-execution.md)."""

from __future__ import annotations

import ast
import builtins
import hashlib
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from specbench_ss.suite import Question
from specbench_ss.suites.sandbox import Outcome, run_program

METRIC = "pass@1"

# What the published harnesses cut completions of a function at; the fence closes that of the prompt.
STOPS = ("\nclass ", "\ndef ", "\n#", "\nif __name__", "\nprint", "\n```")
PYTHON = ("", "python", "python3", "py", "py3")  # info strings of fenced blocks
_FENCE = re.compile(
    r"^(?P<indent>[ \t]*)(?P<mark>`{3,}|~{3,})[ \t]*(?P<info>[^\s`]*)[^\n`]*\n"
    r"(?P<code>.*?)(?:^[ \t]*(?P=mark)[ \t]*$|\Z)",
    re.MULTILINE | re.DOTALL,
)
_TOP_LEVEL = re.compile(r"(?:from|import|class|async|def)\s|@")  # begins a line of code
_INDENTED = re.compile(r"\s*^(?: {2,}|\t)[ \t]*(?!`{3}|~{3})\S", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class CodeQuestion(Question):
    """A question whose outputs are tested by execution.

    preamble: code in front of the answer; an answer may be its continuation. tests: code after the answer, which raises
    an exception unless the answer is right. names: functions that the tests call.
    """

    preamble: str = ""
    tests: str = ""
    names: tuple[str, ...] = ()

    def content(self) -> dict[str, Any]:
        """Return the fields with a hash of the code: methods must not find the tests in the run directory."""
        values = Question.content(self)
        code = repr([values.pop(name) for name in ("preamble", "tests", "names")])
        return {**values, "code_sha256": hashlib.sha256(code.encode()).hexdigest()}


def called_names(tests: str) -> tuple[str, ...]:
    """Return the functions that MBPP's tests call, without built-in ones."""
    called = re.findall(r"\b([A-Za-z_]\w*)\s*\(", tests)
    return tuple(name for name in dict.fromkeys(called) if not hasattr(builtins, name))


def pass_at_1(question: CodeQuestion, output: str) -> float:
    """Return 1 if the code of an output passes the tests, else 0.

    It is executed in a subprocess; equal outputs, as of lossless methods, only once.
    """
    return float(_outcome(program(question, output)).passed)


@lru_cache(maxsize=4096)
def _outcome(parts: tuple[str, ...]) -> Outcome:
    return run_program(parts)


def program(question: CodeQuestion, output: str) -> tuple[str, ...]:
    """Return the parts of the program, which are compiled one by one: preamble, answer, tests.

    The answer is the fenced Python block that defines a function of the tests, or the first block; without a block, the
    code that defines it; else the output continues the preamble.
    """
    output = output.replace("\r\n", "\n")
    if not _INDENTED.match(output):
        code = _fenced(output, question.names)
        if code is None:
            code = _unfenced(output, question.names)
        if code is not None and not _INDENTED.match(code):
            return question.preamble, code, question.tests
        output = output if code is None else code
    cut = min((at for stop in STOPS if (at := output.find(stop)) >= 0), default=len(output))
    return question.preamble + output[:cut], question.tests


def _defines(code: str, names: Sequence[str]) -> bool:
    """Return True if the code has a definition of one of the names that is not indented."""
    listed = "|".join(map(re.escape, names))
    defined = rf"^(?:(?:async\s+)?def\s+(?:{listed})\b|(?:{listed})\s*[:=])"
    return bool(names) and bool(re.search(defined, code, re.MULTILINE))


def _fenced(output: str, names: Sequence[str]) -> str | None:
    """Return the first fenced Python block with a definition of the names, else the first one, else None."""
    blocks = [_block(found) for found in _FENCE.finditer(output) if found["info"].lower() in PYTHON]
    return next((block for block in blocks if _defines(block, names)), blocks[0] if blocks else None)


def _block(found: re.Match[str]) -> str:
    """Return the code of a fenced block without the indentation of its fence."""
    return re.sub(rf"^[ \t]{{0,{len(found['indent'])}}}", "", found["code"], flags=re.MULTILINE)


def _unfenced(output: str, names: Sequence[str]) -> str | None:
    """Return the lines of an output without fences that are a program with a definition of the names, or None."""
    lines = output.split("\n")
    for start, line in enumerate(lines):
        if _TOP_LEVEL.match(line) and _defines(code := _longest_program(lines[start:]), names):
            return code
    return None


def _longest_program(lines: list[str]) -> str:
    """Return first lines of a text that are a Python program, up to the one that ends it."""
    while lines:
        code = "\n".join(lines)
        try:
            with warnings.catch_warnings(action="ignore"):
                ast.parse(code)
        except SyntaxError as error:
            lines = lines[: min(max(0, (error.lineno or 1) - 1), len(lines) - 1)]
        except (ValueError, RecursionError, MemoryError):  # null bytes, or too deep
            return ""
        else:
            return code
    return ""
