"""Reference drafters of EAGLE, P-EAGLE and DFlash: written from the descriptions, one position at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from specbench_ss.engine.decoder import Decoder, DecodeState
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError

Weights = dict[str, Tensor]


def folder(path: Path, weights: Weights, config: dict[str, Any], pickled: bool = False) -> str:
    """Write a drafter's folder."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(weights, path / "pytorch_model.bin")
    else:
        save_file(weights, path / "model.safetensors")
    return str(path)


def draft_words(words: int, vocab: int) -> Weights:
    """Return d2t and t2d of so many of the target's tokens; none where it is all of them."""
    if words == vocab:
        return {}
    chosen = torch.randperm(vocab)[:words].sort().values
    return {
        "d2t": chosen - torch.arange(words),
        "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill(0, chosen, True),
    }


def layer_weights(
    prefix: str, hidden: int, ffn: int, heads: int, kv: int, hd: int, *, width: int = 0,
    norms: Sequence[str] = ("post_attention_layernorm",), biases: Sequence[str] = (), qk_norm: bool = False,
) -> Weights:  # fmt: skip
    """Return the tensors of a decoder layer; width: what its attention reads."""
    rows = {"q_proj": heads * hd, "k_proj": kv * hd, "v_proj": kv * hd}
    shapes = {f"self_attn.{n}": (r, width or hidden) for n, r in rows.items()}
    shapes |= {"self_attn.o_proj": (hidden, heads * hd), "mlp.gate_proj": (ffn, hidden), "mlp.up_proj": (ffn, hidden)}
    shapes |= {"mlp.down_proj": (hidden, ffn)}
    made = {f"{prefix}.{n}.weight": torch.randn(s) * 0.25 for n, s in shapes.items()}
    made |= {f"{prefix}.{n}.bias": torch.randn(shapes[n][0]) for n in biases}
    made |= {f"{prefix}.{n}.weight": torch.rand(hidden) + 0.5 for n in norms}
    if qk_norm:
        made |= {f"{prefix}.self_attn.{n}_norm.weight": torch.rand(hd) + 0.5 for n in "qk"}
    return made


def refused(method: type[Decoder], options: Any, target: Target, reported: str, *, only_load: bool = False) -> None:
    """Check that `check` and `load` refuse in one line that begins with the method and has the keyword."""
    asks: list[Callable[[], Any]] = [lambda: method.load(target, options)]
    for ask in asks if only_load else [*asks, lambda: method.check(options, target)]:
        try:
            ask()
        except UserError as error:
            text = str(error)
        else:
            raise AssertionError("it is accepted")
        assert reported in text and "\n" not in text, text
        assert only_load or text.startswith(method.name), text


