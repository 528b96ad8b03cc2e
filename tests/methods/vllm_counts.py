"""Greedy answers and draft counts of vLLM; a script for the Python of an environment that has it installed.

`python vllm_counts.py JOB OUT`: JOB is a JSON file with the folder of a model, prompts as token ids, the number of new
tokens and named `--speculative-config`s. OUT receives, for each name, [tokens, drafts, accepted] of every prompt, or
the error as a string. vLLM is imported once; each configuration has a process of its own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

COUNTERS = ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
LIKE_OURS = {  # as ssbench decodes: float32, one request at a time, no step taken from a cache or a graph
    "dtype": "float32", "enforce_eager": True, "enable_prefix_caching": False, "disable_log_stats": False,
    "max_num_seqs": 1, "max_model_len": 1024,
}  # fmt: skip


def answers(job: dict[str, Any], speculative: dict[str, Any]) -> list[Any]:
    """Return [tokens, drafts, accepted] of every prompt."""
    from vllm import LLM, SamplingParams

    engine = LLM(job["model"], speculative_config=speculative, **LIKE_OURS)
    greedy = SamplingParams(temperature=0.0, max_tokens=job["tokens"], ignore_eos=True)
    found = []
    for ids in job["prompts"]:
        before = counts(engine)
        [output] = engine.generate({"prompt_token_ids": ids}, greedy, use_tqdm=False)
        after = counts(engine)
        found.append([list(output.outputs[0].token_ids), *(a - b for a, b in zip(after, before, strict=True))])
    return found


def counts(engine: Any) -> list[int]:
    """Return the engine's counters so far."""
    values = {metric.name: getattr(metric, "value", 0) for metric in engine.get_metrics()}
    return [int(values.get(name, 0)) for name in COUNTERS]


def in_own_process(job: dict[str, Any], speculative: dict[str, Any], out: Path) -> Any:
    """Return what `answers` gives, or its error as a string, from a fork: vLLM holds one engine a process."""
    child = os.fork()
    if not child:
        try:
            found: Any = answers(job, speculative)
        except BaseException as error:  # noqa: BLE001 - every refusal is a result
            found = f"{type(error).__name__}: {error}"
        out.write_text(json.dumps(found))
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
    return json.loads(out.read_text()) if out.exists() else "vLLM's process ended without an answer"


if __name__ == "__main__":
    import vllm  # noqa: F401 - takes most of the time, once

    given, target = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    named = given["speculative"].items()
    target.write_text(json.dumps({n: in_own_process(given, s, target.with_suffix(f".{n}")) for n, s in named}))
