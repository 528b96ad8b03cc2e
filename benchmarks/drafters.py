"""Streams, a LoRA of the target, heads and block drafters after the same training on the lab, at equal drafted nodes.

    python benchmarks/drafters.py train WORK --data CHATS.jsonl [--seeds 0 1 2] [--steps 300]
    python benchmarks/drafters.py run WORK [--seeds 0] [--limit 3] [--nodes 2 4 8 15]
    python benchmarks/drafters.py table WORK --out drafters.csv [--plot drafters.html]

`train` makes each drafter from the lab's own answers to the questions of CHATS (`python -m lab text` writes such a
file), with the same batches and anchors for all. `run` measures tau, step times and speedups; times are valid on a
quiet machine only. `table` writes one row per seed, drafter, form and number of nodes, and a second file with the
estimated tau of validation text by training step. It reads all runs of WORK whose name begins with run and the seed;
the last measurement of a method counts. Times are those of the first seed. Finished parts are skipped.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from specbench_ss import load_run
from specbench_ss.options import MethodSpec
from specbench_ss.training.session import FOLDERS_FILE

STREAMS = "adapter_rank=128,init_rank=64,embedding_lr=0.1,lr=0.015"
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
DRAFTERS = {
    "ss": Drafter(f"ss[{STREAMS}]", "nodes={n},k=4"),
    "ss, root and parent": Drafter(f"ss[{STREAMS},root_rank=64,parent_rank=64]", "nodes={n},k=4"),
    "uno": Drafter("uno[rank=8,scale=2,lr=0.003]", BLOCK, "nodes={n}", longest=5),
    "medusa": Drafter("medusa[own_unembed=off,lr=0.01]", "nodes={n}"),
    "eagle": Drafter("eagle[lr=0.003]", "nodes={n}"),
    "dflash": Drafter("dflash[layers=1,lr=0.003]", BLOCK, "nodes={n}"),
    "dspark": Drafter("dspark[layers=1,block_size=7,markov_rank=32,lr=0.003]", BLOCK, "nodes={n}"),
    "dspark, kl": Drafter("dspark[layers=1,block_size=7,markov_rank=32,lr=0.003,loss=kl]", BLOCK, "nodes={n}"),
}


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("train", "run", "table"))
    parser.add_argument("work", type=Path)
    parser.add_argument("--data")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--limit", type=int, default=3, help="questions per category")
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4, 8, 15])
    parser.add_argument("--out", type=Path, default=Path("drafters.csv"))
    parser.add_argument("--plot", type=Path)
    a = parser.parse_args()
    if a.part == "train" and not a.data:
        parser.error("train needs --data")
    if a.part == "table":
        write_table(a.work, a.seeds, a.nodes, a.out, a.plot)
        return
    for seed in a.seeds:
        if a.part == "train":
            train(a.work / f"seed{seed}", a.data, seed, a.steps)
        else:
            measure(a.work, seed, a.limit, a.nodes)


def ssbench(*arguments: Any) -> None:
    """Run the command; end if it fails."""
    subprocess.run([sys.executable, "-m", "specbench_ss", *map(str, arguments)], check=True)


def train(folder: Path, data: str, seed: int, steps: int) -> None:
    """Train all drafters of a seed, or continue."""
    drafters = ",".join(drafter.train for drafter in DRAFTERS.values())
    ssbench(
        "train", "together", "--data", data, "--regenerate-responses", "--out", folder, "--steps", steps,
        "--batch-size", 5, "--anchors", 48, "--eval-fraction", 0.01, "--eval-every", 50, "--cooldown", 0.25,
        "--seed", seed, "--drafters", drafters,
    )  # fmt: skip


def weights_of(folder: Path, drafter: Drafter) -> Path:
    """Return the folder of a drafter's weights; one that does not exist if it is not trained."""
    names = json.loads((folder / FOLDERS_FILE).read_text())
    return folder / str(names.get(MethodSpec.parse(drafter.train).label, "missing"))


def specs(folder: Path, nodes: Sequence[int]) -> Iterator[tuple[str, str, int, MethodSpec]]:
    """Yield (drafter, form, nodes, method) of everything that is measured with the weights in a folder."""
    for name, drafter in DRAFTERS.items():
        weights = weights_of(folder, drafter)
        for form, options in (("tree", drafter.tree), ("chain", drafter.chain)):
            counts = CHAIN_NODES if form == "chain" else nodes
            for n in counts if options is not None and weights.exists() else ():
                if form == "tree" or n <= drafter.longest:
                    assert options is not None
                    text = f"{drafter.method}[weights={weights},{options.format(n=n)}]"
                    yield name, form, n, MethodSpec.parse(text)


def measure(work: Path, seed: int, limit: int, nodes: Sequence[int]) -> None:
    """Run all drafters of a seed on the suite, greedy, in float32."""
    methods = [spec.label for *_, spec in specs(work / f"seed{seed}", nodes)]
    out = work / f"run{seed}"
    ssbench(
        "run", "--suite", "specbench", "--limit", limit, "--dtype", "float32", "--record-drafts", 0, "--out", out,
        "--methods", ",".join(methods), *(["--resume"] if out.exists() else []),
    )  # fmt: skip


def write_table(work: Path, seeds: Sequence[int], nodes: Sequence[int], out: Path, plot: Path | None) -> None:
    """Write the measured rows, the curves of training next to them, and a plot of both."""
    rows, curves = [], []
    for seed in seeds:
        folder = work / f"seed{seed}"
        overall = pd.concat(
            [load_run(path.parent).summary() for path in sorted(work.glob(f"run{seed}*/manifest.json"))]
        )
        overall = overall[overall.task == "overall"].drop_duplicates("method", keep="last").set_index("method")
        for name, form, n, spec in specs(folder, nodes):
            if spec.label not in overall.index:
                continue  # not measured
            row = overall.loc[spec.label]
            columns = ("mean_acceptance_length", *(TIMES if seed == seeds[0] else ()))
            numbers = {column: round(float(row[column]), 3) for column in columns}
            rows.append({"seed": seed, "drafter": name, "form": form, "nodes": n, **numbers, "output": row["output"]})
        for name, drafter in DRAFTERS.items():
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
        figure(table, curve).write_html(plot, config={"displayModeBar": False})


def figure(table: pd.DataFrame, curve: pd.DataFrame) -> go.Figure:
    """Return tau against relative step time, and the estimated tau by training step; means over seeds."""
    drawn = make_subplots(cols=2, subplot_titles=("tau against relative step time (2 to 15 nodes)", "training"))
    mean = table.groupby(["drafter", "form", "nodes"], sort=False)[["mean_acceptance_length", "relative_step_time"]]
    points, learning = mean.mean().reset_index(), curve.groupby(["drafter", "step"], sort=False).mean().reset_index()
    for colour, name in zip(COLOURS, DRAFTERS, strict=True):
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
    drawn.update_yaxes(title="tau", range=[1.4, top], row=1, col=1)
    drawn.update_yaxes(title="estimated tau, validation text", row=1, col=2)
    return drawn.update_layout(template="simple_white", width=1200, height=560, legend={"orientation": "h", "y": -0.2})


COLOURS = ("#0072b2", "#56b4e9", "#d55e00", "#e69f00", "#009e73", "#cc79a7", "#000000", "#7f7f7f")

if __name__ == "__main__":
    main()
