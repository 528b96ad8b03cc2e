"""DSpark's drafter: DFlash's network with a Markov head and a confidence head, and its checkpoints.

Cheng et al. 2026, arXiv:2607.05147. The block begins with the root, whose position drafts too. Two layouts are read.
DeepSpec's: the flat configuration of a Qwen3 model with `markov_rank` and `target_layer_ids`, which name outputs of
layers (-1: the embedding), and copies of the target's embedding and LM head. speculators' type `dspark`, which is
written too and which vLLM serves. Both have DFlash's tensors, `markov_head.*` and `confidence_head.proj.*`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
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


@dataclass(frozen=True, slots=True)
class Shape(dflash.Shape):
    """Shape of a drafter without the sizes of its layers."""

    markov_rank: int = 0  # 0 = no correction
    markov_kind: MarkovKind = "vanilla"
    confidence: Literal["", "states", "markov"] = ""  # what the confidence head reads; "" = there is none


class Drafter(dflash.Drafter):
    """DFlash's network and DSpark's two heads."""

    shape: Shape

    def __init__(self, shape: Shape, config: Qwen3Config, vocab_size: int) -> None:
        super().__init__(shape, config, vocab_size)
        h, rank = config.hidden_size, shape.markov_rank
        self.markov_head = None
        if rank:
            self.markov_head = MarkovHead(shape.markov_kind, rank, h, vocab_size, shape.draft_vocab or vocab_size)
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
    reads: Literal["", "states", "markov"] = "" if not confidence else "markov" if rank else "states"
    same = {field.name: getattr(plain, field.name) for field in fields(plain)}
    shape = Shape(**same, markov_rank=rank, markov_kind=kind, confidence=reads)
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


class DSparkFields(dflash.DFlashFields, frozen=True, kw_only=True):
    """Fields of a DSpark config.json in either layout; the defaults are those of speculators."""

    sample_from_anchor: bool = True
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True

    @property
    def confidence(self) -> Literal["", "states", "markov"]:
        """Return what the confidence head reads; "" = there is none."""
        if not self.enable_confidence_head:
            return ""
        return "markov" if self.confidence_head_with_markov else "states"


def read_fields(config: dict[str, Any]) -> DSparkFields:
    """Return the fields of config.json. Raise UserError if it describes no supported DSpark drafter."""
    if not speculators.check_type(config, "dspark"):
        named = config.get("architectures")
        name = str(named[0]) if isinstance(named, list) and named else ""
        if name != ARCHITECTURE:
            reason = f"its architecture is {name!r}, not {ARCHITECTURE!r}"
            advice = "; use the method dflash" if "dflash_config" in config else ""
            raise UserError(f"config.json describes no supported DSpark drafter: {reason}{advice}")
        required = ("markov_rank", "enable_confidence_head", "target_layer_ids", "mask_token_id", "block_size")
        if missing := [field for field in required if config.get(field) is None]:
            raise UserError(f"config.json lacks {missing[0]}")
    dflash.check_supported(config)
    stated = speculators.parse(config, DSparkFields)
    if stated.markov_rank < 0:
        raise UserError(f"markov_rank in config.json is {stated.markov_rank}, it must be at least 0")
    if stated.markov_rank and stated.markov_head_type not in MARKOV_KINDS:
        kinds = ", ".join(MARKOV_KINDS)
        raise UserError(f"markov_head_type in config.json is {stated.markov_head_type!r}, it must be one of {kinds}")
    if stated.confidence == "markov" and not stated.markov_rank:
        raise UserError("confidence_head_with_markov in config.json needs a markov_rank above 0")
    return stated


def _network(config: dict[str, Any], base: ModelInfo, tensors: dict[str, Tensor]) -> Drafter:
    stated = read_fields(config)
    layer = speculators.layer_config(config, "Qwen3", ("qwen3",) if not config.get(speculators.TYPE) else (), tensors)
    if not config.get(speculators.TYPE) and (stated.is_causal or any(speculators.sliding_layers(layer))):
        raise UserError("config.json has causal layers or layers with a sliding window, which DeepSpec's never are")
    dflash.check_columns("markov_rank", stated.markov_rank, W1, tensors)
    kinds: dict[str, MarkovKind] = {kind: kind for kind in MARKOV_KINDS}
    kind = kinds.get(stated.markov_head_type, "vanilla")  # any, if the rank is 0
    same = dflash.shape_fields(stated, layer, base, tensors)
    shape = Shape(**same, markov_rank=stated.markov_rank, markov_kind=kind, confidence=stated.confidence)
    with speculators.describing("layers as Qwen3 has them"):
        return Drafter(shape, Qwen3Config(**speculators.sizes_of(layer)), base.vocab_size)


def _problems_in_vllm(config: dict[str, Any], drafter: Drafter) -> list[str]:
    """Return deviations of vLLM 0.32 with this drafter, each with its remedy."""
    problems, shape = dflash.causal_problems(config, drafter), drafter.shape
    if config.get(speculators.TYPE) and "sample_from_anchor" not in config:
        problems.append('takes a missing "sample_from_anchor" as false: set it to true in config.json')
    if shape.markov_rank and shape.markov_kind != "vanilla":
        problems.append(f"has no Markov head of the kind {shape.markov_kind}; train one of the kind vanilla")
    return problems


read_drafter = partial(speculators.read_network, "dspark", _network, _problems_in_vllm)


def speculators_config_of(drafter: Drafter, base: ModelInfo) -> dict[str, Any]:
    """Return config.json in speculators' layout.

    Raise UserError for a drafter that reads the final state, and for masks that the layout cannot describe.
    """
    shape = drafter.shape
    return dflash.speculators_config_of(
        drafter,
        base,
        "dspark",
        markov_rank=shape.markov_rank,
        markov_head_type=shape.markov_kind,
        enable_confidence_head=bool(shape.confidence),
        confidence_head_with_markov=shape.confidence == "markov",
    )
