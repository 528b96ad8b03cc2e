"""Does a temperature for each stream, fitted by likelihood, choose better nodes for the tree of `ss`?

    python benchmarks/calibration.py --method "ss[n_draft=8,prune=off,k=3]" [--model lab] [--prompts 3] [--tokens 64]

A tree of `n_draft` nodes takes those with the largest products of the streams' probabilities, which may be too sure of
some levels. On training prompts of the lab's text the logits of each stream are held against the tokens that plain
decoding gives, and one temperature T a level is fitted to them (Guo et al. 2017, arXiv:1706.04599), over the whole
vocabulary. Streams that know parents are told the true ones. Then evaluation prompts are answered twice, greedily, with
nodes chosen by logits and by logits / T, and each answer is held against plain decoding. No times are taken.

Prints for each level T and the loss in nats a token without and with it; tokens a step of both ways, pooled; and the
geometric mean over prompts of their ratio, with a 95 % bootstrap interval (BCa) over prompts.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar
from scipy.stats import bootstrap
from torch import Tensor

from lab.text import SPECBENCH_CATEGORIES, questions
from specbench_ss.decoding.decoder import State
from specbench_ss.decoding.generation import Generation
from specbench_ss.decoding.loop import Limits, generate
from specbench_ss.decoding.sampling import Sampling
from specbench_ss.decoding.target import Target
from specbench_ss.decoding.tree import DraftTree
from specbench_ss.method_spec import MethodSpec
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.methods.ss.decoding import SpeculativeStreaming
from specbench_ss.methods.ss.drafting import conditioned_tree, draft_tree
from specbench_ss.methods.ss.training import StreamsTrainee
from specbench_ss.models.loading import load_target
from specbench_ss.registry import load_method
from specbench_ss.training.trainee import base_states

WIDEST = 20.0  # temperatures are looked for from 1 / WIDEST to WIDEST


class Calibrated(SpeculativeStreaming):
    """`ss` whose nodes are chosen by logits that are divided by temperatures [gamma], one a level."""

    def __init__(self, plain: SpeculativeStreaming, temperatures: Sequence[float]) -> None:
        super().__init__(plain.target, plain.options, plain.streams, plain.advice)
        self.maps = plain.maps
        self.divisor = torch.tensor(temperatures, device=plain.target.device)[:, None]

    def propose(self, state: State) -> DraftTree:
        """As `ss`, with the divided logits."""
        logits, s = self._stream_logits(state.root[0]) / self.divisor, self.settings
        if self.streams.config.parent_rank:
            return conditioned_tree(state.root, logits, self._changes, s.k, s.n_draft)
        return draft_tree(state.root, logits, s.k, s.n_draft)

    def _changes(self, above: Tensor, below: Tensor) -> Tensor:
        """What parents change, [gamma - 1, s, s]: part of the logits of their children's level."""
        return self.maps.changes(above, below) / self.divisor[1:, :, None]


def main() -> None:
    """Fit, decode and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="ss[n_draft=8,prune=off,k=3]")
    parser.add_argument("--model", default="lab")
    parser.add_argument("--prompts", type=int, default=3, help="per category, to fit on and to evaluate")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer, at most")
    parser.add_argument("--fit-on", choices=("train", "calibration"), default="train", help="part of the lab's text")
    arguments = parser.parse_args()
    target = load_target(arguments.model, dtype="float32", device="cpu")
    decoder = load_method(MethodSpec.parse(arguments.method), target)
    if type(decoder) is not SpeculativeStreaming:
        parser.error("--method must be `ss` with its options")
    limits, plain = Limits(arguments.tokens, target.eos_ids), Autoregressive(target)
    prompts = {split: chats(target, split, arguments.prompts) for split in (arguments.fit_on, "eval")}
    answered = [(p, generate(plain, p, limits, Sampling()).tokens) for p in prompts[arguments.fit_on]]
    temperatures = [fitted(*level) for level in zip(*seen(decoder, answered), strict=True)]
    ways = (decoder, Calibrated(decoder, temperatures))
    made = [[generate(way, prompt, limits, Sampling()) for way in ways] for prompt in prompts["eval"]]
    same = sum(
        {tuple(one.tokens) for one in pair} == {tuple(generate(plain, prompt, limits, Sampling()).tokens)}
        for prompt, pair in zip(prompts["eval"], made, strict=True)
    )
    before, after = zip(*made, strict=True)
    print(
        f"tokens a step {tau(before):.4f}, with temperatures {tau(after):.4f}; {same} of {len(made)} answers as plain"
    )
    logs = np.log([tau([b]) / tau([a]) for a, b in made])
    interval = np.exp(bootstrap((logs,), np.mean, rng=0).confidence_interval)
    print(f"ratio by prompt {math.exp(logs.mean()):.4f}, 95 % interval {interval[0]:.4f} to {interval[1]:.4f}")


def chats(target: Target, split: str, each: int) -> list[list[int]]:
    """Prompts of one part of the lab's text, first turns, as tokens."""
    asked = questions(SPECBENCH_CATEGORIES, split, each)
    return [target.encode_chat([{"role": "user", "content": question.turns[0]}]) for question in asked]


@torch.inference_mode()
def seen(decoder: SpeculativeStreaming, answered: Sequence[tuple[list[int], list[int]]]) -> tuple[list[Tensor], ...]:
    """For each level the streams' logits [n, V] where an answer goes on that far, and the tokens [n] that it has there.

    answered: prompts with what plain decoding answers.
    """
    target, g = decoder.target, decoder.streams.config.gamma
    trainee = StreamsTrainee(target, decoder.streams.config)
    trainee.module = decoder.streams
    found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(decoder.gamma)]
    for prompt, answer in answered:
        ids = torch.tensor([[*prompt, *answer]], device=target.device)
        states = base_states(target, ids, trainee.taps, trainee.kv_from)
        at = torch.arange(len(prompt) - 1, ids.shape[1] - 1, device=target.device)
        after = F.pad(ids[0], (0, g + 1), value=-1).unfold(0, g + 1, 1)[at + 1]  # [a, 1 + gamma], -1 beyond the end
        logits = trainee.stream_logits(states, at[None], after[None, :, :g])[0]  # [a, gamma, V]
        for level, kept in enumerate(found):
            there = after[:, level + 1] >= 0
            kept.append((logits[there, level], after[there, level + 1]))
    pairs = [tuple(torch.cat(part) for part in zip(*kept, strict=True)) for kept in found]
    return [logits for logits, _ in pairs], [tokens for _, tokens in pairs]


def fitted(logits: Tensor, tokens: Tensor) -> float:
    """The temperature by which logits [n, V] give tokens [n] the largest likelihood."""

    def loss(log_t: float) -> float:
        return float(F.cross_entropy(logits / math.exp(log_t), tokens))

    widest = math.log(WIDEST)
    best = minimize_scalar(loss, bounds=(-widest, widest), method="bounded", options={"xatol": 1e-3})
    print(f"T {math.exp(best.x):.3f} of {len(tokens)} tokens, loss {loss(0):.4f} -> {best.fun:.4f}", flush=True)
    return math.exp(best.x)


def tau(made: Sequence[Generation]) -> float:
    """Tokens a step of answers together."""
    return sum(s.tokens for one in made for s in one.steps) / sum(len(one.steps) for one in made)


if __name__ == "__main__":
    main()
