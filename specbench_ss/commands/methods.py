"""`ssbench methods`: list the decoding methods and their options."""

from __future__ import annotations

from typing import Any

from specbench_ss import registry
from specbench_ss.commands.shared import Plugin
from specbench_ss.decoding.decoder import Decoder
from specbench_ss.method_spec import REFERENCE
from specbench_ss.options import describe_options


def command(plugin: Plugin = None) -> None:
    """List the decoding methods and their options."""
    for name, method in registry.load_all(registry.METHODS).items():
        output = promise(method, method.Options())
        print(f"{name:<10} {method.summary} [{output}]{f' ({method.paper})' if method.paper else ''}")
        for option in describe_options(method.Options):
            print(f"{'':<12}{option.name}=<{option.type}>  {option.help} (default {option.default or 'empty'})")


def promise(method: type[Decoder], options: Any) -> str:
    """Say what a method promises of its output."""
    if not method.lossless:
        return "may change the output"
    reference = method.reference_for(options).label
    return "same output as the model" if reference == REFERENCE else f"same output as {reference}"
