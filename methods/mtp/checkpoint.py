"""MTP checkpoints: layers in a model's own folder (DeepSeek-V3, GLM-4.5, Qwen3-Next, Qwen3.5) and speculators' `mtp`.

transformers drops the layers when it loads a model, so they are read from the safetensors files here. Embeddings and LM
heads among them are copies of the model's and are left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.errors import UserError
from specbench_ss.methods._shared import speculators, target_copies
from specbench_ss.methods._shared.drafting import Read
from specbench_ss.methods.eagle.drafter import MOST_DEPTH
from specbench_ss.methods.mtp.heads import MTPDrafter, MTPShape
from specbench_ss.models.checkpoint import load_into, read_config, read_shapes, weights_in

MOST_MODULES = 8
DEEPSEEK = {
    "token_layernorm": "enorm", "hidden_layernorm": "hnorm", "input_proj": "eh_proj",
    "final_layernorm": "shared_head.norm",
}  # fmt: skip
QWEN = {
    "token_layernorm": "pre_fc_norm_embedding", "hidden_layernorm": "pre_fc_norm_hidden", "input_proj": "fc",
    "final_layernorm": "norm",
}  # fmt: skip
COPIES: target_copies.Copies = {
    r".*\blayers\.\d+\.embed_tokens\.weight": "embedding",
    r".*\.shared_head\.head\.weight": "LM head",
}
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
EXPERT = re.compile(rf"(.+\.experts)\.(\d+)\.({'|'.join(PROJECTIONS)})\.weight")


@dataclass(frozen=True, slots=True)
class Layout:
    """Names of the tensors of MTP layers.

    Attributes:
        names: a part's name here -> its name in the file, for parts outside the decoder layer.
        layer: prefix of a decoder layer, with its number.
        shared: prefix of the other parts, with the number of the layer, or without if all layers share them.
        counts: fields of config.json with the number of layers.
        output_normed: the recycled state is the one after the output norm (vLLM 0.32).
    """

    names: Mapping[str, str]
    layer: str
    shared: str
    counts: tuple[str, ...] = ("num_nextn_predict_layers",)
    output_normed: bool = True

    def stored(self, name: str, first: int) -> str:
        """Return the file's name of a tensor of `MTPDrafter`; first: number of the model's own layers."""
        _, index, part = name.split(".", 2)
        own, _, rest = part.partition(".")
        prefix, part = (self.shared, f"{self.names[own]}.{rest}") if own in self.names else (self.layer, part)
        return prefix.format(int(index), first + int(index)) + part

    def holds(self, name: str, first: int, modules: int) -> bool:
        """Return True for a tensor of one of the layers that is no copy of the model's."""
        prefixes = {p.format(i, first + i) for p in (self.layer, self.shared) for i in range(modules)}
        copied = any(re.fullmatch(copy, name) for copy in COPIES) or name.endswith(speculators.IGNORED)
        return name.startswith(tuple(prefixes)) and not copied


IN_LAYERS = Layout(DEEPSEEK, "model.layers.{1}.", "model.layers.{1}.")
IN_MTP = Layout(QWEN, "mtp.layers.{0}.", "mtp.", ("mtp_num_hidden_layers", "num_nextn_predict_layers"))
SPECULATORS = Layout({}, "mtp_layers.{0}.", "mtp_layers.{0}.")
NATIVE = {  # model types whose own checkpoints have MTP layers
    "deepseek_v3": IN_LAYERS,
    "glm4_moe": Layout(DEEPSEEK, IN_LAYERS.layer, IN_LAYERS.shared, output_normed=False),
    "qwen3_next": IN_MTP,
    "qwen3_5_text": IN_MTP,
    "qwen3_5_moe_text": IN_MTP,
}


NOT_STATED = ("architectures", "auto_map", "model_type", "quantization_config")  # of the layer's own configuration
QUANTIZED = (".qweight", ".qzeros", ".scales")  # names of AWQ and GPTQ


def read_head(path: Path, sizes: tuple[int, int], read: Read) -> tuple[MTPDrafter, dict[str, Any]]:
    """Return the MTP layers of a folder, or of a weight file in it, and its config.json.

    Args:
        path: a model's own folder, or one in speculators' layout.
        sizes: hidden and vocabulary size of the target.
        read: returns tensors of a file, with values or as shapes only.

    Raises:
        UserError: naming the method and the path, if the layers are missing, damaged or of other sizes.
    """
    about = read_config(path)
    with speculators.locating("mtp", path):
        layout, layer, modules = parse_config(about)
        speculators.check_sizes(
            ("hidden size", layer.hidden_size, sizes[0]), ("vocabulary", layer.vocab_size, sizes[1])
        )
        first = int(layer.num_hidden_layers)  # the number of the first MTP layer
        tensors = joined_experts(_tensors(path, layout, first, modules, read))
        with speculators.describing(f"layers of the type {layer.model_type}"), torch.device("meta"):
            head = MTPDrafter(MTPShape(modules=modules, output_normed=layout.output_normed), layer)
        load_into(head, tensors, "the MTP layer", lambda name: layout.stored(name, first))  # names and shapes
        values = {name: tensors[layout.stored(name, first)] for name in head.state_dict()}
        head.load_state_dict(values, assign=True)
    return head, about


