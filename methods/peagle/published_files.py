"""P-EAGLE's checkpoints as drafters. Knows files and tensors, not decoding.

speculators' layout, which vLLM serves: `speculators_model_type`, `transformer_layer_config`. And EAGLE-3's own, flat,
with a mask token. Both have the same tensors: EAGLE-3's, `mask_hidden`, and possibly further `layers.N.*`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from specbench_ss.engine.architectures import Outline
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.draft_vocabulary import check_words, own_words
from specbench_ss.methods._shared.layer_configs import (
    check_layer_ids,
    check_sizes,
    described_layers,
    describing,
    proposals,
    sizes_of,
    sliding_layers,
)
from specbench_ss.methods._shared.mask_token import check_mask_token
from specbench_ss.methods.peagle.drafter import Drafter, Shape
from specbench_ss.methods.peagle.feature_layers import feature_layers
from specbench_ss.methods.peagle.options import MOST_DEPTHS
from specbench_ss.methods.peagle.said import Said
from specbench_ss.models.checkpoint import load_into, read_config, weight_file

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
IGNORED = "rotary_emb.inv_freq"  # frequencies follow from the configuration
CONFIGS: dict[str, type[PretrainedConfig]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
OWN = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")  # tensors whose length is a vocabulary


def read_drafter(
    path: Path, base: Outline, read: Callable[[Path], dict[str, Tensor]]
) -> tuple[Drafter, dict[str, Any]]:
    """The drafter of a folder, and its config.json. Raises UserError where it does not fit the base."""
    file, _ = weight_file(path, WEIGHT_FILES, "peagle")
    config = read_config(file.parent)
    tensors = {_name(name): t for name, t in read(file).items() if not name.endswith(IGNORED)}
    try:
        return drafter_from_tensors(tensors, config, base), config
    except UserError as error:
        raise UserError(f"peagle: {error} ({file})") from None


def _name(name: str) -> str:
    """A published tensor's name among the drafter's own."""
    name = name.removeprefix("model.")
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def drafter_from_tensors(tensors: dict[str, Tensor], config: dict[str, Any], base: Outline) -> Drafter:
    """A drafter that fits the base. Raises UserError for what is missing, unknown or of another size."""
    said = Said.of(config)
    layer = _layer_config(config, said, tensors)
    _check_fits(said, layer, base)
    own = {name: len(tensors[name]) if name in tensors and tensors[name].ndim else 0 for name in OWN}
    draft_vocab = own_words(said.draft_vocab_size, own, base)
    if not draft_vocab:
        raise UserError("the drafter lacks tensors: lm_head.weight")
    shape = Shape(
        layers=_inputs(said, base),
        depths=said.depths,
        mask_token=said.mask_token_id,
        windows=_windows(said, layer),
        draft_vocab=draft_vocab,
        vocab=base.vocab_size if own["embed_tokens.weight"] else 0,
        mapped=bool(own["d2t"]),
        marked=bool(own["t2d"]),
        fc_bias="fc.bias" in tensors,
        feature_norms=said.fc_norm or any(name.startswith("fc_norm.") for name in tensors),
        input_norm=said.norm_before_fc or "input_norm.weight" in tensors,
        residual_normed=said.norm_before_residual,
    )
    with describing("layers as Llama has them"):
        drafter = Drafter(shape, CONFIGS[layer.model_type](**sizes_of(layer)), base.vocab_size)
    kept = {name: t if name in ("d2t", "t2d") else t.float() for name, t in tensors.items()}
    load_into(drafter, kept, "the drafter")
    check_words(tensors, base.vocab_size)
    return drafter


def _layer_config(config: dict[str, Any], said: Said, tensors: Iterable[str]) -> PretrainedConfig:
    """Of its decoder layers; tensors: the drafter's. Raises UserError where they are of no kind that P-EAGLE has."""
    nested = config.get("transformer_layer_config")
    given, default = (nested, "qwen3") if said.speculators_model_type else (config, "llama")
    given = {"model_type": default, **(given if isinstance(given, dict) else {})}
    kind = given["model_type"]
    if kind not in tuple(CONFIGS):
        raise UserError(f"config.json speaks of layers of the type {kind!r}, not of {' or '.join(CONFIGS)}")
    return described_layers(given, "Llama", tensors)


