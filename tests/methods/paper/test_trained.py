"""Experiments that train: every variant is trained as it states, and measured with its own weights."""

from __future__ import annotations

import json
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
from specbench_ss.reports.paper import ablations
from specbench_ss.reports.paper import training_figures as figures
from specbench_ss.reports.paper.ablations import CENTRE, MAPS, MEDUSA, NODES, SMALL, VARIANTS, Ablations, Variant
from specbench_ss.reports.paper.experiment import spec_for, table
from specbench_ss.reports.paper.training import new_trainees
from specbench_ss.reports.paper.training_figures import (
    EMBEDDINGS,
    ROTATION,
    Figure4,
    Figure11,
    Figure12a,
    PeekingTrainee,
    Shape,
    accuracies,
    least_sure,
    validation_results,
)
from specbench_ss.results.analysis import Results, load_run
from specbench_ss.results.report import Request, Result
from specbench_ss.runs.config import RunConfig
from specbench_ss.training.batch import base_states
from specbench_ss.training.loop import Budget, PackedText
from specbench_ss.training.session import jobs_of
from specbench_ss.training.trainer import TrainConfig
from tests.fabricated import fabricate
from tests.methods.batches import plain_text
from tests.methods.decoders import randomise
from tests.methods.paper.shared import bench, text
from tests.tiny import WITHOUT_WINDOW, few, thorough, tiny_model

SHORT = Budget(steps=2, rows_per_step=2, anchors_per_row=4, warmup=1)


@pytest.mark.parametrize("name", ["figure-4", "figure-6", "figure-11", "figure-16", "appendix-j", "ablations"])
def test_it_needs_training_text(name: str, tmp_path: Path) -> None:
    experiment = registry.load(registry.EXPERIMENTS, name)()
    with pytest.raises(UserError, match=f"{name}: no row can run: .* needs training text for org/model"):
        experiment.run(bench(tmp_path, Request("org/model")))


# -- ablations --------------------------------------------------------------------------------------------------------

FEW = (
    Variant(CENTRE),
    Variant("root known", options="root_rank=4"),
    Variant(SMALL, options="adapter_rank=8"),
    Variant(MEDUSA, "medusa"),
    Variant(f"{CENTRE}, twice the steps", longer=2),
)


def test_every_variant_is_one_that_can_be_trained_and_each_is_another(tmp_path: Path) -> None:
    for longer in {v.longer for v in VARIANTS}:
        asked = [v.drafter for v in VARIANTS if v.longer == longer]
        jobs = jobs_of(",".join(asked), TrainConfig(tmp_path, ("text",)))
        assert len({job.label for job in jobs}) == len(asked)
        assert {job.lr for job in jobs} == {ablations.LR}
    assert len({v.name for v in VARIANTS}) == len(VARIANTS)
    centre = jobs_of(VARIANTS[0].drafter, TrainConfig(tmp_path, ("text",)))[0].options
    assert (VARIANTS[0].name, centre.n_msa_layers, centre.adapter_rank) == (CENTRE, 4, 32)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, RunConfig, Path]:
    folder = tmp_path_factory.mktemp("ablations")
    measured: list[RunConfig] = []

    def measure(config: RunConfig, name: str) -> Results:
        measured.append(config)
        return load_run(fabricate(folder / "made", labels=tuple(spec.label for spec in config.methods)))

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"SEEDS": 2, "STEPS": 2, "ROWS": 2, "LENGTH": 128, "ANCHORS": 4, "TALKS": 60}.items():
            patch.setattr(ablations, name, value)
        patch.setattr(Ablations, "variants", FEW)
        return Ablations().run(bench(folder, Request(limit=1), measure=measure)), measured[0], folder


