"""What a P-EAGLE checkpoint's config.json says, in either layout. Knows no tensor."""

from __future__ import annotations

from typing import Any

import msgspec

from specbench_ss import user_files
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.speculators_format import check_type
from specbench_ss.methods.peagle.options import DEPTHS

TYPE = "peagle"
MASKS = ("mask_token_id", "pard_token", "ptd_token_id")  # the mask token's names; the latter two are vLLM's


class Proposal(msgspec.Struct, frozen=True):
    """One way of drafting that a speculators configuration proposes."""

    speculative_tokens: int = DEPTHS


class Proposals(msgspec.Struct, frozen=True):
    """`speculators_config`."""

    proposal_methods: list[Proposal] = []


class Said(msgspec.Struct, frozen=True):
    """eagle_aux_hidden_state_layer_ids: layers of the target whose inputs are read, None = EAGLE-3's own choice.

    num_depths: of this project's own layout.
    """

    mask_token_id: int
    speculators_model_type: str = ""
    eagle_aux_hidden_state_layer_ids: list[int] | None = None
    speculators_config: Proposals = Proposals()
    num_depths: int | None = None
    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False

    @classmethod
    def of(cls, config: dict[str, Any]) -> Said:
        """Raises UserError where it is no drafter of P-EAGLE's, or something is missing or of another kind."""
        stated = check_type(config, TYPE)
        mask = next((config[name] for name in MASKS if config.get(name) is not None), None)
        if mask is None and not stated:
            raise UserError("config.json describes no P-EAGLE drafter: it has no mask_token_id")
        nested = config.get("eagle_config")
        flat = {**nested, **config} if isinstance(nested, dict) else config
        try:
            return user_files.convert({**flat, "mask_token_id": mask}, cls)
        except ValueError as problem:
            raise UserError(f"config.json: {problem}") from None

    @property
    def depths(self) -> int:
        """Places of a step: those that it was trained on where that is said."""
        said = [proposal.speculative_tokens for proposal in self.speculators_config.proposal_methods]
        return self.num_depths if self.num_depths is not None else max(said, default=DEPTHS)
