"""The command line, called in this process, for tests."""

from __future__ import annotations

import pytest

from specbench_ss.cli.main import main


def failing(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a failing command prints."""
    capsys.readouterr()
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("ssbench: "), captured.err
    assert captured.err.count("\n") == 1
    return captured.err
