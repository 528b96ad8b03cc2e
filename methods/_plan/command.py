"""`ssbench plan`: which kind of drafter could pay on a model and this device. `ssbench --help` imports it."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbench_ss.errors import UserError

if TYPE_CHECKING:
    from specbench_ss.engine.target import Target
    from specbench_ss.methods._plan.step_cost import StepCost
    from specbench_ss.results.acceptance_profile import Profile

TAUS = (1.5, 2.0, 3.0, 4.0)  # mean tokens per step for which speedups are shown
KIND_OF = {  # methods and names of other tools -> kind of drafter with the same cost
    "pld": "lookup", "suffix": "lookup", "lookahead": "lookup", "ngram": "lookup", "medusa": "medusa", "ss": "ss",
    "eagle": "eagle", "eagle2": "eagle", "eagle3": "eagle", "mtp": "eagle", "sd": "sd", "draft_model": "sd",
}  # fmt: skip
MOST_NODES = 256


def command(
    model: Annotated[str, typer.Option(help="Model to verify with: a name, folder, GGUF file or hub id.")] = "lab",
    nodes: Annotated[str, typer.Option(metavar="N,N", help="Draft tokens per step to measure.")] = "2,4,8,16",
    context: Annotated[int, typer.Option(min=8, help="Tokens before the first step.")] = 512,
    draft: Annotated[str, typer.Option(metavar="MODEL", help="Also measure this draft model (sd), as a chain.")] = "",
    draft_vocab: Annotated[
        int, typer.Option(min=0, metavar="N", help="Draft among N token ids (FR-Spec). 0: among all.")
    ] = 0,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="speculation_profile.json of a drafter, as `ssbench export --form profile` writes it: its τ gives the "
            "speedup that it would have here.",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Measured steps of each row.")] = 16,
    dtype: Annotated[str, typer.Option(help="Number format of the model, as for `run`.")] = "auto",
    device: Annotated[str, typer.Option(help="Device, as for `run`.")] = "auto",
    engine: Annotated[str, typer.Option(help="Engine, as for `run`.")] = "auto",
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run code of the model.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Measure a step with each kind of drafter, random and untrained, and print from which τ on it pays.

    A step verifies the draft tokens and drafts the next ones; its time depends on their number and not on what they
    are. A drafter pays where its mean tokens per step (τ) exceed the step in steps of ar.
    """
    from specbench_ss.cli.shared import print_json
    from specbench_ss.models.load import load_target
    from specbench_ss.results.acceptance_profile import read_profile

    found = None if profile is None else read_profile(profile)
    counts = _counts(nodes, found)
    target = load_target(model, dtype=dtype, device=device, engine=engine, trust_remote_code=trust_remote_code)
    if context + MOST_NODES > target.context_length:
        raise UserError(f"--context {context} leaves no room: the context of {model!r} has {target.context_length}")
    helper = load_target(draft, dtype=target.number_format, device=str(target.device)) if draft else None
    rows = [
        _row(kind, count, cost, found)
        for kind, count, cost in _measured(target, helper, counts, context, steps, draft_vocab)
    ]
    if as_json:
        print_json({"model": model, "context": context, "rows": rows})
    else:
        _print(target, context, rows, found)


def _counts(nodes: str, found: Profile | None) -> list[int]:
    """Return the numbers of draft tokens, those of the profile among them. Raises UserError for other text."""
    try:
        counts = {int(part) for part in nodes.split(",")}
    except ValueError:
        raise UserError(f"--nodes {nodes!r}: expected whole numbers, as in 2,4,8") from None
    if found is not None:
        counts |= found.mean_lengths().keys()
    if not all(1 <= count <= MOST_NODES for count in counts):
        raise UserError(f"draft tokens per step must be 1 to {MOST_NODES}, not {', '.join(map(str, sorted(counts)))}")
    return sorted(counts)


def _measured(
    target: Target, draft: Target | None, counts: list[int], context: int, steps: int, draft_vocab: int
) -> list[tuple[str, int, StepCost]]:
    """Return the cost of a step for each kind that the target can have and each number of draft tokens."""
    from specbench_ss.methods._plan.step_cost import EAGLE, LOOKUP, MEDUSA, SD, SS, STREAMS, random_drafter, step_cost

    kinds = [LOOKUP, MEDUSA, *([SS] if target.has_layer_access else []), EAGLE, *([SD] if draft else [])]
    found = []
    for kind in kinds:
        for count in counts:
            decoder = random_drafter(kind, target, count, draft_vocab, draft)
            found.append((kind, count, step_cost(decoder, context, (count + 1) * (1 + STREAMS), steps)))
            if target.graphs is not None:
                target.graphs.evict()  # a recording needs the cache that it was made over
    return found


def _row(kind: str, count: int, cost: StepCost, found: Profile | None) -> dict[str, Any]:
    """Return a row of the table, JSON-ready."""
    row = {
        "drafter": kind,
        "nodes": count,
        "step": cost.ratio,
        "draft_ms": cost.draft_ms,
        "verify_ms": cost.verify_ms,
        "ar_ms": cost.ar_ms,
        "speedup": {f"{tau:g}": tau / cost.ratio for tau in TAUS if tau <= count + 1},
    }
    tau = None if found is None else found.mean_lengths().get(count)
    if found is None or tau is None or KIND_OF.get(found.method or "", kind) != kind:
        return row
    return row | {"profile_tau": tau, "profile_speedup": tau / cost.ratio}


def _print(target: Target, context: int, rows: list[dict[str, Any]], found: Profile | None) -> None:
    from specbench_ss.cli.printing import print_table
    from specbench_ss.results.text import format_number, format_speedup

    about = f"{target.parameter_count / 1e6:,.1f} M parameters, {target.number_format}, {target.device}"
    print(f"{target.name} ({about}), {context:,} tokens of context: a step of ar takes {rows[0]['ar_ms']:.2f} ms")
    print("step: in steps of ar, of which drafting; a drafter pays where its τ is larger than its step")
    print("τ=N: speedup while decoding with N tokens per step; drafters are random, so their own τ is not known here")
    columns = ["drafter", "nodes", "step", "drafting", *(f"τ={tau:g}" for tau in TAUS)]
    predicted = [row for row in rows if "profile_tau" in row]
    columns += ["τ of profile", "speedup"] if predicted else []
    groups = list[list[list[str]]]()
    for kind, own in groupby(rows, key=lambda row: row["drafter"]):
        groups.append([])
        for row in own:
            cells = ["" if groups[-1] else kind, str(row["nodes"]), format_number(row["step"])]
            cells += [format_number(row["draft_ms"] / row["ar_ms"])]
            cells += [format_speedup(row["speedup"].get(f"{tau:g}")) for tau in TAUS]
            if predicted:
                cells += [format_number(row.get("profile_tau")), format_speedup(row.get("profile_speedup"))]
            groups[-1].append(cells)
    print_table(columns, groups, left=("drafter",))
    if predicted:
        best = max(predicted, key=lambda row: row["profile_speedup"])
        verdict = f"{best['profile_speedup']:.2f}× with {best['nodes']} draft tokens"
        print(f"expected of {found and found.method or 'the profile'}: {verdict}, while decoding")
