"""Methods that lie to a run: a plugin file, which `test_planted_runs` runs."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from specbench_ss import Decoder, DecodeState, DraftTree
from specbench_ss.engine.target import Output
from specbench_ss.engine.verify import VerifyResult
from specbench_ss.options import MethodSpec


class Honest(Decoder):
    name, summary = "honest", "drafts one token, and is believed"

    def propose(self, state: DecodeState) -> DraftTree:
        return DraftTree.chain(state.root, state.root)


class OfItself(Honest):
    name = "of-itself"

    @classmethod
    def baseline_for(cls, options: Any) -> MethodSpec:
        return MethodSpec(cls.name)


class OfSpeculative(Honest):
    name = "of-speculative"

    @classmethod
    def baseline_for(cls, options: Any) -> MethodSpec:
        return MethodSpec("honest")


class PlainOfItself(OfItself):
    name = "plain-of-itself"
    autoregressive = True


class OfMissing(Honest):
    name = "of-missing"

    @classmethod
    def baseline_for(cls, options: Any) -> MethodSpec:
        return MethodSpec("nobody")


class OfText(Honest):
    """Names its reference by a text."""

    name, summary = "of-text", "names its reference by a text"

    @classmethod
    def baseline_for(cls, options: Any) -> MethodSpec:
        return "ar"  # type: ignore[return-value]


class Fails(Honest):
    name = "fails"

    def propose(self, state: DecodeState) -> DraftTree:
        raise RuntimeError("out of luck")


class Exits(Honest):
    name = "exits"

    def propose(self, state: DecodeState) -> DraftTree:
        raise SystemExit(0)


class KeepsNothing(Honest):
    name = "keeps-nothing"

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        kept = super().accept(state, tree, output)
        return VerifyResult(kept.path, [], kept.next_token)


class KeepsMore(Honest):
    name = "keeps-more"

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        kept = super().accept(state, tree, output)
        return VerifyResult(kept.path, kept.tokens * 5, kept.next_token)


class LengthensAnswer(Honest):
    name = "lengthens-answer"

    def update(self, state: DecodeState, verdict: VerifyResult, output: Output) -> None:
        state.ids.append(state.ids[-1])
        state.prompt_tokens += 1


class PlainDrafts(Honest):
    name = "plain-drafts"
    autoregressive = True


class AnotherRoot(Honest):
    name = "another-root"

    def propose(self, state: DecodeState) -> DraftTree:
        return DraftTree.root_only((state.root + 1) % self.target.vocab_size)


class DraftsUnknown(Honest):
    name = "drafts-unknown"

    def propose(self, state: DecodeState) -> DraftTree:
        return DraftTree.chain(state.root, torch.tensor([self.target.vocab_size]))


class AnswersUnknown(Honest):
    name = "answers-unknown"

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        kept = super().accept(state, tree, output)
        return VerifyResult(kept.path, [*kept.tokens[:-1], -1], kept.next_token)


class NegativeCalls(Honest):
    name = "negative-calls"
    calls: float = -1

    def update(self, state: DecodeState, verdict: VerifyResult, output: Output) -> None:
        state.num_draft_forwards += self.calls  # type: ignore[assignment]


class HalfCalls(NegativeCalls):
    name, calls = "half-calls", 0.5


class NanCalls(NegativeCalls):
    name, calls = "nan-calls", math.nan


class AcceptsAnything(Honest):
    name = "accepts-anything"

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        path = list(range(len(tree)))
        token = output.logits[0, -1].argmax()[None]
        return VerifyResult(path, [*tree.tokens[1:].tolist(), int(token)], token)


class Rewrites(Honest):
    """Alters what was answered before."""

    name = "rewrites"

    def update(self, state: DecodeState, verdict: VerifyResult, output: Output) -> None:
        state.ids[state.prompt_tokens] = (state.ids[state.prompt_tokens] + 1) % self.target.vocab_size


class Forgets(Honest):
    """Answers by its own logits, which it does not take from the target."""

    name = "forgets"

    def forward(self, state: DecodeState, tree: DraftTree) -> Output:
        output = super().forward(state, tree)
        output.logits = output.logits.roll(1, -1)
        return output


class VerifiesMore(Honest):
    """States that it verified nodes that were not drafted."""

    name = "verifies-more"

    def propose(self, state: DecodeState) -> DraftTree:
        return DraftTree.root_only(state.root)

    def forward(self, state: DecodeState, tree: DraftTree) -> Output:
        tree = DraftTree.chain(state.root, state.root.new_zeros(2))
        output = super().forward(state, tree)
        output.tree = tree
        return output

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        token = output.logits[0, 0].argmax()[None]
        return VerifyResult([0], [int(token)], token)


class StopsClock(Honest):
    """Stops the clock while the target computes."""

    name = "stops-clock"
    real = staticmethod(time.perf_counter)
    lost = 0.0

    def hidden(self, call: Any, *given: Any) -> Any:
        began = self.real()
        time.sleep(0.02)
        made = call(*given)
        type(self).lost += self.real() - began
        time.perf_counter = lambda: self.real() - self.lost
        return made

    def prefill(self, state: DecodeState, ids: torch.Tensor) -> Output:
        output: Output = self.hidden(super().prefill, state, ids)
        return output

    def forward(self, state: DecodeState, tree: DraftTree) -> Output:
        output: Output = self.hidden(super().forward, state, tree)
        return output


class WritesWhatItLikes(Decoder):
    """Claims that the target is another model, of which it is the autoregressive baseline."""

    name, summary = "writes-what-it-likes", "answers from a table"
    autoregressive = True
    lossless = False

    def propose(self, state: DecodeState) -> DraftTree:
        return DraftTree.root_only(state.root)

    def forward(self, state: DecodeState, tree: DraftTree) -> Output:
        output = super().forward(state, tree)
        output.logits = output.logits.roll(1, -1)
        return output


class OfWhatItLikes(WritesWhatItLikes):
    name = "of-what-it-likes"
    autoregressive = False
    lossless = True

    @classmethod
    def baseline_for(cls, options: Any) -> MethodSpec:
        return MethodSpec("writes-what-it-likes")


class ShapelessLogits(WritesWhatItLikes):
    """Answers with its own logits by a call that is wrong."""

    name = "shapeless-logits"

    def next_logits(self, *given: Any) -> torch.Tensor:
        return torch.zeros(2, 2, 2)


class Tampers(Honest):
    """Alters the target while the run goes on."""

    name = "tampers"

    def on_prefill(self, state: DecodeState) -> None:
        self.target.unembed.mul_(1.001)
