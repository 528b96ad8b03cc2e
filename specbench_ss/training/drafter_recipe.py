"""What differs between drafters that are trained by the common loop (session.py)."""

from __future__ import annotations

import shlex
from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from specbench_ss.training.trainer import Trainer

if TYPE_CHECKING:
    from specbench_ss.engine.target import Target
    from specbench_ss.training.drafter_training import Trained
    from specbench_ss.training.trainee import Trainee


class DrafterRecipe(Trainer):
    """What differs between drafters: what is trained, how far ahead it looks, and how its folder is written.

    method: the method that reads the folder, unless options change it (`decoded_by`). lr: peak learning rate where the
    user gives none.
    """

    method: ClassVar[str]
    lr: ClassVar[float] = 5e-4

    @property
    @abstractmethod
    def ahead(self) -> int:
        """Number of tokens that are drafted after the next one: how many further labels a position has."""

    @property
    def decoded_by(self) -> str:
        """Name of the method that reads the folder, as `ssbench run --methods` takes it."""
        return self.method

    @abstractmethod
    def build(self, target: Target, lr: float) -> Trainee:
        """Return what is trained, with its initial weights. Raises UserError where it does not fit the target."""

    def measured(self, training: Trained) -> dict[str, Any]:
        """Return what the folder's config says of the drafter's accuracy.

        All processes measure it together at the end.
        """
        return {}

    @abstractmethod
    def save(self, training: Trained, folder: Path, about: dict[str, Any]) -> None:
        """Write weights and config so that the method loads them.

        about: the base's hash and facts about the training.
        """

    def usage(self, folder: Path, model: str) -> str:
        """Return the shell command that decodes with the folder."""
        weights = f"{self.decoded_by}.weights={folder}"
        return shlex.join(["ssbench", "run", "--model", model, "--methods", self.decoded_by, "--set", weights])
