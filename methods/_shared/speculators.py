"""Reader and writer of drafter folders: config.json of the package `speculators`, decoder layers, weights."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig, Qwen3Config
from transformers.activations import ACT2FN

from specbench_ss import registry
from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.engine.target import FINAL
from specbench_ss.errors import UserError, did_you_mean, first_line
from specbench_ss.methods._shared.draft_vocabulary import VOCAB_MAPS, check_draft_vocab
from specbench_ss.methods._shared.drafter_config import optional, read_field, to_config
from specbench_ss.methods._shared.drafter_network import DrafterNetwork, FeatureShape, check_rope
from specbench_ss.methods._shared.drafting import Read
from specbench_ss.methods._shared.small_llama import llama_layer
from specbench_ss.models.checkpoint import load_into, public_name, read_config, weights_in

TYPE = "speculators_model_type"
LAYER = "transformer_layer_config"
TYPES = {  # supported types: the method that reads each, the architecture that is written
    "eagle3": ("eagle3", "Eagle3DraftModel"), "peagle": ("peagle", "PEagleDraftModel"),
    "dflash": ("dflash", "DFlashDraftModel"), "dflash2": ("dflash", "DFlash2DraftModel"),
    "dspark": ("dspark", "DSparkDraftModel"), "mtp": ("mtp", "MTPDraftModel"),
}  # fmt: skip
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
IGNORED = "rotary_emb.inv_freq"  # a buffer of older transformers: frequencies follow from the configuration
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings", "attention_bias",
    "rope_parameters",
)  # fmt: skip
MOST, MOST_LAYERS = 1 << 20, 1 << 10  # far more than a drafter has; larger values could exhaust memory
COUNTS = {
    "hidden_size": MOST, "intermediate_size": MOST, "num_hidden_layers": MOST_LAYERS, "num_attention_heads": MOST,
    "num_key_value_heads": MOST, "head_dim": MOST,
}  # fmt: skip


# -- the drafter and its target ------------------------------------------------------------------------------------


def check_type(config: Mapping[str, Any], *wanted: str) -> bool:
    """Return True for a config.json in this layout. Raise UserError for one of another type than the wanted ones."""
    kind = config.get(TYPE)
    if kind is None or kind in wanted:
        return kind is not None
    registered = registry.names(registry.METHODS)
    readers = {name: method for name, (method, _) in TYPES.items() if method in registered}
    supported = f"supported types are {', '.join(readers)}"
    advice = f"use the method {readers[kind]}" if kind in list(readers) else supported
    raise UserError(f"config.json describes a speculator of the type {kind!r}, not {wanted[0]!r}: {advice}")


def check_sizes(*sizes: tuple[str, int, int]) -> None:
    """Raise UserError if the drafter is for a model of other sizes. sizes: (name, the drafter's, the model's)."""
    for name, stated, actual in sizes:
        if stated != actual:
            raise UserError(f"the drafter is for a model with a {name} of {stated}, the model has {actual}")


def layer_ids(
    config: Mapping[str, Any],
    name: str,
    base: ModelInfo,
    default: Sequence[int] = (),
    least: int = 0,
    most: int | None = None,
) -> tuple[int, ...]:
    """Return a list of target layers in config.json, else the default.

    Raise UserError for an empty list, and for a layer that is not `least` to `most`, by default the last one.
    """
    listed = optional(config, name, list[int])
    return checked_ids(default if listed is None else listed, f"{name} in config.json", base, least, most)


def checked_ids(
    listed: Sequence[int], name: str, base: ModelInfo, least: int = 0, most: int | None = None
) -> tuple[int, ...]:
    """Return target layers. Raise UserError as `layer_ids` does."""
    if not listed:
        raise UserError(f"{name} names no layer")
    for layer in listed:
        if not least <= layer <= (base.n_layers - 1 if most is None else most):
            raise UserError(f"{name} names layer {layer}, the model has layers 0 to {base.n_layers - 1}")
    return tuple(listed)


class Proposal(msgspec.Struct, frozen=True):
    """Entry of `proposal_methods` in `speculators_config`. speculative_tokens: tokens drafted in a step."""

    speculative_tokens: int = 8


class Proposals(msgspec.Struct, frozen=True):
    """`speculators_config`."""

    proposal_methods: list[Proposal] = []


def proposed_tokens(config: Mapping[str, Any]) -> list[int]:
    """Return the tokens drafted in a step by each proposal. Raise UserError for other types."""
    if "speculators_config" not in config:
        return []
    proposals: Proposals = read_field(config, "speculators_config", Proposals)
    return [proposal.speculative_tokens for proposal in proposals.proposal_methods]


def norm_fields(stated: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, bool]:
    """Return the fields of `FeatureShape` by config.json and tensors. Raise UserError if both alternatives are set."""
    norms = {name: bool(stated.get(name)) for name in ("norm_before_residual", "norm_before_fc", "fc_norm")}
    if norms["norm_before_fc"] and norms["fc_norm"]:
        raise UserError("config.json sets norm_before_fc and fc_norm, which exclude each other")
    norms["norm_before_fc"] |= "input_norm.weight" in tensors
    norms["fc_norm"] |= any(name.startswith("fc_norm.") for name in tensors)
    return norms


def check_no_final(layers: Sequence[int]) -> None:
    """Raise UserError for a drafter that reads the final, normed state, which speculators' layout cannot name."""
    if FINAL in layers:
        raise UserError("speculators' layout names inputs of layers, and this drafter reads the final state")


