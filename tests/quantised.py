"""Tiny targets whose linear layers are kept in fewer bits, for tests of what is made of them."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specbench_ss.engine.target import Target
from specbench_ss.engine.weights import Quantization
from specbench_ss.models.quantize import PACKAGES, quantise


def small_model(seed: int = 0) -> Any:
    """A random Llama of rows of 64 and more, as nf4 needs; the same one for the same seed."""
    config = LlamaConfig(
        vocab_size=61, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=0.15, generator=generator)
    return model


def needs(how: str) -> None:
    """Skip the test where the package that does it is not installed."""
    if find_spec(PACKAGES[how]) is None:
        pytest.skip(f"{PACKAGES[how]} is not installed: pip install -e '.[quantize]'")


def quantised_target(how: str) -> Target:
    """A small model kept so, as `load_target` gives one."""
    model = small_model()
    words = quantise(model, how)
    target = Target(model, None, "tiny")
    target.quantization = Quantization(words, partial(quantise, how=how), small_model)
    return target
