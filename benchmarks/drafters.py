"""Streams, a LoRA of the target, heads and block drafters after the same training, at equal drafted nodes.

    python benchmarks/drafters.py train WORK --data CHATS.jsonl [--model lab] [--seeds 0 1 2] [ssbench's options]
    python benchmarks/drafters.py run WORK [--model lab] [--seeds 0] [--nodes 2 4 8 15] [ssbench's options]
    python benchmarks/drafters.py table WORK --out drafters.csv [--model lab] [--plot drafters.html]

`train` makes each drafter from the model's own answers to the questions of CHATS (`python -m lab text` writes such a
file for the lab), with the same batches and anchors for all. `run` measures tau, step times and speedups; times are
valid on a quiet machine only. Other options are passed on to `ssbench train together` and `ssbench run`; they replace
those of SETUPS. `--nodes` are those of trees; chains have 2, 4 and 7. `table` writes one row per seed, drafter, form
and number of nodes, and a second file with the estimated tau of validation text by training step. It reads all runs of
WORK whose name begins with run and the seed; the last measurement of a method counts. Times are those of the first
seed. Finished parts are skipped.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from specbench_ss import load_run
from specbench_ss.options import MethodSpec
from specbench_ss.training.session import FOLDERS_FILE

TIMES = ("relative_step_time", "speedup", "speedup_low", "speedup_high")
CHAIN_NODES = (2, 4, 7)  # of methods whose published form is a chain


@dataclass(frozen=True, slots=True)
class Drafter:
    """A drafter. train: its part of `train together`. tree, chain: options of its two forms; None = it has no such."""

    train: str
    tree: str | None
    chain: str | None = None
    longest: int = 7  # tokens of a chain

    @property
    def method(self) -> str:
        """Return the name of the method."""
        return MethodSpec.parse(self.train).name


BLOCK = "mode=tree,nodes={n},k=8"
STREAMS = "ss[adapter_rank=128,init_rank=64,embedding_lr=0.1,lr=0.015{more}]"
LAB = {
    "ss": Drafter(STREAMS.format(more=""), "nodes={n},k=4"),
    "ss, root and parent": Drafter(STREAMS.format(more=",root_rank=64,parent_rank=64"), "nodes={n},k=4"),
    "uno": Drafter("uno[rank=8,scale=2,lr=0.003]", BLOCK, "nodes={n}", longest=5),
    "medusa": Drafter("medusa[own_unembed=off,lr=0.01]", "nodes={n}"),
    "eagle": Drafter("eagle[lr=0.003]", "nodes={n}"),
    "dflash": Drafter("dflash[layers=1,lr=0.003]", BLOCK, "nodes={n}"),
    "dspark": Drafter("dspark[layers=1,block_size=7,markov_rank=32,lr=0.003]", BLOCK, "nodes={n}"),
    "dspark, kl": Drafter("dspark[layers=1,block_size=7,markov_rank=32,lr=0.003,loss=kl]", BLOCK, "nodes={n}"),
}
# Learning rates: the best of short trials, but half of it for uno (40 steps: 1e-2) and dspark (2e-3), whose trials were
# on a falling rate, and twice of it for dflash (24 steps: 5e-4), to equal dspark's. uno has 610,560 parameters, as few
# as a rank above 1 allows; streams have 343,296 and 490,752.
STREAMS_8 = "ss[n_msa_layers=8,adapter_rank=32,init_rank=32,{more}]"
SMOLLM2 = {
    "ss": Drafter(STREAMS_8.format(more="lr=0.01"), "nodes={n},k=4"),
    "ss, root and parent": Drafter(
        STREAMS_8.format(more="keep_mlp=on,root_rank=64,parent_rank=64,lr=0.005"), "nodes={n},k=4"
    ),
    "uno": Drafter("uno[rank=2,scale=2,lr=0.005]", BLOCK, "nodes={n}", longest=5),
    "medusa": Drafter("medusa[heads=4,own_unembed=off,lr=0.003]", "nodes={n}"),
    "eagle": Drafter("eagle[lr=0.001]", "nodes={n}"),
    "dflash": Drafter("dflash[layers=1,lr=0.001]", BLOCK, "nodes={n}"),
    "dspark, kl": Drafter("dspark[layers=1,block_size=7,markov_rank=32,lr=0.001,loss=kl]", BLOCK, "nodes={n}"),
}


@dataclass(frozen=True, slots=True)
class Setup:
    """Drafters of a model, and options of `ssbench train together` and `ssbench run`."""

    drafters: Mapping[str, Drafter]
    train: Mapping[str, Any]
    run: Mapping[str, Any]


SETUPS = {
    "lab": Setup(
        LAB,
        {"steps": 300, "batch-size": 5, "anchors": 48, "eval-fraction": 0.01, "eval-every": 50},
        {"dtype": "float32", "limit": 3},
    ),
    "smollm2": Setup(
        SMOLLM2,
        {
            "steps": 1650, "batch-size": 4, "anchors": 24, "eval-fraction": 0.01, "eval-every": 200,
            "answer-limit": 128, "dtype": "bfloat16",
        },
        {"dtype": "bfloat16", "limit": 0, "max-new-tokens": 256},
    ),
}  # fmt: skip


def main() -> None:
    """Parse the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    parser.add_argument("part", choices=("train", "run", "table"))
    parser.add_argument("work", type=Path)
    parser.add_argument("--model", choices=SETUPS, default="lab")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4, 8, 15])
    parser.add_argument("--out", type=Path, help="of table")
    parser.add_argument("--plot", type=Path, help="of table")
    a, ssbench_args = parser.parse_known_args()
    setup = SETUPS[a.model]
    if a.part != "train" and (missing := [s for s in a.seeds if not (a.work / f"seed{s}" / FOLDERS_FILE).exists()]):
        parser.error(f"{a.work / f'seed{missing[0]}'} has no drafters; train them first")
    if a.part == "table":
        if ssbench_args or a.out is None:
            parser.error(f"table has no option {' '.join(ssbench_args)}" if ssbench_args else "table needs --out")
        write_table(a.work, setup.drafters, a.seeds, a.nodes, a.out, a.plot)
        return
    if a.out or a.plot or "--seed" in ssbench_args:
        parser.error("--out and --plot are of table; the seed is one of --seeds")
    for seed in a.seeds:
        if a.part == "train":
            drafters = ",".join(drafter.train for drafter in setup.drafters.values())
            ssbench(
                "train", "together", "--regenerate-responses", "--model", a.model, *to_args(setup.train),
                "--cooldown", 0.25, "--seed", seed, "--drafters", drafters, "--out", a.work / f"seed{seed}",
                *ssbench_args,
            )  # fmt: skip
        else:
            methods = [spec.label for *_, spec in specs(setup.drafters, a.work / f"seed{seed}", a.nodes)]
            if not methods:
                parser.error(f"{a.work / f'seed{seed}'} has no drafters of --model {a.model}")
            out = a.work / f"run{seed}"
            ssbench(
                "run", "--suite", "specbench", "--model", a.model, "--record-drafts", 0, *to_args(setup.run),
                "--methods", ",".join(methods), "--out", out, *(["--resume"] if out.exists() else []), *ssbench_args,
            )  # fmt: skip