# -- decoder layers ------------------------------------------------------------------------------------------------


def layer_config(
    config: Mapping[str, Any], family: str, kinds: Sequence[str] = (), drafted: Iterable[str] | None = None
) -> PretrainedConfig:
    """Return the configuration of the decoder layers, with the model type's defaults for missing fields.

    Args:
        config: config.json, whose layer fields are nested in speculators' layout and flat in others.
        family: name of the layers for error messages.
        kinds: supported model types, the default of a flat layout first; empty = all of transformers.
        drafted: names of the drafter's tensors; config.json may not state more layers than these have.
    """
    nested = bool(config.get(TYPE))
    fields = config.get(LAYER) if nested else config
    if not isinstance(fields, Mapping):
        raise UserError(f"{LAYER} in config.json is not an object")
    kind = fields.get("model_type") or (kinds[0] if kinds and not nested else "qwen3")
    if kinds and kind not in tuple(kinds):
        raise UserError(f"config.json has layers of the type {kind!r}, not {' or '.join(kinds)}")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise UserError(f"config.json has layers of the unknown type {kind!r}")
    stated = {k: v for k, v in fields.items() if k not in ("architectures", "auto_map", "model_type")}
    with describing(f"layers as {family} has them"):
        if "rope_parameters" in stated:
            stated["rope_parameters"] = rope_of(stated)
        check_layer_fields(stated)  # before transformers allocates lists of such lengths
        layers = len({name.split(".")[1] for name in drafted or () if name.startswith("layers.")})
        count = stated.get("num_hidden_layers") or 0
        if drafted is not None and count > layers:  # building that many could take very long
            raise UserError(f"num_hidden_layers in config.json is {count}, the drafter has tensors of {layers}")
        layer = AutoConfig.for_model(kind, **stated)
        check_layer(Qwen3Config(**sizes_of(layer)))
    return layer


@contextmanager
def describing(layers: str) -> Iterator[None]:
    """Turn any error of a configuration, or of layers built from it, into a UserError of one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # transformers raises many types, now or when layers are built
        raise UserError(f"config.json does not describe {layers}: {first_line(error)}") from None


def check_layer(config: PretrainedConfig) -> None:
    """Raise UserError or ValueError if no layer can be built or computed from a complete configuration."""
    check_layer_fields(sizes_of(config))
    if config.num_attention_heads % config.num_key_value_heads:
        groups = f"{config.num_attention_heads} query heads and {config.num_key_value_heads} key heads"
        raise UserError(f"config.json has {groups}, which do not divide")
    check_rope(config)


def check_layer_fields(stated: Mapping[str, Any]) -> None:
    """Raise UserError for a stated size, number or activation that no layer has."""
    for name, most in COUNTS.items():
        count = stated.get(name)
        if count is not None and (type(count) is not int or not 1 <= count <= most):
            raise UserError(f"{name} in config.json is {count!r}, it must be a whole number from 1 to {most}")
    slides = stated.get("use_sliding_window") or "sliding_attention" in (stated.get("layer_types") or ())
    window = stated.get("sliding_window") if slides else None
    if window is not None and (type(window) is not int or window < 1):
        raise UserError(f"sliding_window in config.json is {window!r}, it must be a whole number from 1")
    rope = stated.get("rope_parameters")
    for name, number in {**(rope if isinstance(rope, dict) else {}), **stated}.items():
        positive = type(number) in (int, float) and 0 < number < math.inf
        if name in ("rms_norm_eps", "rope_theta") and number is not None and not positive:
            raise UserError(f"{name} in config.json is {number!r}, it must be a finite number above 0")
    act = stated.get("hidden_act")
    if isinstance(act, str) and act not in ACT2FN:
        raise UserError(f"hidden_act in config.json is {act!r}, which is not supported{did_you_mean(act, ACT2FN)}")


def sizes_of(layer: PretrainedConfig) -> dict[str, Any]:
    """Return a layer's sizes. Sliding windows are left out: drafters build their own masks."""
    return {name: getattr(layer, name) for name in SIZES} | {"rope_parameters": rope_of(layer.to_dict())}


