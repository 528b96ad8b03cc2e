"""DFlash's drafter: network, new weights, and checkpoints in z-lab's and speculators' layouts.

A few Qwen3 layers whose keys and values come from the target's hidden states and from a block: Chen et al. 2026,
arXiv:2602.06036. Modules are named as published tensors.

z-lab's layout: `dflash_config`, `block_size`, layers named by their outputs. speculators' layout, which vLLM serves:
`speculators_model_type`, `transformer_layer_config`, layers named by their inputs, possibly a draft vocabulary.
Both have the same tensors: `fc`, `hidden_norm`, `layers.N.*`, `norm`; speculators adds `lm_head`, `d2t` and `t2d`.

Three extensions in either layout, or in z-lab's alone: DFlash2's convolutions (`layers.N.{attention,mlp}_conv`) and its
candidate selector, of the type `dflash2` in speculators' layout, and Domino's recurrent head (`projector_type`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, Qwen3Config
from transformers.models.llama.modeling_llama import rotate_half
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm

from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.engine.layers.fused import FusedBlock
from specbench_ss.engine.layers.linear import PackedDtype, PrepackedLinear
from specbench_ss.engine.target import FINAL, AnyCache, Target
from specbench_ss.errors import UserError
from specbench_ss.methods._shared import speculators
from specbench_ss.methods._shared.draft_vocabulary import (
    mask_token,
    randomize_drafter,
    set_draft_vocab,
    token_problem,
    vocabulary_fields,
)
from specbench_ss.methods._shared.drafter_config import (
    config_field,
    finite_problem,
    optional,
    read_config_fields,
    read_field,
    to_config,
    within,
)
from specbench_ss.methods._shared.drafter_network import DrafterNetwork, Rotary, VocabularyShape, block_of
from specbench_ss.methods.block_drafters.convolution import BlockConvolution, inside_block
from specbench_ss.methods.block_drafters.correction import CandidateSelector, Correction, RecurrentHead

MOST_BLOCK = 256  # positions of a block; published drafters have at most 16
UNSUPPORTED = ("output_multiplier", "final_logit_softcapping")  # logit transforms in z-lab's code
LAYER_IDS = "aux_hidden_state_layer_ids"
NON_CAUSAL = "sliding_window_non_causal"  # speculators: for sliding layers; vLLM 0.32: for all layers
ORDER = ("draft_vocab_size", "block_size", LAYER_IDS, "mask_token_id", "sample_from_anchor", NON_CAUSAL)  # as written
DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}  # speculators'
CONVOLUTION, SELECTOR = (*DFLASH2,)[:2], (*DFLASH2,)[2:]
DOMINO = ("gru_hidden_dim", "emb_dim", "pure_draft_prefix_len")
PARTS = (*DFLASH2, *DOMINO)
NULLABLE = PARTS[:-1]  # null = absent
TYPES = {"projector_type": str, LAYER_IDS: list[int], "target_layer_ids": list[int]}  # checked in every layout
PROJECTORS = (None, "dflash", "domino")  # z-lab's layout


@dataclass(frozen=True, slots=True)
class BlockAttention:
    """Attention mask of one layer of a DFlash block: visibility over the context and within the block."""

    window: int | None = None  # number of positions visible backwards, None = all
    from_root: bool = False  # window counted from the block's root (speculators), not from each position (z-lab)
    causal: bool = False  # later positions of the block are hidden

    @property
    def no_mask(self) -> bool:
        """Return True if no mask is needed."""
        return self.window is None and not self.causal

    def context(self, root: Tensor, size: int, keys: Tensor) -> Tensor:
        """Return bool [.., size, K]: context positions keys [K] visible to blocks whose roots are at root [..].

        Keys at or after the root are hidden.
        """
        positions = torch.arange(size, device=keys.device)
        before = (keys < root[..., None, None]).expand(*root.shape, size, len(keys))
        if self.window is None:
            return before
        near = root[..., None] - self.window if self.from_root else root[..., None] + positions - self.window + 1
        return before & (keys >= near[..., None])

    def block(self, size: int, device: torch.device) -> Tensor:
        """Return bool [size, size]: visibility of block positions to each position of the block."""
        positions = torch.arange(size, device=device)
        back = positions[:, None] - positions  # distance to the key
        visible = back >= 0 if self.causal else torch.ones_like(back, dtype=torch.bool)
        return visible if self.window is None or self.from_root else visible & (back.abs() < self.window)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape(VocabularyShape):
    """Shape of a drafter without the sizes of its layers."""

    layer_masks: tuple[BlockAttention, ...]
    block: int = config_field("block_size")  # positions of a block, the root included
    # target layers whose inputs are read; FINAL = the final, normed state
    layers: tuple[int, ...] = config_field("aux_hidden_state_layer_ids")
    mask_token: int = config_field("mask_token_id", check=token_problem)
    from_anchor: bool = config_field("sample_from_anchor", False)  # the root's position drafts too
    scale: float = config_field("input_embedding_scale", 1.0, check=finite_problem, always=False)  # of embeddings
    conv_kernel_size: int = config_field("conv_kernel_size", 0, always=False)  # taps of convolutions, 0 = none
    conv_group_size: int = config_field("conv_group_size", 0, always=False)
    selector_rank: int = config_field("selector_rank", 0, always=False)  # 0 = no candidate selector
    selector_top_k: int = config_field("selector_top_k", 0, always=False)
    gru_hidden_dim: int = config_field("gru_hidden_dim", 0, always=False)  # of Domino's recurrent head, 0 = none
    emb_dim: int = config_field("emb_dim", 0, always=False)
    pure_draft_prefix_len: int = config_field("pure_draft_prefix_len", 0, always=False)

    @property
    def first(self) -> int:
        """Return the first position of a block that drafts a token."""
        return 0 if self.from_anchor else 1

    @property
    def sizes(self) -> tuple[int, int]:
        """Return the smallest block size, which drafts one token, and the trained one."""
        return 1 + self.first, self.block

    def check_parts(self, hidden: int, vocab: int) -> None:
        """Raise UserError for convolutions or a correction that the target's sizes do not allow."""
        taps, group, top_k = self.conv_kernel_size, self.conv_group_size, self.selector_top_k
        if negative := [name for name in PARTS if getattr(self, name) < 0]:
            raise UserError(f"{negative[0]} is {getattr(self, negative[0])}, it must be at least 0")
        if taps and (group < 1 or hidden % group):
            raise UserError(f"conv_group_size is {group}, it must divide the hidden size {hidden}")
        if taps > self.block:
            raise UserError(f"conv_kernel_size is {taps}, it must be at most the block_size {self.block}")
        if self.selector_rank and not 1 <= top_k <= vocab:
            raise UserError(f"selector_top_k is {top_k}, it must be 1 to {vocab}, the vocabulary")
        if (taps or self.selector_rank or self.gru_hidden_dim) and 0 < self.draft_vocab < vocab:
            raise UserError(f"DFlash2 and Domino need the whole vocabulary, draft_vocab_size is {self.draft_vocab}")