def _check_fits(said: Said, layer: PretrainedConfig, base: Outline) -> None:
    """Raises UserError where the drafter is for a model of other sizes, or its mask token or depths cannot be."""
    check_sizes((
        ("hidden size", layer.hidden_size, base.hidden_size),
        ("hidden size", said.target_hidden_size or base.hidden_size, base.hidden_size),
        ("vocabulary", layer.vocab_size, base.vocab_size),
    ))  # fmt: skip
    check_mask_token(said.mask_token_id, base, " in config.json")
    most = min(MOST_DEPTHS, base.context_length)
    if not 1 <= said.depths <= most:
        raise UserError(f"config.json speaks of {said.depths} tokens drafted a step, it can be 1 to {most}")
    if said.fc_norm and said.norm_before_fc:
        raise UserError("config.json asks for fc_norm and for norm_before_fc, of which a drafter has one")


def _inputs(said: Said, base: Outline) -> tuple[int, ...]:
    """The layers of the base whose inputs are read. Raises UserError for those it lacks."""
    listed = said.eagle_aux_hidden_state_layer_ids
    if listed is None:
        return feature_layers(base.n_layers)
    check_layer_ids(listed, "eagle_aux_hidden_state_layer_ids", base)
    return tuple(listed)


def _windows(said: Said, layer: PretrainedConfig) -> tuple[int | None, ...]:
    """Sliding windows of the drafter's layers. Raises UserError for one that would hide drafted places."""
    width = getattr(layer, "sliding_window", None)
    windows = tuple(width if slides else None for slides in sliding_layers(layer))
    if small := [w for w in windows if w is not None and w < said.depths]:
        raise UserError(f"sliding_window in config.json is {small[0]}, fewer than the {said.depths} drafted places")
    return windows


def config_of(drafter: Drafter, base: Outline) -> dict[str, Any]:
    """config.json in EAGLE-3's layout, with the mask token under the name that vLLM reads, too."""
    shape = drafter.shape
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layers(drafter, base),
        **_switches(shape, base),
        "ptd_token_id": shape.mask_token,
        "num_depths": shape.depths,
    }


def speculators_config_of(drafter: Drafter, base: Outline) -> dict[str, Any]:
    """config.json in speculators' layout."""
    shape = drafter.shape
    return {
        "architectures": ["PEagleDraftModel"],
        "speculators_model_type": "peagle",
        "transformer_layer_config": _layers(drafter, base),
        **_switches(shape, base),
        "norm_output": False,
        "embed_requires_grad": bool(shape.vocab),
        "speculators_config": proposals("peagle", shape.depths, base),
    }


def _layers(drafter: Drafter, base: Outline) -> dict[str, Any]:
    """Of the drafter's own layers."""
    kind = drafter.config.model_type
    return {"model_type": kind, **sizes_of(drafter.config), "vocab_size": base.vocab_size, **_slides(drafter.shape)}


def _slides(shape: Shape) -> dict[str, Any]:
    """Sliding windows, where there are such."""
    widths = {w for w in shape.windows if w is not None}
    kinds = ["full_attention" if w is None else "sliding_attention" for w in shape.windows]
    return {"sliding_window": max(widths), "use_sliding_window": True, "layer_types": kinds} if widths else {}


def _switches(shape: Shape, base: Outline) -> dict[str, Any]:
    """What both layouts say under the same names."""
    return {
        "draft_vocab_size": shape.draft_vocab,
        "target_hidden_size": base.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(shape.layers),
        "norm_before_residual": shape.residual_normed,
        "norm_before_fc": shape.input_norm,
        "fc_norm": shape.feature_norms,
        "mask_token_id": shape.mask_token,
    }
