"""What differs between drafters that learn by the one loop (session.py)."""

from __future__ import annotations

import shlex
from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from specbench_ss.training.trainer import Trainer

if TYPE_CHECKING:
    from specbench_ss.decoding.target import Target
    from specbench_ss.training.drafter_training import DrafterTraining
    from specbench_ss.training.trainee import Trainee


class DrafterRecipe(Trainer):
    """What differs between drafters: what is trained, how far ahead it looks, how its folder is written.

    method: the method that reads the folder, unless options change it (`decoded_by`). lr: peak learning rate where the
    user gives none.
    """

    method: ClassVar[str]
    lr: ClassVar[float] = 5e-4

    @property
    @abstractmethod
    def ahead(self) -> int:
        """Tokens after the next one that are drafted: how many labels a position has."""

    @property
    def decoded_by(self) -> str:
        """The method that reads the folder, by its name in `ssbench run --methods`."""
        return self.method

    @abstractmethod
    def build(self, target: Target, lr: float) -> Trainee:
        """What is trained, with its first weights. Raises UserError where it does not fit the target."""

    def measured(self, training: DrafterTraining) -> dict[str, Any]:
        """What the folder's config says of how the drafter does, found at the end by all processes together."""
        return {}

    @abstractmethod
    def save(self, training: DrafterTraining, folder: Path, about: dict[str, Any]) -> None:
        """Write weights and config, so that the method loads them. about: the base's hash, what the training was."""

    def usage(self, folder: Path, model: str) -> str:
        """The command that decodes with the folder, as it is typed into a shell."""
        weights = f"{self.decoded_by}.weights={folder}"
        return shlex.join(["ssbench", "run", "--model", model, "--methods", self.decoded_by, "--set", weights])
