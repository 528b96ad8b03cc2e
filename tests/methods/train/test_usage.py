"""The command that `ssbench train` ends with."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from specbench_ss.training.session import usage


@pytest.mark.parametrize("folder", ["out", "my ss folder", "it's ss"])
def test_the_command_is_the_same_words_again_when_a_shell_reads_it(folder: str) -> None:
    words = ["ssbench", "run", "--model", "a ss model", "--methods", "ss", "--set", f"ss.weights={folder}"]
    assert shlex.split(usage("ss", Path(folder), "a ss model")) == words
