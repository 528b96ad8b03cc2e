"""Published DFlash checkpoints as drafters. Knows files and tensors, not decoding.

z-lab's layout: `dflash_config`, `block_size`, layers named by their outputs. speculators' layout, which vLLM serves:
`speculators_model_type`, `transformer_layer_config`, layers named by their inputs, possibly a draft vocabulary.
Both have the same tensors: `fc`, `hidden_norm`, `layers.N.*`, `norm`; speculators adds `lm_head`, `d2t` and `t2d`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig, Qwen3Config

from specbench_ss.engine.architectures import Outline
from specbench_ss.engine.target import FINAL
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
from specbench_ss.methods._shared.speculators_format import TYPE
from specbench_ss.methods.dflash.drafter import Drafter, Shape
from specbench_ss.methods.dflash.options import MOST_BLOCK
from specbench_ss.methods.dflash.said import Said
from specbench_ss.methods.dflash.sight import Sight
from specbench_ss.models.checkpoint import load_into, read_config, weight_file

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
IGNORED = "rotary_emb.inv_freq"  # frequencies follow from the configuration
NON_CAUSAL = "sliding_window_non_causal"  # speculators: of sliding layers; vLLM 0.32: of all layers


def read_drafter(
    path: Path, base: Outline, read: Callable[[Path], dict[str, Tensor]]
) -> tuple[Drafter, dict[str, Any]]:
    """Return the drafter of a folder, and its config.json. Raise UserError where it does not fit the base.

    Warn where vLLM serves the folder otherwise than it is read here.
    """
    file, _ = weight_file(path, WEIGHT_FILES, "dflash")
    config = read_config(file.parent)
    tensors = {name.removeprefix("model."): t for name, t in read(file).items() if not name.endswith(IGNORED)}
    try:
        drafter = drafter_from_tensors(tensors, config, base)
    except UserError as error:
        raise UserError(f"dflash: {error} ({file})") from None
    for problem in _problems_in_vllm(config, drafter.shape):
        warnings.warn(f"dflash: vLLM {problem} ({file})", stacklevel=1)  # this line: once for check and load
    return drafter, config


def _problems_in_vllm(config: dict[str, Any], shape: Shape) -> list[str]:
    """Return how vLLM 0.32 serves a drafter otherwise than it is read here, each with its remedy."""
    problems = []
    if shape.from_anchor:
        problems.append('does not serve "sample_from_anchor": true; train a drafter without it')
    causal, served = {sight.causal for sight in shape.sights}, not config.get(NON_CAUSAL, True)
    if config.get(TYPE) and causal != {served}:
        remedy = f'set "{NON_CAUSAL}" to {str(served).lower()} in config.json'
        if len(causal) > 1:
            remedy = f'it has one "{NON_CAUSAL}" for all layers, these need both'
        problems.append(f"makes every layer {'causal' if served else 'bidirectional'}: {remedy}")
    return problems


def drafter_from_tensors(tensors: dict[str, Tensor], config: dict[str, Any], base: Outline) -> Drafter:
    """A drafter that fits the base. Raises UserError for what is missing, unknown or of another size."""
    said = Said.of(config)
    given = config.get("transformer_layer_config") if said.speculators_model_type else config
    layer = described_layers(given, "Qwen3", tensors)
    _check_fits(said, layer, base)
    own = {name: len(tensors[name]) if name in tensors and tensors[name].ndim else 0
           for name in ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")}  # fmt: skip
    draft_vocab = own_words(said.draft_vocab_size, own, base)
    shape = Shape(
        layers=_inputs(said, base),
        block=said.block_size,
        mask_token=said.mask_token_id,
        sights=_sights(said, layer),
        from_anchor=said.sample_from_anchor,
        scale=said.input_embedding_scale,
        vocab=base.vocab_size if own["embed_tokens.weight"] else 0,
        draft_vocab=draft_vocab,
        mapped=bool(own["d2t"]),
        marked=bool(own["t2d"]),
    )
    with describing("layers as Qwen3 has them"):
        drafter = Drafter(shape, Qwen3Config(**sizes_of(layer)), base.vocab_size)
    kept = {name: t if name in ("d2t", "t2d") else t.float() for name, t in tensors.items()}
    load_into(drafter, kept, "the drafter")
    check_words(tensors, base.vocab_size)
    return drafter


def _check_fits(said: Said, layer: PretrainedConfig, base: Outline) -> None:
    """Raises UserError where the drafter is for a model of other sizes, or its block or mask token cannot be."""
    check_sizes((
        ("hidden size", layer.hidden_size, base.hidden_size),
        ("vocabulary", layer.vocab_size, base.vocab_size),
        ("number of layers", said.num_target_layers or base.n_layers, base.n_layers),
    ))  # fmt: skip
    check_mask_token(said.mask_token_id, base, " in config.json")
    least, most = (1 if said.sample_from_anchor else 2), min(MOST_BLOCK, base.context_length)
    if not least <= said.block_size <= most:
        raise UserError(f"block_size in config.json is {said.block_size}, it can be {least} to {most}")


def _inputs(said: Said, base: Outline) -> tuple[int, ...]:
    """The layers of the base whose inputs are read; -1 = the final state. Raises UserError for those it lacks."""
    listed, last = said.layer_ids, base.n_layers - 1
    check_layer_ids(listed, said.listed_in, base)
    if said.speculators_model_type:
        return tuple(listed)
    return tuple(FINAL if layer == last else layer + 1 for layer in listed)


def _sights(said: Said, layer: PretrainedConfig) -> tuple[Sight, ...]:
    """What places see, layer by layer: each of the two layouts treats sliding windows in its own way."""
    width = getattr(layer, "sliding_window", None)
    if said.speculators_model_type:
        full = sliding = Sight()
        if width is not None:  # without one, layers of the package see all of their block
            sliding = Sight(width, from_root=True, causal=not said.sliding_window_non_causal)
    else:
        causal = said.is_causal
        full, sliding = Sight(causal=bool(causal)), Sight(width, causal=True if causal is None else causal)
    return tuple(sliding if slides else full for slides in sliding_layers(layer))


def config_of(drafter: Drafter, base: Outline) -> dict[str, Any]:
    """Return config.json in z-lab's layout. Raise UserError for a drafter with sliding windows."""
    shape, layer = drafter.shape, drafter.config
    if set(shape.sights) != {Sight()}:
        raise UserError("sliding windows cannot be written in z-lab's layout")
    outputs = [base.n_layers - 1 if i == FINAL else i - 1 for i in shape.layers]
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **sizes_of(layer),
        "vocab_size": base.vocab_size,
        "block_size": shape.block,
        "num_target_layers": base.n_layers,
        "dflash_config": {
            "target_layer_ids": outputs,
            "mask_token_id": shape.mask_token,
            **({"sample_from_anchor": True} if shape.from_anchor else {}),  # where vLLM looks
        },
        **({"draft_vocab_size": shape.draft_vocab} if shape.draft_vocab else {}),
    }


