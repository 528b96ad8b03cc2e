"""Mean acceptance length (tau) of every method on the lab by the number of drafted nodes, without times.

    python benchmarks/nodes.py OUT.jsonl [--only "medusa;ss"] [--prompts 3] [--table nodes.csv]

Evaluation prompts of Spec-Bench's 13 categories, first turns, greedy, float32, 256 new tokens at most. One JSON line
for each method, number of nodes and prompt; existing ones with the same settings and weights are not done again. Each
answer is compared with autoregressive decoding. Rows of the table are named as in WAYS, with semicolons between.

Every method gets n nodes by its option `nodes`:
- chains (`sd`, `pld`) draft n tokens; `space` has four masks, so four tokens are its most;
- `lookahead` verifies n-grams of 4 nodes (for 15: of 3), its window being 15 columns wide at every n: the window's rows
  are not drafts; n-grams of the prompt are in its pool;
- `suffix` and `rest` draft n nodes at most, less where little matches, by their own rules; "suffix, eager" is allowed n
  nodes after any match; `recycling` the n best nodes of its published tree, with the successors that tokens have in the
  prompt;
- `medusa`, `medusa2`, `hydra` and `eagle` grow a static tree of n nodes from their stored accuracies;
- `eagle2` and `eagle3` take the n best of the nodes that the published depth and width give (5 or 7 levels after the
  first, 10 wide); `sd` as a tree the n best of 8 levels, 4 wide;
- `dflash` as a tree takes the n best nodes of its seven positions by the product of their probabilities, 8 tokens
  a position;
- `ss` and `ss-shared` take the n best of the whole tree of 4 candidates for each of 4 streams (340 nodes); streams
  conditioned on the parent grow it level by level; pruned, all 120 nodes of 3 candidates are drafted, and n stay
  after the pruning layer.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lab.text import SPECBENCH_CATEGORIES, questions
from specbench_ss.engine.decoder import Decoder
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.models.load import load_target
from specbench_ss.options import MethodSpec
from specbench_ss.registry import load_method, method_class, method_options
from specbench_ss.suite import Question

NODES = (4, 8, 15, 32, 64)
WAYS: dict[str, str] = {  # name in the table -> the method with its options; N: nodes; LEVEL: of n-grams that divide N
    "ar": "ar",
    "pld": "pld[nodes=N]",
    "suffix": "suffix[nodes=N]",
    "suffix, eager": "suffix[nodes=N,offset=N,min_prob=0.01]",
    "lookahead": "lookahead[nodes=N,level=LEVEL,window=15,pool_from_prompt=true]",
    "recycling": "recycling[nodes=N,prompt=true]",
    "rest": "rest[nodes=N]",
    "sd": "sd[nodes=N]",
    "sd, tree": "sd[form=tree,gamma=8,k=4,nodes=N]",
    "sd, draft-2m": "sd[weights=draft-2m,nodes=N]",
    "sd, draft-2m, tree": "sd[weights=draft-2m,form=tree,gamma=8,k=4,nodes=N]",
    "ss": "ss[nodes=N,k=4]",
    "ss, root and parent known": "ss[nodes=N,k=4,parent=on]",
    "ss, pruned from 120": "ss[k=3,n_draft=0,n_keep=ROWS]",
    "ss-shared": "ss-shared[nodes=N,k=4]",
    "medusa": "medusa[nodes=N]",
    "medusa2": "medusa2[nodes=N]",
    "hydra": "hydra[nodes=N]",
    "eagle": "eagle[nodes=N]",
    "eagle2": "eagle2[nodes=N]",
    "eagle3": "eagle3[nodes=N]",
    "dflash, tree": "dflash[mode=tree,nodes=N]",
    "space": "space[nodes=N]",
}
IMPOSSIBLE = {"space": (4, "four masks are trained, so a chain of 4 is the longest")}
ONCE = {"ar": 0}  # what drafts nothing is the same at every n


@dataclass(frozen=True, slots=True)
class Cell:
    """A method at a number of nodes. plain: autoregressive decoding of its model, with its answers by prompt."""

    way: str
    nodes: int
    decoder: Decoder
    plain: tuple[Decoder, dict[tuple[int, ...], list[int]]]
    settings: str

    @property
    def key(self) -> tuple[str, int, str]:
        """Return the common key of its lines."""
        return self.way, self.nodes, self.settings


def main() -> None:
    """Measure what is missing, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="", help="rows of the table, separated by semicolons")
    parser.add_argument("--prompts", type=int, default=3, help="per category")
    parser.add_argument("--table", type=Path)
    arguments = parser.parse_args()
    target = load_target("lab", dtype="float32", device="cpu")
    ways = [way for way in arguments.only.split(";") if way] or list(WAYS)
    asked = questions(SPECBENCH_CATEGORIES, "eval", arguments.prompts)
    known = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.exists() else []
    done = {(line["way"], line["nodes"], line["settings"], line["question"]) for line in known}
    with arguments.out.open("a") as file:
        for cell in cells(target, ways):
            for question in asked:
                if (*cell.key, question.id) not in done:
                    known.append(measured(target, cell, question))
                    file.write(json.dumps(known[-1]) + "\n")
                    file.flush()
            found = summed(line for line in known if (line["way"], line["nodes"], line["settings"]) == cell.key)
            print(f"{cell.way:24} {cell.nodes:3} " + " ".join(f"{k} {v}" for k, v in found.items()), flush=True)
    if arguments.table:
        write_table(arguments.table, known)