def parse_config(about: Mapping[str, Any]) -> tuple[Layout, PretrainedConfig, int]:
    """Return layout, layer configuration and number of layers by config.json. Raise UserError if unsupported."""
    nested = speculators.check_type(about, "mtp")
    fields = about.get(speculators.LAYER) if nested else about.get("text_config", about)
    if not isinstance(fields, Mapping):
        raise UserError(f"{speculators.LAYER if nested else 'text_config'} in config.json is not an object")
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING or not (nested or kind in NATIVE):
        raise UserError(f"config.json has the model type {kind!r}; types with MTP layers are {', '.join(NATIVE)}")
    stated = {name: value for name, value in fields.items() if name not in NOT_STATED}
    with speculators.describing(f"layers of the type {kind}"):
        speculators.check_layer_fields(stated)
        layer = AutoConfig.for_model(kind, **stated)
    if getattr(layer, "sliding_window", None) and not getattr(layer, "layer_types", None):
        raise UserError(f"config.json has a sliding_window of {layer.sliding_window}, which an MTP layer cannot have")
    layout, source = (SPECULATORS, about) if nested else (NATIVE[kind], fields)
    modules = next((source[name] for name in layout.counts if source.get(name) is not None), 1)
    most = 1 if nested else MOST_MODULES
    if type(modules) is not int or not 1 <= modules <= most:
        raise UserError(f"config.json states {modules!r} MTP layers; at least 1 and at most {most} can be read")
    return layout, layer, modules


def trained_steps(about: Mapping[str, Any]) -> int | None:
    """Return `speculative_tokens` of a config.json in speculators' layout, None if it is not stated.

    Raise UserError for a number that no chain has.
    """
    try:
        tokens = about["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    except (KeyError, IndexError, TypeError):
        return None
    if type(tokens) is not int or not 1 <= tokens <= MOST_DEPTH:
        raise UserError(f"mtp: speculative_tokens in config.json is {tokens!r}; it must be 1 to {MOST_DEPTH}")
    return tokens


def _tensors(path: Path, layout: Layout, first: int, modules: int, read: Read) -> dict[str, Tensor]:
    """Return the tensors of the MTP layers by their names in the files. Raise UserError if there are none."""
    seen = set[str]()

    def keep(name: str) -> bool:
        seen.add(name)
        return layout.holds(name, first, modules)

    source = weights_in(path, "mtp")
    names = list(read_shapes(source, keep))
    if scales := [name for name in names if "weight_scale" in name or name.endswith(QUANTIZED)]:
        raise UserError(f"the MTP layer is quantized ({scales[0]}), which is not supported")
    if not names:
        missing = f"no tensors {layout.layer.format(0, first)}*"
        others = [p for p in ("mtp.", "mtp_layers.") if any(name.startswith(p) for name in seen)]
        if others:
            raise UserError(f"there are {missing} but {others[0]}*, another layout than its config.json states")
        raise UserError(f"there are {missing}: the checkpoint has no MTP layer; many re-uploads drop it")
    return read(source, keep)


def joined_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Join each expert's matrices as transformers holds them: gate_up_proj [E, 2 f, h] and down_proj [E, h, f].

    Raise UserError if an expert lacks one, or their shapes differ.
    """
    joined = {name: tensor for name, tensor in tensors.items() if not EXPERT.fullmatch(name)}
    numbers = dict[str, int]()  # of each prefix: the last expert's
    for match in filter(None, map(EXPERT.fullmatch, tensors)):
        numbers[match[1]] = max(int(match[2]), numbers.get(match[1], 0))
    for prefix, last in numbers.items():
        names = {part: [f"{prefix}.{i}.{part}.weight" for i in range(last + 1)] for part in PROJECTIONS}
        if missing := [name for listed in names.values() for name in listed if name not in tensors]:
            raise UserError(f"the MTP layer lacks tensors: {missing[0]}")
        try:
            gate, up, down = (torch.stack([tensors[name] for name in names[part]]) for part in PROJECTIONS)
        except RuntimeError:
            raise UserError(f"the experts {prefix} have matrices of different shapes") from None
        joined |= {f"{prefix}.gate_up_proj": torch.cat((gate, up), 1), f"{prefix}.down_proj": down}
    return joined


# -- writing -------------------------------------------------------------------------------------------------------

NOT_OF_THE_LAYER = ("architectures", "transformers_version", "dtype", "torch_dtype", "_name_or_path", "ssbench")


def config_of(layer: PretrainedConfig, steps: int, base: ModelInfo) -> dict[str, Any]:
    """Return config.json of a head in speculators' layout. steps: tokens that it was trained to draft."""
    fields = {name: value for name, value in layer.to_diff_dict().items() if name not in NOT_OF_THE_LAYER}
    fields |= {"model_type": layer.model_type, "vocab_size": base.vocab_size}
    return speculators.config_json("mtp", fields, steps, base, num_nextn_predict_layers=1)
