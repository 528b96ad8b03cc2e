"""The layouts that Hydra heads come in: ours, and the published `hydra_lm_head.pt`.

The published one is the state of a module with the base's embedding in it, a misspelt prefix layer, and, in the
prefix-mlp form, a Dropout before every layer, so that layer j of a head stands at 2j + 1.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specbench_ss.engine.architectures import Outline
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.small_llama import llama_layer
from specbench_ss.models.checkpoint import load_into, weight_file

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import LlamaConfig

    from specbench_ss.methods._shared.heads_decoder import Read
    from specbench_ss.methods.hydra.heads import HydraHeads

HEADS_FILES = ("hydra_lm_head.safetensors", "hydra_lm_head.pt")
ARCHITECTURES = ("mlp", "prefix-mlp")
EMBEDDING = "input_embed_fn.weight"
PUBLISHED_PREFIX = "prefix_embeding_layer."
# what is in a published file and not needed: the prefix layer reads states, not tokens; frequencies are computed
UNUSED = (f"{PUBLISHED_PREFIX}embed_tokens.weight", f"{PUBLISHED_PREFIX}layers.0.self_attn.rotary_emb.inv_freq")
_BLOCK = re.compile(r"^hydra_mlp\.(\d+)\.(\d+)\.")


def read_heads(path: Path, base: Outline, read: Read) -> tuple[HydraHeads, dict[str, Any]]:
    """Heads of a file or folder, and their config. Raises UserError, naming the file, where they do not fit the base.

    Counts are read from the tensors. Of the config only what they cannot say counts: the architecture, and which of
    the base's states the heads read.
    """
    file, config = weight_file(path, HEADS_FILES, "hydra")
    architecture = config.get("hydra_head_arch", "mlp")
    if architecture not in ARCHITECTURES:
        known = " and ".join(ARCHITECTURES)
        raise UserError(f"hydra: heads of architecture {architecture!r} are not supported, only {known} ({file})")
    if config.get("grounded_heads") is False:
        raise UserError(f"hydra: heads that do not read the drafted tokens (grounded_heads) are not supported ({file})")
    tensors = {k: v.float() for k, v in read(file).items() if k not in UNUSED}
    check_embedding(tensors.pop(EMBEDDING, None), base, file)
    return heads_from_tensors(tensors, base, f"hydra: {file}"), config


def heads_from_tensors(tensors: dict[str, Tensor], base: Outline, what: str) -> HydraHeads:
    """Raises UserError that names unknown, missing or misshapen tensors."""
    from specbench_ss.methods.hydra.heads import HydraHeads

    places: dict[int, set[int]] = {}
    for name in tensors:
        if match := _BLOCK.match(name):
            places.setdefault(int(match[1]), set()).add(int(match[2]))
    if not places:
        raise UserError(f"{what} holds no Hydra heads: no tensor hydra_mlp.0.0.linear.weight or .0.1.linear.weight")
    last = max(map(max, places.values()))
    if max(last // 2, *places) > len(tensors):
        raise UserError(f"{what} has too few tensors for heads up to hydra_mlp.{max(places)} and blocks up to .{last}")
    wrapped = 0 not in set().union(*places.values())  # Dropout takes the first place
    layers = (last + 1) // 2 if wrapped else last + 1
    published = wrapped or any(name.startswith(PUBLISHED_PREFIX) for name in tensors)
    prefix = (
        prefix_of(tensors, base) if any(name.startswith(("prefix.", PUBLISHED_PREFIX)) for name in tensors) else None
    )
    own = any(name.startswith("hydra_lm_head.") for name in tensors)
    tied = layers > 2 and _repeats(tensors, wrapped)
    heads = HydraHeads(1 + max(places), layers, base.hidden_size, base.vocab_size, prefix, own, tied)
    load_into(heads, tensors, what, lambda name: _called(name, wrapped, published))
    return heads


def _repeats(tensors: dict[str, Tensor], wrapped: bool) -> bool:
    """Whether every block after a head's first is one block again; that takes numbers to tell."""
    first: dict[tuple[str, str], Tensor] = {}
    for name, tensor in sorted(tensors.items()):
        match = _BLOCK.match(name)
        if match is None or int(match[2]) == int(wrapped):
            continue
        before = first.setdefault((match[1], name[match.end() :]), tensor)
        if tensor.device.type == "meta" or not torch.equal(before, tensor):
            return False
    return True


def _called(name: str, wrapped: bool, published: bool) -> str:
    """How a file calls our tensor."""
    if wrapped:
        name = _BLOCK.sub(lambda m: f"hydra_mlp.{m[1]}.{2 * int(m[2]) + 1}.", name)
        name = re.sub(r"^hydra_lm_head\.(\d+)\.", r"hydra_lm_head.\1.1.", name)
    if published:
        name = re.sub(r"^prefix\.layer\.", f"{PUBLISHED_PREFIX}layers.0.", name)
        name = re.sub(r"^prefix\.norm\.", f"{PUBLISHED_PREFIX}norm.", name)
    return name


def prefix_of(tensors: dict[str, Tensor], base: Outline) -> LlamaConfig:
    """The prefix layer's shape: off its tensors, but for the heads, which are as many as the base's."""
    matrices = {name: t for name, t in tensors.items() if t.ndim == 2}
    rows = {name.rpartition("self_attn.k_proj")[1]: t.shape[0] for name, t in matrices.items() if "prefix" in name}
    wide = [t.shape[0] for name, t in matrices.items() if name.endswith("mlp.gate_proj.weight")]
    kv_rows = rows.get("self_attn.k_proj", base.hidden_size)
    return llama_layer(base, ffn=wide[0] if wide else 0, kv_rows=kv_rows)


def check_embedding(saved: Tensor | None, base: Outline, file: Path) -> None:
    """Raises UserError where the base's embedding, saved with the heads, is another one than this base's."""
    if saved is None:
        return
    if saved.shape != (base.vocab_size, base.hidden_size):
        here = (base.vocab_size, base.hidden_size)
        raise UserError(f"hydra: {file} is for embeddings of shape {tuple(saved.shape)}, the model has {here}")
    if isinstance(base, Target) and saved.device.type != "meta":
        own = base.model.get_input_embeddings().weight.detach().to("cpu", torch.float32)
        if (own - saved).norm() > 0.05 * own.norm():  # more than rounding
            raise UserError(f"hydra: {file} was trained for another base: its {EMBEDDING} is not this model's")
