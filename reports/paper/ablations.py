"""`ssbench paper ablations`: streams with one part changed at a time, and Medusa's heads."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import ClassVar

import pandas as pd
from plotly.graph_objects import Scatter

from specbench_ss.options import MethodSpec
from specbench_ss.reports import charts
from specbench_ss.reports.paper.claims import number_or_none
from specbench_ss.reports.paper.experiment import MEASURED, STEP_TIME, health, machine, rows_of, table
from specbench_ss.reports.paper.figures import plot
from specbench_ss.reports.paper.training import VariantsExperiment, write_conversations
from specbench_ss.results.analysis import Results
from specbench_ss.results.report import Bench, Claim, Grid, Plot, Request, Result, Value
from specbench_ss.runs.config import RunConfig
from specbench_ss.training import session
from specbench_ss.training.loop import LOG
from specbench_ss.training.trainer import TrainConfig

GAMMA, LR = 4, 0.01
SEEDS, STEPS, ROWS, LENGTH, ANCHORS, TALKS = 3, 300, 4, 256, 32, 4000
NODES = 8  # of every draft
GUESSES = [f"guess {j}" for j in range(1, GAMMA + 1)]
SPEEDUPS = (0.6, 0.8, 1.0, 1.2, 1.4)  # drawn as lines
CENTRE, MEDUSA, SMALL = "N_s 4, R_s 32", "Medusa's heads", "R_s 8"
MAPS = ("f_eta of rank 8", "f_eta of rank 64")


@dataclass(frozen=True, slots=True)
class Variant:
    """A drafter. name: its difference from the centre. options: of `ssbench train`. longer: factor of the steps."""

    name: str
    method: str = "ss"
    options: str = ""
    longer: int = 1

    @property
    def drafter(self) -> str:
        """Return the drafter for `ssbench train together --drafters`."""
        own = self.options.split(",") if self.options else []
        if self.method == "ss" and not any(option.startswith("adapter_rank=") for option in own):
            own.append("adapter_rank=32")
        return f"{self.method}[{','.join([*own, f'lr={LR}'])}]"

    def decoded(self, folder: Path) -> MethodSpec:
        """Return the method with the drafter's weights and the common number of nodes."""
        own = {"n_draft": str(NODES), "prune": "off"} if self.method == "ss" else {"nodes": str(NODES)}
        return MethodSpec(self.method, {"weights": str(folder), **own})


VARIANTS = (
    Variant(CENTRE),
    Variant("N_s 1", options="n_msa_layers=1"),
    Variant("N_s 2", options="n_msa_layers=2"),
    Variant("N_s 8", options="n_msa_layers=8"),
    Variant(SMALL, options="adapter_rank=8"),
    Variant("R_s 128", options="adapter_rank=128"),
    *(Variant(name, options=f"init_rank={rank}") for name, rank in zip(MAPS, (8, 64), strict=True)),
    Variant("MLPs kept", options="keep_mlp=on"),
    Variant("root known", options="root_rank=64"),
    Variant("MLPs kept, root known", options="keep_mlp=on,root_rank=64"),
    Variant("P_j's rate 0.01", options="embedding_lr=0.01"),
    Variant("P_j's rate 0.2", options="embedding_lr=0.2"),
    Variant(MEDUSA, "medusa"),
    Variant("the base's distribution learnt", options="loss=kl"),
    Variant(f"{MEDUSA}, the base's LM head", "medusa", "own_unembed=off"),
    Variant(
        f"{MEDUSA}, the base's LM head, the base's distribution learnt",
        "medusa",
        "own_unembed=off,loss=kl",
    ),
    Variant(f"{CENTRE}, twice the steps", longer=2),
    Variant("root known, twice the steps", options="root_rank=64", longer=2),
    Variant(f"{MEDUSA}, the base's LM head, twice the steps", "medusa", "own_unembed=off", longer=2),
)