@thorough
def test_every_variant_decodes_with_the_weights_that_it_learnt(made: tuple[Result, RunConfig, Path]) -> None:
    result, config, folder = made
    specs = config.methods[1:]
    assert len({spec.options["weights"] for spec in specs}) == len(specs) == 2 * len(FEW)
    assert all(str(NODES) in (spec.options.get("n_draft"), spec.options.get("nodes")) for spec in specs)
    for spec, (variant, seed) in zip(specs, [(v, seed) for v in FEW for seed in (0, 1)], strict=True):
        about = json.loads((Path(spec.options["weights"]) / "config.json").read_text())
        assert about["trained"]["steps"] == 2 * variant.longer and about["trained"]["seed"] == seed
        assert about.get("streams", {}).get("root_rank", 0) == (4 if variant.name == "root known" else 0)
    assert len(result.grids[0].rows) == len(FEW) and len(result.grids[1].rows) == 2 * len(FEW)
    texts = [(folder / f"conversations-{seed}.jsonl").read_text() for seed in (0, 1)]
    assert texts[0] != texts[1], "a seed has text of its own"


@thorough
def test_means_are_of_all_seeds_gains_of_the_same_seed_and_all_are_drawn(made: tuple[Result, RunConfig, Path]) -> None:
    summary, seeds = made[0].grids
    tau = {(row[0], row[1]): row[2 + ablations.GAMMA] for row in seeds.rows}
    centre, root = ([tau[name, seed] for seed in (0, 1)] for name in (CENTRE, "root known"))
    row = next(row for row in summary.rows if row[0] == "root known")
    assert row[2] == pytest.approx(sum(root) / 2) and row[3:5] == (min(root), max(root))
    assert row[5] == pytest.approx(sum(a / b for a, b in zip(root, centre, strict=True)) / 2)
    (claim,) = Ablations().claims(made[0])
    assert not claim.sure and claim.found.startswith("τ ")
    (plot,) = made[0].plots
    assert [trace["name"] for trace in plot.data if trace["mode"] == "markers"] == [v.name for v in FEW]


@thorough
@pytest.mark.parametrize(
    ("rank_8", "rank_64", "verdicts"),
    [
        ((1.5, 1.4, 1.7), (1.45, 1.55, 1.65), ["tends to agree", "tends not to"]),
        ((1.3, 1.4, 1.5), (1.5, 1.4, 1.7), ["tends not to", "tends to agree"]),
        ((1.5,), (), []),  # one seed shows nothing
    ],
)
def test_the_identity_is_like_a_map_that_is_not_ahead_or_behind_with_every_seed(
    rank_8: tuple[float, ...], rank_64: tuple[float, ...], verdicts: list[str]
) -> None:
    taus = {CENTRE: (1.4, 1.5, 1.6), MAPS[0]: rank_8, MAPS[1]: rank_64}
    forms = dict.fromkeys(("drafter", "parameters", "τ"), "number")
    parameters = table("ablations", forms, [(name, 70 + i, 1.0) for i, name in enumerate(taus)], "")
    rows = [(name, seed, tau) for name, of in taus.items() for seed, tau in enumerate(of)]
    seeds = table("seeds", dict.fromkeys(("drafter", "seed", "τ"), "number"), rows, "")
    assert [claim.verdict for claim in Ablations().claims(Result((parameters, seeds)))] == verdicts


def test_cells_by_title_are_put_in_the_order_of_the_columns() -> None:
    grid = table("grid", {"a": "count", "b": "text"}, [{"b": "x", "more": 2, "a": 1}, (2, "y")], "")
    assert grid.rows == ((1, "x"), (2, "y")) and grid.records()[1] == {"a": 2, "b": "y"}


# -- figures 11 and 12 (a) --------------------------------------------------------------------------------------------


