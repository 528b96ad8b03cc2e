"""DSpark's drafter: DFlash's network with a Markov head and a confidence head, and its checkpoints.

Cheng et al. 2026, arXiv:2607.05147. The block begins with the root, whose position drafts too. Two layouts are read.
DeepSpec's: the flat configuration of a Qwen3 model with `markov_rank` and `target_layer_ids`, which name outputs of
layers (-1: the embedding), and copies of the target's embedding and LM head. speculators' type `dspark`, which is
written too and which vLLM serves. Both have DFlash's tensors, `markov_head.*` and `confidence_head.proj.*`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import Qwen3Config

from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.methods._shared import speculators
from specbench_ss.methods._shared.draft_vocabulary import randomize_drafter, set_draft_vocab
from specbench_ss.methods._shared.drafter_config import config_field, optional
from specbench_ss.methods.block_drafters import dflash
from specbench_ss.methods.block_drafters.correction import (
    MARKOV_KINDS,
    ConfidenceHead,
    Correction,
    MarkovHead,
    MarkovKind,
)

BLOCK = 7  # positions of published drafters
ARCHITECTURE = "Qwen3DSparkModel"  # in DeepSpec's layout, also of their DFlash drafters
UNCORRECTED = Correction()
W1 = "markov_head.markov_w1.weight"


def _rank_problem(rank: int, base: ModelInfo) -> str:
    return "" if rank >= 0 else "it must be at least 0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape(dflash.Shape):
    """Shape of a drafter without the sizes of its layers; the defaults are those of speculators."""

    from_anchor: bool = config_field("sample_from_anchor", True)
    markov_rank: int = config_field("markov_rank", 256, check=_rank_problem)  # 0 = no correction
    markov_kind: str = config_field("markov_head_type", "vanilla")
    has_confidence: bool = config_field("enable_confidence_head", True)
    confidence_with_markov: bool = config_field("confidence_head_with_markov", True)

    @property
    def confidence(self) -> Literal["", "states", "markov"]:
        """Return what the confidence head reads; "" = there is none."""
        return "" if not self.has_confidence else "markov" if self.confidence_with_markov else "states"


class Drafter(dflash.Drafter):
    """DFlash's network and DSpark's two heads."""

    shape: Shape

    def __init__(self, shape: Shape, config: Qwen3Config, vocab_size: int) -> None:
        super().__init__(shape, config, vocab_size)
        h, rank = config.hidden_size, shape.markov_rank
        self.markov_head = None
        if rank:
            kinds: dict[str, MarkovKind] = {kind: kind for kind in MARKOV_KINDS}
            words = shape.draft_vocab or vocab_size
            self.markov_head = MarkovHead(kinds[shape.markov_kind], rank, h, vocab_size, words)
        self.confidence_head = None
        if shape.confidence:
            self.confidence_head = ConfidenceHead(h + rank * (shape.confidence == "markov"))

    @property
    def correction(self) -> Correction:
        """Return the correction of the block's logits; without a Markov head it changes nothing."""
        return self.markov_head or UNCORRECTED

    def confidence(self, states: Tensor, before: Tensor) -> Tensor:
        """Return float32 logits [..] of acceptance for states [.., h] and the tokens before them, int64 [..]."""
        assert self.confidence_head is not None
        if self.shape.confidence == "markov":
            assert self.markov_head is not None
            states = torch.cat((states, self.markov_head.embed(before).to(states.dtype)), -1)
        out: Tensor = self.confidence_head(states)
        return out


# -- new drafters --------------------------------------------------------------------------------------------------


