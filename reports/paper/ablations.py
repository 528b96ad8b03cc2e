"""`ssbench paper ablations`: what each part of the streams is worth, one changed at a time, with several seeds.

The papers sweep the number of MSA layers alone (figure 11). Here every variant learns the same conversations in the
same batches, beside Medusa's heads, and decodes the same prompts with as many nodes a step.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any, ClassVar

from specbench_ss import storage
from specbench_ss.options import REFERENCE, MethodSpec
from specbench_ss.reports.paper.claims import number_or_none, place_of
from specbench_ss.reports.paper.figures import COLOURS, SYMBOLS, axes, health, machine
from specbench_ss.reports.paper.missing_parts import config_for, nothing_runs, training_text
from specbench_ss.results.report import Bench, Claim, Column, Experiment, Grid, Part, Plot, Request, Result, Value
from specbench_ss.results.summary import OVERALL, SummaryRow, summarise
from specbench_ss.results.text import interval
from specbench_ss.runs.config import RunConfig
from specbench_ss.training.drafter_training import LOG

SEEDS, STEPS, ROWS, LENGTH, ANCHORS, TALKS = 3, 300, 4, 256, 32, 4000
NODES = 8  # of every draft
CENTRE, MEDUSA, SMALL = "N_s 4, R_s 32", "Medusa's heads", "R_s 8"
MAPS = ("f_eta of rank 8", "f_eta of rank 64")
GAMMA, LR = 4, 0.01


@dataclass(frozen=True, slots=True)
class Variant:
    """A drafter. name: what is changed from the centre. options: of `ssbench train`. longer: times the steps."""

    name: str
    method: str = "ss"
    options: str = ""
    longer: int = 1

    @property
    def asked(self) -> str:
        """Return it as `ssbench train together --drafters` takes it."""
        own = self.options.split(",") if self.options else []
        if self.method == "ss" and not any(option.startswith("adapter_rank=") for option in own):
            own.append("adapter_rank=32")
        return f"{self.method}[{','.join([*own, f'lr={LR}'])}]"

    def decoded(self, folder: Path) -> MethodSpec:
        """Return the method that decodes with its weights, with as many nodes as all."""
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
    Variant("the base's distribution learnt", options="targets=distribution"),
    Variant(f"{MEDUSA}, the base's LM head", "medusa", "own_unembed=off"),
    Variant(
        f"{MEDUSA}, the base's LM head, the base's distribution learnt",
        "medusa",
        "own_unembed=off,targets=distribution",
    ),
    Variant(f"{CENTRE}, twice the steps", longer=2),
    Variant("root known, twice the steps", options="root_rank=64", longer=2),
    Variant(f"{MEDUSA}, the base's LM head, twice the steps", "medusa", "own_unembed=off", longer=2),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """One variant of one seed. right: share of right first guesses by stream, on held-out text; None: not judged."""

    variant: str
    seed: int
    parameters: int
    right: Sequence[float | None]
    row: SummaryRow

    @property
    def cost(self) -> float | None:
        """Return the time of a step over that of the reference."""
        return None if not self.row.step_ratio else 1 / self.row.step_ratio


class Ablations(Experiment):
    """The experiment `ablations`."""

    name, source = "ablations", "Beyond the papers"
    title = f"streams, one part changed at a time, and Medusa's heads, {NODES} nodes each"
    trains = True
    uses = ("limit", "device", "dtype", "seed")
    limit: ClassVar[int] = 2
    variants: ClassVar[tuple[Variant, ...]] = VARIANTS

    def parts(self, request: Request) -> Sequence[Part]:
        """Return a row for each variant."""
        return [Part(v.name, training_text(request)) for v in self.variants]

    def configs(self, request: Request) -> dict[str, RunConfig]:
        """Return the run. The drafters' folders are known only once they are trained."""
        return {"run": self._config(request, [v.decoded(Path("FOLDER")) for v in self.variants[:1]])}

    def _config(self, request: Request, specs: Sequence[MethodSpec]) -> RunConfig:
        config = config_for(request, [], suite="specbench", limit=self.limit)
        return replace(config, methods=(MethodSpec(REFERENCE), *specs))

    def run(self, bench: Bench) -> Result:
        """Train every variant with every seed, then decode with all of them in one run."""
        parts = self.parts(bench.request)
        if any(part.missing for part in parts):
            raise nothing_runs(self.name, parts)
        seeds = range(bench.request.seed, bench.request.seed + SEEDS)
        folders = {key: folder for seed in seeds for key, folder in self._trained(bench, seed)}
        specs = {(v, seed): v.decoded(folders[v, seed]) for v in self.variants for seed in seeds}
        run = bench.measure(self._config(bench.request, list(specs.values())), "run")
        rows = {row.method: row for row in summarise(run) if row.category == OVERALL}
        found = [_measured(v.name, seed, folders[v, seed], rows[spec.label]) for (v, seed), spec in specs.items()]
        grids = _summary(found, [v.name for v in self.variants]), _each(found)
        about = (
            f"ours: {machine(run)}; {STEPS} steps of {ROWS} rows of {LENGTH} tokens with {ANCHORS} anchors a row",
            f"{SEEDS} seeds decide text, order and initial weights",
            f"peak learning rate {LR}: the best of three in an earlier sweep for streams and heads with the base's LM "
            "head, not tried for heads with their own",
            f"the centre is {CENTRE}, f_eta the identity, no MLPs, a root that is not known, P_j's rate 0.05",
            f"drafts of {NODES} nodes: streams choose theirs in every step, Medusa's tree is fixed by accuracies on "
            "held-out text; nothing is pruned",
        )
        return Result(grids, (_frontier(grids[0]),), notes=(*about, *health(run)))

    def _trained(self, bench: Bench, seed: int) -> Iterator[tuple[tuple[Variant, int], Path]]:
        """Train the variants of one seed, those with as many steps side by side, and yield their folders."""
        from specbench_ss.training.together import Together, TogetherOptions
        from specbench_ss.training.trainer import TrainConfig

        data = bench.folder / f"conversations-{seed}.jsonl"
        write_conversations(data, TALKS, seed)
        for longer in sorted({v.longer for v in self.variants}):
            same = [v for v in self.variants if v.longer == longer]
            trainer = Together(TogetherOptions(",".join(v.asked for v in same)))
            config = TrainConfig(
                bench.folder / f"seed-{seed}-{longer * STEPS}",
                (str(data),),
                bench.request.model,
                longer * STEPS,
                batch_size=ROWS,
                length=LENGTH,
                anchors=ANCHORS,
                seed=seed,
                device=bench.request.device,
                eval_fraction=0.05,
            )
            bench.log(f"training with seed {seed}, {longer * STEPS} steps")
            with redirect_stdout(sys.stderr):
                trainer.train(config)
            yield from (((v, seed), order.folder) for v, order in zip(same, trainer.orders(config), strict=True))

    def claims(self, result: Result) -> Sequence[Claim]:
        """ACL abstract: acceptance with few parameters. App. N.1: f_eta may as well be the identity. Few seeds each."""
        grids = {grid.name: grid for grid in result.grids}
        return [*_few_parameters(grids["ablations"]), *_identity(grids["ablations"], grids["seeds"])]


