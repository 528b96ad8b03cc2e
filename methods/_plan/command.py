"""`ssbench plan`: which kind of drafter could pay on a model and this device. `ssbench --help` imports it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import groupby, product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specbench_ss.errors import UserError

if TYPE_CHECKING:
    from specbench_ss.engine.target import Target
    from specbench_ss.results.acceptance_profile import Profile

TAUS = (1.5, 2.0, 3.0, 4.0)  # mean tokens per step for which speedups are shown
MOST_DRAFTED = 256  # tokens of a step
MOST_REQUESTS = 1024  # at a time, as for `run`
NOISY = 1.15  # times between rows from which a line states it
WITH_RUN = {"against", "steps", "trust_remote_code", "as_json"}  # options that go with --against


def command(
    ctx: typer.Context,
    model: Annotated[str, typer.Option(help="Model to verify with: a name, folder, GGUF file or hub id.")] = "lab",
    nodes: Annotated[str, typer.Option(metavar="N,N", help="Draft tokens per step to measure.")] = "2,4,8,16",
    batch_size: Annotated[str, typer.Option(metavar="N,N", help="Requests at a time, as for `run`.")] = "1",
    context: Annotated[str, typer.Option(metavar="N,N", help="Tokens before the first step, at least 8.")] = "512",
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
    against: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Predict the methods of this run and compare with its measured speedups."),
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
    from specbench_ss.engine.engines import AUTO, EAGER, GRAPH
    from specbench_ss.methods._plan.step_cost import LEAST_CONTEXT
    from specbench_ss.models.load import load_target
    from specbench_ss.results.acceptance_profile import read_profile

    if against is not None:
        _check_alone(ctx)
        _against(against, steps, trust_remote_code, as_json)
        return
    found = None if profile is None else read_profile(profile)
    batch_sizes = _numbers(batch_size, "--batch-size", 1, MOST_REQUESTS)
    contexts = _numbers(context, "--context", LEAST_CONTEXT)
    shape = Shape(_counts(nodes, found), contexts, batch_sizes, steps, draft_vocab)
    kind = _kind_of(found, bool(draft))
    if batch_sizes != [1] and engine == GRAPH:
        raise UserError(f"--batch-size does not support --engine {GRAPH}; use --engine {EAGER}")
    engine = EAGER if batch_sizes != [1] and engine == AUTO else engine
    target = load_target(model, dtype=dtype, device=device, engine=engine, trust_remote_code=trust_remote_code)
    helper = load_target(draft, dtype=target.number_format, device=str(target.device)) if draft else None
    _check(target, helper, shape)
    rows = [_with_profile(row, found, kind) for row in _measured(target, helper, shape)]
    if not rows:
        raise UserError(f"no kind of drafter could be measured with {model!r}")
    best = _best(rows) if found and kind else []
    if as_json:
        settings = {
            "model": model,
            "dtype": target.number_format,
            "device": str(target.device),
            "engine": target.engine,
        }
        print_json(settings | {"draft": draft, "draft_vocab": draft_vocab, "rows": rows, "best": best})
        return
    if found and (about := found.about_length()):
        print(f"profile: {about}")
    _print(target, rows)
    for row in best:
        _print_best(row, [other for other in rows if _condition(other) == _condition(row)], str(found and found.method))


@dataclass(frozen=True, slots=True)
class Shape:
    """Settings of the measured steps: draft tokens, contexts and batch sizes, steps of each row, drafted token ids."""

    counts: list[int]
    contexts: list[int]
    batch_sizes: list[int]
    steps: int
    draft_vocab: int


def _check_alone(ctx: typer.Context) -> None:
    """Raise UserError for an option that the run of --against sets."""
    from specbench_ss.runs.run_options import flag

    for name in ctx.params.keys() - WITH_RUN:
        if ctx.get_parameter_source(name).name != "DEFAULT":  # type: ignore[union-attr]
            raise UserError(f"--against does not go with {flag(name)}: leave it out")


def _against(path: Path, steps: int, trust_remote_code: bool, as_json: bool) -> None:
    """Predict the methods of a run and print the errors."""
    from specbench_ss.cli.shared import print_json
    from specbench_ss.methods._plan.against import predicted_run, print_predictions

    made = predicted_run(path, steps, trust_remote_code)
    if as_json:
        print_json(made.as_dict())
    else:
        print_predictions(made)
        print_noise(made.ar_rows)


def _numbers(text: str, option: str, least: int, most: int | None = None) -> list[int]:
    """Return the numbers of a list in ascending order. Raises UserError for other text, and for other numbers."""
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise UserError(f"{option} {text!r}: expected whole numbers, as in 8,16") from None
    for number in (numbers[0], numbers[-1]):
        if number < least or (most is not None and number > most):
            bounds = f"at least {least}" if most is None else f"{least} to {most}"
            raise UserError(f"{option} must be {bounds}, not {number}")
    return numbers


def _counts(nodes: str, found: Profile | None) -> list[int]:
    """Return the numbers of draft tokens, those of the profile among them. Raises UserError for other text."""
    counts = {*_numbers(nodes, "--nodes", 1, MOST_DRAFTED)}
    stated = [] if found is None else sorted(found.mean_lengths())
    if wrong := [count for count in stated if not 1 <= count <= MOST_DRAFTED]:
        raise UserError(f"--profile: its draft tokens per step must be 1 to {MOST_DRAFTED}, not {wrong[0]}")
    return sorted(counts.union(stated))


def _kind_of(found: Profile | None, with_draft: bool) -> str | None:
    """Return the kind of drafter that a profile describes, None if it names none. Raises UserError for others."""
    from specbench_ss.methods._plan.step_cost import KIND_OF, SD

    if found is None or found.method is None:
        return None
    kind = KIND_OF.get(found.method.lower())
    if kind is None:
        raise UserError(f"--profile: no kind of drafter here costs what {found.method!r} does: {', '.join(KIND_OF)}")
    if kind == SD and not with_draft:
        raise UserError(f"--profile is of {found.method!r}: give its draft model with --draft")
    return kind


def _check(target: Target, draft: Target | None, shape: Shape) -> None:
    """Raise UserError for options that the models do not allow."""
    from specbench_ss.methods._plan.step_cost import growth
    from specbench_ss.methods.sd.draft import mismatch

    if shape.batch_sizes != [1]:
        target.require_layer_access("--batch-size")
    longest = shape.contexts[-1] + growth(shape.steps) + shape.counts[-1]
    for one in (target, draft):
        if one is not None and longest > one.context_length:
            needed = f"--context {shape.contexts[-1]} with {shape.steps} steps needs {longest:,} tokens"
            raise UserError(f"{needed}, more than the context of {one.name!r} ({one.context_length:,})")
    if shape.draft_vocab > target.vocab_size:
        raise UserError(f"--draft-vocab must be at most {target.vocab_size:,}, the size of the vocabulary")
    if draft is not None and (problem := mismatch(target, draft)):
        raise UserError(f"--draft {draft.name!r} has another vocabulary: {problem}")


def _measured(target: Target, draft: Target | None, shape: Shape) -> Iterator[dict[str, Any]]:
    """Yield a row for each kind of drafter, context, batch size and number of draft tokens; warn of those left out."""
    from specbench_ss.bench.timed_sample import memory_given_back
    from specbench_ss.methods._plan.step_cost import EAGLE, LOOKUP, MEDUSA, SD, SS, step_cost, untrained

    kinds = (LOOKUP, MEDUSA, SS, EAGLE, *([SD] if draft else []))
    for kind, context, batch_size, count in product(kinds, shape.contexts, shape.batch_sizes, shape.counts):
        condition = {"drafter": kind, "context": context, "batch_size": batch_size}
        try:
            decoder = untrained(kind, target, count, shape.draft_vocab, draft)
            with memory_given_back(decoder):
                cost = step_cost(decoder, context, shape.steps, batch_size)
            speedups = {f"{tau:g}": tau / cost.ratio for tau in TAUS if tau <= cost.nodes + 1}
            yield condition | asdict(cost) | {"speedup": speedups}
        except UserError as error:
            of = f"{kind} with {count} draft tokens, batch size {batch_size} and {context:,} tokens of context"
            warnings.warn(f"{of} is left out: {error}", stacklevel=2)
        if target.graphs is not None:
            target.graphs.evict()  # a recording needs the cache that it was made over


def _condition(row: dict[str, Any]) -> tuple[int, int]:
    """Return the context and the batch size of a row."""
    return row["context"], row["batch_size"]


def _with_profile(row: dict[str, Any], found: Profile | None, kind: str | None) -> dict[str, Any]:
    """Return a row with the τ and the speedup of a profile, if it is of this kind of drafter or of no certain one."""
    tau = None if found is None or kind not in (None, row["drafter"]) else found.mean_lengths().get(row["nodes"])
    return row if tau is None else row | {"profile_tau": tau, "profile_speedup": tau / row["ratio"]}


def _best(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the row with the largest speedup of the profile for each context and batch size."""
    predicted = sorted((row for row in rows if "profile_tau" in row), key=_condition)
    return [max(own, key=lambda row: row["profile_speedup"]) for _, own in groupby(predicted, key=_condition)]


