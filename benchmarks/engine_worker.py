"""One engine with one configuration: loads a model, then answers requests of standard input one at a time.

A script for the Python of the engine's environment, started by `vs_engines.py`. The first line is its setup as JSON,
answered by {"version": ..}. Each later line, {"ids": [..], "new": n}, is answered by {"seconds": .., "tokens": [..]}:
greedy decoding of exactly n tokens, end tokens included.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

Answer = Callable[[Sequence[int], int], list[int]]  # prompt and number of new tokens -> output tokens
START_S = 300.0  # limit of llama-server's start


def ssbench(setup: dict[str, Any]) -> tuple[str, Answer]:
    """Load a method of this project."""
    import torch

    torch.set_num_threads(setup["threads"])
    from specbench_ss import load_method, load_model
    from specbench_ss.engine.generate import StopParams, generate
    from specbench_ss.engine.sampling import SamplingParams
    from specbench_ss.version import __version__

    target = load_model(setup["model"], dtype=setup["dtype"])
    decoder = load_method(setup["method"], target)

    def answer(ids: Sequence[int], new: int) -> list[int]:
        return generate(decoder, list(ids), StopParams(new), SamplingParams()).tokens

    return f"ssbench {__version__}, torch {torch.__version__}, {target.kernel_summary}", answer


def transformers(setup: dict[str, Any]) -> tuple[str, Answer]:
    """Load transformers' `generate`. settings: further arguments; compiled: a static cache and torch.compile."""
    import torch
    import transformers as library

    torch.set_num_threads(setup["threads"])
    model = library.AutoModelForCausalLM.from_pretrained(setup["folder"], dtype=getattr(torch, setup["dtype"])).eval()
    model.generation_config.eos_token_id = None
    further = dict(setup["settings"])
    if further.pop("compiled", False):
        config = library.CompileConfig(mode="default")
        config._compile_all_devices = True  # transformers' own flag: without it a CPU compiles nothing
        further |= {"cache_implementation": "static", "compile_config": config}

    def answer(ids: Sequence[int], new: int) -> list[int]:
        prompt = torch.tensor([list(ids)])
        given = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": new, "pad_token_id": 0, **further}
        out = model.generate(prompt, do_sample=False, **given)
        return out[0, len(ids) :].tolist()

    return f"transformers {library.__version__}, torch {torch.__version__}", answer


def vllm(setup: dict[str, Any]) -> tuple[str, Answer]:
    """Load vLLM in this process, with one request at a time and without a prefix cache."""
    import vllm as library

    engine = library.LLM(
        setup["folder"],
        dtype=setup["dtype"],
        speculative_config=setup["settings"] or None,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_num_seqs=1,
        max_model_len=setup["context"],
    )

    def answer(ids: Sequence[int], new: int) -> list[int]:
        greedy = library.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        [output] = engine.generate({"prompt_token_ids": list(ids)}, greedy, use_tqdm=False)
        return list(output.outputs[0].token_ids)

    return f"vLLM {library.__version__}", answer


def llama_cpp(setup: dict[str, Any]) -> tuple[str, Answer]:
    """Start llama-server; it is terminated when this process ends. settings: its options without dashes."""
    address = f"http://127.0.0.1:{setup['port']}"
    options = [word for name, value in setup["settings"].items() for word in (f"--{name}", str(value))]
    command = [setup["executable"], "-m", setup["gguf"], "--host", "127.0.0.1", "--port", str(setup["port"])]
    command += ["-t", str(setup["threads"]), "-c", str(setup["context"]), "-np", "1", "--no-warmup", *options]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    atexit.register(server.terminate)
    until = time.monotonic() + START_S
    while True:
        if server.poll() is not None or time.monotonic() > until:
            raise SystemExit(f"{' '.join(command)} does not answer")
        try:
            build = json.load(urllib.request.urlopen(f"{address}/props", timeout=5)).get("build_info", "")
            break
        except OSError:
            time.sleep(0.2)

    def answer(ids: Sequence[int], new: int) -> list[int]:
        body = {"prompt": list(ids), "n_predict": new, "temperature": 0.0, "ignore_eos": True, "cache_prompt": False}
        data = json.dumps(body | {"return_tokens": True}).encode()
        request = urllib.request.Request(f"{address}/completion", data, {"Content-Type": "application/json"})
        return list(json.load(urllib.request.urlopen(request))["tokens"])

    return f"llama.cpp {build}", answer


ENGINES = {"ssbench": ssbench, "transformers": transformers, "vllm": vllm, "llama.cpp": llama_cpp}


def main() -> None:
    """Answer until standard input ends. Engines print to standard output, so answers go to a copy of it."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    setup = json.loads(sys.stdin.readline())
    version, answer = ENGINES[setup["engine"]](setup)
    print(json.dumps({"version": version}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        began = time.perf_counter()
        tokens = answer(request["ids"], request["new"])
        seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=answers, flush=True)


if __name__ == "__main__":
    main()
