"""A run's steps as a pandas frame, for what the summary does not hold: how they are distributed."""

from __future__ import annotations

from dataclasses import asdict

import pandas as pd

from specbench_ss.runs.rows import Run


def steps(run: Run) -> pd.DataFrame:
    """One row a step, with its method and category; empty, but with its columns, where there is none."""
    category = {row.key: row.category for row in run.rows}
    flat = [
        {"method": row.method, "category": category[row.key], "index": row.index, **asdict(row.step)}
        for row in run.steps
    ]
    return pd.DataFrame(flat) if flat else pd.DataFrame(columns=["method", "category", "index", "tokens", "total_s"])


def tokens_per_step(steps: pd.DataFrame) -> pd.DataFrame:
    """method, tokens, steps, share: how often a step of the method kept so many tokens."""
    counted = steps.groupby(["method", "tokens"]).size().rename("steps").reset_index()
    counted["share"] = counted["steps"] / counted.groupby("method")["steps"].transform("sum")
    return counted


def median_step_ms(steps: pd.DataFrame) -> dict[str, float]:
    """Median milliseconds of a step, by method."""
    return {str(method): float(ms) for method, ms in (steps.groupby("method")["total_s"].median() * 1000).items()}