def cells(target: Target, ways: list[str]) -> Iterator[Cell]:
    """Yield all possible cells, method by method."""
    loaded: dict[str, Decoder] = {}
    plain: dict[str, tuple[Decoder, dict[tuple[int, ...], list[int]]]] = {}
    for way in ways:
        for nodes in (ONCE[way],) if way in ONCE else NODES:
            if way in IMPOSSIBLE and nodes > IMPOSSIBLE[way][0]:
                continue
            spec = MethodSpec.parse(filled(WAYS[way], nodes))
            options = method_options(spec)
            one = loaded[way].with_options(options) if way in loaded else load_method(spec, target)
            loaded.setdefault(way, one)
            reference = method_class(spec.name).baseline_for(options)
            about = json.dumps([one.metadata()], sort_keys=True, default=str)
            settings = hashlib.sha256(about.encode()).hexdigest()[:12]
            if reference.label not in plain:
                plain[reference.label] = load_method(reference, target), {}
            yield Cell(way, nodes, one, plain[reference.label], settings)


def filled(text: str, nodes: int) -> str:
    """Return the method with this number of nodes."""
    level = 4 if nodes % 3 == 0 else 5
    for name, value in {"LEVEL": level, "ROWS": nodes + 1, "N": nodes}.items():
        text = text.replace(f"={name}", f"={value}")
    return text


def measured(target: Target, cell: Cell, question: Question) -> dict[str, Any]:
    """Return the counts of one answer, compared with autoregressive decoding."""
    prompt, limits = (
        target.encode_chat([{"role": "user", "content": question.turns[0]}]),
        StopParams(256, target.eos_ids),
    )
    made = generate(cell.decoder, prompt, limits, SamplingParams())
    decoder, answers = cell.plain
    if tuple(prompt) not in answers:
        answers[tuple(prompt)] = generate(decoder, prompt, limits, SamplingParams()).tokens
    return {
        "way": cell.way, "nodes": cell.nodes, "question": question.id, "category": question.category,
        "settings": cell.settings, "steps": len(made.steps), "tokens": sum(s.tokens for s in made.steps),
        "drafted": sum(s.draft_nodes for s in made.steps), "verified": sum(s.verified_nodes for s in made.steps),
        "same": made.tokens == answers[tuple(prompt)],
    }  # fmt: skip


def summed(lines: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return pooled results of prompts: tau, and drafted and verified nodes per step."""
    frame = pd.DataFrame(lines)
    total = frame[["tokens", "drafted", "verified", "steps", "same"]].sum()
    each = {name: round(total[name] / total["steps"], 3) for name in ("tokens", "drafted", "verified")}
    return {
        "tau": each["tokens"], "drafted": each["drafted"], "verified": each["verified"], "prompts": len(frame),
        "steps": total["steps"], "identical": total["same"],
    }  # fmt: skip


def write_table(path: Path, known: list[dict[str, Any]]) -> None:
    """Write the newest settings of each cell as CSV."""
    newest = {(line["way"], line["nodes"]): line["settings"] for line in known}
    rows = []
    for (way, nodes), settings in newest.items():
        own = (line for line in known if (line["way"], line["nodes"], line["settings"]) == (way, nodes, settings))
        rows.append({"way": way, "nodes": nodes, **summed(own), "note": ""})
    for way, (most, why) in IMPOSSIBLE.items():
        rows += [{"way": way, "nodes": nodes, "note": why} for nodes in NODES if nodes > most]
    order = list(WAYS)
    rows.sort(key=lambda row: (order.index(row["way"]), row["nodes"]))
    columns = ["way", "nodes", "tau", "drafted", "verified", "prompts", "steps", "identical", "note"]
    counts = dict.fromkeys(("prompts", "steps", "identical"), "Int64")
    pd.DataFrame(rows, columns=columns).astype(counts).to_csv(path, index=False)


if __name__ == "__main__":
    main()