def _print(target: Target, rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    from specbench_ss.cli.printing import print_table
    from specbench_ss.results.table import Column
    from specbench_ss.results.text import format_number, format_speedup

    print(f"{target.name}: {target.parameter_count / 1e6:,.1f} M parameters, {target.number_format}, {target.device}")
    print("step: in steps of ar, of which drafting; a drafter pays where its τ is larger than its step")
    print(
        "τ=N: speedup while decoding with N tokens per step; the drafters are untrained, so they have no τ of their own"
    )

    def predicted_at(tau: float) -> Column:
        return Column("speedup", f"τ={tau:g}", lambda row: format_speedup(row["speedup"].get(f"{tau:g}")))

    def drafting(row: dict[str, Any]) -> float | None:
        return None if row["draft_ms"] is None else row["draft_ms"] / row["ar_ms"]

    columns = [
        Column("drafter", "drafter", lambda row: row["drafter"], left=True),
        Column("context", "context", lambda row: f"{row['context']:,}"),
        Column("batch_size", "batch", lambda row: str(row["batch_size"])),
        Column("nodes", "nodes", lambda row: str(row["nodes"])),
        Column("ar_ms", "ar, ms", lambda row: format_number(row["ar_ms"])),
        Column("ratio", "step", lambda row: format_number(row["ratio"])),
        Column("drafting", "drafting", lambda row: format_number(drafting(row))),
        *map(predicted_at, TAUS),
    ]
    if any("profile_tau" in row for row in rows):
        columns.append(Column("profile_tau", "τ of profile", lambda row: format_number(row.get("profile_tau"))))
        columns.append(Column("profile_speedup", "speedup", lambda row: format_speedup(row.get("profile_speedup"))))
    print_table(columns, [list(own) for _, own in groupby(rows, key=lambda row: row["drafter"])])
    print_noise(rows)


def print_noise(rows: Iterable[dict[str, Any]]) -> None:
    """Print a line for each context and batch size at which steps of `ar` took unequally long."""
    for (context, batch_size), least, most in _noisy(rows):
        where = f"with batch size {batch_size} and {context:,} tokens of context"
        print(f"noisy: a step of ar {where} took {least:.2f} ms in one row and {most:.2f} ms in another; raise --steps")


def _noisy(rows: Iterable[dict[str, Any]]) -> Iterator[tuple[tuple[int, int], float, float]]:
    """Yield (context, batch size) at which `ar`, measured again for each row, took unequally long: least, most."""
    for condition, own in groupby(sorted(rows, key=_condition), key=_condition):
        times = [row["ar_ms"] for row in own]
        if max(times) > NOISY * min(times):
            yield condition, min(times), max(times)


def _print_best(best: dict[str, Any], rows: list[dict[str, Any]], method: str) -> None:
    """Print the expected speedup of a profile for a context and a batch size. rows: of this context and batch size."""
    tried = sorted(row["nodes"] for row in rows if "profile_tau" in row)
    options = f"best of {', '.join(map(str, tried))}" if len(tried) > 1 else "the only number that the profile has"
    speedup, where = best["profile_speedup"], f"batch size {best['batch_size']}, {best['context']:,} tokens of context"
    verdict = f"{speedup:.2f}× while decoding with {best['nodes']} draft tokens ({options})"
    doubts = [*(["it does not pay"] if speedup <= 1 else []), *(["noisy"] if [*_noisy(rows)] else [])]
    print(f"expected of {method}, {where}: {'; '.join([verdict, *doubts])}")
