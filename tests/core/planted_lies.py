"""Methods that lie to a run: a plugin file, which `test_planted_runs` runs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from specbench_ss import Decoder, DecodeState, DraftTree
from specbench_ss.engine import generate, timing
from specbench_ss.engine.target import Output, Target
from specbench_ss.engine.tree import topology_of
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
        self.patch()
        return made

    def patch(self) -> None:
        time.perf_counter = lambda: self.real() - self.lost

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


class EqualsAnything(int):
    """A token that is every token."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


class EqualTokens(AcceptsAnything):
    name = "equal-tokens"

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        kept = super().accept(state, tree, output)
        return VerifyResult([*map(EqualsAnything, kept.path)], [*map(EqualsAnything, kept.tokens)], kept.next_token)


class EqualsInPlace(AcceptsAnything):
    """Puts such tokens into the answer, where a mismatch would be seen."""

    name = "equals-in-place"

    def update(self, state: DecodeState, verdict: VerifyResult, output: Output) -> None:
        state.ids[state.prompt_tokens :] = map(EqualsAnything, state.ids[state.prompt_tokens :])


class GrowingList(list[int]):
    """Has more numbers whenever it is read again."""

    def __iter__(self) -> Iterator[int]:
        yield from list(range(len(self)))
        self.append(0)


class GrowingPath(Honest):
    name = "growing-path"

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        kept = super().accept(state, tree, output)
        return VerifyResult(GrowingList(kept.path), kept.tokens, kept.next_token)


class LyingResult(VerifyResult):
    @property
    def accepted(self) -> int:
        return 7


class ReturnsLyingResult(Honest):
    name = "lying-result"

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        kept = super().accept(state, tree, output)
        return LyingResult(kept.path, kept.tokens, kept.next_token)


class ChangesResult(Honest):
    """Adds nodes to the path after the step."""

    name = "changes-result"

    def update(self, state: DecodeState, verdict: VerifyResult, output: Output) -> None:
        verdict.path += [1, 1, 1]
        verdict.tokens.clear()


class LongPath(Honest):
    name = "long-path"

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        kept = super().accept(state, tree, output)
        return VerifyResult([*range(9)], kept.tokens * 9, kept.next_token)


class NegativePath(Honest):
    name = "negative-path"

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        kept = super().accept(state, tree, output)
        return VerifyResult([0, -1], [*kept.tokens, 1], kept.next_token)


class NoNextToken(Honest):
    name = "no-next-token"

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        kept = super().accept(state, tree, output)
        return VerifyResult(kept.path, kept.tokens, kept.tokens[-1])  # type: ignore[arg-type]


class MyTensor(torch.Tensor):
    def tolist(self) -> Any:
        return [EqualsAnything(x) for x in super().tolist()]


class TensorTokens(Honest):
    name = "tensor-tokens"

    def propose(self, state: DecodeState) -> DraftTree:
        tree = super().propose(state)
        return replace(tree, tokens=tree.tokens.as_subclass(MyTensor))  # type: ignore[arg-type]


class TensorLogits(AcceptsAnything):
    name = "tensor-logits"

    def forward(self, state: DecodeState, tree: DraftTree) -> Output:
        output = super().forward(state, tree)
        output.logits = output.logits.as_subclass(MyTensor)  # type: ignore[assignment,arg-type]
        return output


class ShorterTree(DraftTree):
    def __len__(self) -> int:
        return 1


class CountsFewerNodes(Honest):
    name = "counts-fewer-nodes"

    def propose(self, state: DecodeState) -> DraftTree:
        tree = super().propose(state)
        return ShorterTree(tree.tokens, tree.topology)


class ChangesTree(Honest):
    """Makes its drafts look deeper, or as if there had been none, once they are verified."""

    name = "changes-tree"

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        kept = super().accept(state, tree, output)
        object.__setattr__(tree, "topology", topology_of((-1,)))
        object.__setattr__(tree, "tokens", tree.tokens[:1])
        return kept


class ReplacesIds(Honest):
    name = "replaces-ids"

    def update(self, state: DecodeState, verdict: VerifyResult, output: Output) -> None:
        state.ids, state.prompt_tokens = [*state.ids, 5, 5], 0


class OtherSampling(Honest):
    """Has its steps run beyond the limits of the request."""

    name = "other-cache"

    def on_prefill(self, state: DecodeState) -> None:
        state.sampling = replace(state.sampling, seed=7)
        state.rng = torch.Generator()


class Unusual(BaseException):
    pass


