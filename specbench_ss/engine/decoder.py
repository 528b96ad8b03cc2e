"""Decoder interface of a decoding method.

A method proposes a draft tree. The core does the rest: loop, target forward, verification, KV cache, sampling,
stopping, counting and timing.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
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
    """One verification pass of the target; times in seconds.

    draft_s + verify_s + accept_s + host_s = total_s.
    """

    draft_nodes: int  # drafted nodes, without the root
    verified_nodes: int  # drafted nodes that reached the last layer: fewer than draft_nodes if a method prunes
    draft_depth: int  # depth of the draft tree before pruning
    accepted_tokens: int  # accepted draft tokens, before the cut
    tokens: int  # tokens kept after the cut at a stop token, stop string or limit; accepted_tokens + 1 without a cut
    draft_s: float
    verify_s: float
    accept_s: float
    host_s: float
    total_s: float


@dataclass(slots=True)
class Generation:
    """Output of one request: len(tokens) == prefill_tokens + sum(step.tokens).

    Attributes:
        tokens: kept ids with the end token if there is one; the first comes from prefill, the others from steps.
        tokens_past_stop: accepted tokens beyond the cut; no other count includes them.
        offers: candidates of each token, for the test of the acceptance rule; only at a temperature above 0.
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
        """Return the seconds spent in steps."""
        return sum(step.total_s for step in self.steps)

    @property
    def wall_s(self) -> float:
        """Return the seconds of prefill and decode."""
        return self.prefill_s + self.decode_s

    @property
    def tokens_per_step(self) -> float | None:
        """Return the mean acceptance length τ of this request: tokens / steps; None without a step."""
        return sum(s.tokens for s in self.steps) / len(self.steps) if self.steps else None

    @property
    def all_drafts_rejected(self) -> bool:
        """Return True if there are several steps, each drafted a token, and none was accepted."""
        return len(self.steps) > 1 and all(s.draft_nodes and not s.accepted_tokens for s in self.steps)

    def check(self) -> None:
        """Raise RuntimeError if the counts do not add up (an impossible result is a bug)."""
        wrong = [
            s
            for s in self.steps
            if not (0 <= s.accepted_tokens <= s.draft_depth <= s.draft_nodes and 0 <= s.tokens <= s.accepted_tokens + 1)
        ]
        if wrong:
            raise RuntimeError(f"impossible counts of a step: {wrong[0]}")
        generated = self.prefill_tokens + sum(s.accepted_tokens + 1 for s in self.steps)
        kept = self.prefill_tokens + sum(s.tokens for s in self.steps)
        if len(self.tokens) != kept or kept + self.tokens_past_stop != generated:
            raise RuntimeError(f"counts do not add up: {len(self.tokens)} tokens, {kept} kept, {generated} generated")


@dataclass(slots=True)
class DecodeState:
    """State of one request between two steps.

    Attributes:
        ids: prompt and output so far, S token ids; the last one is the root, which is not yet in the KV cache.
        root: the last token, int64 [1], on the device.
        hidden_states: {layer: [1, 1, h]} for `Decoder.aux_hidden_state_layers` at the position before the root;
            layer -1 is the final, normed state (the input of the LM head), layer n_layers the state before that norm.
        rng: generator of this request on the target's device, for sampling candidates.
        num_draft_forwards: forward passes of a draft model, counted by the method.
    """

    ids: list[int]
    prompt_tokens: int
    root: Tensor
    cache: Cache
    sampling: SamplingParams
    hidden_states: dict[int, Tensor] = field(default_factory=dict)
    rng: torch.Generator = field(default_factory=lambda: torch.Generator())
    num_draft_forwards: int = 0

    @property
    def position(self) -> int:
        """Return the position of the root, which is the number of tokens in the KV cache."""
        return len(self.ids) - 1


