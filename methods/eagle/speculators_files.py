"""EAGLE-3 in the layout of the package `speculators`: what its config.json says, and how one is written.

What cannot be computed as that package does is refused by the name of the field. Facts: speculators 0.9, models/eagle3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from specbench_ss import user_files
from specbench_ss.engine.architectures import Outline
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.draft_vocabulary import own_words
from specbench_ss.methods._shared.layer_configs import (
    SIZES,
    check_layer_ids,
    check_sizes,
    described_layers,
    proposals,
    sizes_of,
)
from specbench_ss.methods._shared.speculators_format import LAYER, TYPE

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import LlamaConfig

    from specbench_ss.methods.eagle.drafter import Drafter, Shape

IDS = "eagle_aux_hidden_state_layer_ids"
BIASED = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
KINDS = ("llama", "qwen3")  # of layers; Qwen3's norms queries and keys head by head
OF_THE_LAYER = (*SIZES, "mlp_bias", "layer_types", "model_type")
OWN = ("lm_head.weight", "d2t", "t2d")  # tensors whose length is a vocabulary


class Said(msgspec.Struct, frozen=True):
    """Of the layer, and of EAGLE-3. What is left out concerns training: `embed_requires_grad`."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_key_value_heads: int
    vocab_size: int
    model_type: str
    attention_bias: bool = False
    layer_types: list[str] | None = None
    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    eagle_aux_hidden_state_layer_ids: list[int] | None = None

    @classmethod
    def of(cls, about: Mapping[str, Any]) -> Said:
        """Raises UserError where a field is of another kind."""
        try:
            return user_files.convert(dict(about), cls)
        except ValueError as problem:
            raise UserError(f"config.json: {problem}") from None


def laid_flat(config: dict[str, Any]) -> dict[str, Any]:
    """config.json with the layer's fields beside the others, also those that are not stated: its type's defaults.

    Raises UserError for layers that are not computed here.
    """
    given = config.get(LAYER)
    if not isinstance(given, dict):
        raise UserError(f"{LAYER} in config.json is not an object")
    if (kind := given.get("model_type") or "qwen3") not in KINDS:
        raise UserError(f"config.json speaks of layers of the type {kind!r}, not of {' or '.join(KINDS)}")
    layer = described_layers(given, "Llama")
    rope = layer.rope_parameters or {}
    if rope.get("partial_rotary_factor") not in (None, 1):
        raise UserError("config.json asks for partial_rotary_factor, which is not supported")
    return {**config, **{name: getattr(layer, name, None) for name in OF_THE_LAYER}}


def check_layers(about: Mapping[str, Any], base: Outline) -> tuple[int, ...]:
    """The layers whose inputs are features. Raises UserError for those that the model does not have.

    As vLLM counts them: id i is the state that layer i reads. Not stated: 2, N/2, N - 3.
    """
    n, ids = base.n_layers, Said.of(about).eagle_aux_hidden_state_layer_ids
    if ids is None:
        ids = [2, n // 2, n - 3]
        if len(set(ids)) < 3:
            raise UserError(f"config.json does not state {IDS}, and a model of {n} layers has no usual ones")
    if n in ids:
        raise UserError(f"{IDS} in config.json names {n}, the state before the final norm, which is not supported")
    check_layer_ids(ids, IDS, base)
    return tuple(ids)


def check_said(about: Mapping[str, Any], tensors: Mapping[str, Tensor], base: Outline, levels: int) -> None:
    """Raises UserError for a variant that is not computed here, and for what does not fit the model or the tensors."""
    said = Said.of(about)
    if said.num_hidden_layers != 1:
        raise UserError(f"num_hidden_layers in config.json is {said.num_hidden_layers}, a drafter of 1 can be read")
    if other := [kind for kind in (said.layer_types or ())[:1] if kind != "full_attention"]:
        raise UserError(f"layer_types in config.json asks for {other[0]!r}, which is not supported")
    if said.norm_before_fc and said.fc_norm:
        raise UserError("config.json asks for norm_before_fc and for fc_norm, of which there is one")
    target_hidden = said.target_hidden_size or said.hidden_size
    check_sizes((
        ("hidden size", target_hidden, base.hidden_size), ("vocabulary", said.vocab_size, base.vocab_size)
    ))  # fmt: skip
    own = {name: len(tensors[name]) if name in tensors and tensors[name].ndim else 0 for name in OWN}
    own_words(said.draft_vocab_size, own, base)
    wide = tensors["fc.weight"].shape[-1] if "fc.weight" in tensors and tensors["fc.weight"].ndim else None
    if wide not in (None, levels * target_hidden):
        raise UserError(f"fc.weight reads {wide} numbers, which are no {levels} states of {target_hidden}")


def check_shape(about: Mapping[str, Any], shape: Shape) -> None:
    """Raises UserError where the tensors are others than config.json says."""
    said = Said.of(about)
    for name, stated, own in (
        ("hidden_size", said.hidden_size, shape.hidden),
        ("intermediate_size", said.intermediate_size, shape.ffn),
        ("num_key_value_heads", said.num_key_value_heads, shape.kv_heads),
        ("norm_before_fc", said.norm_before_fc, shape.input_norm),
        ("fc_norm", said.fc_norm, shape.feature_norms),
    ):
        if stated != own:
            raise UserError(f"{name} in config.json is {stated}, the drafter's tensors are made for {own}")
    if shape.biases != (BIASED if said.attention_bias else frozenset()):
        has = ", ".join(sorted(shape.biases)) or "nothing"
        raise UserError(f"attention_bias in config.json is {said.attention_bias}, the drafter has biases of {has}")


def published_name(name: str) -> str:
    """A tensor's name in this layout."""
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name


def config_of(
    drafter: Drafter, about: Mapping[str, Any], layers: tuple[int, ...], drafts: int, base: Outline
) -> dict[str, Any]:
    """config.json in this layout. about: what `new_weights.config_for` says of the drafter; drafts: tokens a step."""
    shape = drafter.shape
    return {
        "architectures": ["Eagle3DraftModel"],
        TYPE: "eagle3",
        LAYER: _layer(shape.llama(dict(about)), shape, base),
        "draft_vocab_size": shape.draft_vocab,
        "speculators_config": proposals("eagle3", drafts, base),
        "norm_before_residual": shape.residual_normed,
        "target_hidden_size": base.hidden_size,
        IDS: list(layers),
        "norm_before_fc": shape.input_norm,
        "fc_norm": shape.feature_norms,
        "norm_output": shape.output_normed,
        "embed_requires_grad": False,
    }


def _layer(made: LlamaConfig, shape: Shape, base: Outline) -> dict[str, Any]:
    """Of the layer; `rope_theta` is where older versions of transformers look."""
    return {
        **sizes_of(made),
        "model_type": "qwen3" if shape.head_norms else "llama",
        "vocab_size": base.vocab_size,
        "attention_bias": bool(shape.biases),
        "mlp_bias": made.mlp_bias,
        "rope_theta": (made.rope_parameters or {}).get("rope_theta"),
    }
