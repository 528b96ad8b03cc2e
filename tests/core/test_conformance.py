"""The kit can fail: for every check a decoder that breaks it, caught under that check's name."""

from __future__ import annotations

import copy
import random
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from specbench_ss.conformance import CHECKS, FEW, Case, CheckFailed, CheckRunner, check_decoder, tiny_target
from specbench_ss.conformance.harness import SPARE, Subject, attempt
from specbench_ss.engine.decoder import Decoder, DecodeState
from specbench_ss.engine.target import Output, Target
from specbench_ss.engine.tree import DraftTree
from specbench_ss.engine.verify import VerifyResult, verify, verify_greedy
from specbench_ss.errors import UserError
from specbench_ss.options import MethodSpec
from tests.checks import checks
from tests.planted_samplers import EXACT, PLANTED, Chain, SharperDraws
from tests.tiny import THOROUGH, few, thorough

SAMPLED = [check for check in CHECKS if check.name in ("distribution", "blocks")]


@dataclass(frozen=True)
class Options:
    width: int = field(default=2, metadata={"help": "siblings"})


class Honest(Decoder):
    """Drafts a tree of two branches by arithmetic; breaks nothing."""

    name, summary = "honest", "drafts by arithmetic"
    Options = Options

    def max_tokens_per_step(self) -> int:
        return 5

    def words(self, state: DecodeState) -> list[int]:
        v, x = self.target.vocab_size, sum(state.ids[-3:])
        return [(x + i) % v for i in range(1, 1 + self.options.width)] + [(x * 3) % v, (x + 5) % v]

    def propose(self, state: DecodeState) -> DraftTree:
        tokens = [int(state.root), *self.words(state)]
        return DraftTree.from_parents(torch.tensor(tokens), [-1, 0, 0, 1, 2][: len(tokens)])

    def search_space(self) -> Mapping[str, tuple[int, ...]]:
        return {"width": (1, 2)}


class WrongRoot(Honest):
    def propose(self, state: DecodeState) -> DraftTree:
        return DraftTree.root_only((state.root + 1) % self.target.vocab_size)


class UnknownWord(Honest):
    def words(self, state: DecodeState) -> list[int]:
        return [self.target.vocab_size] * 4


class WrongQ(Honest):
    """States draft_probs of 0 for what it drafted."""

    def propose(self, state: DecodeState) -> DraftTree:
        q = torch.zeros(2, self.target.vocab_size)
        q[:, 0] = 1
        return DraftTree.chain(state.root, torch.tensor([1]), q)


class Raises(Honest):
    def update(self, state: DecodeState, verdict: VerifyResult, output: Output) -> None:
        raise IndexError("out of luck")


class TooManyRows(Honest):
    def max_tokens_per_step(self) -> int:
        return 3


class CountsMore(Honest):
    """Reports a token that nothing decided."""

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        verdict = super().accept(state, tree, output)
        return VerifyResult(verdict.path, [*verdict.tokens, 1], verdict.next_token)


class SkipsNodes(Honest):
    """Accepts a node and not its parent."""

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        token = output.logits[0, 3].argmax()[None]
        return VerifyResult([0, 3], [int(tree.tokens[3]), int(token)], token)


class WrongRows(Honest):
    """Keeps each node's neighbour."""

    def forward(self, state: DecodeState, tree: DraftTree) -> Output:
        output = super().forward(state, tree)
        n = len(tree)
        output.rows = [(0, 1, range(n)), (1, self.target.n_layers, [0, *range(2, n), 1])]
        return output


class NoTreeMask(Honest):
    """Every node sees all the nodes before it, in rows that nobody keeps."""

    def forward(self, state: DecodeState, tree: DraftTree) -> Output:
        output = super().forward(state, tree)
        chained = DraftTree.chain(tree.tokens[:1], tree.tokens[1:])
        parts = [part for part in (*state.cache.keys, *state.cache.values) if part is not None]  # type: ignore[union-attr]
        kept = [part.clone() for part in parts]
        output.logits = self.target.forward_tree(chained, state.cache).logits
        for part, before in zip(parts, kept, strict=True):
            part.copy_(before)
        return output