class Decoder(ABC):
    """One decoding method, bound to one target.

    Subclasses set `name`, `summary`, `paper`, `lossless`, and a frozen dataclass `Options` whose fields carry
    `metadata={"help": ...}`. One object serves many prompts: `on_prefill` must reset all state of the last one.

    Attributes:
        lossless: the output equals that of `baseline_for`; an object with lossy options sets its own to False.
        autoregressive: each step is the root alone and keeps one token (checked by the loop); required of a baseline.
        stateful: earlier prompts may change the speed, never the output; reports show it.
        training_info: record of the training of the weights (`models.checkpoint.read_training_info`), set on loading;
            it goes into the manifest and the reports.
        can_export: `export` writes the weights for vLLM.
        advised: options set from the folder of the weights (`models.checkpoint.read_advice`), set on loading; the run
            prints them and the manifest stores them.
        measured: what was measured on loading and decides how the method drafts; printed and stored in the same way.
            A resumed run measures again.
        load_warnings: warnings that were given on loading, which a run keeps with its own.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    paper: ClassVar[str] = ""
    autoregressive: ClassVar[bool] = False
    lossless: bool = True
    stateful: bool = False
    training_info: Mapping[str, Any] = MappingProxyType({})
    advised: Mapping[str, Any] = MappingProxyType({})
    measured: Mapping[str, Any] = MappingProxyType({})
    load_warnings: tuple[str, ...] = ()

    Options: ClassVar[type[Any]] = NoOptions
    node_options: ClassVar[tuple[str, ...]] = ()
    can_export: ClassVar[bool] = False
    aux_hidden_state_layers: tuple[int, ...] = ()

    def __init__(self, target: Target, options: Any = None) -> None:
        self.target = target
        self.options: Any = self.Options() if options is None else options

    @classmethod  # noqa: B027 - optional hook
    def check(cls, options: Any, base: ModelInfo) -> Mapping[str, Any] | None:
        """Raise UserError for faults of options, files, headers and configurations of the method's own weights.

        Called before the target's weights are loaded; downloads nothing. May return what `advised` will be.
        """

    @classmethod
    def _limits_nodes(cls, given: Mapping[str, str]) -> bool:
        """Return True if one of these options limits the nodes of a step."""
        return bool({"nodes", *cls.node_options} & given.keys())

    @classmethod
    def with_nodes(cls, given: Mapping[str, str], nodes: int) -> dict[str, str]:
        """Return options, as text, that limit a step to `nodes` draft nodes: the option `nodes` of a method.

        Sets the first of `node_options`, the options that limit the nodes of a step. given: the other options. Raises
        UserError if that option is given, or if the others set no limit.
        """
        option = cls.node_options[0]
        if option in given:
            raise UserError(f"{cls.name}: nodes and {option} are the same limit; give one of them")
        return {**given, option: str(nodes)}

    @classmethod
    def load(cls, target: Target, options: Any) -> Decoder:
        """Return the method with its weights for this target. Raises UserError if they are missing or do not fit."""
        return cls(target, options)

    @classmethod
    def test_instances(cls, target: Target) -> Mapping[str, Callable[[], Decoder]]:
        """Return factories of the method's variants for any target, by label; `ssbench check` runs them.

        A method with weights creates random ones. The target may be tiny: two layers, seven tokens.
        """
        return {"default": lambda: cls.load(target, cls.Options())}

    @classmethod
    def baseline_for(cls, options: Any) -> MethodSpec:
        """Return the method whose output a lossless one must equal; a run includes it.

        Override only if the method changes the model: return an autoregressive method of the changed model
        (`check_reference`).
        """
        return MethodSpec(REFERENCE)

    def next_logits(self, prompt: Sequence[int], answer: Sequence[int], cache: Cache | None = None) -> Tensor:
        """Return float32 logits [V] of this method's model after prompt and answer, from a fresh, untimed pass.

        cache: an empty one to use; in every layer the keys and values of prompt and answer come first.
        """
        return self.target.next_logits([*prompt, *answer], cache)

    def answer_logits(self, prompt: Sequence[int], answer: Sequence[int]) -> Iterator[Tensor]:
        """Yield float32 logits [n, V] of this method's model at successive tokens of an answer, from an untimed pass.

        May stop before the end of the answer. If a method overrides only `next_logits`, a few positions are compared,
        with one pass each.
        """
        yield from self.target.answer_logits(prompt, answer)

    @property
    def one_position_per_pass(self) -> bool:
        """Return True if only `next_logits` gives the logits of this method's model."""
        cls = type(self)
        return cls.next_logits is not Decoder.next_logits and cls.answer_logits is Decoder.answer_logits

    def metadata(self) -> dict[str, Any]:
        """Return resolved settings and the hash of any weights, JSON-ready, for the manifest.

        A run is resumed only if they are equal.
        """
        return option_values(self.options)

    def search_space(self) -> Mapping[str, Sequence[Any]]:
        """Return options whose best value depends on the device, with the values to try, the simplest first.

        None may change the output of a lossless method or be needed to load the weights. The most important options
        come first. Called for every configuration that is tried; omit options that have no effect there. {} = nothing
        to tune.
        """
        return {}

    def with_options(self, options: Any) -> Decoder:
        """Return the same method and weights with other values of tunable options; UserError if they do not fit.

        The default loads the weights again; a method with large weights overrides it to share them.
        """
        return type(self).load(self.target, options)

    def clone(self) -> Decoder:
        """Return the same method with the same weights, for a concurrent request."""
        return self.with_options(self.options)

    def max_tokens_per_step(self) -> int | None:
        """Return the maximum query tokens per step of the target, the root included; None if unknown.

        The KV cache reserves that many, and a step with more ends the run with an error. With None the cache grows
        when needed, within the timed step.
        """
        return None

    def drafter_weights(self) -> Iterable[Tensor] | None:
        """Return the weights that one call of the method's own drafter reads, for the cost of a step; None if unknown.

        The default collects attributes that are modules. They are read once per call if the method counts
        `num_draft_forwards`, else once per step.
        """
        modules = [value for value in vars(self).values() if isinstance(value, torch.nn.Module)]
        return [weight for module in modules for weight in read_by_a_pass(module)]

    def export(self, folder: Path) -> dict[str, Any]:
        """Write the weights to a folder as vLLM reads them; return its speculative configuration for them.

        Raises UserError, and writes nothing, if the layout cannot describe these weights.
        """
        raise NotImplementedError(f"{self.name} cannot be exported")

    def extra_work(self) -> ExtraWork:
        """Return the extra work per step beyond verifying the draft nodes, for the cost of a step."""
        return ExtraWork()

    def prefill(self, state: DecodeState, ids: Tensor) -> Output:
        """Run the prompt ids [1, S] through the target; return logits [1, 1, V] at the last position."""
        return self.target.prefill(ids, state.cache, self.aux_hidden_state_layers)

    def on_prefill(self, state: DecodeState) -> None:  # noqa: B027 - optional hook
        """Reset the state of the last prompt; called after the prefill of a new one."""

    def reset_history(self) -> None:  # noqa: B027 - optional hook
        """Reset the history of all earlier prompts, as after warm-up; required if `stateful`."""

    @abstractmethod
    def propose(self, state: DecodeState) -> DraftTree:
        """Return the draft of this step; `DraftTree.root_only(state.root)` = an autoregressive step."""

    def forward(self, state: DecodeState, tree: DraftTree) -> Output:
        """Verify the tree in one target pass; return logits [1, n, V] for the n nodes of `Output.tree`."""
        return self.target.forward_tree(tree, state.cache, self.aux_hidden_state_layers)

    def accept(self, state: DecodeState, tree: DraftTree, output: Output) -> VerifyResult:
        """Return the accepted path; it follows exactly the target's distribution.

        Only a method that is not lossless may override the rule.
        """
        return verify(output.logits[0], tree, state.sampling, state.rng)

    def update(self, state: DecodeState, result: VerifyResult, output: Output) -> None:  # noqa: B027 - optional hook
        """Update the method's state after a commit: state.ids, .root, .hidden_states and .cache are the new ones."""


