"""`ssbench train hydra`: sequential heads on the frozen base, by default with Hydra++'s prefix layer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from specbench_ss.errors import UserError
from specbench_ss.training.heads_trainer import MeasurableHeads, MeasurableHeadsTrainer

if TYPE_CHECKING:
    from specbench_ss.decoding.target import Target
    from specbench_ss.methods.hydra.training import HydraTrainee


@dataclass(frozen=True, slots=True)
class HydraTraining(MeasurableHeads):
    """Defaults: Hydra++ as published."""

    layers: int = field(default=4, metadata={"help": "blocks of a head"})
    prefix: bool = field(default=True, metadata={"help": "Hydra++: one more layer before the heads"})
    own_unembed: bool = field(default=True, metadata={"help": "an LM head for every head, or the base's for all"})


class HydraTrainer(MeasurableHeadsTrainer):
    """Heads, the prefix layer, and accuracies, of which `hydra` builds its tree."""

    name = "hydra"
    summary = "Hydra heads on the frozen base, teacher loss, with Hydra++'s prefix layer"
    method = "hydra"
    weights_file = "hydra_lm_head.safetensors"
    Options = HydraTraining

    def __init__(self, options: Any) -> None:
        super().__init__(options)
        if options.layers < 1:
            raise UserError(f"hydra: layers must be at least 1, not {options.layers}")

    def build(self, target: Target, lr: float) -> HydraTrainee:
        """Heads that begin as the base's LM head."""
        from specbench_ss.methods.hydra.training import HydraTrainee

        o = self.options
        return HydraTrainee(target, o.heads, o.layers, o.prefix, o.own_unembed, lr)

    def loaded(self, target: Target, weights: str) -> HydraTrainee:
        """As `hydra` loads them."""
        from specbench_ss.methods.hydra.decoding import Hydra
        from specbench_ss.methods.hydra.training import HydraTrainee

        decoder = Hydra.load(target, Hydra.Options(weights=weights, tree="published"))
        return HydraTrainee(target, decoder.heads, tap=decoder.tap)