def _few_parameters(grid: Grid) -> list[Claim]:
    """Hold streams of the papers' rank against the better of Medusa's forms (ACL abstract)."""
    tau, count = place_of(grid, "tau"), place_of(grid, "parameters")
    of = {row[0]: (number_or_none(row[tau]), row[count]) for row in grid.rows}
    small = of.get(SMALL, (None, 0))
    rivals = [of[name] for name in (MEDUSA, f"{MEDUSA}, the base's LM head") if name in of]
    medusa = max((one for one in rivals if one[0] is not None), default=(None, 0))
    if small[0] is None or medusa[0] is None:
        return []
    found = f"tau {small[0]:.2f} with {small[1]:,} parameters against {medusa[0]:.2f} with {medusa[1]:,}"
    says = "Streams of rank 8 keep as many tokens a pass as Medusa's heads after the same training"
    return [Claim(says, small[0] >= medusa[0], found, sure=False)]


def _identity(summary: Grid, seeds: Grid) -> list[Claim]:
    """Hold the identity against learnt maps (ACL app. N.1: similar performance, with far fewer parameters).

    They are called alike where neither keeps more tokens a pass with every seed: a seed's text and order are the same.
    """
    tau, count = place_of(seeds, "tau"), place_of(summary, "parameters")
    of = {(row[0], row[1]): number_or_none(row[tau]) for row in seeds.rows}
    parameters = {row[0]: row[count] for row in summary.rows}
    made = []
    for name in MAPS:
        pairs = [(of.get((CENTRE, seed)), value) for (variant, seed), value in of.items() if variant == name]
        gains = [learnt / own for own, learnt in pairs if own and learnt]
        if len(gains) > 1:
            says = f"The identity keeps about as many tokens a pass as a learnt {name}"
            told = f"the map's tau over the identity's, by seed: {', '.join(f'{gain:.2f}' for gain in gains)}"
            found = f"{told}; {parameters[name]:,} parameters against {parameters[CENTRE]:,}"
            made.append(Claim(says, min(gains) <= 1 <= max(gains), found, sure=False))
    return made


