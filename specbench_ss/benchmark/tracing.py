"""The timeline of one request under torch.profiler: a trace that Perfetto opens, and what it adds up to.

On a GPU it is of kernels, copies and fills; on a processor of operators that no other operator called. The profiler
takes time itself, so times in a trace are no measurement of a method's speed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

Span = tuple[float, float]  # start and end, microseconds
BINS = 120  # of the timeline in the summary
MOST_TOKENS = 64  # of a traced answer: a trace of hundreds is too large to look at
NO_CHATTER = ("KINETO_LOG_LEVEL", "6")  # the profiler's library else says on stderr when it starts and stops: "USDT:"
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "hipLaunchKernel")


def traced(request: Callable[[], int], device: torch.device, file: Path) -> dict[str, Any]:
    """Profile a request, write its trace, and return its summary. request: answers, and returns how many tokens."""
    os.environ.setdefault(*NO_CHATTER)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as watched:
        tokens = request()
    file.parent.mkdir(parents=True, exist_ok=True)
    watched.export_chrome_trace(str(file))
    return summary(list(watched.events() or ()), tokens) | {"file": file.name}


def trace_file(label: str, taken: Sequence[str] = ()) -> str:
    """Return a file name of plain characters for a method's label; another one than those taken."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", label).strip("-.") or "method"
    names = [f"{stem}{'' if not i else f'-{i}'}.json.gz" for i in range(len(taken) + 1)]
    return next(name for name in names if name not in taken)


def summary(events: Sequence[Any], tokens: int) -> dict[str, Any]:
    """Return what a profile adds up to, as JSON-ready data; times in seconds.

    what: `kernels` or `operators`. busy_share: share of the time from the first one to the last one in which any ran.
    launches_per_token: kernels that the host started, or operators. gaps: their number, mean and longest. timeline: the
    busy share of each of equally long spans of `span_s`.
    """
    on_device = [e for e in events if e.device_type.name != "CPU"]
    chosen = on_device or [e for e in events if e.cpu_parent is None]
    spans = merged([(e.time_range.start, e.time_range.end) for e in chosen])
    if not spans:
        return {"what": "nothing", "tokens": tokens}
    first, last = spans[0][0], spans[-1][1]
    launched = sum(e.name.startswith(LAUNCHES) for e in events) if on_device else len(chosen)
    gaps = [b[0] - a[1] for a, b in zip(spans, spans[1:], strict=False)]
    return {
        "what": "kernels" if on_device else "operators",
        "tokens": tokens,
        "wall_s": (last - first) / 1e6,
        "busy_share": sum(b - a for a, b in spans) / (last - first) if last > first else 0.0,
        "launches_per_token": launched / tokens if tokens else None,
        "gaps": {
            "number": len(gaps),
            "mean_s": sum(gaps) / len(gaps) / 1e6 if gaps else 0.0,
            "longest_s": max(gaps, default=0.0) / 1e6,
        },
        "span_s": (last - first) / BINS / 1e6,
        "timeline": [round(share, 4) for share in timeline(spans, BINS)],
    }


def merged(spans: Sequence[Span]) -> list[Span]:
    """Return the union of spans, as spans that do not touch, in order."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def timeline(spans: Sequence[Span], bins: int) -> list[float]:
    """Return the share of each bin, from the first span to the last one, that spans which do not touch cover."""
    first, last = spans[0][0], spans[-1][1]
    width = (last - first) / bins
    covered = [0.0] * bins
    for start, end in spans if width > 0 else ():
        for i in range(int((start - first) / width), min(bins, int((end - first) / width) + 1)):
            low, high = first + i * width, first + (i + 1) * width
            covered[i] += max(0.0, min(end, high) - max(start, low))
    return [min(1.0, c / width) for c in covered] if width > 0 else covered
