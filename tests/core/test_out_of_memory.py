"""Out of memory: one helpful line, memory is freed, and the run goes on."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from specbench_ss import load_model, registry, run
from specbench_ss.bench.timed_sample import OutOfMemory, Request, RequestRunner, oom_message, ran_out
from specbench_ss.engine.batching import BatchEngine
from specbench_ss.engine.decoder import Decoder, DecodeState
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.tree import DraftTree
from specbench_ss.methods.medusa.decode import Medusa
from specbench_ss.models.tiny import tiny_target
from specbench_ss.runs.run_dir import read_run
from tests.tiny import thorough

TORCHS = (
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.00 GiB is free."
    "\nIf reserved but unallocated memory is large try setting PYTORCH_ALLOC_CONF=expandable_segments:True"
)
PROMPT = [5, 9, 5, 9, 7, 8]


class Greedy:
    """Stands for `propose` of a decoder: it works for some steps, then there is no memory left."""

    def __init__(self, decoder: Decoder, steps: int, error: Exception) -> None:
        self.own, self.left, self.error = decoder.propose, steps, error
        self.kept: list[weakref.ref[Any]] = []

    def __call__(self, state: DecodeState) -> DraftTree:
        large = torch.zeros(1000)  # what a pass holds in its variables
        self.left -= 1
        if self.left < 0:
            self.kept.append(weakref.ref(large))
            raise self.error
        return self.own(state)


def asked(decoder: Decoder) -> Request:
    return Request("m", decoder, PROMPT, StopParams(12), SamplingParams())


@pytest.mark.parametrize("name", ["sd", "eagle", "ar"])
def test_a_method_without_memory_holds_nothing_afterwards_and_answers_again(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    target = tiny_target("llama", words=61)
    decoder = next(iter(registry.method_class(name).test_instances(target).values()))()
    expected = generate(decoder, PROMPT, StopParams(12), SamplingParams()).tokens
    greedy = Greedy(decoder, 2, torch.OutOfMemoryError(TORCHS))
    answers = RequestRunner(generate, target, None, tmp_path)
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(kept_here()))

    def kept_here() -> bool:
        """Return True if anything of the request is left when torch frees its blocks."""
        own = [getattr(one, "cache", None) for one in (decoder, getattr(decoder, "draft", None))]
        kept = any(keys is not None for cache in own if cache is not None for keys in cache.keys)
        return kept or target._cache is not None or greedy.kept[0]() is not None

    with monkeypatch.context() as patch:
        patch.setattr(decoder, "propose", greedy)
        with pytest.raises(
            OutOfMemory, match=r"^out of memory on cpu \(2.50 GiB more were wanted\): fewer drafted"
        ) as e:
            answers.answer(asked(decoder))
    assert "\n" not in str(e.value)
    assert emptied == [False]
    assert answers.answer(asked(decoder)).tokens == expected


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"),
        RuntimeError("CUDA driver error: out of memory"),
        torch.AcceleratorError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    ],
)
def test_whatever_reports_that_memory_ran_out_is_reported_alike(error: Exception) -> None:
    decoder = registry.method_class("ar").test_instances(tiny_target("llama", words=61))["default"]()
    assert oom_message(error, decoder).startswith("out of memory on cpu: fewer drafted nodes")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: too many resources requested for launch"),
        RuntimeError("out of resource: shared memory, Required: 147456, Hardware limit: 101376"),
        ValueError("CUDA error: out of memory"),
    ],
    ids=str,
)
def test_other_errors_of_a_device_are_not_taken_for_it(error: Exception) -> None:
    assert not ran_out(error)


@thorough
def test_a_sample_without_memory_is_a_failed_row_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, calls = Medusa.propose, [0]

    def propose(self: Medusa, state: DecodeState) -> DraftTree:
        calls[0] += 1
        if calls[0] == 3:
            raise torch.OutOfMemoryError(TORCHS)
        return own(self, state)

    monkeypatch.setattr(Medusa, "propose", propose)
    target = load_model("lab", dtype="float32")
    run(
        "medusa", model=target, warmup=0, limit=2, tasks="qa", max_new_tokens=8, telemetry=0, record_drafts="0",
        out=tmp_path / "run",
    )  # fmt: skip
    done = read_run(tmp_path / "run")
    bad = [row for row in done.rows if not row.ok]
    assert done.manifest["status"] == "complete" and len(done.rows) == 4
    assert [(row.method, row.status, row.steps, row.n_eager_fallbacks) for row in bad] == [
        ("medusa", "failed", None, None)
    ]
    assert (bad[0].error or "").startswith("out of memory on cpu (2.50 GiB more were wanted): fewer drafted nodes")
    assert "\n" not in (bad[0].error or "") and "CUDA out of memory" not in (bad[0].error or "")
    assert [row.reason for row in done.output_match if row.verdict == "not compared"] == ["the sample failed"]


@thorough
def test_several_requests_without_memory_are_failed_rows_of_their_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, left = Medusa.propose, {"steps": 10**9}

    def propose(self: Medusa, state: DecodeState) -> DraftTree:
        left["steps"] -= 1
        if left["steps"] == 0:
            raise torch.OutOfMemoryError(TORCHS)
        return own(self, state)

    def measured(*rest: Any, **named: Any) -> Any:
        left["steps"] = 6  # behind the few unmeasured tokens
        return seen(*rest, **named)

    seen = BatchEngine.answer
    monkeypatch.setattr(Medusa, "propose", propose)
    monkeypatch.setattr(BatchEngine, "answer", measured)
    run(
        "medusa", model=load_model("lab", dtype="float32"), warmup=0, limit=3, tasks="qa", max_new_tokens=12,
        telemetry=0, record_drafts="0", batch_size="2", out=tmp_path / "run",
    )  # fmt: skip
    done = read_run(tmp_path / "run")
    bad = [row for row in done.requests if not row.ok]
    assert [row.method for row in bad] == ["medusa"]
    assert (bad[0].error or "").startswith("out of memory on cpu (2.50 GiB")
    assert len(done.requests) == 6 and len([row for row in done.requests if row.ok]) == 5
