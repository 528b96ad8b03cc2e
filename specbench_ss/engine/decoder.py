"""Decoder interface: what a decoding method implements.

A method proposes a draft tree; the core owns the loop, the target's forward, verification, the cache, sampling,
stopping, cutting and every count.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.engine.costs import ExtraWork, read_by_a_pass
from specbench_ss.engine.kv_cache import Cache
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Output, Target
from specbench_ss.engine.tree import DraftTree
from specbench_ss.engine.verify import Offer, VerifyResult, verify
from specbench_ss.errors import UserError
from specbench_ss.options import REFERENCE, MethodSpec, NoOptions, option_values

Finish = Literal["eos", "stop", "length", "context"]


@dataclass(slots=True)
class Step:
    """One forward pass of the target that verifies. Times in seconds.

    nodes: drafted nodes (the root is not a draft). verified: drafted nodes that reached the last layer
    (fewer than nodes where a method prunes). depth: depth of the drafted tree, before pruning. accepted: drafted tokens
    accepted, before any cut.
    tokens: tokens kept, after the cut at the first end token, stop string or limit (accepted + 1 when uncut).
    draft_s + verify_s + accept_s + host_s = total_s.
    """

    draft_nodes: int
    verified_nodes: int
    draft_depth: int
    accepted_tokens: int
    tokens: int
    draft_s: float
    verify_s: float
    accept_s: float
    host_s: float
    total_s: float


@dataclass(slots=True)
class Generation:
    """The answer to one prompt.

    tokens: kept ids, the end token included when it ended the answer. The first one comes from prefill, the
    others from steps: len(tokens) == prefill_tokens + sum(step.tokens).
    tokens_past_stop: accepted tokens beyond the cut, counted nowhere else.
    offers: at a temperature above 0, the candidates for each token, for the test of what was accepted.
    """

    tokens: list[int]
    prompt_tokens: int
    finish: Finish
    prefill_s: float
    prefill_tokens: int
    steps: list[Step] = field(default_factory=list)
    tokens_past_stop: int = 0
    num_draft_forwards: int = 0
    offers: list[Offer] = field(default_factory=list)

    @property
    def decode_s(self) -> float:
        """Seconds spent in steps."""
        return sum(step.total_s for step in self.steps)

    @property
    def wall_s(self) -> float:
        """Prefill and decode, seconds."""
        return self.prefill_s + self.decode_s

    @property
    def tokens_per_step(self) -> float | None:
        """tau of this request: tokens that steps produced / steps; None without a step."""
        return sum(s.tokens for s in self.steps) / len(self.steps) if self.steps else None

    @property
    def all_drafts_rejected(self) -> bool:
        """Whether something was drafted in every one of several steps and nothing of it accepted."""
        return len(self.steps) > 1 and all(s.draft_nodes and not s.accepted_tokens for s in self.steps)

    def check(self) -> None:
        """Raise RuntimeError where the counts do not add up (an impossible result is a bug)."""
        wrong = [
            s
            for s in self.steps
            if not (0 <= s.accepted_tokens <= s.draft_depth <= s.draft_nodes and 0 <= s.tokens <= s.accepted_tokens + 1)
        ]
        if wrong:
            raise RuntimeError(f"impossible counts of a step: {wrong[0]}")
        made = self.prefill_tokens + sum(s.accepted_tokens + 1 for s in self.steps)
        kept = self.prefill_tokens + sum(s.tokens for s in self.steps)
        if len(self.tokens) != kept or kept + self.tokens_past_stop != made:
            raise RuntimeError(f"counts do not add up: {len(self.tokens)} tokens, {kept} kept, {made} made")


@dataclass(slots=True)
class DecodeState:
    """What is known between two steps of one request.

    ids: prompt and answer so far, a list of S token ids; its last entry is the root: decided, not yet in the cache.
    root: that last token, int64 [1], on the device. taps: hidden states asked for by `Decoder.taps` at the
    position before the root, {layer: [1, 1, h]}; key -1 is the final, normed state (what the LM head reads).
    rng: of this request, on the target's device: for a method that draws its candidates.
    """

    ids: list[int]
    prompt_tokens: int
    root: Tensor
    cache: Cache
    sampling: SamplingParams
    hidden_states: dict[int, Tensor] = field(default_factory=dict)
    rng: torch.Generator = field(default_factory=lambda: torch.Generator())
    num_draft_forwards: int = 0  # forward passes of a draft model, counted by the method that makes them

    @property
    def position(self) -> int:
        """Position of the root: how many tokens the cache holds."""
        return len(self.ids) - 1


class Decoder(ABC):
    """One decoding method, bound to one target.

    Subclasses set `name`, `summary`, `paper`, `lossless`, and a frozen dataclass `Options` whose fields carry
    `metadata={"help": ...}`. One object serves many prompts; `begin` must forget the last one entirely.
    lossless: its output is that of the method that `baseline_for` names; an object whose options give that up sets
    its own to False. autoregressive: each step is the root alone and keeps one token, which the loop enforces; only
    such a method may be a reference. stateful: earlier prompts may change its speed, never its output; reports say so.
    training_info: what is known of the training of its weights (`models.checkpoint.read_training_info`), set where
    they are loaded;
    it goes into the manifest, and reports show it beside the speed. advised: options that are as the folder of the
    weights advises (`models.checkpoint.read_advice`), set where they are loaded; a run says so, and the manifest too.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[str] = ""
    autoregressive: ClassVar[bool] = False
    lossless: bool = True
    stateful: bool = False
    training_info: Mapping[str, Any] = MappingProxyType({})
    advised: Mapping[str, Any] = MappingProxyType({})

    Options: ClassVar[type[Any]] = NoOptions
    node_options: ClassVar[tuple[str, ...]] = ()
    aux_hidden_state_layers: tuple[int, ...] = ()

    def __init__(self, target: Target, options: Any = None) -> None:
        self.target = target
        self.options: Any = self.Options() if options is None else options

    @classmethod  # noqa: B027 - optional hook
    def check(cls, options: Any, base: ModelInfo) -> None:
        """Raises UserError for what can be found wrong before the target's weights are loaded, and nothing downloaded.

        That is in the options, and in the files, headers and configurations of the method's own weights.
        """

    @classmethod
    def with_nodes(cls, given: Mapping[str, str], nodes: int) -> dict[str, str]:
        """Return options, as text, under which a step verifies at most `nodes` drafted nodes.

        It is the meaning of the option `nodes` in every method that has `node_options`: the options that limit the
        nodes of a step, of which the first one is set here. given: the other options. Raises UserError where these
        leave no such limit.
        """
        option = cls.node_options[0]
        if option in given:
            raise UserError(f"{cls.name}: nodes and {option} are the same limit; give one of them")
        return {**given, option: str(nodes)}

    @classmethod
    def load(cls, target: Target, options: Any) -> Decoder:
        """The method with its weights, for this target. Raises UserError where they are missing or do not fit."""
        return cls(target, options)

    @classmethod
    def test_instances(cls, target: Target) -> Mapping[str, Callable[[], Decoder]]:
        """The method in its various shapes for any target, by a label each: what `ssbench check` holds to the laws.

        One that needs weights gives itself random ones. The target may be tiny: two layers, seven words.
        """
        return {"default": lambda: cls.load(target, cls.Options())}

    @classmethod
    def baseline_for(cls, options: Any) -> MethodSpec:
        """Return the method whose output a lossless one must equal; a run includes it.

        Another one than autoregressive decoding of the target only where the method changes the model itself: then an
        autoregressive method of that model (`check_reference`).
        """
        return MethodSpec(REFERENCE)

    def next_logits(self, prompt: Sequence[int], answer: Sequence[int], cache: Cache | None = None) -> Tensor:
        """float32 logits [V] of this method's model after prompt and answer, from a fresh pass; untimed.

        cache: an empty one to use, in which the keys and values of prompt and answer come first in every layer.
        """
        return self.target.next_logits([*prompt, *answer], cache)

    def answer_logits(self, prompt: Sequence[int], answer: Sequence[int]) -> Iterator[Tensor]:
        """Yield float32 logits [n, V] of this method's model at successive tokens of an answer; untimed.

        They come from a fresh pass, and may end before the answer does. Of a method that overrides `next_logits` and
        not this one, only a few positions are compared, with a pass each.
        """
        yield from self.target.answer_logits(prompt, answer)

    @property
    def one_position_per_pass(self) -> bool:
        """Return True if only `next_logits` gives the logits of this method's model."""
        own = type(self)
        return own.next_logits is not Decoder.next_logits and own.answer_logits is Decoder.answer_logits

    def metadata(self) -> dict[str, Any]:
        """What this object measures, JSON-ready: settings as resolved and, where it has weights, their hash.

        Goes into the manifest; a run is resumed only where it is the same.
        """
        return option_values(self.options)

    def search_space(self) -> Mapping[str, Sequence[Any]]:
        """Options whose best value depends on the device, each with the values worth trying, the simplest first.

        None of them may change the output of a lossless method. Options that matter most come first. `ssbench tune`
        asks every configuration that it stands at, so what makes no difference there may be left out. None of these
        may be needed to load the weights. Nothing = not tunable.
        """
        return {}

    def with_options(self, options: Any) -> Decoder:
        """The same method and weights with other values of tunable options. Raises UserError where they do not fit.

        Loads once more; a method whose weights are large overrides it to share them.
        """
        return type(self).load(self.target, options)

    def clone(self) -> Decoder:
        """The same method with the same weights, for a request that is answered at the same time as this one's."""
        return self.with_options(self.options)

    def max_tokens_per_step(self) -> int | None:
        """The most rows that one step may put through the target, the root included; None where that is not known.

        The cache reserves as many as are stated, and a step that needs more ends the run with an error. Of a method
        that states none the cache grows when a step needs it to, which takes time within that step.
        """
        return None

    def drafter_weights(self) -> Iterable[Tensor] | None:
        """Weights that one call of the method's own drafter reads, for counting what a step costs; None: not known.

        Found without being asked for where they are modules that are attributes. One whose `num_draft_forwards`
        are counted reads them once a call, any other once a step.
        """
        modules = [value for value in vars(self).values() if isinstance(value, torch.nn.Module)]
        return [weight for module in modules for weight in read_by_a_pass(module)]

    def extra_work(self) -> ExtraWork:
        """What rows of the method's own are multiplied by besides its nodes, for counting what a step costs."""
        return ExtraWork()

    def prefill(self, state: DecodeState, ids: Tensor) -> Output:
        """Run the prompt ids [1, S] through the target; logits [1, 1, V] at the last position."""
        return self.target.prefill(ids, state.cache, self.aux_hidden_state_layers)

    def on_prefill(self, state: DecodeState) -> None:  # noqa: B027 - optional hook
        """A new prompt has been prefilled; forget the last one."""

    def reset_history(self) -> None:  # noqa: B027 - optional hook
        """Forget every earlier prompt, as after warm-up: what a method that is `stateful` has to do there."""

    @abstractmethod
    def propose(self, state: DecodeState) -> DraftTree:
        """The draft for this step; `DraftTree.root_only(state.root)` = plain autoregressive."""

    def forward(self, state: DecodeState, tree: DraftTree) -> Output:
        """Verify the tree in one pass of the target: logits [1, n, V] for the n nodes of `Output.tree`."""
        return self.target.forward_tree(tree, state.cache, self.aux_hidden_state_layers)

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        """What of the verified tree is accepted: exactly the target's distribution.

        Only a method that is not lossless may have another rule.
        """
        return verify(output.logits[0], tree, state.sampling, state.rng)

    def update(self, state: DecodeState, verdict: VerifyResult, output: Output) -> None:  # noqa: B027 - optional hook
        """The step is committed: state.ids, state.root, state.taps and the cache are already the new ones."""


