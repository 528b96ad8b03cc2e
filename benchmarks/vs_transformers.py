"""Our `ar`, `sd` and `pld` against transformers' `generate` with the same algorithm, model, prompts and draft lengths.

Both answer prompt after prompt in one process, alternating; printed are the ratio of their times with its interval over
the prompts, the tokens per step, and whether every step kept the same. For `ar` also the harness's own share of a
step: time outside the target's forward pass. `ar` is also compared with `generate` over a static cache with
torch.compile, transformers' default on a GPU. On a CPU that requires --compiled, since compiling takes minutes.

    python benchmarks/vs_transformers.py [--model lab] [--draft DIR|ID|none] [--prompts 13] [--new 96] [--lengths 2 4 8]
        [--device auto] [--dtype auto] [--engine eager|graph] [--compiled|--no-compiled]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import CompileConfig
from transformers.generation import candidate_generator as theirs_module

from specbench_ss.bench.timed_sample import gc_disabled
from specbench_ss.engine.decoder import Decoder, Step
from specbench_ss.engine.engines import ENGINES
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.layers import attention as grouped_attention
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.methods.pld import LookupOptions, PromptLookup
from specbench_ss.methods.sd.decode import TwoModel, TwoModelOptions
from specbench_ss.models.load import load_target
from specbench_ss.stats.intervals import speedup_interval
from specbench_ss.suite import SuiteRequest
from specbench_ss.suites.chat_suites import SpecBench

NAME = "update_candidate_strategy"  # the callback of their generators after each step
GENERATORS = (theirs_module.AssistedCandidateGenerator, theirs_module.PromptLookupCandidateGenerator)


@dataclass
class Case:
    """One algorithm: our decoder, and the arguments of `generate` for theirs."""

    name: str
    ours: Decoder
    theirs: dict[str, Any]
    assistant: dict[str, Any] = field(default_factory=dict)  # of the assistant's generation_config, which changes

    @property
    def drafts(self) -> bool:
        """Return True if theirs verifies drafts, so that its steps can be compared with ours."""
        return bool({"assistant_model", "prompt_lookup_num_tokens"} & self.theirs.keys())


@contextmanager
def counted() -> Iterator[list[int]]:
    """Collect the tokens kept by each of their steps, which `generate` does not report."""
    kept: list[int] = []

    def counting(update: Any) -> Any:
        def callback(self: Any, ids: Any, scores: Any, matches: int) -> None:
            kept.append(int(matches) + 1)
            update(self, ids, scores, matches)

        return callback

    with ExitStack() as stack:
        for kind in GENERATORS:
            stack.enter_context(patch.object(kind, NAME, counting(getattr(kind, NAME))))
        yield kept


def answer(target: Target, case: Case, prompt: Sequence[int], new: int) -> tuple[float, int]:
    """Return seconds and tokens of transformers' greedy generate."""
    ids = torch.tensor([list(prompt)], device=target.device)
    if "assistant_model" in case.theirs:  # its schedule and threshold would go from prompt to prompt
        case.theirs["assistant_model"].generation_config.update(**case.assistant)
    eos = sorted(target.eos_ids)
    models = [target.model, *([case.theirs["assistant_model"]] if "assistant_model" in case.theirs else [])]
    for model in models:  # their own attention, not ours
        model.set_attn_implementation("sdpa")
    started = time.perf_counter()
    out = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=eos,
        **case.theirs,
    )  # fmt: skip
    if out.is_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    for model in models:
        model.set_attn_implementation(grouped_attention.NAME)
    return seconds, out.shape[1] - len(prompt)


def same_steps(target: Target, case: Case, prompt: list[int], new: int) -> bool | None:
    """Return True if each step keeps the same number of tokens; None for `ar`, which drafts none.

    Theirs drafts before the prefill, ours after its first token, so theirs gets that token too.
    """
    ours = generate(case.ours, prompt, StopParams(new, target.eos_ids), SamplingParams())
    if not case.drafts or not ours.steps:
        return None
    with counted() as kept:
        answer(target, case, [*prompt, ours.tokens[0]], new - 1)
    return kept == [s.tokens for s in ours.steps]


@dataclass
class Times:
    """Measurements of one case: seconds and tokens [prompts], summed over repeats, and our steps."""

    ours_s: np.ndarray
    theirs_s: np.ndarray
    ours_n: np.ndarray
    theirs_n: np.ndarray
    steps: list[Step] = field(default_factory=list)

    def add(self, i: int, case: Case, target: Target, prompt: list[int], new: int) -> None:
        """Measure one prompt, ours and theirs."""
        with gc_disabled():
            started = time.perf_counter()
            mine = generate(case.ours, prompt, StopParams(new, target.eos_ids), SamplingParams())
            self.ours_s[i] += time.perf_counter() - started
            seconds, tokens = answer(target, case, prompt, new)
        self.theirs_s[i] += seconds
        self.ours_n[i] += len(mine.tokens)
        self.theirs_n[i] += tokens
        self.steps += mine.steps

    def share(self, part: str) -> float:
        """Return the percentage of the steps' time that a part of them took, draft_s or verify_s."""
        return 100 * sum(getattr(s, part) for s in self.steps) / sum(s.total_s for s in self.steps)

    def row(self, name: str, same: list[bool]) -> str:
        """Return a line of the table."""
        ratio = (self.theirs_s.sum() / self.theirs_n.sum()) / (self.ours_s.sum() / self.ours_n.sum())
        around = speedup_interval(self.theirs_s, self.theirs_n, self.ours_s, self.ours_n)
        interval = "" if around is None else f"{around[0]:.2f} to {around[1]:.2f}"
        alike = f"{sum(same)} of {len(same)}" if same else "-"
        tau = sum(s.tokens for s in self.steps) / len(self.steps)
        ms = 1e3 * self.ours_s.sum() / self.ours_n.sum()
        return (
            f"{name:<28}{ratio:<6.2f}{interval:<17}{tau:>6.2f}  {alike:<10}"
            f"{ms:>10.2f}{self.share('draft_s'):>9.1f}{self.share('verify_s'):>9.1f}"
        )


