"""Runs by workers: samples, verdicts and drafts as of one process; what is lost with a worker is run again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specbench_ss import load_model
from specbench_ss.bench import preflight
from specbench_ss.bench import ray as pools
from specbench_ss.bench import ray as sharded
from specbench_ss.bench import runner as local
from specbench_ss.bench.build_config import recording_of
from specbench_ss.bench.ray import ShardResult
from specbench_ss.bench.run_loop import NullCallbacks
from specbench_ss.engine.target import Target
from specbench_ss.errors import RunStopped, UserError
from specbench_ss.options import MethodSpec
from specbench_ss.runs.config import OutputOptions, Recording, RunConfig, StoppingRule, Workers
from specbench_ss.runs.records import Run, SampleRecord
from specbench_ss.runs.run_dir import read_drafts, read_run
from specbench_ss.runs.run_options import RunOptions
from tests.sharded.fake_ray import FakeRay
from tests.tiny import thorough

CONFIG = RunConfig(
    methods=(MethodSpec("ar"), MethodSpec("pld")),
    categories=("writing", "qa"),
    limit=2,
    max_new_tokens=6,
    warmup=0,
    device="cpu",
    dtype="float32",
)
RECORDING = recording_of(RunOptions(telemetry=0.0))
SAME = (
    "index", "position", "seed", "token_ids", "text", "steps", "draft_nodes", "accepted_tokens", "quality", "status",
)  # fmt: skip


@pytest.fixture(scope="module")
def lab() -> Target:
    return load_model("lab", device="cpu", dtype="float32")


@pytest.fixture(autouse=True)
def loaded_once(lab: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of this process take turns with one model."""
    monkeypatch.setattr(local, "_load", lambda plan: lab)


