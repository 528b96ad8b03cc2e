"""Engine of a run: the resolved `auto` counts, for resuming, presets and several requests at a time."""

from __future__ import annotations

import copy
import gc
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from specbench_ss import load_model, load_run, run
from specbench_ss.bench import runner
from specbench_ss.bench import runner as measure
from specbench_ss.bench.preflight import changed, conditions
from specbench_ss.cli import tune as tune_work
from specbench_ss.cli.main import main
from specbench_ss.engine.batching import check_together, graphs_disabled
from specbench_ss.engine.cuda_graphs import CudaGraphRunner, run_eagerly
from specbench_ss.engine.generate import StopParams
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.fine_tuned import fine_tuned
from specbench_ss.models.tiny import tiny_target
from specbench_ss.options import REFERENCE, MethodSpec
from specbench_ss.registry import load_method
from specbench_ss.runs.config import OutputOptions, RunConfig
from specbench_ss.runs.manifest import engine_of
from specbench_ss.runs.preset import read_preset
from specbench_ss.runs.run_dir import RunDir
from specbench_ss.suite import SuiteData
from specbench_ss.tuning.search import Cost, Measurements
from specbench_ss.tuning.session import DecoderBench, TuneResult
from tests import fabricated
from tests.tiny import few, thorough


@pytest.fixture
def lab() -> Target:
    return load_model("lab", device="cpu", dtype="float32")


@pytest.fixture
def replayed(lab: Target) -> Target:
    """The same with passes over buffers, which are called in place of being replayed."""
    lab.graphs = CudaGraphRunner(run_eagerly)
    return lab


def short_run(out: Path, model: Any = "lab", **options: Any) -> dict[str, Any]:
    """The manifest of a short run."""
    by_name = {"device": "cpu", "dtype": "float32"} if model == "lab" else {}
    return run(
        "pld", model=model, limit=1, tasks="qa,math", max_new_tokens=4, warmup=0, telemetry=0, record_drafts=0,
        out=out, **by_name, **options,
    ).manifest  # fmt: skip


# -- going on with a run ---------------------------------------------------------------------------------------------


def manifest(engine: str, asked: str | None = None) -> dict[str, Any]:
    """A manifest of a run by this engine. asked: as its configuration has it."""
    made = copy.deepcopy(fabricated.manifest(("ar",), SuiteData("specbench", "generated", ())))
    made["config"] = {**RunConfig(methods=()).as_dict(), **made["config"]}
    made["config"] |= {} if asked is None else {"engine": asked}
    made["model"]["engine"] = engine
    return made


@pytest.mark.parametrize(
    ("begun", "here", "reported"),
    [
        (manifest("eager", "eager"), manifest("graph"), "use --engine eager"),
        (manifest("graph"), manifest("eager"), "has engine graph, this session eager"),
        (manifest("eager"), manifest("eager", "eager"), ""),
        (manifest("graph", "graph"), manifest("graph"), ""),
    ],
)
def test_a_run_goes_on_by_the_engine_that_it_was_begun_with(
    begun: dict[str, Any], here: dict[str, Any], reported: str, tmp_path: Path
) -> None:
    RunDir.open(OutputOptions(tmp_path), begun).close()
    try:
        RunDir.open(OutputOptions(tmp_path, resume=True), here).close()
    except UserError as error:
        assert reported and reported in str(error)
    else:
        assert not reported


@thorough
def test_on_a_cpu_it_makes_no_difference_how_the_engine_was_asked_for(tmp_path: Path, lab: Target) -> None:
    begun = short_run(tmp_path, engine="eager")
    assert engine_of(begun) == "eager"
    for asked in ("auto", "eager"):
        assert len(short_run(tmp_path, engine=asked, resume=True)["sessions"]) > 1
    lab_is_given = short_run(tmp_path / "loaded", lab)
    assert engine_of(lab_is_given) == "eager"


