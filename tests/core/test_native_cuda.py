"""Triton kernels of layers: run on a CPU by the interpreter; when they are used, and what is used instead."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from specbench_ss.bench.timed_sample import n_attempts
from specbench_ss.engine.layers import triton
from specbench_ss.engine.layers.cpu import VARIABLE
from tests.tiny import thorough

CUDA = torch.device("cuda", 0)


@pytest.fixture
def fresh() -> None:
    triton._load.cache_clear()


@thorough
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run interpreted_cuda_layer.py itself")
def test_the_kernels_are_right_by_the_interpreter() -> None:
    file = Path(__file__).with_name("interpreted_cuda_layer.py")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(file)]
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-2000:]


@pytest.mark.usefixtures("fresh")
def test_the_reason_for_torch_s_operators_is_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "CUDA" in triton.problem(torch.device("cpu"))
    monkeypatch.setenv(VARIABLE, "0")
    triton._load.cache_clear()
    assert VARIABLE in triton.problem(CUDA) and triton.kernels(torch.empty(0)) is None


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("capability", "module", "reason"),
    [((7, 5), object(), "capability"), ((9, 0), None, "imported"), ((9, 0), object(), "compile")],
    ids=["old device", "no Triton", "no compiler"],
)
def test_a_device_without_kernels(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], module: object, reason: str
) -> None:
    """Allocating on CUDA fails here, as a compiler that is missing does there."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setitem(sys.modules, "specbench_ss.engine.layers.triton_kernels", module)
    monkeypatch.delattr("specbench_ss.engine.layers.triton_kernels", raising=False)
    assert reason in triton.problem(CUDA)


def test_stages_fit_the_shared_memory_of_small_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in (101_376, 166_912, 232_448):
        monkeypatch.setattr(triton, "_shared_memory", lambda _, limit=limit: limit)
        triton.tile_of.cache_clear()
        for rows in (16, 32, 64):
            for outputs, inputs, gated in ((12288, 4096, False), (11008, 4096, True), (4096, 11008, False)):
                tile = triton.tile_of(CUDA, outputs, inputs, gated, rows)
                taken = 2 * tile.stages * tile.block * (tile.columns * (1 + gated) + rows)
                assert taken <= limit and tile.stages > 2
    triton.tile_of.cache_clear()


def test_a_sample_in_which_a_kernel_is_compiled_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "_variants", set())
    tries = 0
    for _ in n_attempts(SimpleNamespace(graphs=None), stateful=False):  # type: ignore[arg-type]
        tries += 1
        triton._variants.add("a kernel of the first two tries" if tries < 3 else "")
        triton._variants.discard("")
    assert tries == 2