def test_accuracy_counts_each_stream_by_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = Target(tiny_model("llama"))
    monkeypatch.setattr(figures, "LAYERS_BUDGET", SHORT)
    shapes = [Shape(EMBEDDINGS, n) for n in (1, 2)]
    one, two = new_trainees({shape.name: shape.drafter for shape in shapes}, target, bench(tmp_path))
    ids = {row.tobytes(): row for row in text().rows.astype(np.int64)}

    def guess(states: Any, at: torch.Tensor) -> torch.Tensor:
        """Right for stream 1, wrong for the others."""
        rows = torch.stack([torch.from_numpy(ids[row.numpy().tobytes()]) for row in seen[-1]])
        truth = rows.gather(1, (at + 2).clamp_max(23))
        return F.one_hot(torch.stack((truth, *[torch.zeros_like(truth)] * 3), -1), 61).float()

    seen: list[torch.Tensor] = []
    real = figures.base_states
    monkeypatch.setattr(figures, "base_states", lambda t, ids, *more: (seen.append(ids), real(t, ids, *more))[1])
    monkeypatch.setattr(one, "stream_logits", guess)
    found = accuracies(target, [one, two], text())
    assert found[0] == [1.0, 0.0, 0.0, 0.0]
    assert found[1] != found[0] and all(0 <= share <= 1 for share in found[1])
    assert len(seen) == figures.VALIDATION_BATCHES  # the base ran once a batch for both


@few(1)
@pytest.mark.parametrize("kind,series", [(Figure11, {EMBEDDINGS}), (Figure12a, {EMBEDDINGS, ROTATION})])
def test_what_is_measured_was_trained(
    kind: Any, series: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_run: Callable[..., Path]
) -> None:
    target = Target(tiny_model("llama"))  # of 4 layers: the shapes with more are left out
    monkeypatch.setattr(figures, "LAYERS_BUDGET", SHORT)
    monkeypatch.setattr(figures, "lab_text", text)
    measured: list[RunConfig] = []

    def measure(config: RunConfig, name: str) -> Results:
        measured.append(config)
        for spec in config.methods[1:]:
            streams = registry.load_method(spec, target).drafter
            assert streams.config.n_msa_layers == int(spec.options["n_msa_layers"])
            assert streams.up.abs().max() > 0  # they start at nothing
        return load_run(make_run(labels=tuple(spec.label for spec in config.methods)))

    result = kind().run(bench(tmp_path, Request(limit=2), target, measure=measure))
    fit = [v for v in kind.variants if v.layers <= 4]
    assert [row[:2] for row in result.grids[0].rows] == [(v.series, v.layers) for v in fit]
    assert {row[0] for row in result.grids[0].rows} == series
    assert measured[0].limit == 2 and len(measured[0].methods) == 1 + len(fit)
    assert [len(plot.data) for plot in result.plots] == [len(series), 4 * len(series)]


def test_the_users_options_hold_for_every_shape_but_the_weights() -> None:
    request = Request(settings=("ss.n_draft=5", "ss.weights=elsewhere"))
    given = spec_for(request, "ss")
    specs = [v.spec(given, weights="here") for v in Figure11.variants]
    assert all(s.options["n_draft"] == "5" and s.options["weights"] == "here" for s in specs)
    assert [s.options["n_msa_layers"] for s in specs] == ["1", "2", "4", "6", "8"]
    assert Figure11().configs(Request())["run"].suite == "apps"


@pytest.mark.parametrize("name", ["figure-11", "figure-12a"])
def test_the_command_does_not_hold_its_variants_against_the_shipped_streams(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["paper", name, "--dry-run", "--out", str(tmp_path / "out")]) == 0
    assert "n_msa_layers=2" in capsys.readouterr().out


def test_a_place_that_cannot_be_written_is_reported_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["paper", "figure-4", "--out", "/proc/x"]) == 2
    assert capsys.readouterr().err == "ssbench: cannot write to /proc/x: no such file or directory\n"


# -- figure 4: what a prediction sees of the future, and what it must not ----------------------------------------------

IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13, 14]])
AT = torch.tensor([[3, 5]])


def trainee(gamma: int) -> tuple[PeekingTrainee, Target]:
    target = Target(tiny_model("llama"))
    made = PeekingTrainee(target, gamma, lora_rank=4)
    randomise(made.module, 1, std=0.2)
    return made, target


def future(ids: torch.Tensor, gamma: int) -> torch.Tensor:
    """x_{i+2}.. of the positions AT."""
    return torch.stack([ids[:, i + 2 : i + 2 + gamma] for i in AT[0].tolist()], 1)


