"""The command that `ssbench train` ends with: it names what was trained, whatever the folder is called."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from specbench_ss.methods.medusa.train import MedusaTrainer
from specbench_ss.methods.ss.train import StreamsOptions, StreamsTrainer
from specbench_ss.training.trainer import DrafterRecipe


@pytest.mark.parametrize(
    ("trainer", "method"),
    [
        (StreamsTrainer(StreamsOptions()), "ss"),
        (StreamsTrainer(StreamsOptions(mode="shared")), "ss-shared"),
        (MedusaTrainer(MedusaTrainer.Options()), "medusa"),
    ],
)
@pytest.mark.parametrize("folder", ["out", "my ss folder", "it's ss"])
def test_the_command_is_the_same_words_again_when_a_shell_reads_it(
    trainer: DrafterRecipe, method: str, folder: str
) -> None:
    words = ["ssbench", "run", "--model", "a ss model", "--methods", method, "--set", f"{method}.weights={folder}"]
    assert shlex.split(trainer.usage(Path(folder), "a ss model")) == words
