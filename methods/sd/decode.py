"""Two-model speculative decoding: a smaller model drafts a chain, a tree, or text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import torch
from annotated_types import Ge, Lt
from torch import Tensor

from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.engine.costs import read_by_a_pass
from specbench_ss.engine.decoder import Decoder, DecodeState
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Output, Target
from specbench_ss.engine.tree import MOST_NODES, AnyTopology, DeviceTopology, DraftTree, indices
from specbench_ss.engine.verify import VerifyResult
from specbench_ss.errors import UserError, prefixed
from specbench_ss.methods._shared.small_llama import new_llama
from specbench_ss.methods._shared.tree_growth import Choose, best, draw, grow
from specbench_ss.methods.sd.draft import Draft, check_named, checked_lora, holds_lora, merged_lora, mismatch
from specbench_ss.models.checkpoint import drafter_here, read_config, read_training_info
from specbench_ss.models.load import hash_weights, load_target, outline_of
from specbench_ss.options import Bounded, option

LONGEST = 64  # tokens of a chain whose length is not fixed: more has never paid


@dataclass(frozen=True, slots=True)
class TwoModelOptions(Bounded):
    """Options of `sd`. Raises UserError for what cannot be drafted."""

    owner: ClassVar[str] = "sd"
    weights: str = option(
        "",
        "The draft model: folder or hub id, or as `draft-2m` the name of another one that came with the "
        "model. A folder with a LoRA that names no model changes the one that came with the model. Empty: that one.",
    )
    form: Literal["chain", "tree"] = option("chain", "Form of the draft.")
    gamma: Annotated[int, Ge(1)] = option(
        4, "Length of a chain, at first where a schedule changes it; or depth of a tree."
    )
    threshold: Annotated[float, Ge(0), Lt(1)] = option(
        0.0,
        "Chains only: end the chain with a token that is less probable to the draft model than this. "
        "0: chains of a fixed length.",
    )
    schedule: Literal["constant", "heuristic"] = option(
        "constant",
        "Chains only: how the length changes. heuristic: 2 longer after a chain that was accepted whole, "
        "else 1 shorter.",
    )
    k: Annotated[int, Ge(1)] = option(
        3, "Trees only: candidates of a node, and how many nodes of a level are given candidates."
    )
    nodes: Annotated[int, Ge(0)] = option(
        12, "Trees only: how many nodes are drafted, the best by joint probability. 0: all of them."
    )
    candidates: Literal["auto", "top", "drawn"] = option(
        "auto",
        "Where tokens are sampled: whether candidates are drawn from the draft model's distribution or are "
        "its likeliest tokens (top). auto: drawn for chains, top for trees.",
    )
    retokenise: bool = option(
        False,
        "Accept a draft model of another vocabulary: its likeliest tokens are turned into text, and that "
        "into the target's tokens, which are the draft (a chain).",
    )
    lookbehind: Annotated[int, Ge(1)] = option(
        10, "With `retokenise`: how many earlier tokens new text is tokenised together with."
    )

    def check_together(self) -> None:
        if self.form == "tree" and (self.threshold or self.schedule != "constant"):
            raise UserError("sd: threshold and schedule are for chains, not for form=tree")
        if self.form == "tree" and self.retokenise:
            raise UserError("sd: what is drafted through text is a chain: no retokenise=on with form=tree")
        if self.form == "chain" and self.gamma > LONGEST:
            raise UserError(f"sd: gamma must be at most {LONGEST}, not {self.gamma}")
        if self.form == "tree" and self.whole_tree() >= MOST_NODES:
            raise UserError(f"sd: k={self.k} with gamma={self.gamma} makes a tree of more than {MOST_NODES} nodes")

    def whole_tree(self) -> int:
        """Nodes that a tree has before the best are chosen, root excluded."""
        return self.k + (self.gamma - 1) * self.k**2

    def drawn(self, greedy: bool) -> bool:
        """Whether candidates are drawn from the draft's distribution."""
        drawn = self.form == "chain" if self.candidates == "auto" else self.candidates == "drawn"
        return drawn and not greedy