def rope_of(fields: Mapping[str, Any], layers: int | None = None) -> Any:
    """Return `rope_parameters` of a configuration of decoder layers, which some state by kind of layer.

    Raise UserError if its layers differ. layers: their number, None = as stated.
    """
    rope: Any = fields.get("rope_parameters")
    kinds = fields.get("layer_types") or ()
    by_kind = {kind: part for kind, part in rope.items() if isinstance(part, Mapping)} if isinstance(rope, dict) else {}
    if not by_kind:
        return rope
    if "rope_type" in rope:  # the stated one, to which transformers adds the defaults of the model type
        return {name: value for name, value in rope.items() if name not in by_kind}
    listed = len(kinds) == (layers or fields.get("num_hidden_layers"))
    of_layers = dict.fromkeys(kinds if listed else ("full_attention",))
    first, *others = [by_kind.get(kind) for kind in of_layers]
    if first is None or any(other != first for other in others):
        raise UserError(f"rope_parameters in config.json are not the same for layers of {', '.join(of_layers)}")
    return first


def new_sizes(target: ModelInfo, layers: int) -> dict[str, Any]:
    """Return the sizes of new layers of the target's width, heads and rotary embedding."""
    return sizes_of(llama_layer(target)) | {"num_hidden_layers": layers, "vocab_size": target.vocab_size}


def sliding_layers(layer: PretrainedConfig) -> list[bool]:
    """Return True for each layer with a sliding window. Raise UserError for other or missing layer types."""
    kinds = getattr(layer, "layer_types", None) or ["full_attention"] * layer.num_hidden_layers
    if other := [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]:
        raise UserError(f"config.json sets {other[0]!r}, which is not supported")
    if len(kinds) != layer.num_hidden_layers:
        raise UserError(f"config.json has {len(kinds)} layer_types for {layer.num_hidden_layers} layers")
    return [kind == "sliding_attention" for kind in kinds]


# -- weights -------------------------------------------------------------------------------------------------------

Network = TypeVar("Network", bound=DrafterNetwork)


def read_network(
    method: str,
    build: Callable[[dict[str, Any], ModelInfo, dict[str, Tensor]], Network],
    path: Path,
    base: ModelInfo,
    read: Read,
    stored: Callable[[str], str] = lambda name: name,
) -> tuple[Network, dict[str, Any]]:
    """Return the drafter of a folder and its config.json. Raise UserError naming both if it does not fit the base.

    Args:
        method: name for messages.
        build: returns the network by configuration and tensors, without their values.
        path: the folder, or a weight file in it.
        base: the model that is drafted for.
        read: returns the tensors of a folder or file; EAGLE-3's `midlayer` is renamed to `layers.0`.
        stored: returns the checkpoint's name of a network's tensor.
    """
    source, config = weights_in(path, method), read_config(path)
    with locating(method, source):
        named = {name.removeprefix("model."): t for name, t in read(source).items() if not name.endswith(IGNORED)}
        tensors = {re.sub(r"^midlayer\.", "layers.0.", name): tensor for name, tensor in named.items()}
        network = build(config, base, tensors)
        values = {name: t if name in VOCAB_MAPS else t.float() for name, t in tensors.items()}
        load_into(network, values, "the drafter", stored)
        check_draft_vocab(tensors, base.vocab_size)
    return network, config


@contextmanager
def locating(method: str, path: Path) -> Iterator[None]:
    """Name the method and the path in every UserError of the block."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{method}: {error} ({path})") from None


# -- writing -------------------------------------------------------------------------------------------------------


def config_json(kind: str, layer: Mapping[str, Any], tokens: int, base: ModelInfo, **fields: Any) -> dict[str, Any]:
    """Return config.json of a drafter of this type in speculators' layout. tokens: drafted in a step.

    It names the base by its hub id; lab models, local folders and files are not named.
    """
    architectures = getattr(base.config, "architectures", None) or []
    proposals = {
        "algorithm": kind,
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": public_name(base) or None, "architectures": architectures},
    }
    layers = {"architectures": [TYPES[kind][1]], TYPE: kind, LAYER: dict(layer)}
    return {**layers, **fields, "speculators_config": proposals}


def feature_fields(shape: FeatureShape, layers: Sequence[int], base: ModelInfo) -> dict[str, Any]:
    """Return the fields of a drafter of EAGLE-3's kind that reads the inputs of these layers."""
    sizes = {"draft_vocab_size": shape.draft_vocab, "target_hidden_size": base.hidden_size}
    return {**sizes, LAYER_IDS: list(layers), **to_config(shape)}
