"""Helpers of the tests of the papers' experiments: text to train on, and a bench over made-up runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specbench_ss.engine.target import Target
from specbench_ss.results.analysis import Results, load_run
from specbench_ss.results.report import Bench, Request
from specbench_ss.runs.config import RunConfig
from specbench_ss.training.loop import PackedText
from tests.methods.batches import plain_text

DEFAULT = Request()


def text(*_: Any) -> PackedText:
    """Six rows of 24 tokens. Answers begin at another place in each row."""
    ids = np.random.default_rng(0).integers(3, 61, (6, 24)).astype(np.int32)
    return plain_text(ids, np.arange(24) >= ids[:, :1] % 7 + 3)


def bench(folder: Path, request: Request = DEFAULT, target: Target | None = None, **more: Any) -> Bench:
    """A bench that measures nothing, and loads nothing unless a target is given."""
    never: Callable[..., Any] = lambda *_: pytest.fail("nothing is to be measured or loaded")  # noqa: E731
    return Bench(request, folder, **{"measure": never, "target": (lambda: target) if target else never, **more})


def measuring(
    make_run: Callable[..., Path], configs: list[RunConfig], results: list[Results], **made: Any
) -> Callable[[RunConfig, str], Results]:
    """`Bench.measure` that makes up a run of whatever is asked for, and keeps both."""

    def measure(config: RunConfig, name: str) -> Results:
        configs.append(config)
        results.append(load_run(make_run(labels=tuple(spec.label for spec in config.methods), **made)))
        return results[-1]

    return measure
