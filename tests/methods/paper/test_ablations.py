"""`ssbench paper ablations`: every variant is trained as it says, and measured with its own weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specbench_ss.reports.paper import ablations
from specbench_ss.reports.paper.ablations import CENTRE, MAPS, MEDUSA, NODES, SMALL, VARIANTS, Ablations, Variant
from specbench_ss.results.report import Bench, Column, Grid, Request, Result
from specbench_ss.runs.config import RunConfig
from specbench_ss.runs.records import Run
from specbench_ss.runs.run_dir import read_run
from specbench_ss.training.session import jobs_of
from specbench_ss.training.trainer import TrainConfig
from tests.conftest import fabricate

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

    def measure(config: RunConfig, name: str) -> Run:
        measured.append(config)
        labels = tuple(spec.label for spec in config.methods)
        return read_run(fabricate(folder / "made", labels=labels))

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"SEEDS": 2, "STEPS": 2, "ROWS": 2, "LENGTH": 128, "ANCHORS": 4, "TALKS": 60}.items():
            patch.setattr(ablations, name, value)
        patch.setattr(Ablations, "variants", FEW)
        bench = Bench(Request(limit=1), folder, measure, lambda: pytest.fail("each training loads the model itself"))
        return Ablations().run(bench), measured[0], folder


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


def test_means_are_of_all_seeds_and_gains_of_the_same_seed(made: tuple[Result, RunConfig, Path]) -> None:
    summary, seeds = made[0].grids
    tau = {(row[0], row[1]): row[2 + ablations.GAMMA] for row in seeds.rows}
    centre, root = ([tau[name, seed] for seed in (0, 1)] for name in (CENTRE, "root known"))
    row = next(row for row in summary.rows if row[0] == "root known")
    assert row[2] == pytest.approx(sum(root) / 2) and row[3:5] == (min(root), max(root))
    assert row[5] == pytest.approx(sum(a / b for a, b in zip(root, centre, strict=True)) / 2)
    (claim,) = Ablations().claims(made[0])
    assert not claim.sure and claim.found.startswith("tau ")


def test_the_frontier_draws_every_variant(made: tuple[Result, RunConfig, Path]) -> None:
    (plot,) = made[0].plots
    points = [trace for trace in plot.data if trace["mode"] == "markers"]
    assert [trace["name"] for trace in points] == [v.name for v in FEW]


def of_maps(rank_8: tuple[float, ...], rank_64: tuple[float, ...]) -> list[str]:
    """The verdicts on learnt maps with these taus, one a seed, beside a centre of 1.4, 1.5 and 1.6."""
    taus = {CENTRE: (1.4, 1.5, 1.6), MAPS[0]: rank_8, MAPS[1]: rank_64}
    parameters = Grid(
        "ablations",
        (Column("drafter"), Column("parameters"), Column("tau")),
        tuple((name, 70 + i, 1.0) for i, name in enumerate(taus)),
    )
    rows = tuple((name, seed, tau) for name, of in taus.items() for seed, tau in enumerate(of))
    seeds = Grid("seeds", (Column("drafter"), Column("seed"), Column("tau")), rows)
    return [claim.verdict for claim in Ablations().claims(Result((parameters, seeds)))]


def test_the_identity_is_like_a_map_that_is_not_ahead_or_behind_with_every_seed() -> None:
    level, better, worse = (1.5, 1.4, 1.7), (1.45, 1.55, 1.65), (1.3, 1.4, 1.5)
    assert of_maps(level, better) == ["tends to agree", "tends not to"]
    assert of_maps(worse, level) == ["tends not to", "tends to agree"]
    assert of_maps((1.5,), ()) == [], "one seed tells nothing"
