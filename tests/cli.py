"""The command line, called in this process, for tests."""

from __future__ import annotations

import re
from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from specbench_ss.cli.main import main

READING = re.compile(r"reading .+ \.\.\.\n")  # of a busy machine


def failing(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a failing command prints."""
    capsys.readouterr()
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines(True) if not READING.fullmatch(line)]
    assert len(lines) == 1 and lines[0].startswith("ssbench: ") and lines[0].endswith("\n"), captured.err
    return lines[0]


def printed(show: Callable[[Any, Console], None], shown: Any, **console: Any) -> str:
    """The text that a function prints to a console with these properties."""
    show(shown, Console(file=(out := StringIO()), **console))
    return out.getvalue()