class AcceptsAnything(Honest):
    """Accepts the first branch, whatever the target's logits are."""

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        token = output.logits[0, 1].argmax()[None]
        return VerifyResult([0, 1], [int(tree.tokens[1]), int(token)], token)


class NeedsTwo(Honest):
    """Looks at the last three tokens of a prompt without asking whether there are so many."""

    def on_prefill(self, state: DecodeState) -> None:
        if state.ids[-3] < 0:
            raise ValueError


class CrossesTheEnd(Honest):
    """Looks up the positions that it drafts for."""

    def propose(self, state: DecodeState) -> DraftTree:
        positions = torch.arange(self.target.context_length)
        assert positions[state.position + 2] > 0
        return super().propose(state)


class Cuts(Honest):
    """Answers otherwise where the cache has rows for a short answer alone."""

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        if state.cache.capacity - state.prompt_tokens >= 6 + SPARE + (self.max_tokens_per_step() or 0):
            return super().accept(state, tree, output)
        token = (output.logits[0, 0].argmax()[None] + 1) % self.target.vocab_size
        return VerifyResult([0], [int(token)], token)


class GlobalDraws(Honest):
    """Draws its drafts from the process's generator."""

    def words(self, state: DecodeState) -> list[int]:
        return torch.randint(0, self.target.vocab_size, (4,)).tolist()


class PythonDraws(Honest):
    def words(self, state: DecodeState) -> list[int]:
        return [random.randrange(self.target.vocab_size) for _ in range(4)]


class AlwaysGreedy(Honest):
    """Answers every seed alike."""

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        return verify_greedy(output.logits[0], tree)


class Remembers(Honest):
    """Drafts from all earlier prompts without `stateful`."""

    def __init__(self, target: Target, options: Any = None) -> None:
        super().__init__(target, options)
        self.seen: list[int] = []

    def words(self, state: DecodeState) -> list[int]:
        self.seen += state.ids[-1:]
        return [(sum(token * token for token in self.seen) + i) % self.target.vocab_size for i in range(4)]


class OneForAll(Honest):
    """Keeps the prompt at hand to itself, and is the same object for all requests that are answered together."""

    def on_prefill(self, state: DecodeState) -> None:
        self.at_hand = sum(state.ids)

    def words(self, state: DecodeState) -> list[int]:
        return [(self.at_hand + state.position + i) % self.target.vocab_size for i in range(4)]

    def clone(self) -> Decoder:
        return self


class RowsByChance(Honest):
    """The published row-wise rule: nodes are tried once for each path through them, and the longest path wins."""

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        if state.sampling.greedy:
            return super().accept(state, tree, output)
        p = state.sampling.probs(output.logits[0])
        best = [0]
        for path in ([0, 1, 3], [0, 2, 4], [0, 1], [0, 2]):
            taken = [0]
            for a, b in zip(path, path[1:], strict=False):
                if float(torch.rand((), generator=state.rng)) >= float(p[a, tree.tokens[b]]):
                    break
                taken.append(b)
            best = max(best, taken, key=len)
        token = torch.multinomial(p[best[-1]], 1, generator=state.rng)
        return VerifyResult(best, [*(int(tree.tokens[i]) for i in best[1:]), int(token)], token)


class FlatQ(Honest):
    """Draws from the target's vocabulary at another temperature than its draft_probs have."""

    def propose(self, state: DecodeState) -> DraftTree:
        v = self.target.vocab_size
        q = torch.full((v,), 0.3 / (v - 1))
        q[4] = 0.7
        stated = torch.full((2, v), 1 / v)
        return DraftTree.chain(state.root, torch.multinomial(q, 1, generator=state.rng), stated)


