"""Command `ssbench judge`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from specbench_ss import registry
from specbench_ss.bench.judge import FilePrompts, Judge, Plan, Prompts, judge, plan, request_function
from specbench_ss.bench.server_client import without_user
from specbench_ss.cli.shared import print_warning
from specbench_ss.errors import UserError
from specbench_ss.results.analysis import analyse
from specbench_ss.results.frames import rewrite_scores
from specbench_ss.results.text import format_number, pluralize
from specbench_ss.runs.records import Run
from specbench_ss.runs.run_dir import read_run


def command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Directory of the run.")],
    model: Annotated[str, typer.Option("--model", help="Name of the judge model at its endpoint.")],
    base_url: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Address of an OpenAI-compatible endpoint, as in http://localhost:8000/v1. "
            "The key is read from OPENAI_API_KEY.",
        ),
    ],
    yes: Annotated[bool, typer.Option("--yes", help="Send the answers. Without it, nothing is sent.")] = False,
    methods: Annotated[
        str | None, typer.Option(metavar="A,B", help="Judge the answers of these methods of the run only.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Prompts in the format of MT-Bench's judge_prompts.jsonl. Default: the suite's fetched prompts, else "
            "short ones of this project.",
        ),
    ] = None,
    price: Annotated[
        str | None,
        typer.Option(metavar="IN,OUT", help="Price of a million tokens sent and received, for the estimate."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum length of the judge's answer in tokens.")] = 1024,
    retries: Annotated[int, typer.Option(min=0, help="Number of retries of a failed request.")] = 5,
    workers: Annotated[int, typer.Option(min=1, help="Number of concurrent requests.")] = 4,
) -> None:
    """Let a model rate a run's answers from 1 to 10. The cost is printed first; --yes sends the answers."""
    stored = read_run(run)
    labels = [part for part in (methods or "").split(",") if part]
    planned = plan(stored, Judge.at(model, base_url, max_tokens), _prompts(stored, prompts), labels)
    _print_plan(planned, base_url, max_tokens, _prices(price))
    if not planned.keys:
        print("Every output has a rating.")
    elif not yes and planned.to_send:
        print("Nothing was sent. Add --yes to send these.")
        return
    else:
        try:
            unrated = judge(run, planned, request_function(model, base_url, retries, max_tokens), workers, _progress)
        finally:
            if problem := rewrite_scores(run):
                print_warning(problem)
        if unrated:
            print_warning(f"{unrated} replies have no rating; repeat the command to retry")
    _print_scores(read_run(run))


def _prompts(run: Run, file: Path | None) -> Prompts:
    """Return the given prompts, the suite's, or those of this project."""
    if file is None:
        data = run.manifest["config"].get("data")
        try:
            suite = registry.load_suite(run.manifest["suite"]["name"])
        except UserError:  # of a plugin that is not installed
            return Prompts()
        file = suite.judge_prompts(None if data is None else Path(data))
    return Prompts() if file is None else FilePrompts(file)


def _prices(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        sent, received = (float(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"--price must be two numbers, as in 2.5,10, not {text}") from None
    return sent, received


def _print_plan(plan: Plan, base_url: str, max_tokens: int, prices: tuple[float, float] | None) -> None:
    calls, sent = len(plan.to_send), plan.input_tokens
    print(f"judge      {plan.judge.name} at {without_user(base_url)}, prompts {plan.prompts}, temperature 0")
    print(f"answers    {plan.answers}, {len(plan.messages)} of them different")
    if plan.left_out:
        print(f"left out   {plan.left_out} answers to a third or later turn, which these prompts do not support")
    if plan.damaged:
        print(f"skipped    {plan.damaged} answers, since their question or an answer before them is lost")
    print(f"calls      {calls}: about {sent:,} tokens sent, at most {calls * max_tokens:,} received")
    if prices is not None:
        most = (sent * prices[0] + calls * max_tokens * prices[1]) / 1e6
        print(f"cost       at most about {most:.2f}, by the prices given")


def _progress(done: int, calls: int) -> None:
    if sys.stderr.isatty():
        print(f"\rjudged {done} of {calls}", end="\n" if done == calls else "", file=sys.stderr, flush=True)


def _print_scores(run: Run) -> None:
    rated = [row for row in analyse(run).overall if row.judge_score is not None]
    for row in rated:
        print(
            f"{row.method:<10} judged {format_number(row.judge_score)} over {pluralize(row.judge_score_n, 'question')}"
        )
    if not rated:
        raise UserError("no reply of the judge has a rating")
    print(f"tables with these ratings: ssbench report {run.path}")
