"""The papers' models: hub ids and published shapes, built without weights on the meta device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specbench_ss.engine.target import Target


@dataclass(frozen=True, slots=True)
class PaperModel:
    """hub: where the weights are published. kind: model type in transformers. shape: its published config values."""

    hub: str
    kind: str
    shape: dict[str, int] = field(default_factory=dict)


def _llama(
    hub: str, hidden: int, inner: int, layers: int, heads: int, kv: int = 0, kind: str = "llama", **more: int
) -> PaperModel:
    shape = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv or heads,
        "vocab_size": 32000,
    }
    return PaperModel(hub, kind, shape | more)


def _opt(hub: str, hidden: int, layers: int, heads: int) -> PaperModel:
    shape = {
        "hidden_size": hidden,
        "word_embed_proj_dim": hidden,
        "ffn_dim": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": 50272,
    }
    return PaperModel(hub, "opt", shape)


MODELS: dict[str, PaperModel] = {
    "Vicuna-7B": _llama("lmsys/vicuna-7b-v1.3", 4096, 11008, 32, 32),
    "Vicuna-13B": _llama("lmsys/vicuna-13b-v1.3", 5120, 13824, 40, 40),
    "Vicuna-33B": _llama("lmsys/vicuna-33b-v1.3", 6656, 17920, 60, 52),
    "Llama-2-Chat-7B": _llama("meta-llama/Llama-2-7b-chat-hf", 4096, 11008, 32, 32),
    "Llama-2-Chat-13B": _llama("meta-llama/Llama-2-13b-chat-hf", 5120, 13824, 40, 40),
    "Llama-2-7B": _llama("meta-llama/Llama-2-7b-hf", 4096, 11008, 32, 32),
    "Llama-13B": _llama("huggyllama/llama-13b", 5120, 13824, 40, 40),
    "OpenLlama-7B": _llama("openlm-research/open_llama_7b", 4096, 11008, 32, 32),
    "Mistral-7B": _llama("mistralai/Mistral-7B-Instruct-v0.1", 4096, 14336, 32, 32, kv=8, kind="mistral"),
    "Phi-3": _llama("microsoft/Phi-3-mini-4k-instruct", 3072, 8192, 32, 32, kind="phi3", vocab_size=32064),
    "Phi-1.3B": _llama("microsoft/phi-1_5", 2048, 8192, 24, 32, kind="phi", vocab_size=51200),
    "OPT-1.3B": _opt("facebook/opt-1.3b", 2048, 24, 32),
    "OPT-6.7B": _opt("facebook/opt-6.7b", 4096, 32, 32),
    "OPT-125M": _opt("facebook/opt-125m", 768, 12, 12),
    "Llama-68M": _llama("JackFram/llama-68m", 768, 3072, 2, 12),
}


def on_meta(name: str, **changes: int) -> Any:
    """Return the causal LM of a published model on the meta device: shapes and code, no weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model = MODELS[name]
    auto: Any = AutoModelForCausalLM
    extra = {"sliding_window": None} if model.kind in ("mistral", "phi3") else {}
    config = AutoConfig.for_model(model.kind, **model.shape | changes, **extra, pad_token_id=0)
    with torch.device("meta"):
        return auto.from_config(config, attn_implementation="sdpa")


def meta_target(name: str) -> Target:
    """Return the same model as a target, for the real decoding code."""
    from specbench_ss.engine.target import Target

    return Target(on_meta(name), None, name)


def at_hand(name: str) -> bool:
    """Say whether the published weights are in the hub's cache on this machine. Makes no network request."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(MODELS[name].hub, "config.json"), str)
