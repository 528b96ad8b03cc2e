"""A GPU that the driver lists and torch does not see: reported in one line, once, and kept with a run."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from specbench_ss.bench import runner
from specbench_ss.models import devices
from specbench_ss.models.devices import resolve_device
from tests.core.nvml_replay import replay
from tests.core.test_runner import Bench

REPORTED = "auto uses the CPU: the driver lists a GPU (NVIDIA H100 80GB HBM3), but torch 2.11.0 has none ({})"
TOO_OLD = REPORTED.format("it is built for CUDA 13.0, the driver is 570.86.15")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A driver that lists one GPU, and torch for a newer one."""
    replay(monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    _forget()
    yield
    _forget()


def _forget() -> None:
    devices.unseen_gpu.cache_clear()
    devices.warn_of_unseen_gpu.cache_clear()


def warned(device: str = "auto") -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert resolve_device(device) == "cpu"
    return [str(warning.message) for warning in caught]


def test_auto_states_once_that_it_takes_the_processor() -> None:
    assert warned() == [TOO_OLD]


def test_nothing_is_stated_where_the_processor_is_asked_for_or_the_gpu_is_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not warned("cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not warned()


@pytest.mark.parametrize(("device", "kept"), [("auto", [TOO_OLD]), ("cpu", [])])
def test_a_run_keeps_it(device: str, kept: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(runner.LocalSession, "busy", lambda _: "")
    bench = Bench(tmp_path, device=device)
    assert [text for text in bench.run().manifest.get("warnings", []) if "the driver" in text] == kept