FORWARDED = ("max_tokens_per_step", "prefill", "on_prefill", "forward", "accept", "update")


class DecoderWrapper(Decoder):
    """Forward every call of the loop to `inner`; a subclass overrides the calls that it observes."""

    def __init__(self, inner: Decoder) -> None:
        super().__init__(inner.target, inner.options)
        self.inner, self.aux_hidden_state_layers = inner, inner.aux_hidden_state_layers
        for name in FORWARDED:
            if getattr(type(self), name) is getattr(Decoder, name):
                setattr(self, name, getattr(inner, name))

    def propose(self, state: DecodeState) -> DraftTree:
        """Forward to `inner`."""
        return self.inner.propose(state)


def models_of(decoders: Iterable[Decoder]) -> list[Target]:
    """Return every model that these methods run through target layers: their own and their draft models."""
    models = {id(member): member for decoder in decoders for member in _members(decoder) if isinstance(member, Target)}
    return list(models.values())


def drop_caches(decoder: Decoder) -> None:
    """Free the KV caches of a method and of its models after an interrupted request."""
    for member in _members(decoder):
        if isinstance(member, Cache):
            member.free()
        elif isinstance(member, Target):
            member.drop_cache()


@contextmanager
def eager_passes(decoder: Decoder) -> Iterator[None]:
    """Run passes of the method's models eagerly within the block."""
    before = [(model, model.graphs) for model in models_of([decoder])]
    for model, _ in before:
        model.graphs = None
    try:
        yield
    finally:
        for model, graphs in before:
            model.graphs = graphs