class Ablations(VariantsExperiment):
    """The value of each part of the streams, one changed at a time, with several seeds.

    The papers sweep only the number of MSA layers (figure 11). Here all variants, and Medusa's heads, are trained on
    the same conversations in the same batches, and decode the same prompts with the same number of nodes per step.
    """

    name, source = "ablations", "Beyond the papers"
    title = f"streams, one part changed at a time, and Medusa's heads, {NODES} nodes each"
    uses = ("limit", "device", "dtype", "seed")
    settings = {"suite": "specbench", "limit": 2}
    variants: ClassVar[tuple[Variant, ...]] = VARIANTS
    rows = {v.name: "" for v in VARIANTS}

    def configs(self, request: Request) -> dict[str, RunConfig]:
        """Return the run, with a placeholder for the drafters' folders, which exist only after training."""
        return {"run": self.run_of(request, [v.decoded(Path("FOLDER")) for v in self.variants[:1]])}

    def train(self, bench: Bench) -> list[tuple[MethodSpec, dict[str, Value]]]:
        """Train every variant with every seed, those with equal steps together."""
        seeds = range(bench.request.seed, bench.request.seed + SEEDS)
        folders: dict[tuple[Variant, int], Path] = {}
        for seed, longer in product(seeds, sorted({v.longer for v in self.variants})):
            same = [v for v in self.variants if v.longer == longer]
            trained = _train_together([v.drafter for v in same], bench, seed, longer * STEPS)
            folders |= zip(product(same, [seed]), trained, strict=True)
        return [
            (v.decoded(folders[v, seed]), {"drafter": v.name, "seed": seed, **_trained_cells(folders[v, seed])})
            for v, seed in product(self.variants, seeds)
        ]

    def show(self, rows: Sequence[dict[str, Value]], run: Results) -> Result:
        """Show means over the seeds, every training, and τ against relative step time."""
        frame = pd.DataFrame(rows)
        grids = _summary(frame), _each(frame)
        about = (
            f"ours: {machine(run)}; {STEPS} steps of {ROWS} rows of {LENGTH} tokens with {ANCHORS} anchors a row",
            f"{SEEDS} seeds decide text, order and initial weights",
            f"peak learning rate {LR}: the best of three in an earlier sweep for streams and heads with the "
            "base's LM head, not tried for heads with their own",
            f"the centre is {CENTRE}, f_eta the identity, no MLPs, no root conditioning, P_j's rate 0.05",
            f"drafts of {NODES} nodes: streams choose theirs in every step, Medusa's tree is fixed by accuracies on "
            "validation text; nothing is pruned",
        )
        return Result(grids, (_frontier(grids[0]),), notes=(*about, *health(run)))

    def claims(self, result: Result) -> Sequence[Claim]:
        """Test EMNLP abstract: acceptance with few parameters; app. N.1: f_eta may be the identity. Few seeds each."""
        summary, seeds = (grid.records() for grid in result.grids[:2])
        return [*_few_parameters(summary), *_identity(summary, seeds)]


def _train_together(drafters: Sequence[str], bench: Bench, seed: int, steps: int) -> list[Path]:
    """Train drafters on the conversations of a seed as `ssbench train together` does; return their folders."""
    data = bench.folder / f"conversations-{seed}.jsonl"
    write_conversations(data, TALKS, seed)
    config = TrainConfig(
        bench.folder / f"seed-{seed}-{steps}",
        (str(data),),
        bench.request.model,
        steps,
        batch_size=ROWS,
        length=LENGTH,
        anchors=ANCHORS,
        seed=seed,
        device=bench.request.device,
        eval_fraction=0.05,
    )
    bench.log(f"training with seed {seed}, {steps} steps")
    options = session.TogetherOptions(",".join(drafters))
    with redirect_stdout(sys.stderr):
        session.run(session.MultiDrafterTrainer, options, config)
    return [job.folder for job in session.jobs_of(options.drafters, config)]


Rows = Sequence[Mapping[str, Value]]


def _few_parameters(summary: Rows) -> list[Claim]:
    """Test streams of the papers' rank against the better of Medusa's forms (EMNLP abstract)."""
    of = {row["drafter"]: (tau, row["parameters"]) for row in summary if (tau := number_or_none(row["τ"])) is not None}
    rivals = [of[name] for name in (MEDUSA, f"{MEDUSA}, the base's LM head") if name in of]
    if SMALL not in of or not rivals:
        return []
    (small, few), (medusa, many) = of[SMALL], max(rivals, key=lambda rival: rival[0])
    found = f"τ {small:.2f} with {few:,} parameters against {medusa:.2f} with {many:,}"
    statement = "Streams of rank 8 keep as many tokens a pass as Medusa's heads after the same training"
    return [Claim(statement, small >= medusa, found, sure=False)]