class Deep(Honest):
    """Drafts a chain as long as published methods do."""

    def max_tokens_per_step(self) -> int:
        return 6

    def propose(self, state: DecodeState) -> DraftTree:
        words = torch.tensor([(state.ids[-1] * 3 + i) % self.target.vocab_size for i in range(5)])
        return DraftTree.chain(state.root, words)


class RawBonus(Deep):
    """As a published copy of EAGLE-1: where all of a draft is accepted, temperature and top-p are left out."""

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        verdict = super().accept(state, tree, output)
        if state.sampling.greedy or verdict.accepted < tree.topology.depth:
            return verdict
        raw = output.logits[0, verdict.path[-1]].float().softmax(-1)
        token = torch.multinomial(raw, 1, generator=state.rng)
        return VerifyResult(verdict.path, [*verdict.tokens[:-1], int(token)], token)


class GreedyInTheDeep(Deep):
    """Draws the first tokens of a block; from the fourth on it takes the most probable ones."""

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        best = output.logits[0].clone()
        best[3:].scatter_(1, best[3:].argmax(-1, keepdim=True), 1e4)
        return verify(best, tree, state.sampling, state.rng)


class MadeUpBonus(Deep):
    """At T=0, after three accepted tokens, the next one is not the target's."""

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        verdict = super().accept(state, tree, output)
        if verdict.accepted < 3 or not state.sampling.greedy:
            return verdict
        token = (verdict.next_token + 1) % self.target.vocab_size
        return VerifyResult(verdict.path, [*verdict.tokens[:-1], int(token)], token)


class Imposter(Honest):
    """Decodes exactly, but with another model."""

    def __init__(self, target: Target, options: Any = None) -> None:
        other = copy.deepcopy(target.model)
        for p in other.parameters():
            p.data += 0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1))
        super().__init__(Target(other, target.tokenizer, target.name), options)


class Rescales(Honest):
    """Makes the target its own."""

    def on_prefill(self, state: DecodeState) -> None:
        self.target.unembed.mul_(1.001)


class Tuned(Honest):
    """An option that may be tuned changes what is accepted."""

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        accepts = super().accept if self.options.width == 2 else AcceptsAnything(self.target, self.options).accept
        return accepts(state, tree, output)


class NotJson(Honest):
    def metadata(self) -> dict[str, Any]:
        return {"where": id(self)}


class LossyInSilence(Honest):
    """Lossy by an option whose help does not state it."""

    def __init__(self, target: Target, options: Any = None) -> None:
        super().__init__(target, options)
        self.lossless = False

    accept = AcceptsAnything.accept


class OfItself(Honest):
    """Is compared with its own answers."""

    @classmethod
    def baseline_for(cls, options: Any) -> MethodSpec:
        return MethodSpec(cls.name)


class CribsOfLongPrompts(Honest):
    """Drafts its last answer without `stateful`; only for prompts that the other checks do not use."""

    def __init__(self, target: Target, options: Any = None) -> None:
        super().__init__(target, options)
        self.known: dict[tuple[int, ...], list[int]] = {}

    def cribs(self, state: DecodeState) -> bool:
        return state.prompt_tokens > 15

    def words(self, state: DecodeState) -> list[int]:
        prompt, at = tuple(state.ids[: state.prompt_tokens]), len(state.ids)
        known = self.known.setdefault(prompt, [])
        crib = known[at : at + 4] if self.cribs(state) else []
        known += state.ids[len(known) :]
        return crib if len(crib) == 4 else super().words(state)


class CribsOfManyWords(CribsOfLongPrompts):
    def cribs(self, state: DecodeState) -> bool:
        return self.target.vocab_size > 100


class CribsLate(CribsOfLongPrompts):
    """From the fortieth token of an answer on."""

    def cribs(self, state: DecodeState) -> bool:
        return len(state.ids) - state.prompt_tokens > 40