def cases(target: Target, draft: str, lengths: Sequence[int]) -> list[Case]:
    """Return `ar`, then chains of each length, then lookups. draft: "none" leaves the chains out."""
    found = [Case("ar", Autoregressive(target), {})]
    loaded = None if draft == "none" else TwoModel.load(target, TwoModelOptions(weights=draft))
    for n in lengths if loaded else ():
        fixed = {"num_assistant_tokens": n, "num_assistant_tokens_schedule": "constant"}
        for threshold in (0.0, 0.4):
            ours = loaded.with_options(TwoModelOptions(weights=draft, gamma=n, threshold=threshold))
            assistant = {**fixed, "assistant_confidence_threshold": threshold}
            name = f"sd[gamma={n}]" if not threshold else f"sd[gamma={n},threshold={threshold}]"
            found.append(Case(name, ours, {"assistant_model": loaded.draft.model.model}, assistant))
    for ngram, n in ((2, 10), (3, 10), (2, 4)):
        ours = PromptLookup(target, LookupOptions(ngram=ngram, length=n, complete=False))
        given = {"prompt_lookup_num_tokens": n, "max_matching_ngram_size": ngram}
        found.append(Case(f"pld[ngram={ngram},length={n}]", ours, given))
    return found


def compiled(target: Target) -> Case:
    """Return `ar` against `generate` over a static cache with compiled steps, on request on a CPU too."""
    config = CompileConfig() if target.device.type == "cuda" else CompileConfig(mode="default")
    config._compile_all_devices = True  # transformers' own flag: without it a CPU compiles nothing
    given = {"cache_implementation": "static", "compile_config": config}
    return Case("ar, theirs compiled", Autoregressive(target), given)


def compile_ahead(target: Target, case: Case, prompts: Sequence[Sequence[int]], new: int) -> None:
    """Answer the longest prompt twice, so that the cache keeps its size and no later answer compiles."""
    longest = max(prompts, key=len)
    for _ in range(2):
        started = time.perf_counter()
        answer(target, case, longest, new)
        print(f"{case.name}: an answer that is not measured took {time.perf_counter() - started:.1f} s", flush=True)


def read_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="lab")
    parser.add_argument("--draft", default="")
    parser.add_argument("--prompts", type=int, default=13)
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--engine", choices=ENGINES, default="eager", help="of ours")
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, help="default: on a GPU alone")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    arguments = read_arguments()
    target = load_target(arguments.model, dtype=arguments.dtype, device=arguments.device, engine=arguments.engine)
    questions = SpecBench().load(SuiteRequest(limit=1, lab=True)).questions[: arguments.prompts]
    prompts = [target.encode_chat([{"role": "user", "content": q.turns[0]}]) for q in questions]
    found = cases(target, arguments.draft, arguments.lengths)
    if target.device.type == "cuda" if arguments.compiled is None else arguments.compiled:
        found.insert(1, compiled(target))
        compile_ahead(target, found[1], prompts, arguments.new)
    times = [Times(*(np.zeros(len(prompts)) for _ in range(4))) for _ in found]
    same = [[alike for p in prompts if (alike := same_steps(target, c, p, arguments.new)) is not None] for c in found]
    for _ in range(arguments.repeats):  # `same_steps` has warmed up
        for i, prompt in enumerate(prompts):
            for case, taken in zip(found, times, strict=True):
                taken.add(i, case, target, prompt, arguments.new)
    threads = torch.get_num_threads()
    print(f"device {target.device}, {threads} threads, {len(prompts)} prompts, {arguments.repeats} times")
    print(f"ours: {target.number_format}, {target.kernel_summary}")
    print("theirs/ours: seconds a token; same steps: prompts of which every step keeps as many tokens")
    print(f"{'':<28}{'theirs/ours':<23}{'tau':>6}  {'same steps':<10}{'ms/token':>10}{'draft %':>9}{'verify %':>9}")
    for case, taken, alike in zip(found, times, same, strict=True):
        print(taken.row(case.name, alike))
    share = 100 - times[0].share("verify_s")
    print(f"harness's share of a step of ar (outside the target's forward): {share:.1f} %")


if __name__ == "__main__":
    main()
