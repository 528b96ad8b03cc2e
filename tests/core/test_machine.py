"""Costs counted from shapes, the machine's limits, and what a run states of both."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from specbench_ss import Decoder, load_method, load_model, load_run
from specbench_ss.bench.runner import cost_shape
from specbench_ss.cli import doctor
from specbench_ss.cli.main import main
from specbench_ss.engine.costs import drafter_shape, model_shape
from specbench_ss.engine.target import Target
from specbench_ss.engine.tree import DraftTree
from specbench_ss.models import limits as machine_limits
from specbench_ss.reports.html.report import page
from specbench_ss.results.analysis import analyse
from specbench_ss.results.cost_model import counted, machine_lines
from specbench_ss.results.summary import OVERALL, summarise
from specbench_ss.runs.records import Run, SampleRecord
from specbench_ss.runs.run_dir import read_run
from tests.tiny import ARCHITECTURES, tiny_model

LIMITS = {"read_bytes_per_s": 1e9, "flops_per_s": {"float32": 1e11}, "launch_s": 1e-6}


def sample(**numbers: Any) -> SampleRecord:
    row = SampleRecord("q", 0, "m", 0, "c", 0, 0, 0, "e", "h", "ok")
    return replace(row, **({"prompt_tokens": 0, "tokens": 0, "verified_nodes": 0, "num_draft_forwards": 0} | numbers))


def lines_of(run: Run) -> list[str]:
    return machine_lines(analyse(run).machine_rows, run.manifest)


@pytest.mark.usefixtures("torch_kernels")
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_counted_flops_are_those_that_torch_counts(kind: str) -> None:
    """Of one pass over 5 nodes; torch counts none for attention on a CPU, and none for products by native kernels."""
    target = Target(tiny_model(kind))
    shape = model_shape(target)
    cache = target.new_cache(32)
    with torch.inference_mode():
        target.prefill(torch.arange(12)[None] % 7, cache)
        tree = DraftTree.chain(torch.tensor([1]), torch.tensor([1, 2, 3, 4]))
        with FlopCounterMode(display=False) as counter:
            target.forward_tree(tree, cache)
    cost = counted([sample(prompt_tokens=12, verified_nodes=4, steps=1)], shape | {"attention_flops": 0})
    assert cost is not None
    assert cost.flops == counter.get_total_flops()


def test_a_pass_reads_each_weight_once_and_tables_not_at_all() -> None:
    tied, untied = Target(tiny_model("opt")), Target(tiny_model("llama"))
    for target in (tied, untied):
        table = target.model.get_input_embeddings().weight
        head = target.unembed
        read = model_shape(target)["weight_bytes"] / 4
        looked_up = sum(m.weight.numel() for m in target.model.modules() if isinstance(m, nn.Embedding))
        expected = target.parameter_count - looked_up + (table.numel() if head is table else 0)
        assert read == expected


def test_windows_bound_what_is_read_of_the_context() -> None:
    shape = {
        "weight_bytes": 0, "matrix_parameters": 0, "kv_bytes": 10, "attention_flops": 1, "windows": [None, 4],
        "drafter": None,
    }  # fmt: skip
    cost = counted([sample(prompt_tokens=90, tokens=20, steps=2)], shape)
    assert cost is not None and cost.bytes == 2 * 10 * (100 + 4) and cost.drafter_bytes is None


def test_a_drafter_is_read_once_a_call_or_once_a_step() -> None:
    shape = {
        "weight_bytes": 100, "matrix_parameters": 25, "kv_bytes": 0, "attention_flops": 0, "windows": [None],
        "drafter": {"weight_bytes": 7, "matrix_parameters": 1},
    }  # fmt: skip
    heads, model = counted([sample(steps=3)], shape), counted([sample(steps=3, num_draft_forwards=12)], shape)
    assert heads is not None and model is not None
    assert (heads.drafter_bytes, model.drafter_bytes) == (21, 84)
    assert (heads.bytes, model.bytes) == (321, 384)
    assert model.flops == 2 * 25 * 3 + 2 * 12


class WithHead(Decoder):
    name, summary = "with-head", "has a layer of its own, and one of the target's"

    def propose(self, state: Any) -> DraftTree:
        return DraftTree.root_only(state.root)


def test_a_drafter_is_what_the_target_is_not() -> None:
    target = Target(tiny_model("llama"))
    decoder = WithHead(target)
    assert drafter_shape(decoder.drafter_weights(), target) == {"weight_bytes": 0, "matrix_parameters": 0}
    decoder.own, decoder.shared = nn.Linear(3, 5), target.family.head  # type: ignore[attr-defined]
    assert drafter_shape(decoder.drafter_weights(), target) == {"weight_bytes": 4 * 20, "matrix_parameters": 15}
    assert drafter_shape(None, target) is None


def test_a_draft_model_is_its_methods_drafter() -> None:
    lab = load_model("lab", device="cpu")
    found = {name: cost_shape(load_method(name, lab)) for name in ("sd", "pld")}
    assert 0 < found["sd"]["drafter"]["weight_bytes"] < found["sd"]["weight_bytes"]
    assert found["pld"]["drafter"] == {"weight_bytes": 0, "matrix_parameters": 0}


def test_limits_are_kept_by_device_and_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSBENCH_CACHE", str(tmp_path))
    monkeypatch.setattr(machine_limits, "ON_CPU", {"read": 1 << 20, "side": 64, "launches": 10})
    monkeypatch.setattr(machine_limits, "LEAST_S", 0.0)
    cpu = torch.device("cpu")
    assert machine_limits.known_limits(cpu) is None
    made = machine_limits.calibrate(cpu, (torch.float32,), busy="the machine is busy")
    assert machine_limits.known_limits(cpu) == made and made.busy == "the machine is busy"
    assert made.read_bytes_per_s > 0 and made.flops_per_s["float32"] > 0 and made.launch_s > 0
    monkeypatch.setattr(torch, "get_num_threads", lambda: 977)
    assert machine_limits.known_limits(cpu) is None, "other threads, other limits"


def test_doctor_states_what_is_known_and_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SSBENCH_CACHE", str(tmp_path))
    assert main(["doctor", "--device", "cpu"]) == 0
    reported = capsys.readouterr().out
    assert "host_cpu_share" in reported and "`ssbench doctor --calibrate`" in reported and "torch" in reported
    monkeypatch.setattr(machine_limits, "ON_CPU", {"read": 1 << 20, "side": 64, "launches": 10})
    monkeypatch.setattr(machine_limits, "LEAST_S", 0.0)
    assert main(["doctor", "--device", "cpu", "--calibrate"]) == 0
    assert "GFLOP/s in float32" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "busy", lambda: "the machine is busy (load 9)")
    assert main(["doctor", "--device", "cpu", "--calibrate"]) == 0
    assert "the machine is busy (load 9)" in capsys.readouterr().out


@pytest.fixture
def made(make_run: Any) -> Path:
    """A run whose manifest has shapes and limits."""
    path: Path = make_run(labels=("ar", "ss"))
    shape = {
        "weight_bytes": 4000, "matrix_parameters": 1000, "kv_bytes": 8, "attention_flops": 16, "windows": [None],
        "drafter": {"weight_bytes": 0, "matrix_parameters": 0},
    }  # fmt: skip
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["machine"] = {"limits": LIMITS, "shapes": {"ar": shape, "ss": shape}}
    (path / "manifest.json").write_text(json.dumps(manifest))
    return path


def test_shares_of_limits_and_predictions_follow_from_counts(made: Path) -> None:
    run = read_run(made)
    plain, streams = analyse(run).machine_rows
    rows = [row for row in run.rows if row.method == "ar"]
    steps, seconds = sum(r.steps or 0 for r in rows), sum(r.decode_s or 0 for r in rows)
    assert plain.bandwidth_share == pytest.approx((plain.bytes_per_step or 0) * steps / seconds / 1e9)
    assert plain.compute_share == pytest.approx((plain.flops_per_step or 0) * steps / seconds / 1e11)
    assert plain.fastest_step_s == pytest.approx((plain.bytes_per_step or 0) / 1e9), "reading is the nearer limit"
    assert plain.predicted_speedup == plain.decode_speedup == 1
    assert streams.predicted_speedup is not None and streams.predicted_speedup > 1
    summary = load_run(made).summary(all=True).set_index(["task", "method"]).loc[("overall", "ss")]
    assert streams.decode_speedup == pytest.approx(summary["mean_acceptance_length"] / summary["relative_step_time"])


def test_the_terminal_states_what_the_parts_leave_and_what_was_reached(made: Path) -> None:
    left, limits = lines_of(read_run(made))
    share = max(row.host_share or 0 for row in analyse(read_run(made)).machine_rows)
    assert f"at most {share:.1%}" in left and limits.startswith("roofline limits: share of memory bandwidth")
    assert "differ" not in left and "add up" not in left
    run = read_run(made)
    longer = replace(run.steps.columns, total_s=1.03 * run.steps.columns.total_s)
    run.steps = replace(run.steps, columns=longer)
    assert "two clocks, differ: ar +2.9%; ss +2.9%" in lines_of(run)[0]
    run.manifest["machine"]["limits"]["busy"] = "the machine is busy"
    assert "the machine is busy" in lines_of(run)[-1]


def test_the_report_shows_what_was_counted_and_read(made: Path) -> None:
    run = read_run(made)
    run.rows[0].nvml_power_w = 300.0
    counted_table, read_table = page(analyse(run))["machine"]
    ar, ss = sorted(counted_table.rows, key=lambda cells: cells[0].text)
    values = dict(zip([column.title for column in counted_table.columns], ss, strict=True))
    row = analyse(run).machine_rows[1]
    assert values["GFLOP per step"].sort == pytest.approx((row.flops_per_step or 0) / 1e9)
    assert values["bandwidth"].text == f"{100 * (row.bandwidth_share or 0):.0f}%"
    titles = [column.title for column in read_table.columns]
    assert "W" in titles and "tensor cores" not in titles, "a column that has no value is left out"
    assert [cell.text for cell in ar][:1] == ["ar"]


def test_the_report_of_a_run_without_shapes_or_readings_has_neither_table(made: Path) -> None:
    run = read_run(made)
    run.manifest["machine"] = {}
    for row in run.rows:
        row.host_cpu_share = row.host_foreign_share = row.noise_reason = None
    assert page(analyse(run))["machine"] == []


def test_costs_are_of_pairs_and_invalid_results_have_no_speedup(made: Path) -> None:
    run = read_run(made)
    lost = next(row for row in run.rows if row.method == "ss")
    lost.status, lost.error = "failed", "RuntimeError: no"
    same = read_run(made)
    same.rows = [row for row in same.rows if row.question_id != lost.question_id or row.method == "ar"]
    (plain, streams), (_, without) = analyse(run).machine_rows, analyse(same).machine_rows
    assert streams == without and (plain.samples, streams.samples) == (len(run.rows) // 2, len(run.rows) // 2 - 1)
    summary = {row.method: row for row in summarise(run) if row.task == OVERALL}
    assert streams.decode_speedup == pytest.approx(summary["ss"].decode_speedup), "of the same prompts on both sides"
    next(row for row in run.rows if row.method == "ss" and row.ok).tokens = 7  # nothing adds up any more
    invalid = analyse(run).machine_rows[1]
    assert invalid.decode_speedup is None and invalid.predicted_speedup is None and invalid.bytes_per_step


class Hidden:
    """No module: nobody finds its weights."""

    layer = nn.Linear(3, 5)


def test_a_drafter_that_nobody_found_does_not_weigh_nothing(made: Path) -> None:
    target = Target(tiny_model("llama"))
    decoder = WithHead(target)
    decoder.hidden = Hidden()  # type: ignore[attr-defined]
    run = read_run(made)
    run.manifest["machine"]["shapes"]["ss"]["drafter"] = drafter_shape(decoder.drafter_weights(), target)
    for row in run.rows:
        row.num_draft_forwards = (row.steps or 0) if row.method == "ss" else 0
    plain, streams = analyse(run).machine_rows
    assert plain.drafter_bytes_per_step == 0 and plain.predicted_speedup == 1
    assert streams.drafter_bytes_per_step is None and streams.predicted_speedup is None


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("no"), RuntimeError("DefaultCPUAllocator: can't allocate memory: no"), MemoryError()],
)
@pytest.mark.parametrize("name", ["read_bandwidth", "best_time"])
def test_too_little_memory_to_calibrate_is_one_line(
    name: str, error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> float:
        raise error

    monkeypatch.setattr(machine_limits, "ON_CPU", {"read": 1 << 20, "side": 64, "launches": 10})
    monkeypatch.setattr(machine_limits, "LEAST_S", 0.0)
    monkeypatch.setattr(machine_limits, "read_bandwidth", lambda *_: 1.0)
    monkeypatch.setattr(machine_limits, "_launch_time", lambda *_: 1.0)
    monkeypatch.setattr(machine_limits, name, full)
    assert main(["doctor", "--device", "cpu", "--calibrate"]) == 2
    assert "not enough free memory on cpu" in capsys.readouterr().err
