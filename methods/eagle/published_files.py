"""Published EAGLE checkpoints as drafters: sizes are read off tensors, and what is not known is an error that names it.

EAGLE-1/2: `fc.*`, `layers.0.*`. EAGLE-3: `fc.*`, `midlayer.*` (speculators and vLLM: `layers.0.*`), `norm`, `lm_head`,
`d2t`, `t2d`; EAGLE-3.1 adds `fc_norm.*`. Either may bring `embed_tokens`. Knows files and tensors, not decoding.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from specbench_ss.engine.architectures import Outline
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.draft_vocabulary import check_words
from specbench_ss.methods._shared.layer_configs import describing
from specbench_ss.methods._shared.speculators_format import LAYER, TYPE, check_type
from specbench_ss.methods.eagle.drafter import Drafter, Eagle1Drafter, Eagle3Drafter, Shape
from specbench_ss.methods.eagle.speculators_files import check_said, check_shape, laid_flat, published_name
from specbench_ss.models.checkpoint import load_into, read_config, weight_file

WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
IGNORED = "rotary_emb.inv_freq"  # a buffer of older transformers: frequencies follow from the configuration
BIASED = ("q_proj", "k_proj", "v_proj", "o_proj")
Tensors = Mapping[str, Tensor]


def read_drafter(
    path: Path, base: Outline, method: str, levels: int, read: Callable[[Path], dict[str, Tensor]]
) -> Drafter:
    """Return the drafter in a folder. Raise UserError naming method and file; warn of biases that vLLM misreads.

    levels: features a position, 0 = EAGLE-1.
    """
    file, _ = weight_file(path, WEIGHT_FILES, method)
    about = drafter_config(path, method)
    tensors = read(file)
    try:
        drafter = drafter_from_tensors(tensors, about, base, levels)
    except UserError as error:
        raise UserError(f"{method}: {error} ({file})") from None
    if problem := _problem_in_vllm(about, drafter.shape, levels):
        warnings.warn(f"{method}: vLLM {problem} ({file})", stacklevel=1)  # this line: once for check and load
    return drafter


def _problem_in_vllm(about: dict[str, Any], shape: Shape, levels: int) -> str:
    """Return how vLLM 0.32 misreads the drafter's biases, with the remedy; empty where it does not."""
    attention = not levels and bool(about.get("bias")) and not shape.biases.issuperset(BIASED)
    mistaken = 'takes "bias": true in config.json for attention biases'
    if "fc" in shape.biases:
        return f"drops fc.bias{f' and {mistaken}' if attention else ''}; train it again to serve it there"
    return f'{mistaken}; delete "bias" from config.json' if attention else ""


def drafter_config(path: Path, method: str = "eagle3") -> dict[str, Any]:
    """config.json beside the weights; what speculators nest in `transformer_layer_config` is laid flat.

    Raises UserError, naming the method, where such a config.json is for another one or describes no layer.
    """
    about = read_config(path if path.is_dir() else path.parent)
    try:
        if check_type(about, method.removesuffix("2")):
            return laid_flat(about)
    except UserError as error:
        raise UserError(f"{method}: {error} ({path})") from None
    layer = about.get(LAYER)
    return {**layer, **about} if isinstance(layer, dict) else about


def drafter_from_tensors(given: Tensors, about: dict[str, Any], base: Outline, levels: int) -> Drafter:
    """A drafter that fits the base. levels: as in `read_drafter`. Raises UserError for what is missing or unknown."""
    tensors = {n.removeprefix("model."): t for n, t in given.items() if not n.endswith(IGNORED)}
    stated = about.get(TYPE) == "eagle3"
    third = stated or any(n.endswith("hidden_norm.weight") or n.startswith("midlayer.") for n in tensors)
    if third != bool(levels):
        raise UserError("these are weights of EAGLE-3: use eagle3" if third else "these are no weights of EAGLE-3")
    if stated:
        check_said(about, tensors, base, levels)
    shape = _shape(tensors, about, base, levels)
    if stated:
        check_shape(about, shape)
    drafter = _built(shape, about, tensors)
    kept = {n: t if n in ("d2t", "t2d") else t.float() for n, t in tensors.items()}
    load_into(drafter, kept, "the drafter", (lambda n: n) if _midlayer(tensors) else published_name)
    check_words(tensors, base.vocab_size)
    return drafter


def _built(shape: Shape, about: dict[str, Any], tensors: Tensors) -> Drafter:
    """Without its weights. Raises UserError for a configuration that no Llama layer has."""
    with describing("a Llama layer"):
        config = shape.llama(about)
        if shape.draft_vocab:  # EAGLE-3
            marked = len(tensors["t2d"]) if "t2d" in tensors else 0
            return Eagle3Drafter(shape, config, "d2t" in tensors, marked)
        return Eagle1Drafter(shape, config)