class AcceptsAnythingLate(Honest):
    """From the fortieth token of an answer on."""

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        late = len(state.ids) - state.prompt_tokens > 40
        return AcceptsAnything.accept(self, state, tree, output) if late else super().accept(state, tree, output)  # type: ignore[arg-type]


class Hangs(Honest):
    """Never comes back, once an answer has two tokens; the alarm of the time limit rings at once."""

    def propose(self, state: DecodeState) -> DraftTree:
        while len(state.ids) - state.prompt_tokens > 2:
            assert signal.getitimer(signal.ITIMER_REAL)[0], "no time limit is set"
            signal.raise_signal(signal.SIGALRM)
        return super().propose(state)


class Exits(Honest):
    def propose(self, state: DecodeState) -> DraftTree:
        raise SystemExit(3)


class Nothing(Honest):
    def propose(self, state: DecodeState) -> DraftTree:
        return cast(DraftTree, None)


class Lossy(AcceptsAnything):
    """As it should be done."""

    name, lossless = "lossy", False


BROKEN: tuple[tuple[str, type[Decoder], str], ...] = (
    ("draft", WrongRoot, "the root is"),
    ("draft", UnknownWord, "has not all of"),
    ("draft", WrongQ, "draft_probs of its parent is 0"),
    ("outputs", Exits, "SystemExit: 3"),
    ("draft", Nothing, "TypeError: propose returned None, not a DraftTree"),
    ("outputs", Raises, r"IndexError: out of luck \(test_conformance.py:\d+ in update\)"),
    ("rows", TooManyRows, r"5 rows were written .*, max_tokens_per_step\(\) is 3"),
    ("counts", CountsMore, "and the next token are"),
    ("counts", SkipsNodes, "are no path from the root"),
    ("cache", WrongRows, r"row \d+ of layer 1 is off by"),
    ("logits", NoTreeMask, "logits are off by"),
    ("greedy", AcceptsAnything, "a fresh pass has"),
    ("lengths", NeedsTwo, "IndexError"),
    ("context", CrossesTheEnd, "IndexError: index 128 is out of bounds"),
    ("ends", Cuts, "max_new_tokens"),
    ("seed", GlobalDraws, "generators at another point"),
    ("seed", PythonDraws, "generators at another point"),
    ("seed", AlwaysGreedy, "seeds gave only"),
    ("memory", Remembers, "after other prompts"),
    ("together", OneForAll, r"next to three others: .*; its clone\(\) returns the method itself"),
    ("long", CribsOfLongPrompts, "the repeated request drafted"),
    ("long", CribsOfManyWords, "the repeated request drafted"),
    ("long", CribsLate, "the repeated request drafted"),
    ("long", AcceptsAnythingLate, "a fresh pass has"),
    ("distribution", RowsByChance, r"p = [\d.]+e-\d+"),
    ("distribution", FlatQ, r"p = [\d.]+e-\d+|p = 0 "),
    ("blocks", RawBonus, "after all of a draft"),
    ("blocks", GreedyInTheDeep, "(depth [34] of the|after all of a) draft"),
    ("blocks", MadeUpBonus, "the logits have"),
    ("model", Imposter, "off from the target's"),
    ("target", Rescales, "the target's logits changed"),
    ("search_space", Tuned, "with width=1: token"),
    ("description", NotJson, r"metadata\(\) of two"),
    ("description", LossyInSilence, "contains 'lossy'"),
    ("description", OfItself, "baseline_for names"),
)


@few(12)
@pytest.mark.parametrize(("check", "kind", "text"), BROKEN, ids=[kind.__name__ for _, kind, _ in BROKEN])
def test_what_fails_a_check_is_caught_under_its_name(check: str, kind: type[Decoder], text: str) -> None:
    """All checks before it in the order pass, which the thorough suite tries; its own is run in full."""
    every = zip(CHECKS, checks(0, thorough=False), strict=True)
    tried = [whole if whole.name == check else part for whole, part in every if THOROUGH or whole.name == check]
    with pytest.raises(CheckFailed, match=text) as caught:
        check_decoder(kind, architectures=["llama"], checks=tried)
    assert caught.value.check == check
    assert str(caught.value).startswith(f"check '{check}' failed: ")


