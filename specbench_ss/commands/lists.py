"""`ssbench methods` and `ssbench models`: what there is."""

from __future__ import annotations


def methods() -> None:
    """List the methods and their options."""
    from specbench_ss import registry
    from specbench_ss.options import describe_options

    for name, method in registry.load_all(registry.METHODS).items():
        output = "same output as the model" if method.lossless else "may change the output"
        print(f"{name:<10} {method.summary} [{output}]{f' ({method.paper})' if method.paper else ''}")
        for option in describe_options(method.Options):
            print(f"{'':<12}{option.name}=<{option.type}>  {option.help} (default {option.default or 'empty'})")


def models() -> None:
    """List the models that come with the package or lie ready; any path or hub id works too."""
    from specbench_ss.models import available

    for model in available():
        print(f"{model.name:<10} {model.summary}")
    print("Any folder or hub id of a causal language model with a known architecture works too: --model PATH_OR_ID")