def new_drafter(
    target: Target,
    draft_layers: int,
    block: int,
    draft_vocab: int = 0,
    mask: int | None = None,
    *,
    rank: int,
    kind: MarkovKind = "vanilla",
    confidence: bool = True,
) -> Drafter:
    """Return an untrained drafter, whose Markov head changes nothing yet. draft_vocab: 0 = the target's LM head."""
    plain, config = dflash.new_shape(target, draft_layers, block, draft_vocab, mask, from_anchor=True)
    heads: dict[str, Any] = {"has_confidence": confidence, "confidence_with_markov": confidence and bool(rank)}
    same = {field.name: getattr(plain, field.name) for field in fields(plain)}
    shape = Shape(**same, markov_rank=rank, markov_kind=kind, **heads)
    drafter = Drafter(shape, config, target.vocab_size)
    if drafter.markov_head is not None:
        drafter.markov_head.reset_parameters()
    if drafter.confidence_head is not None:
        nn.init.zeros_(drafter.confidence_head.proj.weight)
    if shape.draft_vocab:
        set_draft_vocab(drafter, torch.arange(shape.draft_vocab))
    return drafter


def random_drafter(
    target: Target, draft_vocab: int = 0, rank: int = 3, kind: MarkovKind = "vanilla", confidence: bool = True
) -> Drafter:
    """Return a drafter with random weights: two layers, blocks of four positions."""
    drafter = new_drafter(target, 2, 4, draft_vocab, rank=rank, kind=kind, confidence=confidence)
    return randomize_drafter(drafter, target.vocab_size)


# -- checkpoints ---------------------------------------------------------------------------------------------------


REQUIRED = ("markov_rank", "enable_confidence_head", "target_layer_ids", "mask_token_id", "block_size")  # by DeepSpec


def _network(config: dict[str, Any], base: ModelInfo, tensors: dict[str, Tensor]) -> Drafter:
    deepspec = not speculators.check_type(config, "dspark")
    if deepspec:
        _check_deepspec(config)
    layer = speculators.layer_config(config, "Qwen3", ("qwen3",) if deepspec else (), tensors)
    if deepspec and (optional(config, "is_causal", bool) or any(speculators.sliding_layers(layer))):
        raise UserError("config.json has causal layers or layers with a sliding window, which DeepSpec's never are")
    shape = _checked_heads(dflash.read_shape(Shape, config, layer, base, tensors))
    dflash.check_columns("markov_rank", shape.markov_rank, W1, tensors)
    with speculators.describing("layers as Qwen3 has them"):
        return Drafter(shape, Qwen3Config(**speculators.sizes_of(layer)), base.vocab_size)


read_drafter = partial(speculators.read_network, "dspark", _network)


def _check_deepspec(config: dict[str, Any]) -> None:
    """Raise UserError if config.json describes no drafter in DeepSpec's layout."""
    named = config.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else ""
    if name != ARCHITECTURE:
        reason = f"its architecture is {name!r}, not {ARCHITECTURE!r}"
        advice = "; use the method dflash" if "dflash_config" in config else ""
        raise UserError(f"config.json describes no supported DSpark drafter: {reason}{advice}")
    if missing := [field for field in REQUIRED if config.get(field) is None]:
        raise UserError(f"config.json lacks {missing[0]}")


def _checked_heads(shape: Shape) -> Shape:
    """Return a shape without switches of heads that it does not have. Raise UserError for impossible heads."""
    if shape.markov_rank and shape.markov_kind not in MARKOV_KINDS:
        kinds = ", ".join(MARKOV_KINDS)
        raise UserError(f"markov_head_type in config.json is {shape.markov_kind!r}, it must be one of {kinds}")
    if shape.confidence == "markov" and not shape.markov_rank:
        raise UserError("confidence_head_with_markov in config.json needs a markov_rank above 0")
    kind = shape.markov_kind if shape.markov_kind in MARKOV_KINDS else "vanilla"
    return replace(shape, markov_kind=kind, confidence_with_markov=shape.confidence == "markov")


speculators_config_of = partial(dflash.speculators_config_of, kind="dspark")


def vllm_config_of(drafter: Drafter, base: ModelInfo) -> dict[str, Any]:
    """Return `speculators_config_of`, which vLLM reads. Warn of what vLLM 0.32 does not serve."""
    shape = drafter.shape
    if shape.markov_rank and shape.markov_kind != "vanilla":
        problem = f"vLLM has no Markov head of the kind {shape.markov_kind}; train one of the kind vanilla"
        warnings.warn(f"dspark: {problem}", stacklevel=1)
    return speculators_config_of(drafter, base)