class Drafter(DrafterNetwork):
    """DFlash network: fc over hidden states of several target layers, D layers over context and block, a norm.

    Layers may have convolutions, and the block's logits a correction. config: sizes of its layers. vocab_size: the
    target's.
    """

    config: Qwen3Config

    def __init__(self, shape: Shape, config: Qwen3Config, vocab_size: int) -> None:
        super().__init__(shape, config)
        h, eps, taps = config.hidden_size, config.rms_norm_eps, shape.conv_kernel_size
        self.fc = nn.Linear(len(shape.layers) * h, h, bias=False)
        self.hidden_norm = Qwen3RMSNorm(h, eps)
        self.layers = nn.ModuleList([Qwen3DecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = Qwen3RMSNorm(h, eps)
        self.make_head(vocab_size)
        self.candidate_selector = self.recurrent_head = None
        if shape.selector_rank:
            self.candidate_selector = CandidateSelector(shape.selector_rank, shape.selector_top_k, h, vocab_size)
        if shape.gru_hidden_dim:
            sizes = shape.gru_hidden_dim, shape.emb_dim, shape.pure_draft_prefix_len
            self.recurrent_head = RecurrentHead(*sizes, h, vocab_size)
        if taps:
            for layer in self.layers:
                layer.attention_conv = BlockConvolution(h, taps, shape.conv_group_size)
                layer.mlp_conv = BlockConvolution(h, taps, shape.conv_group_size)
        # a convolution follows the norm: the block then has none of its own
        self.blocks = [block_of(layer, nn.Identity() if taps else None) for layer in self.layers]
        for block in self.blocks:
            block.attention.is_causal = False
        self.injection: tuple[PrepackedLinear, Tensor] | None = None

    @property
    def correction(self) -> Correction | None:
        """Return the correction of the block's logits, or None."""
        return self.candidate_selector or self.recurrent_head

    def finalize(self, rotary: Rotary, pack: PackedDtype) -> None:
        """Prepare for inference with final weights."""
        super().finalize(rotary, pack)
        self.injection = self.injection or self._injection(pack)
        for part in self.modules():
            if isinstance(part, BlockConvolution | Correction):
                part.finalize(pack)

    def table(self, target: Target) -> Tensor:
        """Return the embedding [V, h] of the target's tokens, the drafter's or the target's, without a scale."""
        weight: Tensor = (self.embed_tokens or target.model.get_input_embeddings()).weight
        return weight

    def block_inputs(self, tokens: Tensor, size: int, target: Target) -> Tensor:
        """Return what `forward` reads of tokens [B, n] in blocks of `size` positions: [B, n, h], or wider.

        With convolutions of T taps: [B, n, h + T - 1], the embeddings and `inside_block`, which rows carry with them
        wherever a pass joins or pads rows.
        """
        embedded, taps = self.embed(tokens, target), self.shape.conv_kernel_size
        if taps < 2:
            return embedded
        inside = inside_block(tokens.shape[1], size, taps, embedded)
        return torch.cat((embedded, inside.expand(len(tokens), -1, -1)), -1)

    def embed(self, tokens: Tensor, target: Target) -> Tensor:
        """Return scaled embeddings [B, n, h] of token ids [B, n]."""
        embedded = super().embed(tokens, target)
        return embedded if self.shape.scale == 1 else embedded * self.shape.scale

    def fuse(self, features: Sequence[Tensor]) -> Tensor:
        """Return the context [B, n, h] from hidden states of each target layer [B, n, h]."""
        context: Tensor = self.hidden_norm(self.fc(torch.cat(tuple(features), -1)))
        return context

    def inject(self, context: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return keys and values [D, B, kv_heads, n, head_dim] of context [B, n, h] in all layers, with RoPE."""
        kv_proj, norm = self.injection or self._injection()
        c, (cos, sin) = self.config, (x[:, :, None, None] for x in rotary)
        rows = kv_proj(context).unflatten(-1, (2, len(self.blocks), c.num_key_value_heads, c.head_dim))
        keys, values = rows.unbind(2)  # [B, n, D, kv_heads, head_dim]
        keys = F.rms_norm(keys, (c.head_dim,), eps=c.rms_norm_eps) * norm
        keys = keys * cos + rotate_half(keys) * sin
        return keys.permute(2, 0, 3, 1, 4), values.permute(2, 0, 3, 1, 4)

    def _injection(self, pack: PackedDtype = None) -> tuple[PrepackedLinear, Tensor]:
        """Return k_proj and v_proj of all layers as one matmul, and the weights of their k_norm [D, 1, head_dim]."""
        attentions: list[Any] = [layer.self_attn for layer in self.layers]
        parts = [a.k_proj for a in attentions] + [a.v_proj for a in attentions]
        bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
        norm = torch.stack([a.k_norm.weight for a in attentions])[:, None]
        weights = [part.weight for part in parts]
        return PrepackedLinear(torch.cat(weights), bias, pack, weights), norm

    def forward(
        self, embedded: Tensor, cache: AnyCache, masks: Sequence[Tensor | None], rotary: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Return normed states [B, n, h] of block positions from `block_inputs`.

        cache: has the context's keys and values. masks: additive, one per layer, None = everything is visible.
        """
        taps, h = self.shape.conv_kernel_size, self.config.hidden_size
        x, inside = (embedded[..., :h], embedded[..., h:]) if taps else (embedded, embedded)
        for layer, block, mask in zip(self.layers, self.blocks, masks, strict=True):
            if taps:
                attend = partial(block.attend, cache=cache, mask=mask, rotary=rotary)
                x = self._convolved(layer, block, x, inside, attend)
            else:
                x = block(x, cache, mask, rotary)
        out: Tensor = self.norm(x)
        return out

    @staticmethod
    def _convolved(layer: Any, block: Any, x: Tensor, inside: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """Run a layer with convolutions: x [B, n, h] -> [B, n, h]. inside: [B, n, taps - 1]."""

        def mlp(normed: Tensor) -> Tensor:
            out: Tensor
            if isinstance(block, FusedBlock) and torch.is_inference_mode_enabled():
                gate, up = block.joined.gate_up(normed).chunk(2, -1)
                out = block.joined.down(block.joined.act(gate) * up)
            else:
                out = layer.mlp(normed)
            return out

        x = x + layer.attention_conv(layer.input_layernorm(x), inside, attend)
        x = x + layer.mlp_conv(layer.post_attention_layernorm(x), inside, mlp)
        return x


# -- new drafters --------------------------------------------------------------------------------------------------


def published_layers(draft_layers: int, target_layers: int) -> tuple[int, ...]:
    """Return the target layers whose outputs a new drafter reads, one for each of its own layers if possible.

    The last layer's output is excluded: it is available only after the final norm.
    """
    if draft_layers == 1:
        return (min(target_layers // 2, max(0, target_layers - 2)),)
    step = (target_layers - 4) / (draft_layers - 1)
    outputs = {round(1 + i * step) for i in range(draft_layers)}
    return tuple(sorted({min(max(0, i), max(0, target_layers - 2)) for i in outputs}))


def new_shape(
    target: Target,
    draft_layers: int,
    block: int,
    draft_vocab: int = 0,
    mask: int | None = None,
    from_anchor: bool = False,
    layer_masks: Sequence[BlockAttention] | None = None,
    **parts: int,
) -> tuple[Shape, Qwen3Config]:
    """Return the shape of an untrained drafter and the configuration of its layers.

    Raise UserError for parts that the target does not allow.

    Args:
        target: the model that is drafted for.
        draft_layers: number of layers.
        block: positions of a block.
        draft_vocab: 0 = the target's LM head; else its own, over the first tokens.
        mask: the mask token; None = as `mask_token`.
        from_anchor: the root's position drafts too.
        layer_masks: one per layer; None = everything is visible.
        parts: fields of `Shape` for convolutions and a correction.
    """
    draft_vocab = 0 if draft_vocab >= target.vocab_size else draft_vocab
    reduced, outputs = bool(draft_vocab), published_layers(draft_layers, target.n_layers)
    inputs = tuple(-1 if i + 1 == target.n_layers else i + 1 for i in outputs)
    mask = mask_token(target, target.model.get_input_embeddings().weight) if mask is None else mask
    masks = tuple(layer_masks) if layer_masks is not None else (BlockAttention(),) * draft_layers
    words: dict[str, Any] = {"draft_vocab": draft_vocab, "mapped": reduced, "marked": reduced}
    shape = Shape(
        layer_masks=masks, block=block, layers=inputs, mask_token=mask, from_anchor=from_anchor, **words | parts
    )
    shape.check_parts(target.hidden_size, target.vocab_size)
    return shape, Qwen3Config(**speculators.new_sizes(target, draft_layers))


def new_drafter(target: Target, *args: Any, **parts: Any) -> Drafter:
    """Return an untrained drafter, whose convolutions and selector change nothing yet. Arguments: of `new_shape`."""
    shape, config = new_shape(target, *args, **parts)
    drafter = Drafter(shape, config, target.vocab_size)
    if drafter.candidate_selector is not None:
        drafter.candidate_selector.reset_parameters()
    if shape.draft_vocab:
        set_draft_vocab(drafter, torch.arange(shape.draft_vocab))
    return drafter


def random_drafter(
    target: Target,
    draft_vocab: int = 0,
    from_anchor: bool = False,
    layer_masks: Sequence[BlockAttention] | None = None,
    **parts: int,
) -> Drafter:
    """Return a drafter with random weights: two layers, blocks of five positions. parts: as for `new_drafter`."""
    drafter = new_drafter(target, 2, 5, draft_vocab, None, from_anchor, layer_masks, **parts)
    return randomize_drafter(drafter, target.vocab_size)


# -- checkpoints ---------------------------------------------------------------------------------------------------


def _network(config: dict[str, Any], base: ModelInfo, tensors: dict[str, Tensor]) -> Drafter:
    fields, parts = _fields(config)
    layer = speculators.layer_config(config, "Qwen3", drafted=tensors)
    shape = read_shape(Shape, fields, layer, base, tensors, parts)
    shape.check_parts(base.hidden_size, base.vocab_size)
    for name, tensor in (
        ("selector_rank", "candidate_selector.predecessor_codebook"),
        ("gru_hidden_dim", "prefix_gru.weight_hh_l0"),
        ("emb_dim", "embed_proj.2.weight"),
    ):
        if name in parts:
            check_columns(name, getattr(shape, name), tensor, tensors)
    with speculators.describing("layers as Qwen3 has them"):
        return Drafter(shape, Qwen3Config(**speculators.sizes_of(layer)), base.vocab_size)


read_drafter = partial(
    speculators.read_network, "dflash", _network, stored=lambda name: name.removeprefix("recurrent_head.")
)  # Domino's head has no prefix in a checkpoint


def _fields(config: dict[str, Any]) -> tuple[dict[str, Any], Collection[str]]:
    """Return the fields of config.json, and names of those of convolutions and a correction.

    Raise UserError if it describes no supported DFlash drafter.
    """
    nested = config.get("dflash_config")
    if not speculators.check_type(config, "dflash", "dflash2") and not isinstance(nested, dict):
        advice = "; use the method dspark" if config.get("markov_rank") is not None else ""
        raise UserError(f"config.json describes no DFlash drafter: it has no dflash_config{advice}")
    fields = {**config, **nested} if isinstance(nested, dict) else config
    fields = _without_nulls(fields)
    if (projector := optional(fields, "projector_type", str)) not in PROJECTORS:
        raise UserError(f"projector_type in config.json is {projector!r}, which is not supported")
    if (kind := optional(fields, speculators.TYPE, str)) is not None:
        defaults = DFLASH2 if kind == "dflash2" else {}
        return {**defaults, **fields}, defaults
    names = [*CONVOLUTION] * bool(fields.get("conv_kernel_size")) + [*SELECTOR] * bool(fields.get("selector_rank"))
    names += DOMINO if projector == "domino" else ()
    fields.setdefault("pure_draft_prefix_len", 0)
    if missing := [name for name in names if name not in fields]:
        raise UserError(f"config.json lacks {missing[0]}")
    return fields, names


def _without_nulls(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields without those of parts that are null, as of a drafter without the part."""
    return {name: value for name, value in fields.items() if value is not None or name not in NULLABLE}


def check_columns(field: str, stated: int, name: str, tensors: dict[str, Tensor]) -> None:
    """Raise UserError if a tensor's columns differ from a field, before a matrix of that size is allocated."""
    stored = tensors[name].shape[-1] if name in tensors and tensors[name].ndim else 0
    if stored != stated:
        raise UserError(f"{field} in config.json is {stated}, {name} has {stored or 'no'} columns")


AnyShape = TypeVar("AnyShape", bound=Shape)


def read_shape(
    kind: type[AnyShape],
    fields: dict[str, Any],
    layer: PretrainedConfig,
    base: ModelInfo,
    tensors: dict[str, Tensor],
    parts: Collection[str] = (),
) -> AnyShape:
    """Return the shape that config.json states. Raise UserError if the drafter does not fit the base.

    parts: names of the fields that are used of those for convolutions and a correction.
    """
    if other := [name for name in UNSUPPORTED if fields.get(name) is not None]:
        raise UserError(f"config.json sets {other[0]}, which is not supported")
    for name, kind_of in TYPES.items():
        optional(fields, name, kind_of)
    speculators.check_sizes(
        ("hidden size", layer.hidden_size, base.hidden_size),
        ("vocabulary", layer.vocab_size, base.vocab_size),
        ("number of layers", optional(fields, "num_target_layers", int) or base.n_layers, base.n_layers),
    )
    if fields.get(speculators.TYPE):
        inputs = speculators.layer_ids(fields, LAYER_IDS, base, most=base.n_layers)
    else:  # outputs, from -1 on: the embedding
        outputs = speculators.layer_ids(fields, "target_layer_ids", base, least=-1)
        inputs = tuple(FINAL if i == base.n_layers - 1 else i + 1 for i in outputs)
    values = read_config_fields({**_without_nulls(fields), LAYER_IDS: inputs}, kind, base)
    values["from_anchor"] |= "shift_label" in fields and read_field(fields, "shift_label", bool)  # Domino's name of it
    values |= {name: 0 for name in PARTS if name not in parts}
    vocabulary = vocabulary_fields(optional(fields, "draft_vocab_size", int), tensors, base)
    shape = kind(layer_masks=_layer_masks(fields, layer), **values, **vocabulary)
    if problem := within(shape.block, 1 + shape.first, min(MOST_BLOCK, base.context_length)):
        raise UserError(f"block_size in config.json is {shape.block}, {problem}")
    return shape


def _layer_masks(fields: dict[str, Any], layer: PretrainedConfig) -> tuple[BlockAttention, ...]:
    """Return each layer's mask; the two layouts treat sliding windows differently."""
    width, kind = getattr(layer, "sliding_window", None), fields.get(speculators.TYPE)
    causal, non_causal = (optional(fields, name, bool) for name in ("is_causal", NON_CAUSAL))
    if kind is None:
        full, sliding = BlockAttention(causal=bool(causal)), BlockAttention(width, causal=causal is not False)
    else:  # without a window, speculators' layers attend to their whole block
        full, sliding = BlockAttention(), BlockAttention()
        if width is not None:
            non_causal = kind == "dflash2" if non_causal is None else non_causal
            sliding = BlockAttention(width, from_root=True, causal=not non_causal)
    return tuple(sliding if slides else full for slides in speculators.sliding_layers(layer))


def config_of(drafter: Drafter, base: ModelInfo) -> dict[str, Any]:
    """Return config.json in z-lab's layout. Raise UserError for sliding windows and for a recurrent head."""
    shape = drafter.shape
    if shape.gru_hidden_dim:
        raise UserError("a recurrent head (Domino) cannot be written")
    if set(shape.layer_masks) != {BlockAttention()}:
        raise UserError("sliding windows cannot be written in z-lab's layout")
    fields = to_config(shape)
    block, inputs = fields.pop("block_size"), fields.pop(LAYER_IDS)
    if not shape.from_anchor:
        del fields["sample_from_anchor"]
    return {
        "architectures": ["DFlash2DraftModel" if shape.conv_kernel_size or shape.selector_rank else "DFlashDraftModel"],
        "model_type": "qwen3",
        **speculators.sizes_of(drafter.config),
        "vocab_size": base.vocab_size,
        "block_size": block,
        "num_target_layers": base.n_layers,
        # vLLM looks for sample_from_anchor here
        "dflash_config": {"target_layer_ids": [base.n_layers - 1 if i == FINAL else i - 1 for i in inputs], **fields},
        **({"draft_vocab_size": shape.draft_vocab} if shape.draft_vocab else {}),
    }


def speculators_config_of(drafter: Drafter, base: ModelInfo, kind: str = "dflash") -> dict[str, Any]:
    """Return config.json in speculators' layout, of `dflash2` for a drafter with convolutions and a selector.

    Raise UserError for a drafter that reads the final state (target of one layer), and for masks, parts and scales
    that the layout cannot describe.
    """
    shape = drafter.shape
    speculators.check_no_final(shape.layers)
    if shape.gru_hidden_dim:
        raise UserError("speculators' layout has no recurrent head (Domino)")
    if bool(shape.conv_kernel_size) != bool(shape.selector_rank):
        has, lacks = ("convolutions", "a selector") if shape.conv_kernel_size else ("a selector", "convolutions")
        raise UserError(f"speculators' dflash2 has convolutions and a selector, this drafter has {has}, not {lacks}")
    if shape.scale != 1:
        raise UserError(f"speculators' layout has no input_embedding_scale, this drafter has {shape.scale:g}")
    windows, non_causal = _windows(shape)
    layer = {"model_type": "qwen3", **speculators.sizes_of(drafter.config), "vocab_size": base.vocab_size, **windows}
    kind = "dflash2" if shape.conv_kernel_size else kind
    derived = {"draft_vocab_size": shape.draft_vocab or base.vocab_size, NON_CAUSAL: non_causal}
    fields = dict.fromkeys(ORDER) | to_config(shape) | derived
    return speculators.config_json(kind, layer, shape.block - shape.first, base, **fields)


def vllm_config_of(drafter: Drafter, base: ModelInfo) -> dict[str, Any]:
    """Return `speculators_config_of`, which vLLM reads. Warn of what vLLM 0.32 does not serve."""
    if drafter.shape.from_anchor:
        problem = 'vLLM does not serve "sample_from_anchor": true; train a drafter without it'
        warnings.warn(f"dflash: {problem}", stacklevel=1)
    return speculators_config_of(drafter, base)


def _windows(shape: Shape) -> tuple[dict[str, Any], bool]:
    """Return the fields of sliding windows in speculators' layout, and the value of `sliding_window_non_causal`.

    The value is valid for sliding layers, as in speculators, and for all layers, as in vLLM.
    """
    others = set(shape.layer_masks) - {BlockAttention()}
    if not others:
        return {}, True
    mask = others.pop()
    if others or mask.window is None or not mask.from_root:
        raise UserError("speculators' layout supports one sliding window, counted from the root; these layers differ")
    if mask.causal and BlockAttention() in shape.layer_masks:
        raise UserError(f"{NON_CAUSAL} cannot be false with full layers: vLLM would make them causal too")
    kinds = ["full_attention" if s == BlockAttention() else "sliding_attention" for s in shape.layer_masks]
    return {"use_sliding_window": True, "sliding_window": mask.window, "layer_types": kinds}, not mask.causal