class DecoderWrapper(Decoder):
    """Does all that the loop asks of it as `inner` does. A subclass overrides the calls that it watches."""

    def __init__(self, inner: Decoder) -> None:
        super().__init__(inner.target, inner.options)
        self.inner, self.aux_hidden_state_layers = inner, inner.aux_hidden_state_layers

    def max_tokens_per_step(self) -> int | None:
        """As `inner`."""
        return self.inner.max_tokens_per_step()

    def prefill(self, state: DecodeState, ids: Tensor) -> Output:
        """As `inner`."""
        return self.inner.prefill(state, ids)

    def on_prefill(self, state: DecodeState) -> None:
        """As `inner`."""
        self.inner.on_prefill(state)

    def propose(self, state: DecodeState) -> DraftTree:
        """As `inner`."""
        return self.inner.propose(state)

    def forward(self, state: DecodeState, tree: DraftTree) -> Output:
        """As `inner`."""
        return self.inner.forward(state, tree)

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        """As `inner`."""
        return self.inner.accept(state, tree, output)

    def update(self, state: DecodeState, verdict: VerifyResult, output: Output) -> None:
        """As `inner`."""
        self.inner.update(state, verdict, output)


def models_of(decoders: Iterable[Decoder]) -> list[Target]:
    """Return every model that these run through the layers of a target: their own, and those of their drafts."""
    found = {id(one): one for decoder in decoders for one in _held_by(decoder) if isinstance(one, Target)}
    return list(found.values())


