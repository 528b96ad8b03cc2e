"""What configurations of published drafters say of their decoder layers, in the terms of transformers."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig, Qwen3Config
from transformers.activations import ACT2FN

from specbench_ss.errors import UserError, did_you_mean, first_line
from specbench_ss.methods._shared.rotary import check_rope

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from specbench_ss.engine.architectures import Outline

HUB = "https://huggingface.co/"
SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings", "attention_bias",
    "rope_parameters",
)  # fmt: skip
MOST, MOST_LAYERS = 1 << 20, 1 << 10  # far more than a drafter has, and few enough for lists and tables of them
COUNTS = {
    "hidden_size": MOST, "intermediate_size": MOST, "num_hidden_layers": MOST_LAYERS, "num_attention_heads": MOST,
    "num_key_value_heads": MOST, "head_dim": MOST,
}  # fmt: skip


@contextmanager
def describing(layers: str) -> Iterator[None]:
    """Within, a configuration is read or layers are made by it: whatever goes wrong is a UserError of one line.

    layers: what it should describe, for the message.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of many kinds: transformers looks at some of it now, at some when layers are made
        raise UserError(f"config.json does not describe {layers}: {first_line(error)}") from None


def described_layers(given: Any, family: str, drafted: Iterable[str] | None = None) -> PretrainedConfig:
    """The draft layers' configuration, with its model type's own defaults for what is not stated.

    given: what config.json says of them, as it was read. family: whose layers they are, for the message. drafted: the
    names of the drafter's tensors, of which no more layers may be stated. Raises UserError where they are not of this
    form.
    """
    given = given if isinstance(given, dict) else {}
    known = {k: v for k, v in given.items() if k not in ("architectures", "auto_map", "model_type")}
    kind = given.get("model_type") or "qwen3"
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        raise UserError(f"config.json speaks of layers of the type {kind!r}, which is not known")
    with describing(f"layers as {family} has them"):
        check_stated(known)  # before transformers makes lists of such lengths
        if drafted is not None:
            _check_depth(known.get("num_hidden_layers"), drafted)
        layer = AutoConfig.for_model(kind, **known)
        check_layer(Qwen3Config(**sizes_of(layer)))
    return layer


def check_layer(config: PretrainedConfig) -> None:
    """Raises UserError or ValueError where no layer can be made by a whole configuration, or computed with it."""
    check_stated(sizes_of(config))
    if config.num_attention_heads % config.num_key_value_heads:
        groups = f"{config.num_attention_heads} heads of queries and {config.num_key_value_heads} of keys"
        raise UserError(f"config.json speaks of {groups}, which do not divide")
    check_rope(config)


def check_stated(said: Mapping[str, Any]) -> None:
    """Raises UserError for a size, a number or an activation that no layer has. What is not stated is not looked at."""
    for name, most in COUNTS.items():
        count = said.get(name)
        if count is not None and (type(count) is not int or not 1 <= count <= most):
            raise UserError(f"{name} in config.json is {count!r}, it can be a whole number from 1 to {most}")
    slides = said.get("use_sliding_window") or "sliding_attention" in (said.get("layer_types") or ())
    window = said.get("sliding_window") if slides else None
    if window is not None and (type(window) is not int or window < 1):
        raise UserError(f"sliding_window in config.json is {window!r}, it can be a whole number from 1")
    rope = said.get("rope_parameters")
    for name, number in {**(rope if isinstance(rope, dict) else {}), **said}.items():
        if name in ("rms_norm_eps", "rope_theta") and number is not None and not _positive(number):
            raise UserError(f"{name} in config.json is {number!r}, it can be a finite number above 0")
    act = said.get("hidden_act")
    if isinstance(act, str) and act not in ACT2FN:
        raise UserError(f"hidden_act in config.json is {act!r}, which is not known{did_you_mean(act, ACT2FN)}")


def _positive(number: Any) -> bool:
    return type(number) in (int, float) and number > 0 and math.isfinite(number)


def _check_depth(stated: Any, drafted: Iterable[str]) -> None:
    """Raises UserError where more layers are stated than there are tensors of: making them could take for ever."""
    layers = {name.split(".")[1] for name in drafted if name.startswith("layers.")}
    if stated is not None and stated > len(layers):
        raise UserError(f"num_hidden_layers in config.json is {stated}, the drafter has tensors of {len(layers)}")


def sizes_of(layer: PretrainedConfig) -> dict[str, Any]:
    """What a layer's configuration says of sizes. Sliding windows are not among them: drafters mask by themselves."""
    return {name: getattr(layer, name) for name in SIZES}


def sliding_layers(layer: PretrainedConfig) -> list[bool]:
    """Which of its layers have a sliding window. Raises UserError for layers of other kinds, or not a kind for each."""
    kinds = getattr(layer, "layer_types", None) or ["full_attention"] * layer.num_hidden_layers
    if other := [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]:
        raise UserError(f"config.json asks for {other[0]!r}, which is not supported")
    if len(kinds) != layer.num_hidden_layers:
        raise UserError(f"config.json has {len(kinds)} layer_types for {layer.num_hidden_layers} layers")
    return [kind == "sliding_attention" for kind in kinds]


def check_layer_ids(listed: Sequence[int], name: str, base: Outline) -> None:
    """Raises UserError where a list in config.json names no layer, or one that the base lacks."""
    if not listed:
        raise UserError(f"{name} in config.json names no layer")
    for layer in listed:
        if not 0 <= layer < base.n_layers:
            raise UserError(
                f"{name} in config.json names layer {layer}, of the model's can be read: 0 to {base.n_layers - 1}"
            )


def check_sizes(pairs: Iterable[tuple[str, int, int]]) -> None:
    """Raises UserError where the drafter is for a model of other sizes. pairs: (what, the drafter's, the model's)."""
    for name, stated, own in pairs:
        if stated != own:
            raise UserError(f"the drafter is for a model with a {name} of {stated}, the model has {own}")


def proposals(algorithm: str, tokens: int, base: Outline) -> dict[str, Any]:
    """`speculators_config` of a drafter of so many tokens a step."""
    return {
        "algorithm": algorithm,
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}],
        "default_proposal_method": "greedy",
        "verifier": {
            "name_or_path": known_name(base),
            "architectures": getattr(base.config, "architectures", None) or [],
        },
    }


def known_name(base: Outline) -> str | None:
    """Return what others find the base by: its hub id; None for the lab's models, folders and files of this machine."""
    page = str(base.origin.get("page", ""))
    if page.startswith(HUB):
        return page.removeprefix(HUB)
    return None if base.is_lab or base.folder is not None or "gguf" in base.origin else base.name
