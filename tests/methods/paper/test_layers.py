"""Figures 11 and 12 (a): the streams that are trained are those that are measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from specbench_ss import registry
from specbench_ss.cli.main import main
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.reports.paper import training_figures as layers
from specbench_ss.reports.paper.training_figures import EMBEDDINGS, ROTATION, Figure11, Figure12a, Shape, accuracies
from specbench_ss.results.report import Bench, Request
from specbench_ss.runs.config import RunConfig
from specbench_ss.runs.records import Run
from specbench_ss.runs.run_dir import read_run
from specbench_ss.training.loop import Budget, DrafterText
from tests.tiny import tiny_model

SHORT = Budget(steps=2, rows_per_step=2, anchors_per_row=4, warmup=1)


def text(*_: Any) -> DrafterText:
    ids = np.random.default_rng(0).integers(3, 61, (6, 24)).astype(np.int32)
    return DrafterText(ids, lambda row: np.arange(len(row)) >= 5, 2)


def test_accuracy_counts_each_stream_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny_model("llama"))
    monkeypatch.setattr(layers, "LAYERS_BUDGET", SHORT)
    one, two = (Shape(EMBEDDINGS, n).trainee(target, 0) for n in (1, 2))
    ids = {row.tobytes(): row for row in text().rows.astype(np.int64)}

    def guess(states: Any, at: torch.Tensor) -> torch.Tensor:
        """Right for stream 1, wrong for the others."""
        rows = torch.stack([torch.from_numpy(ids[row.numpy().tobytes()]) for row in seen[-1]])
        truth = rows.gather(1, (at + 2).clamp_max(23))
        return F.one_hot(torch.stack((truth, *[torch.zeros_like(truth)] * 3), -1), 61).float()

    seen: list[torch.Tensor] = []
    real = layers.base_states
    monkeypatch.setattr(layers, "base_states", lambda t, ids, *more: (seen.append(ids), real(t, ids, *more))[1])
    monkeypatch.setattr(one, "stream_logits", guess)
    found = accuracies(target, [one, two], text())
    assert found[0] == [1.0, 0.0, 0.0, 0.0]
    assert found[1] != found[0] and all(0 <= share <= 1 for share in found[1])
    assert len(seen) == layers.HELD_OUT_BATCHES  # the base ran once a batch for both


@pytest.mark.parametrize("kind,series", [(Figure11, {EMBEDDINGS}), (Figure12a, {EMBEDDINGS, ROTATION})])
def test_what_is_measured_was_trained(
    kind: Any, series: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_run: Callable[..., Path]
) -> None:
    target = Target(tiny_model("llama"))  # of 4 layers: the shapes with more are left out
    monkeypatch.setattr(layers, "LAYERS_BUDGET", SHORT)
    monkeypatch.setattr(layers, "lab_text", text)
    measured: list[RunConfig] = []

    def measure(config: RunConfig, name: str) -> Run:
        measured.append(config)
        for spec in config.methods[1:]:
            streams = registry.load_method(spec, target).streams
            assert streams.config.n_msa_layers == int(spec.options["n_msa_layers"])
            assert streams.up.abs().max() > 0  # they start at nothing
        return read_run(make_run(labels=tuple(spec.label for spec in config.methods)))

    result = kind().run(Bench(Request(limit=2), tmp_path, measure, lambda: target))
    fit = [v for v in kind.variants if v.layers <= 4]
    assert [row[:2] for row in result.grids[0].rows] == [(v.series, v.layers) for v in fit]
    assert {row[0] for row in result.grids[0].rows} == series
    assert measured[0].limit == 2 and len(measured[0].methods) == 1 + len(fit)
    assert [len(plot.data) for plot in result.plots] == [len(series), 4 * len(series)]


def test_the_users_options_hold_for_every_shape_but_the_weights() -> None:
    request = Request(settings=("ss.n_draft=5", "ss.weights=elsewhere"))
    config, given = Figure11()._config(request)
    specs = [v.spec(given, weights="here") for v in Figure11.variants]
    assert all(s.options["n_draft"] == "5" and s.options["weights"] == "here" for s in specs)
    assert [s.options["n_msa_layers"] for s in specs] == ["1", "2", "4", "6", "8"]
    assert Figure11().configs(Request())["run"].suite == "apps"


def test_it_needs_training_text(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="training text for org/model"):
        Figure11().run(Bench(Request("org/model"), tmp_path, text, text))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["figure-11", "figure-12a"])
def test_the_command_does_not_hold_its_variants_against_the_shipped_streams(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["paper", name, "--dry-run", "--out", str(tmp_path / "out")]) == 0
    assert "n_msa_layers=2" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["figure-4", "figure-6", "figure-8"])
def test_a_place_that_cannot_be_written_is_told_first(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", name, "--out", "/proc/x"]) == 2
    assert capsys.readouterr().err == "ssbench: cannot write to /proc/x: no such file or directory\n"
