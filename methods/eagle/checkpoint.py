"""EAGLE checkpoints: the authors' layouts and speculators' for EAGLE-3.

EAGLE-1/2: `fc.*`, `layers.0.*`. EAGLE-3: `fc.*`, `midlayer.*` (speculators and vLLM: `layers.0.*`), `norm`, `lm_head`,
`d2t`, `t2d`; EAGLE-3.1 adds `fc_norm.*`. Either may have `embed_tokens`. Sizes are read from tensors. Fields of
speculators' configurations that differ from speculators 0.9 (models/eagle3) are rejected by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import FINAL, Target
from specbench_ss.errors import UserError, prefixed
from specbench_ss.methods._shared import speculators
from specbench_ss.methods._shared.draft_vocabulary import vocabulary_fields
from specbench_ss.methods._shared.drafter_config import optional, read_config_fields, read_field
from specbench_ss.methods._shared.drafter_network import Rotary, published_levels
from specbench_ss.methods._shared.drafting import Read
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.methods.eagle.drafter import SIZES, Drafter, Eagle1Drafter, Eagle3Drafter, Shape, layer_config
from specbench_ss.models.checkpoint import read_config

TYPE, LAYER_IDS = speculators.TYPE, speculators.LAYER_IDS
LAYER = "layers.0"
BIASED = ("q_proj", "k_proj", "v_proj", "o_proj")
KINDS = ("llama", "qwen3")  # model types of layers in speculators' layout
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
Tensors = Mapping[str, Tensor]


# -- reading -------------------------------------------------------------------------------------------------------


def read_drafter(path: Path, base: ModelInfo, method: str, levels: int, read: Read) -> Drafter:
    """Return the drafter in a folder. Raise UserError naming method and file.

    levels: target layers that are read, 0 = EAGLE-1.
    """
    build = partial(_network, method=method, levels=levels)
    return speculators.read_network(method, build, path, base, read, published_name)[0]


def drafter_config(path: Path, method: str = "eagle3") -> dict[str, Any]:
    """Return config.json next to the weights, with the fields of a nested `transformer_layer_config` at top level.

    Raise UserError, naming the method, for a config.json of another method, or of layers that are not supported.
    """
    about = read_config(path)
    with speculators.locating(method, path):
        return _flat(about, method)


def _flat(about: dict[str, Any], method: str) -> dict[str, Any]:
    """Return config.json with the fields of its layer at top level."""
    if not speculators.check_type(about, method.removesuffix("2")):
        nested = about.get(speculators.LAYER)
        about = {**nested, **about} if isinstance(nested, dict) else about
        return about | {"rope_parameters": speculators.rope_of(about, 1)}
    layer = speculators.layer_config(about, "Llama", KINDS)
    if (layer.rope_parameters or {}).get("partial_rotary_factor") not in (None, 1):
        raise UserError("config.json sets partial_rotary_factor, which is not supported")
    names = (*speculators.SIZES, "mlp_bias", "layer_types", "model_type")
    return {**about, **{name: getattr(layer, name, None) for name in names}}


def _network(config: dict[str, Any], base: ModelInfo, tensors: Tensors, method: str, levels: int) -> Drafter:
    """Return a drafter of the tensors' sizes without their values. Raise UserError if it does not fit the base."""
    about = _flat(config, method)
    third = TYPE in about or any(n.endswith("hidden_norm.weight") for n in tensors)
    if third != bool(levels):
        raise UserError("these are weights of EAGLE-3: use eagle3" if third else "these are no weights of EAGLE-3")
    sizes = _sizes(tensors, about, base, levels)
    shape = _speculators_shape(tensors, about, base, levels) if TYPE in about else _shape(tensors, about, base, levels)
    with speculators.describing("a Llama layer"):
        layer = layer_config(about, **sizes)
        return (Eagle3Drafter if levels else Eagle1Drafter)(shape, layer, base.vocab_size)


def _speculators_shape(tensors: Tensors, about: dict[str, Any], base: ModelInfo, levels: int) -> Shape:
    """Return the shape that config.json states. Raise UserError for an unsupported variant or another model."""
    layers, hidden, vocab = (
        read_field(about, name, int) for name in ("num_hidden_layers", "hidden_size", "vocab_size")
    )
    if layers != 1:
        raise UserError(f"num_hidden_layers in config.json is {layers}, only 1 is supported")
    if other := [kind for kind in (about.get("layer_types") or ())[:1] if kind != "full_attention"]:
        raise UserError(f"layer_types in config.json has {other[0]!r}, which is not supported")
    width = optional(about, "target_hidden_size", int) or hidden
    speculators.check_sizes(("hidden size", width, base.hidden_size), ("vocabulary", vocab, base.vocab_size))
    about = about | {"norm_output": bool(about.get("norm_output"))}  # null is false
    return _shape(tensors, about, base, levels)