def read(made: PeekingTrainee, target: Target, ids: torch.Tensor, ahead: torch.Tensor | None = None) -> torch.Tensor:
    """Logits at AT."""
    with torch.no_grad():
        ahead = future(ids, made.gamma) if ahead is None else ahead
        return made.logits(base_states(target, ids, (), 0), ids, AT, ahead)


def answers(*_: Any) -> PackedText:
    """Two answers a row, the first of which ends at token 11."""
    ids = np.random.default_rng(0).integers(3, 61, (6, 24)).astype(np.int32)
    ids[:, 11] = 2
    return plain_text(ids, (np.arange(24) >= 5) & (np.arange(24) != 12))


@pytest.mark.parametrize("kind", WITHOUT_WINDOW)
def test_untrained_and_without_peeks_it_is_the_base(kind: str) -> None:
    target = Target(tiny_model(kind))
    with torch.no_grad():
        plain = target.model(IDS).logits[:, AT[0]]
    torch.testing.assert_close(read(PeekingTrainee(target, 0), target, IDS), plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("gamma", [1, 3])
def test_a_prediction_depends_on_its_peeks_but_not_on_its_own_token(gamma: int) -> None:
    made, target = trainee(gamma)
    before = read(made, target, IDS)
    for place in range(IDS.shape[1]):
        changed = IDS.clone()
        changed[0, place] = 40
        after = read(made, target, changed)
        for column, at in enumerate(AT[0].tolist()):
            seen = place <= at or at + 2 <= place < at + 2 + gamma
            assert torch.equal(before[:, column], after[:, column]) is not seen, (at, place)


def test_peeks_beyond_the_answer_are_not_seen() -> None:
    unseen = read(*trainee(2), IDS, future(IDS, 2).index_fill(2, torch.tensor([1]), -100))
    one = read(*trainee(1), IDS)
    torch.testing.assert_close(unseen, one, atol=1e-5, rtol=1e-5)


def test_it_learns_where_the_base_is_least_sure() -> None:
    logits = torch.zeros(1, 6, 4)
    logits[0, :, 0] = torch.tensor([0.0, 1.0, 9.0, 3.0, 2.0, 5.0])  # the larger, the surer
    labels = torch.arange(12).view(1, 6, 2)
    labels[0, 0] = -100  # no answer's
    assert least_sure(logits, labels, 3).at.tolist() == [[1, 4, 3]]
    assert least_sure(logits, labels, 3).labels.tolist() == [[[2, 3], [8, 9], [6, 7]]]
    assert least_sure(logits, labels, 6).labels[0, -1].tolist() == [-100, -100]


def test_an_answer_is_right_only_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tokens are guessed but one of the second answer."""
    (made, target), data = trainee(1), answers()

    def guess(states: Any, ids: torch.Tensor, at: torch.Tensor, ahead: torch.Tensor) -> torch.Tensor:
        logits = torch.nn.functional.one_hot(ids[:, at[0] + 1], 61).float()
        logits[:, at[0] == 20] = 0.0
        return logits

    monkeypatch.setattr(made, "logits", guess)
    (found,) = validation_results(target, [made], data)
    assert found.tokens == 6 * 18 and found.answers == 0.5
    assert found.right == pytest.approx(17 / 18)


@thorough
def test_figure_4_trains_every_gamma_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "PEEKING_BUDGET", SHORT)
    monkeypatch.setattr(figures, "lab_text", answers)
    stated: list[str] = []
    here = bench(tmp_path, target=Target(tiny_model("llama")), log=stated.append)
    first, again = Figure4().run(here), Figure4().run(here)
    assert len(stated) == 1 and all(f"gamma-{g} loss" in stated[0] for g in figures.GAMMAS)
    assert [row[:2] for row in first.grids[0].rows] == [("base", 0), *(("2 steps", g) for g in figures.GAMMAS)]
    assert first.grids == again.grids
    assert len({row[4] for row in first.grids[0].rows}) == len(first.grids[0].rows)
