"""Reference of MTP layers, written from the published definitions: plain torch over whole rows, without a cache.

Names and shapes are those of the published checkpoints, with one matrix for each expert.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import save_file
from torch import Tensor

H, V, HEADS, KV, HD, FFN, EXPERTS, WIDE = 32, 61, 4, 2, 8, 48, 4, 16
RANK_Q, RANK_KV, NOPE, ROPE, VD = 12, 16, 6, 8, 10  # of multi-head latent attention
COMMON: dict[str, Any] = {
    "vocab_size": V, "hidden_size": H, "intermediate_size": FFN, "num_hidden_layers": 3, "num_attention_heads": HEADS,
    "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": 1e-5,
}  # fmt: skip
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": WIDE}
GROUPED = {**ROUTED, "n_routed_experts": EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2}
GROUPED |= {"topk_group": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True}
QWEN = {"num_key_value_heads": KV, "head_dim": HD, "num_hidden_layers": 4, "partial_rotary_factor": 0.5}
CONFIGS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        **COMMON, **GROUPED, "num_key_value_heads": HEADS, "q_lora_rank": RANK_Q, "kv_lora_rank": RANK_KV,
        "qk_rope_head_dim": ROPE, "qk_nope_head_dim": NOPE, "v_head_dim": VD, "num_nextn_predict_layers": 1,
    },
    "glm4_moe": {
        **COMMON, **GROUPED, "num_key_value_heads": KV, "head_dim": HD, "partial_rotary_factor": 0.5,
        "num_nextn_predict_layers": 1,
    },
    "qwen3_next": {
        **COMMON, **QWEN, **ROUTED, "num_experts": EXPERTS, "shared_expert_intermediate_size": WIDE,
        "norm_topk_prob": True,
    },
    "qwen3_5_text": {**COMMON, **QWEN, "mtp_num_hidden_layers": 1},
    "qwen3": {**COMMON, "num_key_value_heads": KV, "head_dim": HD},  # in the layout of speculators
}  # fmt: skip
NAMES = {  # norm of the embedding, norm of the state, projection, output norm, decoder layer
    "deepseek_v3": ["model.layers.{n}.enorm", "model.layers.{n}.hnorm", "model.layers.{n}.eh_proj",
                    "model.layers.{n}.shared_head.norm", "model.layers.{n}"],
    "qwen3_next": ["mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", "mtp.layers.0"],
    "qwen3": ["mtp_layers.0.token_layernorm", "mtp_layers.0.hidden_layernorm", "mtp_layers.0.input_proj",
              "mtp_layers.0.final_layernorm", "mtp_layers.0"],
}  # fmt: skip
NAMES |= {"glm4_moe": NAMES["deepseek_v3"], "qwen3_5_text": NAMES["qwen3_next"]}


def names_of(kind: str, index: int = 0) -> list[str]:
    return [name.format(n=CONFIGS[kind]["num_hidden_layers"] + index) for name in NAMES[kind]]


def weights_of(kind: str, index: int = 0, seed: int = 0) -> dict[str, Tensor]:
    """Return random tensors of one MTP layer, under the names of its checkpoint."""
    torch.manual_seed(seed)
    token, state, project, out, layer = names_of(kind, index)
    attention, mlp = f"{layer}.self_attn.", f"{layer}.mlp."
    gated, grouped = kind.startswith("qwen3_"), kind in ("deepseek_v3", "glm4_moe")
    shapes: dict[str, tuple[int, ...]] = {f"{project}.weight": (H, 2 * H)}
    norms = {token: H, state: H, out: H, f"{layer}.input_layernorm": H, f"{layer}.post_attention_layernorm": H}
    if kind == "deepseek_v3":
        latent = {
            "q_a_proj": (RANK_Q, H), "q_b_proj": (HEADS * (NOPE + ROPE), RANK_Q),
            "kv_a_proj_with_mqa": (RANK_KV + ROPE, H), "kv_b_proj": (HEADS * (NOPE + VD), RANK_KV),
            "o_proj": (H, HEADS * VD),
        }  # fmt: skip
        shapes |= {f"{attention}{name}.weight": shape for name, shape in latent.items()}
        norms |= {f"{attention}q_a_layernorm": RANK_Q, f"{attention}kv_a_layernorm": RANK_KV}
    else:
        rows = {"q_proj": HEADS * HD * (2 if gated else 1), "k_proj": KV * HD, "v_proj": KV * HD}
        shapes |= {f"{attention}{name}.weight": (n, H) for name, n in rows.items()}
        shapes[f"{attention}o_proj.weight"] = (H, HEADS * HD)
        if kind != "glm4_moe":
            norms |= {f"{attention}q_norm": HD, f"{attention}k_norm": HD}
    blocks = {mlp: FFN}
    if grouped or kind == "qwen3_next":
        shared = "shared_experts." if grouped else "shared_expert."
        blocks = {f"{mlp}experts.{i}.": WIDE for i in range(EXPERTS)} | {mlp + shared: WIDE}
        shapes[f"{mlp}gate.weight"] = (EXPERTS, H)
        shapes |= {} if grouped else {f"{mlp}shared_expert_gate.weight": (1, H)}
    for prefix, width in blocks.items():
        shapes |= {f"{prefix}{name}_proj.weight": (width, H) for name in ("gate", "up")}
        shapes[f"{prefix}down_proj.weight"] = (H, width)
    made = {name: torch.randn(shape) * 0.25 for name, shape in shapes.items()}
    made |= {f"{name}.weight": torch.rand(n) - 0.5 + (0 if gated else 1) for name, n in norms.items()}
    if grouped:
        made[f"{mlp}gate.e_score_correction_bias"] = torch.rand(EXPERTS)
    return made


class Reference:
    """One MTP layer over rows [n, h] at positions 0, 1, .."""

    def __init__(self, w: dict[str, Tensor], kind: str, index: int = 0) -> None:
        self.w, self.kind, self.c = w, kind, CONFIGS[kind]
        self.token, self.state, self.project, self.out, self.layer = names_of(kind, index)

    def norm(self, x: Tensor, name: str, eps: float = 1e-5) -> Tensor:
        centred = self.kind.startswith("qwen3_")  # zero-centred weights
        return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * (self.w[f"{name}.weight"] + (1 if centred else 0))

    def product(self, x: Tensor, name: str) -> Tensor:
        return x @ self.w[f"{name}.weight"].T

    def rows(self, embedded: Tensor, states: Tensor) -> Tensor:
        """Return u [n, h], before the output norm, of rows with these embeddings and states [n, h]."""
        joined = torch.cat((self.norm(embedded, self.token), self.norm(states, self.state)), -1)
        x = self.product(joined, self.project)
        x = x + self.attention(self.norm(x, f"{self.layer}.input_layernorm"))
        return x + self.mlp(self.norm(x, f"{self.layer}.post_attention_layernorm"))

    def normed(self, u: Tensor) -> Tensor:
        return self.norm(u, self.out)

    def turned(self, x: Tensor, dims: int) -> Tensor:
        """Rotate the first dimensions of heads [n, heads, d]; pairs are (i, i + dims / 2)."""
        angles = torch.arange(len(x))[:, None, None] / 1e4 ** (torch.arange(0, dims, 2) / dims)
        low, high, rest = x[..., : dims // 2], x[..., dims // 2 : dims], x[..., dims:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), -1)

    def attention(self, x: Tensor) -> Tensor:
        p, n = f"{self.layer}.self_attn.", len(x)
        if self.kind == "deepseek_v3":
            q = self.product(self.norm(self.product(x, p + "q_a_proj"), p + "q_a_layernorm", 1e-6), p + "q_b_proj")
            q = q.view(n, HEADS, NOPE + ROPE)
            latent, shared = self.product(x, p + "kv_a_proj_with_mqa").split((RANK_KV, ROPE), -1)
            kv = self.product(self.norm(latent, p + "kv_a_layernorm", 1e-6), p + "kv_b_proj").view(n, HEADS, NOPE + VD)
            pairs = [*range(0, ROPE, 2), *range(1, ROPE, 2)]  # published in interleaved pairs
            q = torch.cat((q[..., :NOPE], self.turned(q[..., NOPE:][..., pairs], ROPE)), -1)
            k = self.turned(shared[:, None, pairs], ROPE).expand(-1, HEADS, -1)
            return self.attend(q, torch.cat((kv[..., :NOPE], k), -1), kv[..., NOPE:], None)
        q, k, v = (
            self.product(x, f"{p}{name}_proj").view(n, heads, -1)
            for name, heads in zip("qkv", (HEADS, KV, KV), strict=True)
        )
        gate = None
        if self.kind.startswith("qwen3_"):
            q, gate = q.chunk(2, -1)
        if f"{p}q_norm.weight" in self.w:
            q, k = self.norm(q, p + "q_norm"), self.norm(k, p + "k_norm")
        dims = int(HD * self.c.get("partial_rotary_factor", 1))
        k, v = (t.repeat_interleave(HEADS // KV, 1) for t in (self.turned(k, dims), v))
        return self.attend(self.turned(q, dims), k, v, gate)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None) -> Tensor:
        n = len(q)
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -torch.inf)
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
        out = out if gate is None else out * gate.sigmoid()
        return self.product(out.flatten(1), f"{self.layer}.self_attn.o_proj")

    def feed(self, x: Tensor, p: str) -> Tensor:
        return self.product(F.silu(self.product(x, f"{p}gate_proj")) * self.product(x, f"{p}up_proj"), f"{p}down_proj")

    def mlp(self, x: Tensor) -> Tensor:
        p = f"{self.layer}.mlp."
        if f"{p}gate.weight" not in self.w:
            return self.feed(x, p)
        scores = self.product(x, f"{p}gate")
        if self.kind == "qwen3_next":
            shares = scores.softmax(-1)
            chosen, shared = shares.topk(2).indices, f"{p}shared_expert."
        else:
            shares, shared = scores.sigmoid(), f"{p}shared_experts."
            biased = shares + self.w[f"{p}gate.e_score_correction_bias"]
            groups = biased.view(-1, 2, EXPERTS // 2)
            best = groups.sum(-1).argmax(-1)  # two experts in a group: the sum of its best two
            mask = F.one_hot(best, 2).bool()[..., None].expand_as(groups).flatten(1)
            chosen = biased.masked_fill(~mask, -torch.inf).topk(2).indices
        taken = torch.zeros_like(shares).scatter(1, chosen, shares.gather(1, chosen))
        taken = taken / taken.sum(-1, keepdim=True) * self.c.get("routed_scaling_factor", 1)
        out = sum(taken[:, i, None] * self.feed(x, f"{p}experts.{i}.") for i in range(EXPERTS))
        always = self.feed(x, shared)
        if self.kind == "qwen3_next":
            always = always * self.product(x, f"{p}shared_expert_gate").sigmoid()
        return out + always

    def recursion(self, table: Tensor, ids: list[int], states: Tensor, normed: bool) -> Tensor:
        """Return the last row's u [h] behind ids[1:], the first of which have target states [n, h].

        Rows without one read the row before: its u, or u after the output norm.
        """
        while True:
            rows = self.rows(table[ids[1 : len(states) + 1]], states)
            if len(states) == len(ids) - 1:
                return rows[-1]
            states = torch.cat((states, (self.normed(rows[-1:]) if normed else rows[-1:])))


def folder(path: Path, kind: str, w: dict[str, Tensor], shards: int = 0, **changes: Any) -> Path:
    """Write a checkpoint's folder. shards: number of files, 0 = one file without an index."""
    path.mkdir(exist_ok=True)
    about: dict[str, Any] = {**CONFIGS[kind], "model_type": kind, **changes}
    if kind == "qwen3":
        methods = [{"proposal_type": "greedy", "speculative_tokens": 3}]
        about = {
            "speculators_model_type": "mtp", "transformer_layer_config": {**CONFIGS[kind], "model_type": kind},
            "num_nextn_predict_layers": 1, "speculators_config": {"proposal_methods": methods}, **changes,
        }  # fmt: skip
    (path / "config.json").write_text(json.dumps(about))
    w = {name: tensor.contiguous() for name, tensor in w.items()}
    if not shards:
        save_file(w, path / "model.safetensors")
        return path
    files = {name: f"model-{i % shards}.safetensors" for i, name in enumerate(sorted(w))}
    for file in set(files.values()):
        save_file({name: w[name] for name in w if files[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return path


def model_of(kind: str, **changes: Any) -> Any:
    """Return a random causal LM of the model type; its first and last tokens' logits vary."""
    config = transformers.AutoConfig.for_model(kind, **{**CONFIGS[kind], **changes})
    torch.manual_seed(4)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(config).float()
    for p in model.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=0.15)
    return model