def _shape(tensors: Tensors, about: dict[str, Any], base: ModelInfo, levels: int) -> Shape:
    """Return the shape of the drafter's switches, which the authors' layout shows by its tensors."""
    published = TYPE not in about
    stated = {n: bool(about.get(n)) for n in SWITCHES} if published else read_config_fields(about, Shape, base)
    biases = {name for name in BIASED if f"{LAYER}.self_attn.{name}.bias" in tensors}
    size = None if published else optional(about, "draft_vocab_size", int)
    norms = (
        speculators.norm_fields(stated, tensors) if levels else {"norm_before_residual": stated["norm_before_residual"]}
    )
    return Shape(
        biases=frozenset(biases | ({"fc"} if "fc.bias" in tensors else set())),
        feature=base.hidden_size,
        levels=levels or 1,
        norm_output=stated["norm_output"],
        head_norms=f"{LAYER}.self_attn.q_norm.weight" in tensors if published else about.get("model_type") == "qwen3",
        **norms,
        **vocabulary_fields(size, tensors, base),
    )


def _sizes(tensors: Tensors, about: dict[str, Any], base: ModelInfo, levels: int) -> dict[str, int]:
    """Return the sizes of the layer by its tensors. Raise UserError for sizes that do not fit together or the base."""
    hidden, fc_width = _size(tensors, "fc.weight")
    rows, width = _size(tensors, f"{LAYER}.self_attn.q_proj.weight")
    kv_rows, _ = _size(tensors, f"{LAYER}.self_attn.k_proj.weight")
    ffn, _ = _size(tensors, f"{LAYER}.mlp.gate_proj.weight")
    heads, head_dim = _heads(about, rows)
    if kv_rows % head_dim or not kv_rows or heads % (kv_rows // head_dim):
        raise UserError(f"{LAYER}.self_attn.k_proj.weight has {kv_rows} rows, no keys for {heads} heads of {head_dim}")
    if width != hidden * (2 if levels else 1):
        raise UserError(f"{LAYER}.self_attn.q_proj.weight is {width} wide, the hidden size is {hidden}")
    if levels and fc_width != levels * base.hidden_size:
        raise UserError(f"fc.weight reads {fc_width} numbers, not {levels} hidden states of {base.hidden_size}")
    if not levels and hidden != base.hidden_size:
        raise UserError(f"the drafter is for hidden size {hidden}, the model has {base.hidden_size}")
    embedded = getattr(base.config, "word_embed_proj_dim", base.hidden_size)
    if "embed_tokens.weight" not in tensors and hidden != embedded:
        problem = f"the model's embedding is {embedded} wide, not {hidden}"
        raise UserError(f"the drafter has no embed_tokens.weight, and {problem}")
    return dict(zip(SIZES, (hidden, ffn, heads, kv_rows // head_dim, head_dim), strict=True))


def _size(tensors: Tensors, name: str) -> tuple[int, int]:
    """Return rows and columns of a matrix; 0 for missing dimensions."""
    if name not in tensors:
        raise UserError(f"the drafter lacks tensors: {name}")
    rows, columns = (*tensors[name].shape, 0, 0)[:2]
    return rows, columns


def _heads(about: dict[str, Any], rows: int) -> tuple[int, int]:
    """Return the number of heads and their width, which tensor shapes alone do not determine."""
    heads = about.get("num_attention_heads")
    if type(heads) is not int or heads < 1:
        found = "" if heads is None else f", a count: it is {heads!r}"
        raise UserError(f"config.json lacks num_attention_heads{found}")
    head_dim = about.get("head_dim") or rows // heads
    if type(head_dim) is not int or head_dim * heads != rows or not head_dim or head_dim % 2:
        raise UserError(f"the drafter's queries have {rows} rows, its config.json states {heads} heads of {head_dim}")
    return heads, head_dim


# -- target layers that are read -----------------------------------------------------------------------------------

QUESTION = "Explain in a few sentences why the sky is blue, and name two other things with the same cause."
MIN_ANSWERS, MAX_ANSWERS, ANSWER_TOKENS = 3, 8, 96  # sampled answers on which readings are compared; tokens of each
CERTAIN = 3.3  # standard errors, a two-sided p-value of 0.001
Readings = tuple[tuple[int, ...], ...]  # one, or two: the stated ids as inputs of layers and as outputs


def layers_of(config: dict[str, Any], base: ModelInfo) -> tuple[Readings, str]:
    """Return the layers whose inputs EAGLE-3 reads by config.json, and the reason; two readings if ids may be either.

    `eagle_aux_hidden_state_layer_ids` names inputs of layers in speculators and vLLM. SGLang, SpecForge and ModelOpt
    nest it in `eagle_config` and name outputs, from 1 on. Only inputs have an id for the state after the last layer.
    Raise UserError for layers that the model does not have.
    """
    with prefixed("eagle3"):
        return _layers_of(config, base, base.n_layers)


def _layers_of(config: dict[str, Any], base: ModelInfo, n: int) -> tuple[Readings, str]:
    if TYPE in config:  # by default 2, N/2, N - 3
        if optional(config, LAYER_IDS, list[int]) is None and len({2, n // 2, n - 3}) < 3:
            raise UserError(f"config.json does not state {LAYER_IDS}; a model of {n} layers has no default")
        inputs = speculators.layer_ids(config, LAYER_IDS, base, (2, n // 2, n - 3), most=n)
        return (inputs,), f"{LAYER_IDS} are inputs in speculators' layout"
    if "feature_layers" in config:
        listed = read_field(config, "feature_layers", list[int])
        return (checked_layers(listed, base, "feature_layers in config.json"),), ""
    nested: Any = config.get("eagle_config")
    of_sglang = nested.get(LAYER_IDS) if isinstance(nested, dict) and not config.get(LAYER_IDS) else None
    if not (config.get(LAYER_IDS) or of_sglang):
        return (published_levels(n),), "config.json states none, and these are the published ones"
    listed = read_field(nested if of_sglang else config, LAYER_IDS, list[int])
    inputs = checked_layers(listed, base, f"{LAYER_IDS} in config.json")
    outputs = tuple(i + 1 for i in inputs)
    if n in inputs:
        return (inputs,), f"{LAYER_IDS} are inputs: {n} is the state after the last layer"
    if of_sglang and inputs[0] == 1:
        return (outputs,), f"{LAYER_IDS} are outputs, as in SGLang, SpecForge and ModelOpt"
    return (inputs, outputs), ""


def checked_layers(layers: Sequence[int], base: ModelInfo, name: str) -> tuple[int, ...]:
    """Return a list of layers; FINAL and the number of layers, the state before the final norm, are allowed.

    Raise UserError for layers that the model does not have.
    """
    with prefixed("eagle3"):
        return speculators.checked_ids(layers, name, base, FINAL, base.n_layers)


@torch.inference_mode()
def choose_layers(target: Target, drafter: Drafter, readings: Readings, reason: str) -> tuple[int, str, bool]:
    """Return the index of the reading to use, the reason, and True if it is certain.

    Two readings are compared by the acceptance probabilities of drafts at all tokens of sampled answers: a paired test.
    """
    if len(readings) == 1:
        return 0, reason, True
    drafter = drafter.to(target.device, target.dtype).eval()
    rotary, both, z = Rotary(drafter.config, target.device), torch.zeros(2, 0), 0.0
    for seed in range(MAX_ANSWERS):
        both = torch.cat((both, _acceptance(target, drafter, rotary, readings, seed)), 1)
        gain = both[1] - both[0]
        z = float(gain.mean() * len(gain) ** 0.5 / gain.std().clamp_min(1e-9)) if len(gain) > 1 else 0.0
        if seed + 1 >= MIN_ANSWERS and abs(z) > CERTAIN:
            break
    best, (a, b) = int(z > 0), both.mean(1).tolist()
    found = f"on {both.shape[1]} answer tokens drafts are accepted to {a:.1%} with inputs, {b:.1%} with outputs"
    return best, f"{LAYER_IDS} are {('inputs', 'outputs')[best]}: {found}", abs(z) > CERTAIN


def _acceptance(target: Target, drafter: Drafter, rotary: Rotary, readings: Readings, seed: int) -> Tensor:
    """Return the probabilities [readings, n] that a draft is accepted at each token of a sampled answer.

    It is the sum of min(p, q) at temperature 1, given the true hidden states.
    """
    prompt = _prompt(target)
    tokens = min(ANSWER_TOKENS, target.context_length - len(prompt))
    answer = generate(Autoregressive(target), prompt, StopParams(tokens), SamplingParams(1.0, seed=seed)).tokens
    ids = torch.tensor([[*prompt, *answer]], device=target.device)
    layers = {layer for reading in readings for layer in reading}
    states = target.prefill(ids[:, :-1], target.new_cache(ids.shape[1]), layers, every=True).hidden_states
    positions, rows = torch.arange(ids.shape[1] - 1, device=ids.device)[None], []
    p = target.logits(states[FINAL][0, len(prompt) :]).softmax(-1, torch.float32)  # row s + 1, for slot s
    for reading in readings:
        fused = drafter.fuse([states[layer] for layer in reading])
        out = drafter(drafter.embed(ids[:, 1:], target), fused, None, None, rotary(positions, fused.dtype))
        q = drafter.logits(out[0, len(prompt) - 1 : -1], target).softmax(-1, torch.float32)
        rows.append(torch.minimum(p, drafter.vocabulary(target.vocab_size).target_probs(q)).sum(-1))
    return torch.stack(rows).cpu()


def _prompt(target: Target) -> list[int]:
    """Return a question if there is a chat template, else the BOS token."""
    if target.tokenizer is not None and target.tokenizer.chat_template is not None:
        ids = target.encode_chat([{"role": "user", "content": QUESTION}])
        if len(ids) < target.context_length:
            return ids
    bos = target.config.bos_token_id
    return [bos if isinstance(bos, int) else 0]


# -- writing -------------------------------------------------------------------------------------------------------


def published_name(name: str) -> str:
    """Return a tensor's name in speculators' layout."""
    return name.replace("midlayer.", "layers.0.", 1) if name.startswith("midlayer.") else name


def config_of(drafter: Drafter, layers: tuple[int, ...], drafts: int, base: ModelInfo) -> dict[str, Any]:
    """Return config.json in speculators' layout. Raise UserError for a drafter that it cannot describe.

    Args:
        drafter: an EAGLE-3 drafter.
        layers: target layers whose inputs it reads.
        drafts: tokens that a server drafts in a step.
        base: the model that is drafted for.
    """
    shape, config = drafter.shape, drafter.config
    speculators.check_no_final(layers)
    layer = {
        **speculators.sizes_of(config),
        "model_type": "qwen3" if shape.head_norms else "llama",
        "vocab_size": base.vocab_size,
        "attention_bias": attention_bias(shape),
        "mlp_bias": config.mlp_bias,
        "rope_theta": (config.rope_parameters or {}).get("rope_theta"),  # for older versions of transformers
    }
    fields = speculators.feature_fields(shape, layers, base)
    return speculators.config_json("eagle3", layer, drafts, base, **fields, embed_requires_grad=False)


FC_BIAS = "fc.bias"


def vllm_tensors(drafter: Drafter) -> dict[str, Tensor]:
    """Return the tensors of a drafter for vLLM. Raise UserError if it has a bias that vLLM drops."""
    tensors = drafter.state_dict()
    if FC_BIAS in tensors and bool(tensors.pop(FC_BIAS).any()):
        raise UserError("vLLM drops fc.bias, which this drafter has; train it again with `ssbench train`")
    return tensors


def attention_bias(shape: Shape) -> bool:
    """Return True for biases in the attention. Raise UserError if some projections have one and others do not."""
    biased = shape.biases.intersection(BIASED)
    if biased and len(biased) < len(BIASED):
        raise UserError(f"vLLM needs attention biases in all projections or none; this drafter has {len(biased)} of 4")
    return bool(biased)


def vllm_config_of(drafter: Drafter, about: Mapping[str, Any], base: ModelInfo) -> dict[str, Any]:
    """Return config.json of an EAGLE-1 drafter for vLLM, which takes `bias` for the biases of the attention.

    about: its present config.json.
    """
    return {
        **{name: value for name, value in about.items() if name != "rope_scaling"},  # part of rope_parameters
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **speculators.sizes_of(drafter.config),
        "vocab_size": base.vocab_size,
        "attention_bias": attention_bias(drafter.shape),
        "bias": False,
    }