@thorough
def test_a_model_by_name_goes_on_with_what_a_loaded_one_began(
    tmp_path: Path, replayed: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_run(tmp_path, replayed)
    with pytest.raises(UserError, match="has engine graph, this session eager"):
        short_run(tmp_path, resume=True)
    monkeypatch.setattr(measure, "load_target", lambda *_, **__: replayed)
    assert engine_of(short_run(tmp_path, resume=True)) == "graph"


# -- presets ---------------------------------------------------------------------------------------------------------


def test_a_preset_is_tuned_and_noted_with_the_engine_of_runs(
    tmp_path: Path, replayed: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, ss, book, out = [], MethodSpec("ss"), Measurements(), tmp_path / "p.yaml"
    block = book.open_block(0)
    for label in ("ar", "ss"):
        book.add(label, block, Cost(1.0, 10))

    def loaded(model: str, engine: str = "eager", **_: Any) -> Target:
        asked.append(engine)
        return replayed

    monkeypatch.setattr(tune_work, "load_target", loaded)
    monkeypatch.setattr(tune_work, "tune", lambda *_: TuneResult(ss, ss, ss, book, book))
    for engine in ((), ("--engine", "eager")):
        assert main(["tune", "ss", "--tasks", "qa", "--out", str(out), "--device", "cpu", *engine]) == 0
    assert asked == ["auto", "eager"]
    made_for = read_preset(out).made_for
    assert made_for["engine"] == "graph"
    replayed.graphs = None
    assert changed(made_for, conditions(replayed)) == "engine graph, here eager"


def test_tuning_measures_no_answer_during_which_a_pass_was_recorded(
    replayed: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, reference, during = MethodSpec("pld"), load_method(MethodSpec(REFERENCE), replayed), list[int]()
    bench = DecoderBench(spec, load_method(spec, replayed), reference, [[5, 6, 7, 5, 6]], StopParams(8))
    answer = bench._answer

    def watched(*asked: Any) -> Cost:
        assert replayed.graphs is not None
        before, cost = replayed.graphs.n_captures, answer(*asked)
        during.append(replayed.graphs.n_captures - before)
        return cost

    monkeypatch.setattr(bench, "_answer", watched)
    bench.measure(spec, 0)
    assert max(during) > 0 and during[-1] == 0
    bench.measure(spec, 0)  # the first prompt took the cache's memory; now its pass is recorded too
    tried = len(during)
    bench.measure(spec, 0)
    assert during[tried - 1 :] == [0, 0]


# -- several requests at a time --------------------------------------------------------------------------------------


@thorough
def test_a_loaded_model_makes_the_whole_of_a_run_with_several_requests_by_eager_steps(
    replayed: Target, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    passes, computed = replayed.graphs, replayed.kernel_summary
    found = short_run(tmp_path, replayed, batch_size=2)
    assert engine_of(found) == "eager" and found["config"]["engine"] == "auto"
    assert found["model"]["computed"].startswith(computed) and "eagerly in this run" in found["model"]["computed"]
    warned = [*found.get("warnings", ()), *(str(warning.message) for warning in recwarn)]
    assert not [text for text in warned if "engine" in text or "eagerly" in text]
    assert passes is not None and passes.n_captures == 0, "one request at a time is eager too"
    assert replayed.graphs is passes and replayed.kernel_summary == computed
    assert engine_of(short_run(tmp_path / "alone", replayed)) == "graph"


def test_a_model_is_as_before_where_such_a_run_fails(replayed: Target, tmp_path: Path) -> None:
    passes = replayed.graphs
    with pytest.raises(UserError, match="order of requests"):
        run("suffix[past=on]", model=replayed, limit=1, tasks="qa,math", batch_size=2, out=tmp_path / "run")
    assert replayed.graphs is passes


def test_models_in_its_place_follow_it_into_such_a_run_and_out_of_it(tmp_path: Path) -> None:
    target = tiny_target("llama", words=61)
    before = fine_tuned(target)
    target.graphs = CudaGraphRunner(run_eagerly)
    during, replayed_before = None, fine_tuned(target)
    assert (before.engine, replayed_before.engine) == ("eager", "graph")
    passes, computed = replayed_before.graphs, replayed_before.kernel_summary
    with graphs_disabled(target):
        during = fine_tuned(target)
        assert {model.engine for model in (target, before, replayed_before, during)} == {"eager"}
    assert (target.engine, before.engine, during.engine) == ("graph", "eager", "graph")
    assert replayed_before.graphs is passes and replayed_before.kernel_summary == computed
    del before, replayed_before, during
    gc.collect()
    assert not target.derived, "nobody uses them any more"


@few(1)
@pytest.mark.parametrize("name", ["ss-shared", "medusa2", "space"])
def test_a_method_with_a_model_of_its_own_that_is_in_use_is_loaded_again_for_such_a_run(
    name: str, replayed: Target
) -> None:
    """It has the model that is in use, whose steps are replayed before and after."""
    in_use = load_method(MethodSpec(name, {}), replayed)
    assert in_use.target is not replayed and in_use.target.engine == "graph"
    with graphs_disabled(replayed):
        again = load_method(MethodSpec(name, {}), replayed)
        assert again.target is in_use.target
        check_together(again)
    assert in_use.target.engine == "graph"


# -- memory ----------------------------------------------------------------------------------------------------------


@thorough
@pytest.mark.parametrize("engine", ["eager", "graph"])
def test_the_peak_of_memory_is_not_reported_where_steps_are_replayed(
    engine: str, lab: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Intermediate tensors of a replay lie in memory that counts as free."""
    monkeypatch.setattr(runner, "peak_memory", lambda *devices: nullcontext(lambda: 7))
    lab.graphs = CudaGraphRunner(run_eagerly) if engine == "graph" else None
    short_run(tmp_path / "run", lab)
    peaks = set(load_run(tmp_path / "run").samples["peak_memory_bytes"].dropna())
    assert peaks == ({7} if engine == "eager" else set())