def test_no_check_is_without_a_decoder_that_breaks_it() -> None:
    assert {check.name for check in CHECKS} == {name for name, _, _ in BROKEN}


@few(2)
@pytest.mark.parametrize("kind", PLANTED if THOROUGH else PLANTED[::3], ids=lambda kind: kind.__name__)
def test_a_sampler_that_is_biased_is_caught(kind: type[Decoder]) -> None:
    checks = SAMPLED if kind is SharperDraws else SAMPLED[::-1]  # first the one that catches it soon
    with pytest.raises(CheckFailed) as caught:
        check_decoder(kind, architectures=(), checks=checks)
    assert caught.value.check in ("distribution", "blocks")


@thorough  # the quick suite tries the samplers of methods: tests/methods/test_checks.py
@pytest.mark.parametrize("kind", EXACT, ids=[kind.__name__ for kind in EXACT])
def test_an_exact_sampler_passes(kind: type[Decoder]) -> None:
    some = [replace(check, cases=lambda subject, every=check.cases: list(every(subject))[::3]) for check in SAMPLED]
    results = check_decoder(kind, architectures=(), checks=some, all=True)
    assert [result.verdict for result in results] == ["ok", "ok"]


@thorough
def test_a_check_that_tested_nothing_is_untested() -> None:
    class DraftsNothing(Chain):
        def propose(self, state: DecodeState) -> DraftTree:
            return DraftTree.root_only(state.root)

    def sampled(subject: Subject) -> list[Case]:
        return [case for case in blocks.cases(subject) if not case.sampling.greedy][:1]

    class DraftsAmongFewWords(Chain):
        def propose(self, state: DecodeState) -> DraftTree:
            few = self.target.vocab_size < 100
            return super().propose(state) if few else DraftTree.root_only(state.root)

    blocks = next(check for check in SAMPLED if check.name == "blocks")
    for kind in (DraftsNothing, DraftsAmongFewWords):  # one of its models is not enough
        with pytest.warns(UserWarning, match="not tested on .*acceptance"):
            (result,) = check_decoder(kind, architectures=(), checks=[replace(blocks, cases=sampled)])
        assert result.verdict == "untested"


@pytest.mark.parametrize(("turn", "kind"), [(0, Honest), (1, Deep), (2, Lossy)][: None if THOROUGH else 1])
def test_what_breaks_nothing_passes(turn: int, kind: type[Decoder]) -> None:
    check_decoder(kind, architectures=FEW if THOROUGH else FEW[:1], checks=checks(turn, thorough=False))