def _size(tensors: Tensors, name: str) -> tuple[int, int]:
    """Rows and columns of a matrix; 0 for what a vector or a number does not have."""
    if name not in tensors:
        raise UserError(f"the drafter lacks tensors: {name}")
    rows, columns = (*tensors[name].shape, 0, 0)[:2]
    return rows, columns


def _midlayer(tensors: Tensors) -> bool:
    """Whether the layer is called so, as EAGLE-3 was published; else it is `layers.0`."""
    return any(n.startswith("midlayer.") for n in tensors)


def _shape(tensors: Tensors, about: dict[str, Any], base: Outline, levels: int) -> Shape:
    layer = "midlayer" if _midlayer(tensors) else "layers.0"
    hidden, fc_width = _size(tensors, "fc.weight")
    rows, width = _size(tensors, f"{layer}.self_attn.q_proj.weight")
    heads, head_dim = _heads(about, rows)
    kv_rows, _ = _size(tensors, f"{layer}.self_attn.k_proj.weight")
    if kv_rows % head_dim or not kv_rows or heads % (kv_rows // head_dim):
        said = f"{layer}.self_attn.k_proj.weight has {kv_rows} rows"
        raise UserError(f"{said}, which are no keys for {heads} heads of {head_dim}")
    if width != hidden * (2 if levels else 1):
        raise UserError(f"{layer}.self_attn.q_proj.weight is {width} wide beside a hidden size of {hidden}")
    _check_hidden(hidden, fc_width, base, levels, "embed_tokens.weight" in tensors)
    vocab = _size(tensors, "embed_tokens.weight")[0] if "embed_tokens.weight" in tensors else 0
    draft_vocab = _size(tensors, "lm_head.weight")[0] if levels else 0
    _check_vocab(tensors, vocab, draft_vocab, base.vocab_size)
    biases = {name for name in BIASED if f"{layer}.self_attn.{name}.bias" in tensors}
    return Shape(
        hidden=hidden,
        ffn=_size(tensors, f"{layer}.mlp.gate_proj.weight")[0],
        heads=heads,
        kv_heads=kv_rows // head_dim,
        head_dim=head_dim,
        biases=frozenset(biases | ({"fc"} if "fc.bias" in tensors else set())),
        vocab=vocab,
        draft_vocab=draft_vocab,
        feature=base.hidden_size,
        levels=levels or 1,
        feature_norms=bool(levels) and (bool(about.get("fc_norm")) or any(n.startswith("fc_norm.") for n in tensors)),
        input_norm=bool(levels) and (bool(about.get("norm_before_fc")) or "input_norm.weight" in tensors),
        residual_normed=bool(about.get("norm_before_residual")),
        output_normed=bool(about.get("norm_output")),
        head_norms=TYPE in about and about.get("model_type") == "qwen3",
    )


def _heads(about: dict[str, Any], rows: int) -> tuple[int, int]:
    """Heads and their width: the one thing that tensors alone do not say."""
    heads = about.get("num_attention_heads")
    if type(heads) is not int or heads < 1:
        raise UserError(
            f"config.json lacks num_attention_heads{'' if heads is None else f', a count: it is {heads!r}'}"
        )
    head_dim = about.get("head_dim") or rows // heads
    if type(head_dim) is not int or head_dim * heads != rows or not head_dim or head_dim % 2:
        raise UserError(f"the drafter's queries have {rows} rows, its config.json says {heads} heads of {head_dim}")
    return heads, head_dim


def _check_hidden(hidden: int, fc_width: int, base: Outline, levels: int, own_embedding: bool) -> None:
    if levels and fc_width != levels * base.hidden_size:
        made_for = f"{fc_width // levels}" if fc_width % levels == 0 else f"{fc_width} / {levels}"
        raise UserError(f"the drafter is for hidden size {made_for}, the model has {base.hidden_size}")
    if not levels and hidden != base.hidden_size:
        raise UserError(f"the drafter is for hidden size {hidden}, the model has {base.hidden_size}")
    embedded = getattr(base.config, "word_embed_proj_dim", base.hidden_size)
    if not own_embedding and hidden != embedded:
        raise UserError(
            f"the drafter has no embed_tokens.weight, and the model's embedding is {embedded} wide, not {hidden}"
        )


def _check_vocab(tensors: Tensors, vocab: int, draft_vocab: int, base_vocab: int) -> None:
    if vocab and vocab != base_vocab:
        raise UserError(f"the drafter is for a vocabulary of {vocab}, the model has {base_vocab}")
    for name in ("d2t", "t2d"):
        if name in tensors and tensors[name].ndim != 1:
            raise UserError(f"{name} has shape {tuple(tensors[name].shape)}, it should be a list")
    if "t2d" in tensors and len(tensors["t2d"]) != base_vocab:
        raise UserError(f"the drafter is for a vocabulary of {len(tensors['t2d'])}, the model has {base_vocab}")
    if draft_vocab and draft_vocab != base_vocab and "d2t" not in tensors:
        raise UserError(
            f"the drafter's LM head has {draft_vocab} words, the model {base_vocab}, and it lacks tensors: d2t"
        )