def drop_caches(decoder: Decoder) -> None:
    """Forget what a method's caches and its models' hold, and their memory: a request was broken off at any place."""
    for held in _held_by(decoder):
        if isinstance(held, Cache):
            held.free()
        elif isinstance(held, Target):
            held.drop_cache()


@contextmanager
def eager_passes(decoder: Decoder) -> Iterator[None]:
    """Within: the method's models run their passes eagerly, where they are replayed otherwise too."""
    before = [(model, model.graphs) for model in models_of([decoder])]
    for model, _ in before:
        model.graphs = None
    try:
        yield
    finally:
        for model, passes in before:
            model.graphs = passes


def _held_by(decoder: Decoder) -> Iterator[Any]:
    """Yield what a method holds, and what that holds in turn; of a target nothing further, of a method all."""
    for held in vars(decoder).values():
        yield held
        if isinstance(held, Decoder):
            yield from _held_by(held)
        elif not isinstance(held, Target):
            yield from list(getattr(held, "__dict__", {}).values())


def check_reference(method: type[Decoder], reference: type[Decoder]) -> None:
    """Raise UserError if a method may not be compared with the one that its `baseline_for` names.

    The autoregressive baseline is a reference of every method. Any other reference must be autoregressive: it keeps one
    token a step, which the loop enforces (`generate.Session`). It is compared with the baseline alone, so that no
    method is compared with itself.
    """
    if reference.name == REFERENCE:
        return
    named = f"method {method.name!r}: baseline_for names {reference.name!r}"
    if method.autoregressive:
        raise UserError(f"{named}; the reference of an autoregressive method is {REFERENCE!r}: leave baseline_for out")
    if not reference.autoregressive:
        raise UserError(
            f"{named}, which is not autoregressive; name {REFERENCE!r} or autoregressive decoding of its model"
        )


