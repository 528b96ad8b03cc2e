"""A stand-in for libnvidia-ml.so at the level of its C calls: the real pynvml fills its structures from a script.

`nvml_session.json` has for each C function the list of its answers: `[code, output, output, ...]`, one output for each
pointer that is written through. The last answer of a list repeats. The answers were written by hand in the form that
the library's header gives; they were not recorded from a device.
"""

from __future__ import annotations

import ctypes
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest

SESSION = Path(__file__).with_name("nvml_session.json")


class Replay:
    """Takes the place of the loaded library. calls: how often each function was called."""

    def __init__(self, answers: dict[str, list[list[Any]]]) -> None:
        self.answers, self.calls = answers, Counter[str]()

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name not in self.answers:
            raise AttributeError(name)  # as ctypes does for a symbol that a driver does not have
        return lambda *arguments: self._call(name, arguments)

    def _call(self, name: str, arguments: tuple[Any, ...]) -> int:
        script = self.answers[name]
        code, *outputs = script[min(self.calls[name], len(script) - 1)]
        self.calls[name] += 1
        pointers = [a._obj if hasattr(a, "_obj") else a for a in arguments if _written(a)]
        for pointer, output in zip(pointers, outputs, strict=False):
            _write(pointer, output)
        return int(code)


def _written(argument: Any) -> bool:
    return hasattr(argument, "_obj") or isinstance(argument, ctypes.Array)


def _write(into: Any, output: Any) -> None:
    if isinstance(output, str):
        into.value = output.encode()
    elif isinstance(output, dict) and "metrics" in output:  # what GPM was asked for, by the number of each metric
        for i in range(into.numMetrics):
            asked = into.metrics[i]
            asked.nvmlReturn, asked.value = 0, output["metrics"][str(asked.metricId)]
    elif isinstance(output, dict):
        for name, value in output.items():
            assert name in dict(into._fields_)
            setattr(into, name, value)
    elif isinstance(output, list):
        for place, fields in enumerate(output):
            _write(into[place], fields)
    elif hasattr(into, "value"):
        into.value = output


def replay(monkeypatch: pytest.MonkeyPatch, **changes: list[list[Any]]) -> Replay:
    """Put the session in the library's place. changes: other answers of some functions; [] is a function not there."""
    answers = json.loads(SESSION.read_text()) | changes
    library = Replay({name: script for name, script in answers.items() if script})
    monkeypatch.setattr(pynvml, "nvmlLib", library)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    monkeypatch.setattr(pynvml, "_nvmlLib_refcount", 0)
    return library
