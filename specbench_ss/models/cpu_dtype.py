"""The dtype of a model on a CPU, by the instructions of the processor.

Decoding reads every weight for each token, so fewer bytes per weight are faster. With the processor's instructions
bfloat16 products read half of the bytes; without them torch emulates these products, many times slower. Native kernels
also multiply float32 rows with float16 weights, in layers of the Llama family: half of the bytes, on any processor with
AVX2. Times of both on several processors are in docs/log.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM

from specbench_ss.engine.architectures import LLAMA_LIKE
from specbench_ss.engine.layers import cpu
from specbench_ss.engine.layers.linear import has_room
from specbench_ss.engine.numerics import HALF_WEIGHTS
from specbench_ss.models.devices import resolve_dtype
from specbench_ss.models.resolve import is_lab

BFLOAT16 = {"avx512_bf16", "amx_bf16"}  # flags of processors with instructions for bfloat16


def has_bfloat16() -> bool:
    """Return True if the processor has instructions for bfloat16 products, as far as Linux states them."""
    return bool(BFLOAT16 & cpu.processor_flags())


def chosen_dtype(
    requested: str, device: str, model: str, config: Callable[[], Any], quantized: bool = False
) -> tuple[str, str]:
    """Return the dtype of a model and a line on its choice ('' if there was none).

    requested: 'auto' or a dtype's name. config: returns the configuration, called only if there is a choice. The lab
    stays in float32, so that outputs are identical token by token. Raises UserError for an unknown name.
    """
    default = str(resolve_dtype(requested, device)).removeprefix("torch.")
    if requested != "auto":
        return requested, ""
    if device.partition(":")[0] != "cpu" or is_lab(model):
        return default, ""
    dtype, reason = dtype_of_processor(config(), quantized)
    return dtype, f"--dtype auto chose {dtype}: {reason}"


def dtype_of_processor(config: Any, quantized: bool) -> tuple[str, str]:
    """Return the dtype of a model of this configuration on this machine, and the reason for it.

    quantized: linear layers are in fewer bits, of which float16 weights would be another quantization.
    """
    if has_bfloat16():
        return "bfloat16", "the processor has instructions for it"
    if quantized or config.model_type not in LLAMA_LIKE or not cpu.supports(torch.float32, torch.float16):
        return "float32", "no other dtype is faster on this processor"
    with init_empty_weights():
        weights_bytes = 4 * sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if not has_room(weights_bytes):
        return "float32", "the machine has no room for a float16 copy of the weights"
    return HALF_WEIGHTS, "native kernels read float16 weights"
