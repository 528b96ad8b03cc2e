"""Quantization of linear layers: `--quantize`.

int8, int4: torchao's weight-only formats. nf4: bitsandbytes' 4-bit NormalFloat with double quantization (Dettmers et
al. 2023). Activations, drafters, streams and adapters keep the number format of `--dtype`.
"""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, Literal, get_args

from torch import nn

from specbench_ss.engine.numerics import HALF_WEIGHTS
from specbench_ss.engine.weights import holds_numbers
from specbench_ss.errors import UserError, first_line
from specbench_ss.models.devices import check_one_device

Quantize = Literal["none", "int8", "int4", "nf4"]
QUANTIZE: tuple[str, ...] = get_args(Quantize)
PACKAGES = {"int8": "torchao", "int4": "torchao", "nf4": "bitsandbytes"}
GROUP = 128  # weights of a row that share a scale, in int4
BLOCK = 64  # weights that share a scale, in nf4: bitsandbytes 0.50 mixes them up on CPUs for rows of partial blocks
PACKED_ROWS = 32  # row multiple of its CPU kernel with bfloat16


def check_quantize(how: str, device: str, dtype: str = "auto") -> None:
    """Raise UserError if this quantization does not support the device or dtype, or lacks a package."""
    if how not in QUANTIZE:
        raise UserError(f"unknown --quantize {how!r}; known: {', '.join(QUANTIZE)}")
    if how == "none":
        return
    check_one_device(device, f"--quantize {how}")
    if dtype == HALF_WEIGHTS:
        raise UserError(f"--dtype {HALF_WEIGHTS} and --quantize {how} are mutually exclusive")
    if how == "int4" and not device.startswith("cuda"):
        raise UserError(f"--quantize int4 needs a CUDA device, not {device!r}; use int8 or nf4")
    if find_spec(PACKAGES[how]) is None:
        raise UserError(
            f"--quantize {how} needs {PACKAGES[how]}: pip install {PACKAGES[how]}, "
            "or -e '.[quantize]' in the folder of this package"
        )
    if how == "int4" and find_spec("mslk") is None:
        raise UserError("--quantize int4 needs the package mslk (torchao's CUDA kernels)")


def quantise(model: Any, how: str) -> str:
    """Quantize the weights of a model's linear layers in place. Return a description for the record, '' for none.

    Raises UserError if the package fails.
    """
    if how == "none":
        return ""
    head = model.get_output_embeddings()
    linear = {n: module for n, module in model.named_modules() if _can_quantize(module, how) and module is not head}
    count = len(linear)
    if not linear:
        raise UserError(f"--quantize {how}: the model has no linear layer that supports it")
    try:
        _nf4(model, linear) if how == "nf4" else _torchao(model, set(linear), how)
    except (ImportError, RuntimeError, NotImplementedError, ValueError, AssertionError, TypeError) as error:
        raise UserError(f"--quantize {how} does not work with this model: {first_line(error)}") from error
    return f"{how}: weights of {count} linear layers, by {PACKAGES[how]} {version(PACKAGES[how])}"


def _can_quantize(module: Any, how: str) -> bool:
    supported = type(module) is nn.Linear and holds_numbers(module.weight)
    return supported and (how != "nf4" or module.in_features % BLOCK == 0)


def _torchao(model: Any, names: set[str], how: str) -> None:
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    config = Int8WeightOnlyConfig() if how == "int8" else Int4WeightOnlyConfig(group_size=GROUP)
    quantize_(model, config, filter_fn=lambda module, name: name in names)


def _nf4(model: Any, linear: dict[str, nn.Linear]) -> None:
    """Quantize by bitsandbytes, which acts on the transfer to a device. linear: emptied, to free replaced modules."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for name in list(linear):
        module = linear.pop(name)
        weight = module.weight.data
        quantized = Linear4bit(
            module.in_features, module.out_features, False, weight.dtype, compress_statistics=True, quant_type="nf4",
            device="meta",
        )  # fmt: skip
        quantized.bias = module.bias
        if module.out_features % PACKED_ROWS:
            quantized.support_avx512bf16_for_cpu = False  # that kernel fails on other shapes in the first pass
        quantized.weight = Params4bit(weight.cpu(), requires_grad=False, compress_statistics=True, quant_type="nf4")
        owner, _, child = name.rpartition(".")
        setattr(model.get_submodule(owner), child, quantized.to(weight.device))