def draft_chain(
    draft: Draft, logits: Tensor, length: int, threshold: float, drawn: SamplingParams | None, state: DecodeState
) -> tuple[Tensor, Tensor | None]:
    """At most `length` tokens int64 [n] after what has been fed, given its logits [V]: the best, or as `drawn` samples.

    Also what each was drawn from [n + 1, V] (the last row is of no token), None = the best. A token less probable than
    the threshold ends the chain: whether another follows depends on what is verified alone, and what was drawn is never
    dropped, so that verification stays exact. Without threshold the device is never waited for.
    """
    tokens: list[Tensor] = []
    probs: list[Tensor] = []
    while True:
        if drawn is None:
            token = logits.argmax(-1, keepdim=True)
        else:
            probs.append(drawn.probs(logits))
            token = draw(probs[-1], state.rng)
        tokens.append(token)
        if len(tokens) == length:
            break
        if threshold:
            p = logits.softmax(-1, dtype=torch.float32) if drawn is None else probs[-1]
            if float(p[token]) < threshold:
                break
        logits = draft.feed(token)
    return torch.cat(tokens), torch.stack([*probs, probs[-1]]) if probs else None


def drawing(k: int, sampling: SamplingParams, rng: torch.Generator) -> Choose:
    """k tokens of each row, drawn without replacement."""

    def choose(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = sampling.probs(logits)
        tokens = draw(q, rng, k)
        return tokens, q.gather(-1, tokens).log(), q

    return choose


PARTIAL = "\ufffd"  # the text of a token that ends within a character


class Bridge:
    """What the draft has been told of the target's text, in the draft's tokens.

    ids: these tokens; the last `tell` left the first `settled` of them as they were. told: of the target's tokens.
    """

    ids: list[int]
    told: int
    settled: int

    def __init__(self, ours: Any, theirs: Any, lookbehind: int) -> None:
        self.ours, self.theirs, self.lookbehind = ours, theirs, lookbehind
        self.on_prefill()

    def on_prefill(self) -> None:
        """A new prompt."""
        self.ids, self.told, self.settled = [], 0, 0

    def tell(self, ids: list[int]) -> bool:
        """Take in the target's tokens. False where they end within a character: the draft has to wait."""
        if self.told == len(ids):
            self.settled = len(self.ids)
            return True
        text = added(self.ours, ids[max(0, self.told - self.lookbehind) : self.told], ids[self.told :])
        if text.endswith(PARTIAL):
            return False
        if self.told:
            self.settled = max(0, len(self.ids) - self.lookbehind)
            self.ids = extended(self.theirs, self.ids, text, self.lookbehind)
        else:
            self.ids = list(self.theirs(text)["input_ids"])  # with what the draft begins a text with
        self.told = len(ids)
        return bool(self.ids)

    def candidates(self, ids: list[int], drafted: list[int]) -> list[int]:
        """The draft's tokens as those of the target that follow `ids`."""
        text = added(self.theirs, self.ids[-self.lookbehind :], drafted).rstrip(PARTIAL)
        return following(self.ours, ids[-self.lookbehind :], text)


def decoded(tokenizer: Any, ids: list[int]) -> str:
    """Text, special tokens left out."""
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def encoded(tokenizer: Any, text: str) -> list[int]:
    """Tokens of a part of a text."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def added(tokenizer: Any, before: list[int], new: list[int]) -> str:
    """What `new` adds to the text of `before`."""
    known, whole = decoded(tokenizer, before), decoded(tokenizer, before + new)
    return whole[len(known) :] if whole.startswith(known) else decoded(tokenizer, new)


def following(tokenizer: Any, before: list[int], text: str) -> list[int]:
    """Tokens of the text behind `before`, which stay as they are."""
    known = decoded(tokenizer, before)
    apart, together = encoded(tokenizer, known), encoded(tokenizer, known + text)
    return together[len(apart) :] if together[: len(apart)] == apart else encoded(tokenizer, text)


def extended(tokenizer: Any, ids: list[int], text: str, lookbehind: int) -> list[int]:
    """ids continued by the text; the last `lookbehind` of them may change, so that words are cut as they should be."""
    cut = max(0, len(ids) - lookbehind)
    tail = ids[cut:]
    again = encoded(tokenizer, decoded(tokenizer, tail) + text)
    if tail and again[:1] != tail[:1]:  # the window begins within a word: nothing before the new text is touched
        return ids + following(tokenizer, tail, text)
    return ids[:cut] + again


T = TypeVar("T", bound=ModelInfo)

FINER = 4  # tokens of the draft for one of the target that there is room for, where they have different vocabularies
NODES = (4, 6, 8, 12, 16, 24, 32, 48)


class TwoModel(Decoder):
    """The draft has a cache of its own, which holds what is accepted but for the newest token (or two)."""

    name = "sd"
    summary = "two-model speculative decoding: a small model drafts a chain or a tree"
    paper = "Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318"
    Options = TwoModelOptions
    node_options = ("gamma", "nodes")
    companion: ClassVar[str] = "draft"  # the folder beside a model that has the weights

    def __init__(self, target: Target, options: TwoModelOptions, draft: Target) -> None:
        super().__init__(target, options)
        self.draft = Draft(draft, target.vocab_size)
        self.gamma = options.gamma  # length of the next chain
        self.bridge: Bridge | None = None
        if check_pair(options, target, draft):
            self.bridge = Bridge(target.tokenizer, draft.tokenizer, options.lookbehind)
        self.logits = torch.empty(0)  # [V] after all that the draft has been fed
        self.fed: list[int] = []  # where it drafts through text: its tokens in its cache
        self.shape: AnyTopology | None = None  # of the last tree that was grown, with rows of the draft's cache noted

    def drafter_weights(self) -> Iterable[torch.Tensor]:
        """The draft model's; each of its calls reads them once."""
        return read_by_a_pass(self.draft.model.model)

    @classmethod
    def with_nodes(cls, given: Mapping[str, str], nodes: int) -> dict[str, str]:
        """Return the options with the length of a chain, or the nodes of a tree."""
        tree = given.get("form") == "tree"
        open_ended = {"candidates": "drawn"} if tree else {"schedule": "heuristic", "retokenise": "on"}
        for name, value in open_ended.items():
            if given.get(name) == value:
                raise UserError(f"sd: {name}={value} sets no limit of nodes; leave out {name} or nodes")
        return {**given, "nodes": str(nodes)} if tree else super().with_nodes(given, min(nodes, LONGEST))

    @classmethod
    def check(cls, options: Any, base: ModelInfo) -> None:
        path = drafter_here(options.weights, cls.name, base, cls.companion)
        if path is not None:
            check_pair(options, base, draft_in(str(path), base, outline_of, checked_lora))

    @classmethod
    def load(cls, target: Target, options: Any) -> TwoModel:
        """The draft that the user named, or the one that came with the model, in the target's dtype beside it."""
        path = drafter_here(options.weights, cls.name, target, cls.companion)
        beside = partial(load_target, dtype=target.number_format, device=str(target.device))
        place = str(path or options.weights)
        found = cls(target, options, draft_in(place, target, beside, merged_lora))
        own = getattr(found.draft.model.model.config, "ssbench", {})
        found.training_info = read_training_info(read_config(Path(place)) if holds_lora(Path(place)) else own)
        return found

    @classmethod
    def test_instances(cls, target: Target) -> Mapping[str, Callable[[], Decoder]]:
        """Chains and trees of a random draft; the target as its own draft; a draft whose context ends early."""
        random, short = random_draft(target, target.context_length), random_draft(target, 24)
        o = TwoModelOptions
        shapes = {
            "chain": (o(), random),
            "adaptive": (o(gamma=6, threshold=0.3), random),
            "heuristic": (o(gamma=2, schedule="heuristic"), random),
            "tree": (o(form="tree", gamma=3, k=2, nodes=6), random),
            "tree-drawn": (o(form="tree", gamma=3, k=2, candidates="drawn"), random),
            "short-draft": (o(candidates="top"), short),
            "same-model": (o(form="tree", gamma=3, k=3, nodes=0), target),
        }
        return {label: partial(cls, target, options, draft) for label, (options, draft) in shapes.items()}

    def with_options(self, options: Any) -> TwoModel:
        other = type(self)(self.target, options, self.draft.model)
        other.draft = self.draft
        return other

    def clone(self) -> TwoModel:
        return type(self)(self.target, self.options, self.draft.model)

    def search_space(self) -> Mapping[str, Sequence[Any]]:
        if self.options.form == "tree":
            return {"gamma": (1, 2, 3, 4, 5, 6), "k": (1, 2, 3, 4, 6), "nodes": NODES, "form": ("chain", "tree")}
        chain = {"gamma": (1, 2, 3, 4, 5, 6, 8, 10), "threshold": (0.0, 0.2, 0.4, 0.6, 0.8)}
        return chain if self.bridge else {**chain, "form": ("chain", "tree")}

    def metadata(self) -> dict[str, Any]:
        used = ("gamma", "k", "nodes") if self.options.form == "tree" else ("gamma", "threshold", "schedule")
        through = {"lookbehind": self.options.lookbehind} if self.bridge else {}
        model = self.draft.model
        return {
            "form": self.options.form,
            **{name: getattr(self.options, name) for name in used},
            "drawn": self._drawn(greedy=False),
            "retokenised": self.bridge is not None,
            **through,
            "draft_parameters": model.parameter_count,
            "draft_context": model.context_length,
            "draft_hash": model.weights_hash or hash_weights(model.model),
        }

    def max_tokens_per_step(self) -> int:
        o = self.options
        if o.form == "chain":
            return 1 + (LONGEST if o.retokenise or o.schedule == "heuristic" else int(o.gamma))
        whole = int(o.whole_tree())
        return 1 + (whole if o.candidates == "drawn" else min(o.nodes, whole) or whole)  # what was drawn is not dropped

    # -- the loop's calls ---------------------------------------------------------------------------------------

    def on_prefill(self, state: DecodeState) -> None:
        """The draft reads the prompt and the first token."""
        from specbench_ss.engine.engines import replay_draft

        o = self.options
        own = o.gamma * o.k if o.form == "tree" else 0  # rows of a tree that no accepted token gets
        capacity = state.cache.capacity * (FINER if self.bridge else 1)
        replay_draft(self.draft.model, self.target)
        self.draft.begin(min(capacity, self.draft.model.context_length) + own)
        self.gamma = o.gamma
        self.fed = []
        if self.bridge:
            self.bridge.on_prefill()
        self._catch_up(state)
        state.num_draft_forwards = self.draft.calls

    def propose(self, state: DecodeState) -> DraftTree:
        """A draft, as far as both models have positions; where the draft's context ends, none."""
        self.shape = None
        here = self.target.context_length - 1 - state.position
        if here < 1 or not self._catch_up(state):
            return DraftTree.root_only(state.root)
        tree = self._drafted(state, min(self.gamma, here, self.draft.room + 1))  # the last token is not fed
        state.num_draft_forwards = self.draft.calls
        return tree

    def update(self, state: DecodeState, verdict: VerifyResult, output: Output) -> None:
        """The draft's cache forgets what was not accepted."""
        assert output.tree is not None
        drafted = len(output.tree) - 1
        if self.options.schedule == "heuristic" and drafted:  # as in transformers
            whole = verdict.accepted == drafted
            self.gamma = min(LONGEST, self.gamma + 2) if whole else max(1, self.gamma - 1)
        rows = self.shape.node_tags if isinstance(self.shape, DeviceTopology) else []
        if max(rows, default=-1) >= 0:
            self.draft.keep(state.position - verdict.accepted, [rows[i] for i in verdict.path if rows[i] >= 0])
        elif self.bridge is None:
            self.draft.rewind(state.position)

    def _drafted(self, state: DecodeState, length: int) -> DraftTree:
        o, drawn = self.options, state.sampling if self._drawn(state.sampling.greedy) else None
        if o.form == "tree":
            choose = best(o.k) if drawn is None else drawing(o.k, drawn, state.rng)
            nodes = o.nodes if drawn is None else 0  # drawn candidates stay: only what is verified may choose

            def expand(tokens: Tensor, visible: Tensor, above: Tensor, level: int) -> Tensor:
                return self.draft.feed_level(tokens, visible, level)

            tree = grow(state.root, self.logits, choose, expand, length, nodes)
            self.shape = tree.topology
            return tree
        tokens, probs = draft_chain(self.draft, self.logits, length, o.threshold, drawn, state)
        if self.bridge is None:
            return DraftTree.chain(state.root, tokens, probs)
        return self._through_text(state, tokens.tolist())

    def _drawn(self, greedy: bool) -> bool:
        return self.bridge is None and bool(self.options.drawn(greedy))

    def _catch_up(self, state: DecodeState) -> bool:
        """Feed the draft what it has not seen. False where it has no room, or the text ends within a character."""
        known = state.ids
        if self.bridge:
            if not self.bridge.tell(state.ids):
                return False
            known, settled = self.bridge.ids, self.bridge.settled
            alike = takewhile(lambda pair: pair[0] == pair[1], zip(self.fed[settled:], known[settled:-1], strict=False))
            self.draft.rewind(settled + sum(1 for _ in alike))
            self.fed = known
        unseen = known[self.draft.fed :]
        if len(unseen) > self.draft.room:
            return False
        if unseen:
            one = len(unseen) == 1 and self.bridge is None  # the root, which is on the device
            self.logits = self.draft.feed(state.root if one else indices(unseen, state.root.device))
        return True

    def _through_text(self, state: DecodeState, drafted: list[int]) -> DraftTree:
        """What the draft's tokens say, in the target's."""
        assert self.bridge is not None
        self.fed = self.bridge.ids + drafted[:-1]
        ends = self.draft.model.eos_ids
        said = list(takewhile(lambda token: token not in ends, drafted))
        ids = self.bridge.candidates(state.ids, said) if said else []
        ids = list(takewhile(lambda token: token < self.target.vocab_size, ids[:LONGEST]))
        return DraftTree.chain(state.root, indices(ids, state.root.device)) if ids else DraftTree.root_only(state.root)


def check_pair(options: TwoModelOptions, base: ModelInfo, draft: ModelInfo) -> bool:
    """Whether they have different vocabularies. Raises UserError where the options do not allow that."""
    if options.form == "tree" and options.k > base.vocab_size:
        raise UserError(f"sd: k must be at most {base.vocab_size}, the size of the vocabulary, not {options.k}")
    problem = mismatch(base, draft)
    if problem and not options.retokenise:
        raise UserError(
            f"sd: the draft {draft.name!r} has another vocabulary: {problem}; "
            "--set sd.retokenise=on lets it draft through text"
        )
    if problem and (base.tokenizer is None or draft.tokenizer is None):
        raise UserError("sd: retokenise=on needs the tokenizers of both models")
    return bool(problem)


def draft_in(place: str, base: ModelInfo, load: Callable[[str], T], with_lora: Callable[[T, Path], T]) -> T:
    """The draft in a folder or at the hub; where there is only a LoRA, the draft that came with the base has it.

    Raises UserError.
    """
    with prefixed("sd"):
        only_lora = holds_lora(Path(place))
        own = base.bundled_drafter(TwoModel.companion) if only_lora else None
        if only_lora and own is None:
            raise UserError(f"{place} holds a LoRA that names no model, and no draft came with {base.name!r}")
        if not only_lora:
            check_named(Path(place))
        with prefixed("sd: the draft"):
            draft = load(str(own or place))
        return with_lora(draft, Path(place)) if only_lora else draft


def random_draft(target: Target, context: int) -> Target:
    """A tiny Llama of the target's vocabulary, always the same one, with opinions."""
    special = {"bos": None, "eos": None, "pad": None}
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(1)
        model = new_llama(32, 2, 4, 2, 48, target.vocab_size, context, special)
        for p in model.parameters():
            if p.ndim > 1:
                torch.nn.init.normal_(p, std=0.15)
    return Target(model.to(target.device, target.dtype), target.tokenizer, name="random draft")
