"""`ssbench plan`: which kind of drafter could pay on a model and this device. `ssbench --help` imports it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby, product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbench_ss.errors import UserError

if TYPE_CHECKING:
    from specbench_ss.engine.target import Target
    from specbench_ss.methods._plan.step_cost import StepCost
    from specbench_ss.results.acceptance_profile import Profile

TAUS = (1.5, 2.0, 3.0, 4.0)  # mean tokens per step for which speedups are shown
KIND_OF = {  # methods, and names of other tools -> kind of drafter with about the same cost
    **dict.fromkeys(("pld", "suffix", "recycling", "ngram"), "lookup"),
    **dict.fromkeys(("medusa", "medusa2"), "medusa"),
    **dict.fromkeys(("eagle", "eagle2", "eagle3", "mtp"), "eagle"),
    **dict.fromkeys(("sd", "draft_model"), "sd"),
    "ss": "ss",
}
MOST_DRAFTED = 256  # tokens of a step
NOISY = 1.15  # times between rows from which a line states it


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
    """Measure a step with each kind of drafter, untrained, and print from which τ on it pays.

    A step verifies the draft tokens and drafts the next ones; its time depends on their number and not on what they
    are. A drafter pays where its mean tokens per step (τ) exceed the step in steps of ar.
    """
    from specbench_ss.cli.shared import print_json
    from specbench_ss.models.load import load_target
    from specbench_ss.results.acceptance_profile import read_profile

    found = None if profile is None else read_profile(profile)
    counts, kind = _counts(nodes, found), _kind_of(found, bool(draft))
    target = load_target(model, dtype=dtype, device=device, engine=engine, trust_remote_code=trust_remote_code)
    helper = load_target(draft, dtype=target.number_format, device=str(target.device)) if draft else None
    _check(target, helper, counts, context, steps, draft_vocab)
    rows = [
        _row(of, cost, found if of == kind or kind is None else None)
        for of, cost in _measured(target, helper, counts, context, steps, draft_vocab)
    ]
    if not rows:
        raise UserError(f"no kind of drafter could be measured with {model!r}")
    if as_json:
        settings = {
            "model": model,
            "dtype": target.number_format,
            "device": str(target.device),
            "engine": target.engine,
        }
        print_json(settings | {"context": context, "draft": draft, "draft_vocab": draft_vocab, "rows": rows})
    else:
        if found and (about := found.about_length()):
            print(f"profile: {about}")
        _print(target, context, rows, found.method if found and kind else None)


def _counts(nodes: str, found: Profile | None) -> list[int]:
    """Return the numbers of draft tokens, those of the profile among them. Raises UserError for other text."""
    try:
        counts = {int(part) for part in nodes.split(",")}
    except ValueError:
        raise UserError(f"--nodes {nodes!r}: expected whole numbers, as in 2,4,8") from None
    if found is not None:
        counts |= found.mean_lengths().keys()
    if wrong := [count for count in sorted(counts) if not 1 <= count <= MOST_DRAFTED]:
        raise UserError(f"draft tokens per step must be 1 to {MOST_DRAFTED}, not {wrong[0]}")
    return sorted(counts)


def _kind_of(found: Profile | None, with_draft: bool) -> str | None:
    """Return the kind of drafter that a profile describes, None if it names none. Raises UserError for others."""
    if found is None or found.method is None:
        return None
    kind = KIND_OF.get(found.method.lower())
    if kind is None:
        raise UserError(f"--profile: no kind of drafter here costs what {found.method!r} does: {', '.join(KIND_OF)}")
    if kind == "sd" and not with_draft:
        raise UserError(f"--profile is of {found.method!r}: give its draft model with --draft")
    return kind


def _check(target: Target, draft: Target | None, counts: list[int], context: int, steps: int, draft_vocab: int) -> None:
    """Raise UserError for options that the models do not allow."""
    from specbench_ss.methods._plan.step_cost import KEPT, WARMUP
    from specbench_ss.methods.sd.draft import mismatch

    longest = context + (steps + WARMUP) * KEPT + max(counts)
    for one in (target, draft):
        if one is not None and longest > one.context_length:
            needed = f"--context {context} with {steps} steps needs {longest:,} tokens"
            raise UserError(f"{needed}, more than the context of {one.name!r} ({one.context_length:,})")
    if draft_vocab > target.vocab_size:
        raise UserError(f"--draft-vocab must be at most {target.vocab_size:,}, the size of the vocabulary")
    if draft is not None and (problem := mismatch(target, draft)):
        raise UserError(f"--draft {draft.name!r} has another vocabulary: {problem}")


def _measured(
    target: Target, draft: Target | None, counts: list[int], context: int, steps: int, draft_vocab: int
) -> Iterator[tuple[str, StepCost]]:
    """Yield the cost of a step for each kind and number of draft tokens; warn of those that are left out."""
    from specbench_ss.bench.timed_sample import memory_given_back
    from specbench_ss.methods._plan.step_cost import EAGLE, LOOKUP, MEDUSA, SD, SS, STREAMS, step_cost, untrained

    for kind, count in product((LOOKUP, MEDUSA, SS, EAGLE, *([SD] if draft else [])), counts):
        try:
            decoder = untrained(kind, target, count, draft_vocab, draft)
            with memory_given_back(decoder):
                yield kind, step_cost(decoder, context, (count + 1) * (1 + STREAMS), steps)
        except UserError as error:
            warnings.warn(f"{kind} with {count} draft tokens is left out: {error}", stacklevel=2)
        if target.graphs is not None:
            target.graphs.evict()  # a recording needs the cache that it was made over


def _row(kind: str, cost: StepCost, found: Profile | None) -> dict[str, Any]:
    """Return a row of the table, JSON-ready. found: the profile of this kind of drafter."""
    row: dict[str, Any] = {"drafter": kind, **asdict(cost)}
    row["speedup"] = {f"{tau:g}": tau / cost.ratio for tau in TAUS if tau <= cost.nodes + 1}
    tau = None if found is None else found.mean_lengths().get(cost.nodes)
    return row if tau is None else row | {"profile_tau": tau, "profile_speedup": tau / cost.ratio}


def _print(target: Target, context: int, rows: list[dict[str, Any]], profiled: str | None) -> None:
    """Print the table. profiled: method of the profile, if it names one."""
    from specbench_ss.cli.printing import print_table
    from specbench_ss.results.table import Column
    from specbench_ss.results.text import format_number, format_speedup

    about = f"{target.parameter_count / 1e6:,.1f} M parameters, {target.number_format}, {target.device}"
    print(f"{target.name} ({about}), {context:,} tokens of context: a step of ar takes {rows[0]['ar_ms']:.2f} ms")
    print("step: in steps of ar, of which drafting; a drafter pays where its τ is larger than its step")
    print(
        "τ=N: speedup while decoding with N tokens per step; the drafters are untrained, so they have no τ of their own"
    )

    def predicted_at(tau: float) -> Column:
        return Column("speedup", f"τ={tau:g}", lambda row: format_speedup(row["speedup"].get(f"{tau:g}")))

    columns = [
        Column("drafter", "drafter", lambda row: row["drafter"], left=True),
        Column("nodes", "nodes", lambda row: str(row["nodes"])),
        Column("ratio", "step", lambda row: format_number(row["ratio"])),
        Column("drafting", "drafting", lambda row: format_number(row["draft_ms"] / row["ar_ms"])),
        *map(predicted_at, TAUS),
    ]
    predicted = [row for row in rows if "profile_tau" in row]
    if predicted:
        columns.append(Column("profile_tau", "τ of profile", lambda row: format_number(row.get("profile_tau"))))
        columns.append(Column("profile_speedup", "speedup", lambda row: format_speedup(row.get("profile_speedup"))))
    print_table(columns, [list(own) for _, own in groupby(rows, key=lambda row: row["drafter"])])
    noise = _noise(rows)
    if noise:
        print(noise)
    if predicted and profiled:
        best = max(predicted, key=lambda row: row["profile_speedup"])
        verdict = f"{best['profile_speedup']:.2f}× with {best['nodes']} draft tokens"
        print(f"expected of {profiled}: {verdict}, while decoding{' (noisy)' if noise else ''}")


def _noise(rows: list[dict[str, Any]]) -> str:
    """Return a line if steps of `ar`, which are measured again for each row, took unequally long; else ''."""
    least, most = (end(row["ar_ms"] for row in rows) for end in (min, max))
    if most <= NOISY * least:
        return ""
    return f"noisy: a step of ar took {least:.2f} ms in one row and {most:.2f} ms in another; repeat with more --steps"
