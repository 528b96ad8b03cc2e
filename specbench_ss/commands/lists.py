"""`ssbench methods` and `ssbench models`: what there is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specbench_ss.config import REFERENCE

if TYPE_CHECKING:
    from specbench_ss.decoder import Decoder


def methods() -> None:
    """List the methods and their options."""
    from specbench_ss import registry
    from specbench_ss.options import describe_options

    for name, method in registry.load_all(registry.METHODS).items():
        output = _output(method)
        print(f"{name:<10} {method.summary} [{output}]{f' ({method.paper})' if method.paper else ''}")
        for option in describe_options(method.Options):
            print(f"{'':<12}{option.name}=<{option.type}>  {option.help} (default {option.default or 'empty'})")


def _output(method: type[Decoder]) -> str:
    if not method.lossless:
        return "may change the output"
    reference = method.reference_for(method.Options()).label
    return "same output as the model" if reference == REFERENCE else f"same output as {reference}"


def models() -> None:
    """List the models that come with the package or lie ready; any path or hub id works too."""
    from specbench_ss.models import available

    for model in available():
        print(f"{model.name:<10} {model.summary}")
    print("Any folder or hub id of a causal language model with a known architecture works too: --model PATH_OR_ID")