def test_a_trial_that_does_not_end_fails_its_check() -> None:
    began = len(threading.enumerate())
    with pytest.raises(CheckFailed, match=r"no end within 60 s \(test_conformance.py:\d+ in propose\)") as caught:
        check_decoder(Hangs, architectures=["llama"], timeout=60.0, checks=CHECKS[1:])
    assert caught.value.check == "outputs"
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0) and len(threading.enumerate()) == began


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"checks": "x"}, "checks= is a list, not 'x'"),
        ({"checks": ["greedy"]}, "checks= is a list of parts"),
        ({"architectures": ["lama"]}, r"no architecture 'lama' \(did you mean llama\?\)"),
        ({"architectures": "llama"}, "architectures= is a list, not 'llama'"),
    ],
)
def test_what_is_no_check_or_architecture_is_one_line(given: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        check_decoder(Honest, **given)


@thorough
def test_a_lossy_method_is_exempt_where_it_is_lossy_and_nowhere_else() -> None:
    kit = CheckRunner(Lossy, ["llama"])
    found = {result.check.name: result for result in kit.results()}
    exempt = {name for name, result in found.items() if result.verdict == "exempt"}
    assert exempt == {"model", "logits", "greedy", "distribution", "blocks", "search_space"}
    assert "lossless = False" in found["greedy"].exempt
    with pytest.raises(CheckFailed) as caught:
        check_decoder(Lossy, architectures=["llama"], own_model=True)
    assert caught.value.check == "greedy"


def test_a_failure_reads_well() -> None:
    with pytest.raises(CheckFailed) as caught:
        check_decoder(AcceptsAnything, architectures=["llama"])
    first, instance, example, found = str(caught.value).splitlines()
    assert first == "check 'greedy' failed: at temperature 0 every token is the argmax of a fresh pass"
    assert instance == "  instance  default on tiny llama (4 layers, 11 tokens)"
    assert example == "  example   prompt [3, 4, 5, 3, 4, 6, 3, 4, 5, 3, 4], at most 12 new tokens, temperature 0"
    assert found.startswith("  found     token ")


@thorough
def test_an_instance_of_more_words_is_tested_by_all_checks() -> None:
    """Together with one that needs fewer."""

    def instances(target: Target) -> dict[str, Callable[[], Decoder]]:
        def wide() -> Decoder:
            if target.vocab_size < 10:
                raise UserError("too few words")
            return AlwaysGreedy(target)

        return {"plain": lambda: Honest(target), "wide": wide}

    with pytest.raises(CheckFailed, match="seeds gave only") as caught:
        check_decoder(instances, architectures=["llama"])
    assert caught.value.instance.startswith("wide on tiny opt (2 layers, 11 tokens)")


def test_what_ends_the_process_fails_a_check() -> None:
    class Quits(Honest):
        def words(self, state: DecodeState) -> list[int]:
            raise SystemExit(0)

    with pytest.raises(CheckFailed, match="SystemExit"):
        check_decoder(Quits, architectures=["llama"])


def test_examples_that_fail_are_one_line() -> None:
    class Unready(Honest):
        @classmethod
        def test_instances(cls, target: Target) -> Mapping[str, Callable[[], Decoder]]:
            raise ZeroDivisionError("nothing yet")

    with pytest.raises(UserError, match="it has no test instance for a tiny model: ZeroDivisionError: nothing yet"):
        check_decoder(Unready)


def test_any_factory_will_do() -> None:
    def instances(target: Target) -> dict[str, Callable[[], Decoder]]:
        return {"narrow": lambda: Honest(target, Options(1)), "broken": lambda: TooManyRows(target)}

    few = [check for check in CHECKS if check.name in ("rows", "greedy")]
    check_decoder(lambda target: Honest(target), architectures=["llama"], checks=few)
    with pytest.raises(CheckFailed, match="broken on tiny"):
        check_decoder(instances, architectures=["llama"], checks=few)


def test_a_shape_that_a_model_cannot_have_is_named_and_left_out() -> None:
    def factory(target: Target) -> Decoder:
        if any(target.windows):
            raise UserError("no windows")
        return Honest(target)

    kit = CheckRunner(lambda t: {"one": lambda: factory(t)}, ["llama", "mistral-window"])
    assert kit.left_out == {"one on tiny mistral-window (4 layers, 11 tokens)": "no windows"}
    with pytest.raises(UserError, match="nothing to check: no weights"):
        check_decoder(_weightless)


def _weightless(target: Target) -> Decoder:
    raise UserError("no weights")


def test_tiny_targets_have_a_tokenizer_that_reads_what_it_writes() -> None:
    for words in (7, 11, 61):
        tokenizer = tiny_target("opt", words, layers=1).tokenizer
        assert len(tokenizer) == words
        text = tokenizer.decode(list(range(words)), skip_special_tokens=True)
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_an_error_of_a_plugins_own_kind_is_a_failed_check() -> None:
    class Unusual(BaseException):
        pass

    def unusual(*_: Any) -> str:
        raise Unusual("of its own")

    assert "Unusual: of its own" in attempt(cast("Any", SimpleNamespace(test=unusual)), cast("Any", None), FEW[0])