def reference_spec(method: type[Decoder] | Decoder, options: Any) -> MethodSpec:
    """Return what `baseline_for` gives. Raises UserError for anything but a MethodSpec."""
    found = method.baseline_for(options)
    if not isinstance(found, MethodSpec):
        raise UserError(f"method {method.name!r}: baseline_for returns {found!r}; return MethodSpec(name)")
    return found


def references(decoders: Mapping[str, Decoder]) -> dict[str, str]:
    """Return the label of every method's reference, by label.

    Raises UserError where a reference is not among the methods, or is one that `check_reference` refuses.
    """
    found = {label: reference_spec(decoder, decoder.options).label for label, decoder in decoders.items()}
    for label in (REFERENCE, *found.values()):
        if label not in decoders:
            raise UserError(f"the reference method {label!r} must be among the methods")
    for label, reference in found.items():
        if reference != REFERENCE:
            check_reference(type(decoders[label]), type(decoders[reference]))
    return found


SELECTION_OPS = {"topk", "argmax", "max", "sort", "multinomial", "_softmax", "_log_softmax", "logsumexp"}  # of torch


class NonFiniteDetector(TorchDispatchMode):
    """Sees whether any tensor that tokens are chosen from holds NaN or infinity. -inf is allowed: it means never."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at the first argument of an operation that chooses, and let it go on."""
        if func.overloadpacket.__name__ in SELECTION_OPS and args[0].is_floating_point():
            self.found = self.found or bool((args[0].isnan() | (args[0] == math.inf)).any())
        return func(*args, **(kwargs or {}))
