"""Hydra heads and their checkpoint layouts.

Head i reads the prefix state and the embeddings of the root and of i drafted tokens, (i + 2) h values: Ankner et al.
2024, sec. 3.1; the prefix layer is of sec. 4.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from specbench_ss.engine.architectures import ModelInfo, rotary_table
from specbench_ss.engine.layers import attention
from specbench_ss.engine.layers.linear import PrepackedLinear
from specbench_ss.engine.target import AnyCache
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.drafting import Read
from specbench_ss.methods._shared.small_llama import llama_layer
from specbench_ss.methods._shared.target_copies import differences
from specbench_ss.models.checkpoint import load_into, read_config, weights_in


class ResBlock(nn.Module):
    """Residual block R x + SiLU(W x + b); R is the identity, or linear if the width changes."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, hidden)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        self.res_connection: nn.Module = nn.Identity()
        if width != hidden:
            self.res_connection = nn.Linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [m, width] to [m, h]."""
        out: Tensor = self.res_connection(x) + F.silu(self.linear(x))
        return out


class Prefix(nn.Module):
    """Prefix layer: one Llama layer with its own KV cache and norm over the base's states."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        config._attn_implementation = attention.NAME
        self.config = config
        self.layer = LlamaDecoderLayer(config, 0)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self._table: tuple[Tensor, Tensor] | None = None  # cos, sin [length, head_dim]

    def forward(self, x: Tensor, cache: AnyCache, mask: Tensor | None, rotary: Any) -> Tensor:
        """Map states x [B, q, h] to [B, q, h]. mask: additive, None = causal. rotary: cos, sin."""
        out: Tensor = self.norm(self.layer(x, attention_mask=mask, past_key_values=cache, position_embeddings=rotary))
        return out

    def rotary(self, positions: Tensor, until: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos, sin [1 or B, q, head_dim] at positions [1 or B, q], all below `until`."""
        cos, sin = (table[positions].to(dtype) for table in self._tables(until, positions.device))
        return cos, sin

    def _tables(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cos, sin of positions 0..length-1 and more, in float32 for any dtype of the layer.

        Never beyond the base's maximum length, where some RoPE types change.
        """
        table = self._table
        if table is None or len(table[0]) < length or table[0].device != device:
            rotary = LlamaRotaryEmbedding(self.config).to(device)
            most = max(length, self.config.max_position_embeddings)
            table = self._table = rotary_table(rotary, min(2 * length, most), torch.empty(0, device=device))
        return table


class HydraHeads(nn.Module):
    """Heads of `layers` residual blocks each. Modules are named as published tensors without wrappers.

    Args:
        prefix: configuration of the prefix layer (Hydra++).
        own_unembed: give each head its own LM head with a bias; else the base's is used.
        tied: a head's blocks after the first are one shared block, as published.
    """

    def __init__(
        self,
        heads: int,
        layers: int,
        hidden: int,
        vocab: int,
        prefix: LlamaConfig | None = None,
        own_unembed: bool = True,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.layers = layers

        def inner_blocks() -> list[ResBlock]:
            n = layers - 1
            return [ResBlock(hidden, hidden)] * n if tied else [ResBlock(hidden, hidden) for _ in range(n)]

        self.hydra_mlp = nn.ModuleList(
            nn.Sequential(ResBlock((i + 2) * hidden, hidden), *inner_blocks()) for i in range(heads)
        )
        self.hydra_lm_head = nn.ModuleList(nn.Linear(hidden, vocab) for _ in range(heads)) if own_unembed else None
        self.prefix = None if prefix is None else Prefix(prefix)
        self.products: list[PrepackedLinear] = []  # of `lm_heads`, for inference on a CPU

    @property
    def count(self) -> int:
        """Return the number of heads."""
        return len(self.hydra_mlp)

    def lm_heads(self) -> list[Any]:
        """Return weight and bias of each head's own LM head."""
        return [(head.weight, head.bias) for head in self.hydra_lm_head or ()]

    def logits(
        self,
        head: int,
        x: Tensor,
        path: Tensor,
        shared: Callable[[Tensor], Tensor],
        rows: Sequence[PrepackedLinear] = (),
    ) -> Tensor:
        """Return logits [m, V] of a head from prefix states x [1 or m, h] and embedded tokens.

        path: [m, head + 1, h], from the root on. shared: LM head for heads without one of their own, [.., h] ->
        [.., V]. rows: selected rows of the heads' own, in place of those.
        """
        states: Tensor = self.hydra_mlp[head](torch.cat((x.expand(len(path), -1), path.flatten(1)), 1))
        if self.hydra_lm_head is None:
            return shared(states)
        products = self.products if torch.is_inference_mode_enabled() else ()
        heads: Any = rows or products or self.hydra_lm_head
        out: Tensor = heads[head](states)
        return out


@torch.no_grad()
def initialize(heads: HydraHeads, unembed: Tensor) -> None:
    """Initialize LM heads from the base's and the prefix layer as the identity; other weights stay random.

    Heads that start as the identity on the state train more slowly on the lab model (docs/methods/hydra.md): they first
    predict the next token again.
    """
    for module in heads.hydra_lm_head or ():
        head: Any = module
        head.weight.copy_(unembed)
        head.bias.zero_()
    if heads.prefix is not None:
        layer: Any = heads.prefix.layer
        nn.init.zeros_(layer.self_attn.o_proj.weight)
        nn.init.zeros_(layer.mlp.down_proj.weight)


HEADS_FILES = ("hydra_lm_head.safetensors", "hydra_lm_head.pt")
ARCHITECTURES = ("mlp", "prefix-mlp")
EMBEDDING = "input_embed_fn.weight"
PUBLISHED_PREFIX = "prefix_embeding_layer."
# unused tensors of published files: the prefix layer reads states, not tokens; frequencies are computed
UNUSED = (f"{PUBLISHED_PREFIX}embed_tokens.weight", f"{PUBLISHED_PREFIX}layers.0.self_attn.rotary_emb.inv_freq")
_BLOCK = re.compile(r"^hydra_mlp\.(\d+)\.(\d+)\.")


def read_heads(path: Path, base: ModelInfo, read: Read) -> tuple[HydraHeads, dict[str, Any]]:
    """Return the heads of a file or folder, and their config. Raise UserError if they do not fit the base.

    Counts are read from the tensors; the config gives only the architecture and the layer that the heads read.
    """
    file, config = weights_in(path, "hydra", HEADS_FILES), read_config(path) if path.is_dir() else {}
    architecture = config.get("hydra_head_arch", "mlp")
    if architecture not in ARCHITECTURES:
        supported = " and ".join(ARCHITECTURES)
        raise UserError(f"hydra: heads of architecture {architecture!r} are not supported, only {supported} ({file})")
    if config.get("grounded_heads") is False:
        raise UserError(f"hydra: heads that do not read the drafted tokens (grounded_heads) are not supported ({file})")
    tensors = {k: v.float() for k, v in read(file).items() if k not in UNUSED}
    check_embedding(tensors.pop(EMBEDDING, None), base, file)
    return heads_from_tensors(tensors, base, f"hydra: {file}"), config


def heads_from_tensors(tensors: dict[str, Tensor], base: ModelInfo, source: str) -> HydraHeads:
    """Return the heads. Raise UserError that names unknown, missing or misshapen tensors of `source`."""
    block_ids: dict[int, set[int]] = {}  # of each head
    for name in tensors:
        if match := _BLOCK.match(name):
            block_ids.setdefault(int(match[1]), set()).add(int(match[2]))
    if not block_ids:
        raise UserError(f"{source} has no Hydra heads: no tensor hydra_mlp.0.0.linear.weight or .0.1.linear.weight")
    last = max(map(max, block_ids.values()))
    if max(last // 2, *block_ids) > len(tensors):
        raise UserError(f"{source} lacks tensors of heads up to hydra_mlp.{max(block_ids)} and blocks up to .{last}")
    wrapped = 0 not in set().union(*block_ids.values())  # Dropout is the first module
    layers = (last + 1) // 2 if wrapped else last + 1
    published = wrapped or any(name.startswith(PUBLISHED_PREFIX) for name in tensors)
    prefix = (
        prefix_of(tensors, base) if any(name.startswith(("prefix.", PUBLISHED_PREFIX)) for name in tensors) else None
    )
    own_unembed = any(name.startswith("hydra_lm_head.") for name in tensors)
    tied = layers > 2 and _repeats(tensors, wrapped)
    heads = HydraHeads(1 + max(block_ids), layers, base.hidden_size, base.vocab_size, prefix, own_unembed, tied)
    load_into(heads, tensors, source, lambda name: _published_name(name, wrapped, published))
    return heads


def _repeats(tensors: dict[str, Tensor], wrapped: bool) -> bool:
    """Return True if all blocks after a head's first are equal; False for tensors without values."""
    first: dict[tuple[str, str], Tensor] = {}
    for name, tensor in sorted(tensors.items()):
        match = _BLOCK.match(name)
        if match is None or int(match[2]) == int(wrapped):
            continue
        before = first.setdefault((match[1], name[match.end() :]), tensor)
        if tensor.device.type == "meta" or not torch.equal(before, tensor):
            return False
    return True


def _published_name(name: str, wrapped: bool, published: bool) -> str:
    """Return the name of our tensor in a file."""
    if wrapped:
        name = _BLOCK.sub(lambda m: f"hydra_mlp.{m[1]}.{2 * int(m[2]) + 1}.", name)
        name = re.sub(r"^hydra_lm_head\.(\d+)\.", r"hydra_lm_head.\1.1.", name)
    if published:
        name = re.sub(r"^prefix\.layer\.", f"{PUBLISHED_PREFIX}layers.0.", name)
        name = re.sub(r"^prefix\.norm\.", f"{PUBLISHED_PREFIX}norm.", name)
    return name


def prefix_of(tensors: dict[str, Tensor], base: ModelInfo) -> LlamaConfig:
    """Return the prefix layer's configuration: sizes from its tensors, the number of heads from the base."""
    matrices = {name: t for name, t in tensors.items() if t.ndim == 2}
    rows = {name.rpartition("self_attn.k_proj")[1]: t.shape[0] for name, t in matrices.items() if "prefix" in name}
    width = [t.shape[0] for name, t in matrices.items() if name.endswith("mlp.gate_proj.weight")]
    kv_rows = rows.get("self_attn.k_proj", base.hidden_size)
    return llama_layer(base, ffn=width[0] if width else 0, kv_rows=kv_rows)


def check_embedding(saved: Tensor | None, base: ModelInfo, file: Path) -> None:
    """Raise UserError if the embedding saved with the heads has another shape than the base's, or other values."""
    expected = (base.vocab_size, base.hidden_size)
    if saved is not None and saved.shape != expected:
        raise UserError(f"hydra: {file} is for embeddings of shape {tuple(saved.shape)}, the model has {expected}")
    for difference in differences(file, {re.escape(EMBEDDING): "embedding"}, base):
        raise UserError(f"hydra: {file} was trained for another base: {difference}")