@pytest.fixture(scope="module")
def alone(lab: Target, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run by this process, which others are compared with."""
    where = OutputOptions(tmp_path_factory.mktemp("runs") / "alone", recording=RECORDING)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "_load", lambda plan: lab)
        local.measure(preflight.check(CONFIG, where), where, ["test"])
    return read_run(where.out)


@pytest.fixture
def by(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Run]:
    """Make a run by a fake Ray, or by this process where it is None."""

    def made(
        ray: FakeRay | None,
        name: str,
        resume: bool = False,
        goal: StoppingRule | None = None,
        recording: Recording = RECORDING,
        count: int = 2,
        config: RunConfig = CONFIG,
    ) -> Run:
        where = OutputOptions(tmp_path / name, resume, recording=recording, goal=goal, workers=Workers(count))
        plan = preflight.check(config, where)
        if ray is None:
            local.measure(plan, where, ["test"])
        else:
            monkeypatch.setattr(sharded, "ray_pool", lambda job, wanted: pool_of(ray, job, count))
            sharded.measure(plan, where, ["test"])
        return read_run(where.out)

    return made


@contextlib.contextmanager
def pool_of(ray: FakeRay, job: Any, count: int) -> Iterator[pools.RayPool]:
    monkey_machine = pools.Worker.machine
    pools.Worker.machine = lambda self: "a machine"  # type: ignore[method-assign]
    try:
        pool = pools.RayPool(ray, job, count, 1, 0)
        yield pool
        pool.end()
    finally:
        pools.Worker.machine = monkey_machine  # type: ignore[method-assign]


def reported(row: SampleRecord) -> dict[str, Any]:
    return {name: getattr(row, name) for name in SAME}


def same(one: Run, other: Run) -> None:
    """Return True if two runs have the same samples, verdicts and drafts."""
    assert {row.key: reported(row) for row in one.rows} == {row.key: reported(row) for row in other.rows}
    assert {v.key: v.verdict for v in one.output_match} == {v.key: v.verdict for v in other.output_match}
    assert {d.key: len(d.steps) for d in read_drafts(one.path)} == {
        d.key: len(d.steps) for d in read_drafts(other.path)
    }
    assert one.manifest["status"] == other.manifest["status"] == "complete"


def test_workers_make_the_run_that_one_process_makes(by: Callable[..., Run], alone: Run) -> None:
    ray = FakeRay()
    shared = by(ray, "shared")
    same(alone, shared)
    assert len(shared.rows) == 12 and ray.options == {
        "num_cpus": 1, "num_gpus": 0, "max_restarts": -1, "max_task_retries": 2
    }  # fmt: skip
    workers = shared.manifest["sessions"][-1]["workers"]
    assert [worker["machine"] for worker in workers] == ["a machine"] * 2
    assert sum("2 workers on one machine" in text for text in shared.manifest["warnings"]) == 1


@thorough
def test_the_estimate_is_of_all_workers_together(by: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    def warm_up(self: local.LocalSession) -> None:
        self.token_s = {"ar": 3.0, "pld": 1.0}  # seconds per token

    estimates: list[tuple[float, int]] = []
    monkeypatch.setattr(local.LocalSession, "warm_up", warm_up)
    monkeypatch.setattr(NullCallbacks, "on_estimate", lambda self, *estimate: estimates.append(estimate))
    by(FakeRay(), "run", config=replace(CONFIG, warmup=1))
    assert estimates == [(6 * 6 * (3.0 + 1.0) / 2, 12)]  # six samples of six tokens each, by two workers


@thorough
def test_a_question_stays_with_one_worker(by: Callable[..., Run]) -> None:
    asked: list[str] = []
    shared = by(
        FakeRay(lambda name, *given: asked.extend([given[0].question_id] if name == "make" else []) or False), "run"
    )
    assert len(asked) == len(set(asked)) == 4 == len({row.question_id for row in shared.rows})


@thorough
def test_a_lost_worker_is_replaced_and_its_question_made_again(by: Callable[..., Run], alone: Run) -> None:
    losses = iter([True, False, True])
    ray = FakeRay(lambda name, *given: name == "make" and next(losses, False))
    shared = by(ray, "shared")
    same(alone, shared)
    assert len(shared.manifest["sessions"][-1]["workers"]) == 4
    lost = [text for text in shared.manifest["warnings"] if "a worker was lost" in text]
    assert lost and lost[0] == "a worker was lost at question lab-writing-0000, which is run again"


@thorough
def test_a_question_that_costs_too_many_workers_ends_the_run_which_goes_on_later(
    by: Callable[..., Run], alone: Run, tmp_path: Path
) -> None:
    bad: list[str] = []

    def lost(name: str, *given: Any) -> bool:
        if name == "make" and len(bad) < 1:
            bad.append(given[0].question_id)
        return name == "make" and given[0].question_id == bad[0]

    with pytest.raises(RunStopped, match=f"3 workers were lost at question .*{'--resume'}"):
        by(FakeRay(lost), "run")
    begun = read_run(tmp_path / "run")
    assert begun.manifest["status"] == "failed" and bad[0] not in {row.question_id for row in begun.rows}
    again = by(FakeRay(), "run", resume=True)
    same(alone, again)
    assert {row.key for row in begun.rows} <= {row.key for row in again.rows}


@thorough
def test_resuming_makes_what_is_missing_of_a_question_and_nothing_else(by: Callable[..., Run], tmp_path: Path) -> None:
    whole = by(FakeRay(), "run")
    for name in ("samples.jsonl", "output_match.jsonl"):
        file = tmp_path / "run" / name
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:-3]))
    left = read_run(tmp_path / "run")
    asked: list[Any] = []
    ray = FakeRay(lambda name, *given: asked.extend(given[:1] if name == "make" else []) or False)
    again = by(ray, "run", resume=True)
    same(whole, again)
    kept = {row.key: row.started for row in left.rows}
    assert {row.key: row.started for row in again.rows if row.key in kept} == kept
    assert {shard.question_id for shard in asked} == {r.question_id for r in whole.rows if r.key not in kept} | {
        v.question_id for v in whole.output_match if v.key not in {w.key for w in left.output_match}
    }


def test_a_sample_is_committed_behind_its_side_lines_and_before_its_verdict(by: Callable[..., Run]) -> None:
    """A kill in between leaves none without them, whose readings would be lost for good."""
    calls: list[str] = []

    class RunStore:
        def __getattr__(self, name: str) -> Any:
            return lambda *given: calls.append(name) or ""

    run = by(None, "run")
    parcel = ShardResult([(run.rows[0], [])], [run.output_match[0]], [("drafts.jsonl", {})], ["a warning"])
    assert parcel.commit(RunStore()) == []  # type: ignore[arg-type]
    assert calls == ["append_optional", "append", "append_output_match", "keep_warning"]


@thorough
def test_all_repeats_of_a_question_are_made_by_one_worker(by: Callable[..., Run], tmp_path: Path) -> None:
    """Also where a sample of the first round is missing and later rounds are there: these are compared with it."""
    goal = StoppingRule(0.011, max_repeats=2)
    whole = by(FakeRay(), "run", goal=goal)
    file, bad = tmp_path / "run" / "samples.jsonl", whole.rows[0].key
    kept = [line for line in file.read_text().splitlines(keepends=True) if SampleRecord.read(line.encode()).key != bad]
    file.write_text("".join(kept))
    asked: list[Any] = []
    ray = FakeRay(lambda name, *given: asked.extend(given[:1] if name == "make" else []) or False)
    again = by(ray, "run", resume=True, goal=goal)
    same(whole, again)
    assert [shard.question_id for shard in asked] == [bad[0]]
    assert {sample.repeat for sample in asked[0].samples} == {0, 1}


def test_workers_with_another_model_are_refused(
    by: Callable[..., Run], lab: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = iter(["one", "other"])

    def another(plan: Any) -> Target:
        lab.weights_hash = next(made)
        return lab

    monkeypatch.setattr(lab, "weights_hash", lab.weights_hash)
    monkeypatch.setattr(local, "_load", another)
    with pytest.raises(UserError, match="workers differ in their model"):
        by(FakeRay(), "run")


@pytest.mark.parametrize(
    ("wanted", "machines", "on_gpu", "found"),
    [
        (None, [(8, 0)], False, (1, 8, 0)),
        (4, [(8, 0)], False, (4, 2, 0)),
        (None, [(16, 4)], True, (4, 4, 1)),
        (2, [(3, 4)], True, (2, 1, 1)),
        (2, [(4, 0), (4, 0), (4, 0)], False, (2, 4, 0)),  # 6 of all 12 processors are on no machine
        (None, [(8, 0), (2, 0)], False, (2, 4, 0)),
        (None, [(64, 1), (8, 2)], True, (3, 4, 1)),
    ],
)
def test_the_cluster_is_shared_out(
    wanted: int | None, machines: list[tuple[int, int]], on_gpu: bool, found: tuple[int, int, int]
) -> None:
    assert pools._share(FakeRay(lambda *_: False, *machines), Workers(wanted), on_gpu) == found


@pytest.mark.parametrize(
    ("device", "asked", "gpus", "stated"),
    [("cuda:1", "cuda:1", 2, "use --device cuda"), ("cpu", "auto", 2, "has GPUs, this machine has none")],
)
def test_workers_compute_on_what_the_checks_were_made_for(device: str, asked: str, gpus: int, stated: str) -> None:
    with pytest.raises(UserError, match=stated):
        pools._check_device(FakeRay(lambda *_: False, (4, gpus)), device, asked)
    for fine in (("cpu", "cpu"), ("cuda", "auto"), ("cuda", "cuda")):
        pools._check_device(FakeRay(lambda *_: False, (4, gpus)), *fine)