def _members(decoder: Decoder) -> Iterator[Any]:
    """Yield the attributes of a method and theirs in turn, recursively for decoders, not for targets."""
    for member in vars(decoder).values():
        yield member
        if isinstance(member, Decoder):
            yield from _members(member)
        elif isinstance(member, list | tuple):
            yield from member
        elif not isinstance(member, Target):
            yield from list(getattr(member, "__dict__", {}).values())


def check_reference(method: type[Decoder], reference: type[Decoder]) -> None:
    """Raise UserError if a method may not be compared with the one that its `baseline_for` names.

    The autoregressive baseline may be the reference of every method. Any other reference must be autoregressive
    (checked by `generate.DecodeSession`) and is itself compared with the baseline, so that no method is compared with
    itself.
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
    """Return the result of `baseline_for`. Raises UserError unless it is a MethodSpec."""
    spec = method.baseline_for(options)
    if type(spec) is not MethodSpec or type(spec.name) is not str:
        raise UserError(f"method {method.name!r}: baseline_for returns {spec!r}; return MethodSpec(name)")
    return spec


def check_references(decoders: Mapping[str, Decoder], baselines: Mapping[str, str]) -> None:
    """Raise UserError if a reference is not among the methods or fails `check_reference`. baselines: by label."""
    for label in (REFERENCE, *baselines.values()):
        if label not in decoders:
            raise UserError(f"the reference method {label!r} must be among the methods")
    for label, reference in baselines.items():
        if reference != REFERENCE:
            check_reference(type(decoders[label]), type(decoders[reference]))


SELECTION_OPS = {"topk", "argmax", "max", "sort", "multinomial", "_softmax", "_log_softmax", "logsumexp"}  # of torch


class NonFiniteDetector(TorchDispatchMode):
    """Detect NaN or +inf in tensors that tokens are selected from; -inf is allowed (a masked token)."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Check the first argument of a selection operator, then run the operator."""
        if func.overloadpacket.__name__ in SELECTION_OPS and args[0].is_floating_point():
            self.found = self.found or bool((args[0].isnan() | (args[0] == math.inf)).any())
        return func(*args, **(kwargs or {}))