class Reference:
    """A drafter's layers over rows at positions 0, 1, ..; config: its config.json, in any layout."""

    def __init__(self, w: Weights, config: dict[str, Any], embedding: Tensor) -> None:
        self.w, self.config, self.about = w, config, config.get("transformer_layer_config", config)
        self.table, self.eps = w.get("embed_tokens.weight", embedding), self.about.get("rms_norm_eps", 1e-6)
        rope = self.about.get("rope_parameters", {})
        self.theta = self.about.get("rope_theta", rope.get("rope_theta", 1e4))
        self.first = "midlayer" if "midlayer.hidden_norm.weight" in w else "layers.0"
        self.hd = len(w[f"{self.first}.self_attn.q_proj.weight"]) // self.about["num_attention_heads"]

    def normed(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * self.w[f"{name}.weight"]

    def product(self, x: Tensor, name: str) -> Tensor:
        return self.w[f"{name}.weight"] @ x + self.w.get(f"{name}.bias", torch.zeros(()))

    def heads(self, x: Tensor, name: str, position: int | None) -> Tensor:
        """Heads [n, hd] of a row, turned to its position where it has one."""
        out = self.product(x, f"{name}_proj").view(-1, self.hd)
        if position is None:
            return out
        if f"{name}_norm.weight" in self.w:
            out = self.normed(out, f"{name}_norm")
        angle = position / self.theta ** (torch.arange(self.hd // 2) * 2 / self.hd)
        low, high = out[:, : self.hd // 2], out[:, self.hd // 2 :]
        return torch.cat((low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()), -1)

    def attend(self, p: str, rows: Sequence[Tensor], query: int, seen: Sequence[int]) -> Tensor:
        """Attention of row `query` over the rows seen."""
        q = self.heads(rows[query], f"{p}.self_attn.q", query)
        keys = torch.stack([self.heads(rows[n], f"{p}.self_attn.k", n) for n in seen])
        values = torch.stack([self.heads(rows[n], f"{p}.self_attn.v", None) for n in seen])
        keys, values = (x.repeat_interleave(len(q) // x.shape[1], 1) for x in (keys, values))
        shares = ((keys * q).sum(-1) / self.hd**0.5).softmax(0)  # [seen, heads]
        return self.product((shares[..., None] * values).sum(0).flatten(), f"{p}.self_attn.o_proj")

    def mlp(self, x: Tensor, p: str) -> Tensor:
        """The layer's output, x added."""
        return x + self.gated(self.normed(x, f"{p}.post_attention_layernorm"), p)

    def gated(self, z: Tensor, p: str) -> Tensor:
        gate = F.silu(self.product(z, f"{p}.mlp.gate_proj")) * self.product(z, f"{p}.mlp.up_proj")
        return self.product(gate, f"{p}.mlp.down_proj")

    def fused(self, feature: Tensor) -> Tensor:
        """Hidden states of all target layers [n * h] -> what a slot reads."""
        if "input_norm.weight" in self.w:
            feature = self.normed(feature, "input_norm")
        if "fc_norm.0.weight" in self.w:
            parts = feature.split(len(self.w["fc_norm.0.weight"]))
            feature = torch.cat([self.normed(f, f"fc_norm.{i}") for i, f in enumerate(parts)])
        return self.product(feature, "fc")

    def wide(self, token: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return what EAGLE-3's attention reads of a token and a state, and the residual."""
        inner = self.normed(state, f"{self.first}.hidden_norm")
        read = torch.cat((self.normed(self.table[token], f"{self.first}.input_layernorm"), inner))
        return read, inner if self.config.get("norm_before_residual") else state

    def eagle(self, tokens: Sequence[int], features: Sequence[Tensor]) -> list[Tensor]:
        """Output of every slot of EAGLE or EAGLE-3; slots without features read the output before them."""
        third, rows, out = f"{self.first}.hidden_norm.weight" in self.w, [], []
        for i, token in enumerate(tokens):
            given = features[i] if i < len(features) else None
            if third:
                read, residual = self.wide(token, out[-1] if given is None else self.fused(given))
            else:
                state = out[-1] if given is None else given
                read = residual = self.product(torch.cat((self.table[token], state)), "fc")
            rows.append(read)
            x = self.mlp(residual + self.attend(self.first, rows, i, range(i + 1)), self.first)
            out.append(self.normed(x, "norm") if self.config.get("norm_output") else x)
        return out

    def eagle3_logits(self, state: Tensor) -> Tensor:
        return self.product(state if self.config.get("norm_output") else self.normed(state, "norm"), "lm_head")

    def peagle(self, ids: Sequence[int], features: Sequence[Tensor], depths: int, mask: int) -> Tensor:
        """Logits [depths, words]; features of all ids [S] but the root, which is the last."""
        states = [self.fused(f) for f in features] + [self.fused(self.w["mask_hidden"].flatten())] * (depths - 1)
        pairs = [self.wide(t, s) for t, s in zip([*ids[1:], *[mask] * (depths - 1)], states, strict=True)]
        read, rows = ([pair[i] for pair in pairs] for i in (0, 1))
        for i in range(self.about["num_hidden_layers"]):
            p = f"layers.{i}" if i else self.first
            read = [self.normed(x, f"{p}.input_layernorm") for x in rows] if i else read
            slides = self.about.get("layer_types", ["full_attention"] * 9)[i] == "sliding_attention"
            start = [max(0, n + 1 - self.about["sliding_window"]) if slides else 0 for n in range(len(rows))]
            rows = [self.mlp(x + self.attend(p, read, n, range(start[n], n + 1)), p) for n, x in enumerate(rows)]
        return torch.stack([self.product(self.normed(x, "norm"), "lm_head") for x in rows[-depths:]])

    def dflash(self, block: Sequence[int], features: Sequence[Tensor], head: Tensor) -> Tensor:
        """Logits [block, words] of a block that begins with the root; head: the target's."""
        head = self.w.get("lm_head.weight", head)
        return torch.stack([head @ state for state in self.block_states(block, features)])

    def block_states(self, block: Sequence[int], features: Sequence[Tensor]) -> list[Tensor]:
        """Normed states [h] of a block that begins with the root."""
        context = [self.normed(self.fused(f), "hidden_norm") for f in features]
        s, rows = len(context), [self.table[token] for token in block]
        for i in range(self.about["num_hidden_layers"]):
            p = f"layers.{i}"
            normed = [self.normed(x, f"{p}.input_layernorm") for x in rows]
            read = [*context, *self.convolved(normed, normed, f"{p}.attention_conv", 0)]
            seen = [[k for k in range(len(read)) if self._sees(i, s, s + n, k)] for n in range(len(rows))]
            out = [self.attend(p, read, s + n, seen[n]) for n in range(len(rows))]
            rows = [x + y for x, y in zip(rows, self.convolved(out, normed, f"{p}.attention_conv", 1), strict=True)]
            normed = [self.normed(x, f"{p}.post_attention_layernorm") for x in rows]
            out = [self.gated(z, p) for z in self.convolved(normed, normed, f"{p}.mlp_conv", 0)]
            rows = [x + y for x, y in zip(rows, self.convolved(out, normed, f"{p}.mlp_conv", 1), strict=True)]
        return [self.normed(x, "norm") for x in rows]

    def convolved(self, rows: Sequence[Tensor], source: Sequence[Tensor], p: str, side: int) -> Sequence[Tensor]:
        """DFlash2's convolution of a block's rows, by kernels that follow from `source`; the rows if there is none."""
        if f"{p}.base_kernel" not in self.w:
            return rows
        base, out = self.w[f"{p}.base_kernel"][side], []
        for t, x in enumerate(source):
            delta = self.product(x, f"{p}.kernel_projection").view(2, len(base), -1)[side]
            kernel = base + delta.repeat_interleave(base.shape[1] // delta.shape[1], 1)
            out.append(sum((kernel[tap] * rows[t - tap] for tap in range(min(t + 1, len(base)))), torch.zeros(())))
        return out

    def selected(self, unary: Tensor, state: Tensor, before: int, top_k: int) -> Tensor:
        """DFlash2's logits of a place: of its best tokens, -inf elsewhere."""
        out, p = torch.full_like(unary, -torch.inf), "candidate_selector"
        left = self.w[f"{p}.predecessor_codebook"][before] * self.product(state, f"{p}.hidden_projection")
        for token in unary.argsort(descending=True)[:top_k].tolist():
            out[token] = unary[token] + left @ self.w[f"{p}.successor_codebook"][token]
        return out

    def domino(self, state: Tensor, tokens: Sequence[int]) -> Tensor:
        """Domino's bias at a place of the block, after the root and the tokens drafted before it."""
        w_in, w_state = (self.w[f"prefix_gru.weight_{n}_l0"] for n in ("ih", "hh"))
        memory = torch.zeros(w_state.shape[1])
        for token in tokens:
            r, z, new = (w_in @ self.table[token]).view(3, -1)
            by_r, by_z, by_new = (w_state @ memory).view(3, -1)
            z = (z + by_z).sigmoid()
            memory = (1 - z) * (new + (r + by_r).sigmoid() * by_new).tanh() + z * memory
        inner = self.product(torch.cat((state, memory)), "embed_proj.0")
        return self.product(F.silu(inner), "embed_proj.2")

    def markov(self, kind: str, state: Tensor, before: int, memory: Tensor) -> tuple[Tensor, Tensor]:
        """DSpark's bias [words] at a place of the block, and the memory [r] after it."""
        e = self.w["markov_head.markov_w1.weight"][before]
        if kind == "gated":
            e = e * self.product(torch.cat((state, e)), "markov_head.gate_proj").sigmoid()
        if kind == "rnn":
            f, c, e = self.product(torch.cat((memory, e, state)), "markov_head.joint_proj").view(3, -1)
            memory, e = f.sigmoid() * memory + (1 - f.sigmoid()) * c.tanh(), e.tanh()
        return self.w["markov_head.markov_w2.weight"] @ e, memory

    def confidence(self, state: Tensor, before: int) -> float:
        """DSpark's estimate that the token drafted at a place is accepted."""
        e = self.w["markov_head.markov_w1.weight"][before] if self.config["confidence_head_with_markov"] else state[:0]
        return float(self.product(torch.cat((state, e)), "confidence_head.proj").sigmoid())

    def _sees(self, layer: int, root: int, query: int, key: int) -> bool:
        """Return True if position `key` is visible at position `query` of a DFlash block."""
        about, config = self.about, self.config
        sliding = about.get("layer_types", ["full_attention"] * 9)[layer] == "sliding_attention"
        if not sliding or not about["use_sliding_window"]:
            return True
        if about is not config:
            outside = key >= root - about["sliding_window"]
            return outside if key < root else key <= query or config["sliding_window_non_causal"]
        return query - about["sliding_window"] < key <= query


def watching(method: type[Any]) -> type[Any]:
    """Return the block method, which keeps what it drafted from: (tokens so far, logits)."""

    class Watching(method):  # type: ignore[misc]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.seen: list[tuple[list[int], Tensor]] = []

        def logits(self, state: DecodeState) -> Tensor:
            found: Tensor = super().logits(state)
            self.seen.append((list(state.ids), found))
            return found

    return Watching
