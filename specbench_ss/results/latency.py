"""How long a user waits: quantiles over samples of time to first token, time per output token and whole requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specbench_ss.runs.rows import Row

QUANTILES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}
TIMES = ("ttft", "tpot", "latency")


def latencies(rows: Sequence[Row]) -> dict[str, Any]:
    """Return ttft_s_p50 to latency_s_p99 of good samples, in seconds; None where no sample has such a time.

    Time per output token is that of the steps over the tokens that they produced; the first token is prefill's.
    """
    times = {
        "ttft": [row.prefill_s for row in rows if row.prefill_s is not None],
        "tpot": [row.decode_s / later for row in rows if row.decode_s is not None and (later := _later(row)) > 0],
        "latency": [row.wall_s for row in rows if row.wall_s is not None],
    }
    return {
        f"{name}_s_{quantile}": float(np.quantile(times[name], share)) if times[name] else None
        for name in TIMES
        for quantile, share in QUANTILES.items()
    }


def _later(row: Row) -> int:
    return (row.tokens or 0) - (row.prefill_tokens or 0)