def to_args(options: Mapping[str, Any]) -> list[Any]:
    """Return options as words of a command line."""
    return [word for name, value in options.items() for word in (f"--{name}", value)]


def ssbench(*arguments: Any) -> None:
    """Run the command; end if it fails."""
    subprocess.run([sys.executable, "-m", "specbench_ss", *map(str, arguments)], check=True)


def weights_of(folder: Path, drafter: Drafter) -> Path:
    """Return the folder of a drafter's weights; one that does not exist if it is not trained."""
    names = json.loads((folder / FOLDERS_FILE).read_text())
    return folder / str(names.get(MethodSpec.parse(drafter.train).label, "missing"))


def specs(
    drafters: Mapping[str, Drafter], folder: Path, nodes: Sequence[int]
) -> Iterator[tuple[str, str, int, MethodSpec]]:
    """Yield (drafter, form, nodes, method) of everything that is measured with the weights in a folder."""
    for name, drafter in drafters.items():
        weights = weights_of(folder, drafter)
        for form, options in (("tree", drafter.tree), ("chain", drafter.chain)):
            counts = CHAIN_NODES if form == "chain" else nodes
            for n in counts if options is not None and weights.exists() else ():
                if form == "tree" or n <= drafter.longest:
                    assert options is not None
                    text = f"{drafter.method}[weights={weights},{options.format(n=n)}]"
                    yield name, form, n, MethodSpec.parse(text)


