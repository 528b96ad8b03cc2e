"""Folders as the package `speculators` writes them and vLLM serves them: which method reads which."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specbench_ss import registry
from specbench_ss.errors import UserError

TYPE = "speculators_model_type"
LAYER = "transformer_layer_config"
READ_BY_A_METHOD = ("eagle3", "peagle", "dflash")  # types, named as the methods that read them


def check_type(config: Mapping[str, Any], wanted: str) -> bool:
    """Whether config.json is of this format. Raises UserError where it is, and of another type than `wanted`."""
    kind = config.get(TYPE)
    if kind is None or kind == wanted:
        return kind is not None
    readers = [name for name in registry.names(registry.METHODS) if name in READ_BY_A_METHOD]
    advice = f"use the method {kind}" if kind in readers else f"types that can be read are {', '.join(readers)}"
    raise UserError(f"config.json describes a speculator of the type {kind!r}, not {wanted!r}: {advice}")
