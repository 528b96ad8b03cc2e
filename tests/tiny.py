"""Tiny models of the tests; the models are the conformance kit's."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import pytest

from specbench_ss import registry
from specbench_ss.conformance import FEW
from specbench_ss.engine.decoder import Decoder
from specbench_ss.engine.target import Target
from specbench_ss.models.tiny import ARCHITECTURES as ARCHITECTURES
from specbench_ss.models.tiny import WHOLE as WHOLE
from specbench_ss.models.tiny import tiny_model as tiny_model

# one method of each kind of drafter
KINDS = ("ar", "dflash", "eagle2", "lookahead", "medusa", "pld", "recycling", "rest", "sd", "space", "ss", "suffix")
# CI sets it. The quick suite has one case of each kind, and leaves out costly tests of what cheaper ones test too.
THOROUGH = os.environ.get("SSBENCH_THOROUGH", "") not in ("", "0")
thorough = pytest.mark.skipif(not THOROUGH, reason="it runs with SSBENCH_THOROUGH=1")
few = pytest.mark.few  # few(n): the quick suite tries n of the test's cases, CI all of them
METHODS = registry.names(registry.METHODS) if THOROUGH else KINDS
SOME = ARCHITECTURES if THOROUGH else FEW
WITHOUT_WINDOW = tuple(kind for kind in SOME if kind != "mistral-window")  # for what no sliding window can have


def instances(name: str, target: Target) -> dict[str, Callable[[], Decoder]]:
    """Return the test instances of a method, every third of them in the quick suite."""
    return registry.method_class(name).test_instances(target) if THOROUGH else third(name, target)


def third(name: str, target: Target) -> dict[str, Callable[[], Decoder]]:
    """Return every third test instance of a method, the first among them."""
    return dict(list(registry.method_class(name).test_instances(target).items())[::3])


def paths(parents: Sequence[int]) -> list[list[int]]:
    """The path root..node of every node of a tree."""
    found = [[0]]
    for i, p in enumerate(parents[1:], start=1):
        found.append([*found[p], i])
    return found