def speculators_config_of(drafter: Drafter, base: Outline) -> dict[str, Any]:
    """Return config.json in speculators' layout.

    Raise UserError for a drafter that reads the final state, as one of a target of a single layer does, and for layers
    that the layout cannot describe.
    """
    shape = drafter.shape
    if FINAL in shape.layers:
        raise UserError(
            "speculators' layout names inputs of layers, this drafter reads the final state: --format z-lab"
        )
    windows, non_causal = _windows(shape)
    layer = {"model_type": "qwen3", **sizes_of(drafter.config), "vocab_size": base.vocab_size, **windows}
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": layer,
        "draft_vocab_size": shape.draft_vocab or base.vocab_size,
        "block_size": shape.block,
        "aux_hidden_state_layer_ids": list(shape.layers),
        "mask_token_id": shape.mask_token,
        "sample_from_anchor": shape.from_anchor,
        NON_CAUSAL: non_causal,
        "speculators_config": proposals("dflash", shape.block - shape.first, base),
    }


def _windows(shape: Shape) -> tuple[dict[str, Any], bool]:
    """Return the fields of sliding windows in speculators' layout, and the value of `sliding_window_non_causal`.

    The value is the same whether it holds for sliding layers, as in speculators, or for all layers, as in vLLM.
    """
    others = set(shape.sights) - {Sight()}
    if not others:
        return {}, True
    sight = others.pop()
    if others or sight.window is None or not sight.from_root:
        raise UserError("speculators' layout has one sliding window, counted from the root; these layers have others")
    if sight.causal and Sight() in shape.sights:
        raise UserError(f"{NON_CAUSAL} cannot be false beside full layers: vLLM would make them causal too")
    kinds = ["full_attention" if s == Sight() else "sliding_attention" for s in shape.sights]
    return {"use_sliding_window": True, "sliding_window": sight.window, "layer_types": kinds}, not sight.causal