def write_table(
    work: Path,
    drafters: Mapping[str, Drafter],
    seeds: Sequence[int],
    nodes: Sequence[int],
    out: Path,
    plot: Path | None,
) -> None:
    """Write the measured rows, the curves of training next to them, and a plot of both."""
    rows, curves = [], []
    for seed in seeds:
        folder = work / f"seed{seed}"
        runs = sorted(work.glob(f"run{seed}*/manifest.json"))
        if not runs:
            sys.exit(f"{work} has no run of seed {seed}")
        overall = pd.concat([load_run(path.parent).summary() for path in runs])
        overall = overall[overall.task == "overall"].drop_duplicates("method", keep="last").set_index("method")
        for name, form, n, spec in specs(drafters, folder, nodes):
            if spec.label not in overall.index:
                continue  # not measured
            row = overall.loc[spec.label]
            columns = ("mean_acceptance_length", *(TIMES if seed == seeds[0] else ()))
            numbers = {column: round(float(row[column]), 3) for column in columns}
            rows.append({"seed": seed, "drafter": name, "form": form, "nodes": n, **numbers, "output": row["output"]})
        for name, drafter in drafters.items():
            log = weights_of(folder, drafter) / "training.jsonl"
            lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
            curves += [
                {"seed": seed, "drafter": name, "step": line["step"], "estimated_tau": round(line["estimated_tau"], 3)}
                for line in lines if "estimated_tau" in line
            ]  # fmt: skip
    table, curve = pd.DataFrame(rows), pd.DataFrame(curves)
    table.to_csv(out, index=False)
    curve.to_csv(out.with_name(f"{out.stem}-training.csv"), index=False)
    if plot is not None:
        figure(table, curve, list(drafters)).write_html(plot, config={"displayModeBar": False})


def figure(table: pd.DataFrame, curve: pd.DataFrame, drafters: Sequence[str]) -> go.Figure:
    """Return tau against relative step time, and the estimated tau by training step; means over seeds."""
    drawn = make_subplots(cols=2, subplot_titles=("tau against relative step time, by drafted nodes", "training"))
    mean = table.groupby(["drafter", "form", "nodes"], sort=False)[["mean_acceptance_length", "relative_step_time"]]
    points, learning = mean.mean().reset_index(), curve.groupby(["drafter", "step"], sort=False).mean().reset_index()
    for colour, name in zip(COLOURS, drafters, strict=False):
        for form, dash in (("tree", "solid"), ("chain", "dot")):
            some = points[(points.drafter == name) & (points.form == form)]
            drawn.add_scatter(
                x=some.relative_step_time, y=some.mean_acceptance_length, text=some.nodes, mode="lines+markers+text",
                textposition="top center", name=f"{name}, {form}", line={"color": colour, "dash": dash}, row=1, col=1,
                showlegend=not some.empty,
            )  # fmt: skip
        some = learning[learning.drafter == name]
        drawn.add_scatter(
            x=some.step, y=some.estimated_tau, mode="lines", line={"color": colour}, showlegend=False, row=1, col=2
        )
    top = 1.05 * points.mean_acceptance_length.max()
    for speedup in (0.5, 0.75, 1):  # lines of equal decode speedup
        ends = [1, min(top / speedup, points.relative_step_time.max())]
        drawn.add_scatter(
            x=ends, y=[speedup * x for x in ends], mode="lines+text", text=["", f"{speedup:g}x"], row=1, col=1,
            textposition="bottom right", line={"color": "#bbbbbb", "width": 1}, showlegend=False,
        )  # fmt: skip
    drawn.update_xaxes(title="step time, autoregressive step = 1", row=1, col=1)
    drawn.update_xaxes(title="training step", row=1, col=2)
    drawn.update_yaxes(title="tau", range=[points.mean_acceptance_length.min() - 0.1, top], row=1, col=1)
    drawn.update_yaxes(title="estimated tau, validation text", row=1, col=2)
    return drawn.update_layout(template="simple_white", width=1200, height=560, legend={"orientation": "h", "y": -0.2})


COLOURS = ("#0072b2", "#56b4e9", "#d55e00", "#e69f00", "#009e73", "#cc79a7", "#000000", "#7f7f7f")

if __name__ == "__main__":
    main()