class RaisesUnusual(Honest):
    name = "raises-unusual"

    def propose(self, state: DecodeState) -> DraftTree:
        raise Unusual("and nothing catches it")


class LossyFromNowOn(AcceptsAnything):
    """Is lossless where that is shown, and lossy where it is compared."""

    name = "lossy-from-now-on"

    def on_prefill(self, state: DecodeState) -> None:
        self.lossless = False


class AnotherName(AcceptsAnything):
    name = "another-name"

    def on_prefill(self, state: DecodeState) -> None:
        vars(self)["name"] = "ar"


class Loads(Honest):
    """Declares something at load; the subclasses have what is wrong with it."""

    name = "loads"

    declared: Any = {}  # noqa: RUF012

    def __init__(self, target: Target, options: Any = None) -> None:
        super().__init__(target, options)
        vars(self).update(self.declared)


class InfoNan(Loads):
    name, declared = "info-nan", {"training_info": {"tokens": math.nan}}


class InfoText(Loads):
    name, declared = "info-text", {"training_info": {"tokens": "many"}}


class InfoList(Loads):
    name, declared = "info-list", {"training_info": [1, 2]}


class InfoKeys(Loads):
    name, declared = "info-keys", {"training_info": {(1, 2): 3}}


class InfoHuge(Loads):
    name, declared = "info-huge", {"measured": {"text": "x" * 2_000_000}}


class LosslessNumber(Loads):
    name, declared = "lossless-number", {"lossless": EqualsAnything(1)}


class StatefulText(Loads):
    name, declared = "stateful-text", {"stateful": "yes"}


class SummaryNumber(Loads):
    name, declared = "summary-number", {"summary": 7}


class OptionsNan(Loads):
    name = "metadata-nan"

    def metadata(self) -> dict[str, Any]:
        return {"alpha": math.inf}


class MetadataFails(Honest):
    name = "metadata-fails"

    def metadata(self) -> dict[str, Any]:
        raise KeyError("hash")


class WeightsFail(Honest):
    name = "weights-fail"

    def drafter_weights(self) -> Iterable[torch.Tensor] | None:
        return [1, 2]  # type: ignore[list-item]


class CheckFails(Honest):
    name = "check-fails"

    @classmethod
    def check(cls, options: Any, base: Any) -> None:
        raise ZeroDivisionError


class AdvisesText(Honest):
    name = "advises-text"

    @classmethod
    def check(cls, options: Any, base: Any) -> Any:
        return "length=3"


class BaselineFails(Honest):
    name = "baseline-fails"

    @classmethod
    def baseline_for(cls, options: Any) -> MethodSpec:
        raise SystemExit(0)


class LoadFails(Honest):
    name = "load-fails"

    @classmethod
    def load(cls, target: Target, options: Any) -> Decoder:
        raise ZeroDivisionError("on loading")


class LoadExits(Honest):
    name = "load-exits"

    @classmethod
    def load(cls, target: Target, options: Any) -> Decoder:
        raise SystemExit(0)


class LoadRaisesUnusual(Honest):
    name = "load-raises-unusual"

    @classmethod
    def load(cls, target: Target, options: Any) -> Decoder:
        raise Unusual


class LoadsNothing(Honest):
    name = "loads-nothing"

    @classmethod
    def load(cls, target: Target, options: Any) -> Decoder:
        return None  # type: ignore[return-value]


class LoadsAnother(Honest):
    name = "loads-another"

    @classmethod
    def load(cls, target: Target, options: Any) -> Decoder:
        return WritesWhatItLikes(target)


class ManyRows(Honest):
    """Answers with another type each time that it is asked for its rows."""

    name = "float-rows"

    def max_tokens_per_step(self) -> int | None:
        return 2.5  # type: ignore[return-value]


class ReadsCache(Honest):
    """Drafts what the rows behind those of its prompt hold: the answer of the method that ran before."""

    name = "reads-cache"
    rows = 0

    def on_prefill(self, state: DecodeState) -> None:
        keys = state.cache.keys[0]
        assert keys is not None
        type(self).rows += int((keys[0, :, state.position :] != 0).any(-1).any(0).sum())


class StopsOurClock(StopsClock):
    """Stops the clock of the harness, which nothing in this process can forbid; other clocks go on."""

    name = "stops-our-clock"
    lost = 0.0

    def patch(self) -> None:
        timing.now = generate.now = lambda: self.real() - self.lost  # type: ignore[assignment,attr-defined]
