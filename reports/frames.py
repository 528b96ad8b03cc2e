"""A run as pandas frames: one row a sample, one row a step. Everything else in the report is read off these."""

from __future__ import annotations

from dataclasses import asdict

import pandas as pd

from specbench_ss.rows import Run

PARTS = ("draft", "verify", "accept", "host")


def samples(run: Run) -> pd.DataFrame:
    """One row a sample, answers left out; tau is None where there was no step."""
    frame = pd.DataFrame([row.as_dict() for row in run.rows]).drop(columns=["text", "token_ids"], errors="ignore")
    verdicts = {verdict.key: verdict.verdict for verdict in run.sameness}
    frame["sameness"] = [verdicts.get(row.key) for row in run.rows]
    frame["step_tokens"] = frame["tokens"] - frame["prefill_tokens"]
    return frame


def steps(run: Run) -> pd.DataFrame:
    """One row a step, with its method and category."""
    category = {row.key: row.category for row in run.rows}
    flat = [
        {"method": row.method, "category": category[row.key], "sample": row.key, "index": row.index, **asdict(row.step)}
        for row in run.steps
    ]
    columns = ["method", "category", "sample", "index", "depth", "accepted", "tokens", "nodes", "verified"]
    return pd.DataFrame(flat, columns=[*columns, *(f"{part}_s" for part in PARTS), "total_s"])


def tokens_per_step(steps: pd.DataFrame) -> pd.DataFrame:
    """method, tokens, steps, share: how often a step of the method kept so many tokens."""
    counted = steps.groupby(["method", "tokens"]).size().rename("steps").reset_index()
    counted["share"] = counted["steps"] / counted.groupby("method")["steps"].transform("sum")
    return counted


def acceptance(steps: pd.DataFrame) -> pd.DataFrame:
    """method, position, drafted, accepted, n, at, given: docs/metrics.md, acceptance_at[i] and acceptance_given[i]."""
    found = []
    for method, own in steps.groupby("method", sort=False):
        for position in range(1, int(own["depth"].max()) + 1):
            drafted = own["depth"] >= position
            reached = drafted & (own["accepted"] >= position - 1)
            accepted = int((drafted & (own["accepted"] >= position)).sum())
            n = int(reached.sum())
            if n:
                found.append((method, position, int(drafted.sum()), accepted, n, accepted / int(drafted.sum()), accepted / n))
    return pd.DataFrame(found, columns=["method", "position", "drafted", "accepted", "n", "at", "given"])


def time_per_token(samples: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """Milliseconds per kept token by part of the work (prefill and the parts of a step), one row a method."""
    good = samples[samples["status"] == "ok"]
    tokens = good.groupby("method")["tokens"].sum()
    frame = steps.groupby("method")[[f"{part}_s" for part in PARTS]].sum()
    frame.columns = pd.Index(PARTS)
    frame.insert(0, "prefill", good.groupby("method")["prefill_s"].sum())
    return frame.div(tokens, axis=0).mul(1000).fillna(0.0)


def step_times(steps: pd.DataFrame) -> pd.DataFrame:
    """Per method: steps, tau, mean milliseconds of a step and of its parts, median of the whole."""
    grouped = steps.groupby("method")
    frame = grouped[[f"{part}_s" for part in PARTS]].mean().mul(1000)
    frame.columns = pd.Index(PARTS)
    frame["total"] = grouped["total_s"].mean() * 1000
    frame["median"] = grouped["total_s"].median() * 1000
    frame["steps"] = grouped.size()
    frame["tau"] = grouped["tokens"].sum() / grouped.size()
    return frame
