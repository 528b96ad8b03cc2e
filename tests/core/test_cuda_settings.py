"""Settings of torch's CUDA backend: made when a model is loaded there, recorded, and compared."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specbench_ss.engine import target as targets
from specbench_ss.engine.timing import cuda_settings, settle_cuda
from specbench_ss.models.tiny import tiny_target
from specbench_ss.results.compare import differences
from specbench_ss.runs.config import RunConfig
from specbench_ss.runs.manifest import manifest_for
from specbench_ss.runs.run_dir import read_run
from specbench_ss.suite import SuiteData
from tests.conftest import MakeRun

MATMUL = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def otherwise() -> Iterator[None]:
    """Have every setting as no run should have it, as an image's environment may; and as it was, afterwards."""
    before = (
        torch.backends.cuda.cudnn_sdp_enabled(), torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32,
        MATMUL.allow_bf16_reduced_precision_reduction, MATMUL.allow_fp16_reduced_precision_reduction,
    )  # fmt: skip
    set_all(True, "high", True, True, True)
    yield
    set_all(*before)


def set_all(attention: bool, products: str, convolutions: bool, bfloat16: bool, float16: bool) -> None:
    torch.backends.cuda.enable_cudnn_sdp(attention)
    torch.set_float32_matmul_precision(products)
    torch.backends.cudnn.allow_tf32 = convolutions
    MATMUL.allow_bf16_reduced_precision_reduction = bfloat16
    MATMUL.allow_fp16_reduced_precision_reduction = float16


def test_all_settings_are_made() -> None:
    assert set(cuda_settings().values()) == {"on"}
    settle_cuda()
    assert set(cuda_settings().values()) == {"off"} and len(cuda_settings()) == 5
    assert not MATMUL.allow_tf32


def test_a_setting_that_torch_cannot_report_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def mixed() -> bool:
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", mixed)
    assert len(cuda_settings()) == 4


class OnCuda(torch.nn.Module):
    """A model that states its weights lie on CUDA, and goes no further."""

    def __init__(self) -> None:
        super().__init__()
        self.config = tiny_target("llama").config

    def get_input_embeddings(self) -> Any:
        return SimpleNamespace(weight=SimpleNamespace(device=torch.device("cuda", 0)))


def test_settings_are_made_where_a_model_lies_on_cuda_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(targets, "settle_cuda", lambda: made.append("settled"))
    tiny_target("llama")
    assert not made
    with pytest.raises(Exception):  # noqa: B017, PT011 - there is no such device here
        targets.Target(OnCuda())
    assert made == ["settled"]


def test_a_run_on_cuda_records_its_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    target, data = tiny_target("llama"), SuiteData("specbench", "generated", ())
    assert "cuda_settings" not in manifest_for(RunConfig(methods=()), target, data, (), ())["model"]
    monkeypatch.setattr(target, "device", torch.device("cuda", 0))
    model = manifest_for(RunConfig(methods=()), target, data, (), ())["model"]
    assert model["cuda_settings"] == cuda_settings()


def test_runs_with_other_settings_differ_by_their_names(make_run: MakeRun) -> None:
    a = read_run(make_run())
    b = copy.deepcopy(a)
    a.manifest["model"]["cuda_settings"] = {"TF32 products": "off", "cuDNN attention": "off"}
    b.manifest["model"]["cuda_settings"] = {"TF32 products": "on", "cuDNN attention": "off"}
    found = [(one.what, one.a, one.b) for one in differences(a, b)]
    assert found == [("CUDA setting, TF32 products", "off", "on")]
