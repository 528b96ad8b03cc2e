"""What a DFlash checkpoint's config.json says, in either layout. Knows no tensor."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from specbench_ss import user_files
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.speculators_format import check_type

NOT_HERE = ("output_multiplier", "final_logit_softcapping")  # what z-lab's code does to logits of some models


class Said(msgspec.Struct, frozen=True):
    """layer_ids: of the target; outputs of these layers in z-lab's layout, inputs in speculators'.

    is_causal: of z-lab's layers, None = those with a sliding window.
    """

    block_size: int
    mask_token_id: int
    target_layer_ids: list[int] | None = None
    aux_hidden_state_layer_ids: list[int] | None = None
    speculators_model_type: str = ""
    num_target_layers: int | None = None
    draft_vocab_size: int | None = None
    sample_from_anchor: bool = False
    sliding_window_non_causal: bool = False
    is_causal: bool | None = None
    input_embedding_scale: float = 1.0

    @classmethod
    def of(cls, config: dict[str, Any]) -> Said:
        """Raises UserError where it is no drafter of DFlash's, or something is missing or of another kind."""
        nested = config.get("dflash_config")
        if not check_type(config, "dflash") and not isinstance(nested, dict):
            raise UserError("config.json describes no DFlash drafter: it has no dflash_config")
        flat = {**config, **nested} if isinstance(nested, dict) else config
        if other := [name for name in NOT_HERE if flat.get(name) is not None]:
            raise UserError(f"config.json asks for {other[0]}, which is not supported")
        try:
            said = user_files.convert(flat, cls)
        except ValueError as problem:
            raise UserError(f"config.json: {problem}") from None
        if not math.isfinite(said.input_embedding_scale):
            raise UserError(
                f"input_embedding_scale in config.json is {said.input_embedding_scale}, which is not finite"
            )
        return said

    @property
    def listed_in(self) -> str:
        """The name of the list of layers."""
        return "aux_hidden_state_layer_ids" if self.speculators_model_type else "target_layer_ids"

    @property
    def layer_ids(self) -> list[int]:
        """That list."""
        ids = self.aux_hidden_state_layer_ids if self.speculators_model_type else self.target_layer_ids
        return ids or []