def write_conversations(path: Path, count: int, seed: int) -> None:
    """Write this many of the lab's training conversations, one JSON object a line, unless they are there."""
    from specbench_ss.training.text.lab_text import conversations

    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with storage.replacing(path) as file:
        for example in islice(conversations("train", seed), count):
            pairs = zip(example.turns, example.answers, strict=True)
            said = [
                (role, text) for turn, answers in pairs for role, text in (("user", turn), ("assistant", answers[0]))
            ]
            line = {"messages": [{"role": role, "content": text} for role, text in said]}
            file.write(json.dumps(line).encode() + b"\n")


def _measured(name: str, seed: int, folder: Path, row: SummaryRow) -> Measured:
    config = json.loads((folder / "config.json").read_text())
    lines = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
    judged = [line for line in lines if line["step"] == config["trained"]["steps"] and "held_out_right" in line]
    right = judged[-1]["held_out_right"][:GAMMA] if judged else (None,) * GAMMA  # none: nothing was held out at the end
    return Measured(name, seed, config["trained"]["parameters"], right, row)


def _summary(found: Sequence[Measured], names: Sequence[str]) -> Grid:
    """Return a row a variant: means over the seeds, tau's range, and what tau gains on the centre of the same seed."""
    columns = (
        Column("drafter", "text"),
        Column("parameters", "count"),
        Column("tau"),
        Column("lowest tau"),
        Column("highest tau"),
        Column("tau over the centre's", "times"),
        Column("step time over ar's", "times"),
        Column("speedup", "times"),
    )
    centre = {one.seed: one.row.tau for one in found if one.variant == CENTRE}
    rows = []
    for name in names:
        same = [one for one in found if one.variant == name]
        taus = [one.row.tau for one in same if one.row.tau]
        gains = [one.row.tau / own for one in same if one.row.tau and (own := centre.get(one.seed))]
        costs, speedups = [c for one in same if (c := one.cost)], [one.row.speedup for one in same if one.row.speedup]
        ends = (min(taus, default=None), max(taus, default=None))
        rows.append((name, same[0].parameters, _mean(taus), *ends, _mean(gains), _mean(costs), _mean(speedups)))
    return Grid("ablations", columns, tuple(rows), f"{Ablations.title}: means of {SEEDS} seeds")


def _each(found: Sequence[Measured]) -> Grid:
    columns = (
        Column("drafter", "text"),
        Column("seed", "count"),
        *(Column(f"guess {j}", "percent", 1) for j in range(1, GAMMA + 1)),
        Column("tau"),
        Column("step time over ar's", "times"),
        Column("speedup", "times"),
        Column("95 % interval", "text"),
        Column("prompts", "count"),
    )
    rows = tuple(_row(one) for one in found)
    return Grid("seeds", columns, rows, "Every training: right guesses on held-out text, and what decoding gains")


def _row(one: Measured) -> tuple[Value, ...]:
    around = interval(one.row.speedup_interval) or None
    return (one.variant, one.seed, *one.right, one.row.tau, one.cost, one.row.speedup, around, one.row.n_prompts)


def _mean(values: Sequence[float]) -> float | None:
    return mean(values) if values else None


def _frontier(grid: Grid) -> Plot:
    """Plot tau against the time of a step, a point a variant, with lines of equal speedup."""
    at, cost = place_of(grid, "tau"), place_of(grid, "step time over ar's")
    known = [row for row in grid.rows if row[at] and row[cost]]
    widest = max((float(row[cost] or 0) for row in known), default=1.0)
    least = min((float(row[cost] or 0) for row in known), default=1.0)
    n = len(COLOURS)
    data: list[dict[str, Any]] = [
        {"type": "scatter", "mode": "markers", "name": str(row[0]), "x": [row[cost]], "y": [row[at]],
         "marker": {"size": 11, "color": COLOURS[i % n], "symbol": SYMBOLS[(i + i // n) % len(SYMBOLS)]}}
        for i, row in enumerate(known)
    ]  # fmt: skip
    for speedup in (0.6, 0.8, 1.0, 1.2, 1.4):
        ends = [least, widest]
        data.append(
            {"type": "scatter", "mode": "lines", "name": f"{speedup:g}×", "x": ends, "y": [speedup * x for x in ends],
             "line": {"dash": "dot", "width": 1, "color": "#888"}, "showlegend": False}
        )  # fmt: skip
    title = "tau against the time of a step; dotted: where tau over step time is 0.6, 0.8, 1, 1.2 and 1.4"
    highest = max((float(row[at] or 0) for row in known), default=1.0)
    layout = axes("step time over ar's", "tau", range=[1, 1.1 * highest])
    return Plot("frontier", title, f"Scatter chart: {title}.", data, layout, grid)
