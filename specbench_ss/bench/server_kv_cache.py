"""KV-cache capacity of vLLM's servers, from the labels of a metric or from the log of a start.

The labels are the fields of CacheConfig (vllm/config/cache.py). Releases without `kv_cache_size_tokens` have blocks and
their size there, and the largest concurrency in the log alone (vllm/v1/core/kv_cache_utils.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

METRIC = "vllm:cache_config_info"
LABEL = re.compile(r'\b(\w+)="((?:[^"\\]|\\.)*)"')
NUMBER = re.compile(r"\d{1,15}(\.\d+)?")
SIZE = re.compile(r"KV cache size: ([\d,]{1,20}) tokens")
CONCURRENCY = re.compile(r"Maximum concurrency for [\d,]+ tokens per request: (\d{1,9}\.\d+)x")


def read_kv_cache(metrics: str, log: str, unread: str = "") -> dict[str, Any]:
    """Return the tokens of a server's KV cache, the requests of the longest context that it holds, and the source.

    The numbers have vLLM's names; None: not reported. metrics: text of /metrics. unread: the reason why there is none.
    log: output of a started server; of data-parallel engines the last one's counts.
    """
    engines = [dict(LABEL.findall(line)) for line in metrics.split("\n") if line.startswith(METRIC)]
    tokens, requests = _total(engines, "kv_cache_size_tokens"), _total(engines, "kv_cache_max_concurrency")
    if tokens is None:  # too many where layers keep different caches
        tokens = _total(engines, "num_gpu_blocks", "block_size")
    source, sizes, ratios = "reported in /metrics", SIZE.findall(log), CONCURRENCY.findall(log)
    if tokens is None:
        tokens = float(sizes[-1].replace(",", "")) if sizes else None
        source = "reported in its log" if sizes else f"not reported: {unread or f'no {METRIC} in its /metrics'}"
    if requests is None and ratios:
        requests = float(ratios[-1])
    size = None if tokens is None else int(tokens)
    return {"kv_cache_size_tokens": size, "kv_cache_max_concurrency": requests, "kv_cache": source}


def _total(engines: Sequence[Mapping[str, str]], name: str, factor: str = "") -> float | None:
    """Return the sum of a label over a server's engines, each times another label; None if one is no number."""
    texts = [labels.get(one, "") for labels in engines for one in (name, factor) if one]
    if not texts or not all(map(NUMBER.fullmatch, texts)):
        return None
    return sum(float(labels[name]) * float(labels[factor] if factor else 1) for labels in engines)