def _identity(summary: Rows, seeds: Rows) -> list[Claim]:
    """Test the identity against learnt maps (EMNLP app. N.1: similar performance, with far fewer parameters).

    They are equal if neither accepts more tokens per pass with every seed; text and order of a seed are the same.
    """
    of = {(row["drafter"], row["seed"]): number_or_none(row["τ"]) for row in seeds}
    parameters = {row["drafter"]: row["parameters"] for row in summary}
    claims = []
    for name in MAPS:
        pairs = [(of.get((CENTRE, seed)), value) for (variant, seed), value in of.items() if variant == name]
        gains = [trained / identity for identity, trained in pairs if identity and trained]
        if len(gains) > 1:
            statement = f"The identity keeps about as many tokens a pass as a learnt {name}"
            by_seed = f"the map's τ over the identity's, by seed: {', '.join(f'{gain:.2f}' for gain in gains)}"
            found = f"{by_seed}; {parameters[name]:,} parameters against {parameters[CENTRE]:,}"
            claims.append(Claim(statement, min(gains) <= 1 <= max(gains), found, sure=False))
    return claims


def _trained_cells(folder: Path) -> dict[str, Value]:
    """Return the cells of a training: parameters, and top-1 accuracy of each stream on validation text."""
    trained = json.loads((folder / "config.json").read_text())["trained"]
    log = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
    last = [line for line in log if line["step"] == trained["steps"] and "validation_accuracy" in line]
    right = last[-1]["validation_accuracy"][:GAMMA] if last else (None,) * GAMMA  # None: no validation at the end
    return {"parameters": trained["parameters"], **dict(zip(GUESSES, right, strict=True))}


def _summary(frame: pd.DataFrame) -> Grid:
    """Return a row per variant: means over the seeds, the range of τ, and τ relative to the centre."""
    centre = frame[frame["drafter"] == CENTRE].set_index("seed")["τ"]
    gains = frame.assign(gain=frame["τ"] / frame["seed"].map(centre)).groupby("drafter", sort=False)
    tau, means = gains["τ"], gains[["τ", "gain", STEP_TIME, "speedup"]].mean()
    columns = gains["parameters"].first(), means["τ"], tau.min(), tau.max(), *(means[n] for n in means.columns[1:])
    forms = {
        "drafter": "text", "parameters": "count", "τ": "number", "lowest τ": "number", "highest τ": "number",
        "τ over the centre's": "times", STEP_TIME: "times", "speedup": "times",
    }  # fmt: skip
    whole = pd.concat(columns, axis=1).reset_index()
    return table("ablations", forms, rows_of(whole), f"{Ablations.title}: means of {SEEDS} seeds")


def _each(frame: pd.DataFrame) -> Grid:
    titles = ["drafter", "seed", *GUESSES, "τ", STEP_TIME, "speedup", "95 % interval", "prompts"]
    known = {"drafter": "text", "seed": "count", **dict.fromkeys(GUESSES, "percent 1"), **MEASURED}
    caption = "Every training: top-1 accuracies on validation text, and results of decoding"
    return table("seeds", {title: known[title] for title in titles}, rows_of(frame[titles]), caption)


def _frontier(grid: Grid) -> Plot:
    """Plot τ against relative step time, one point per variant, with lines of equal speedup."""
    known = {
        str(row["drafter"]): [(cost, tau)]
        for row in grid.records()
        if (cost := number_or_none(row[STEP_TIME])) and (tau := number_or_none(row["τ"]))
    }
    costs = [cost for ((cost, _),) in known.values()] or [1.0]
    highest = max((tau for ((_, tau),) in known.values()), default=1.0)
    drawn = charts.lines(known, STEP_TIME, "τ").update_traces(mode="markers")
    for speedup in SPEEDUPS:
        x = [min(costs), max(costs)]
        y = [speedup * cost for cost in x]
        line = {"dash": "dot", "width": 1, "color": "#888"}
        drawn.add_trace(Scatter(x=x, y=y, name=f"{speedup:g}×", mode="lines", line=line, showlegend=False))
    title = "τ against relative step time; dotted: where τ over relative step time is 0.6, 0.8, 1, 1.2 and 1.4"
    return plot("frontier", title, grid, drawn, yaxis_range=[1, 1.1 * highest])
