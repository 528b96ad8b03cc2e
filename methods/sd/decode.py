"""Two-model speculative decoding: a smaller model drafts a chain, a tree, or text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from specbench_ss.methods._shared.draft_vocabulary import (
    DraftVocabulary,
    draft_vocabulary,
    vocabulary_option,
)
from specbench_ss.methods._shared.small_llama import new_llama
from specbench_ss.methods._shared.tree_growth import Choose, best, draw, grow
from specbench_ss.methods.sd.draft import Draft, check_adapter, check_lora_fits, is_bundled_lora, merged_lora, mismatch
from specbench_ss.models.catalog import fetchable
from specbench_ss.models.checkpoint import find_drafter, read_config, read_training_info
from specbench_ss.models.frequent_tokens import read_frequent_tokens
from specbench_ss.models.load import hash_weights, load_model_info, load_target
from specbench_ss.models.resolve import find_folder
from specbench_ss.options import Bounded, option, parse_options, value_text

LONGEST = 64  # tokens of a chain whose length is not fixed: more has never paid


@dataclass(frozen=True, slots=True)
class TwoModelOptions(Bounded):
    """Options of `sd`. Raise UserError for incompatible values."""

    owner: ClassVar[str] = "sd"
    weights: str = option(
        "",
        "Draft model: folder, hub id, or name of a fetched or bundled one (as `draft-2m`). A folder with a LoRA that "
        "names no model adapts the bundled draft model. Empty: the one bundled with the model.",
    )
    form: Literal["chain", "tree"] = option("chain", "Draft shape.")
    gamma: Annotated[int, Ge(1)] = option(4, "Length of a chain (initial length with a schedule), or depth of a tree.")
    threshold: Annotated[float, Ge(0), Lt(1)] = option(
        0.0,
        "Chains only: end the chain after a token with a draft probability below this. 0: chains of a fixed length.",
    )
    schedule: Literal["constant", "heuristic"] = option(
        "constant",
        "Chains only: schedule of the length. heuristic: 2 longer after a fully accepted chain, else 1 shorter.",
    )
    k: Annotated[int, Ge(1)] = option(3, "Trees only: candidates per node, and expanded nodes per level.")
    nodes: Annotated[int, Ge(0)] = option(
        12, "Trees only: number of drafted nodes, the best by joint probability. 0: all."
    )
    candidates: Literal["auto", "top", "drawn"] = option(
        "auto",
        "When sampling: drawn samples candidates from the draft model's distribution, top takes its "
        "likeliest tokens. auto: drawn for chains, top for trees.",
    )
    retokenise: bool = option(
        False,
        "Support a draft model with another vocabulary: its likeliest tokens are decoded to text and "
        "encoded into the target's tokens (a chain).",
    )
    lookbehind: Annotated[int, Ge(1)] = option(
        10, "With `retokenise`: number of earlier tokens that are tokenised together with new text."
    )
    draft_vocab: str = vocabulary_option("all tokens")

    def check_together(self) -> None:
        if self.form == "tree" and (self.threshold or self.schedule != "constant"):
            raise UserError("sd: threshold and schedule do not support form=tree; use form=chain")
        if self.form == "tree" and self.retokenise:
            raise UserError("sd: retokenise=on does not support form=tree; use form=chain")
        if self.form == "chain" and self.gamma > LONGEST:
            raise UserError(f"sd: gamma must be at most {LONGEST}, not {self.gamma}")
        if self.form == "tree" and self.full_tree_size() >= MOST_NODES:
            raise UserError(f"sd: k={self.k} with gamma={self.gamma} makes a tree of more than {MOST_NODES} nodes")

    def full_tree_size(self) -> int:
        """Return the number of nodes of a tree before the best are chosen, root excluded."""
        return self.k + (self.gamma - 1) * self.k**2

    def samples(self, greedy: bool) -> bool:
        """Return True if candidates are sampled from the draft's distribution."""
        sampled = self.form == "chain" if self.candidates == "auto" else self.candidates == "drawn"
        return sampled and not greedy


def draft_chain(
    draft: Draft, logits: Tensor, length: int, threshold: float, sampling: SamplingParams | None, state: DecodeState
) -> tuple[Tensor, Tensor | None]:
    """Draft at most `length` tokens int64 [n] after the draft's input, given its logits: the best, or sampled.

    Also return the distribution of each [n, V], None for the best. A token less probable than the threshold ends the
    chain. Verification stays exact, since the end depends only on verified tokens and no
    sampled token is dropped. Without a threshold there is no device synchronization.
    """
    tokens: list[Tensor] = []
    probs: list[Tensor] = []
    while True:
        if sampling is None:
            drafted = logits.argmax(-1, keepdim=True)
        else:
            probs.append(sampling.probs(logits))
            drafted = draw(probs[-1], state.rng)
        tokens.append(draft.vocabulary.token_ids(drafted))
        if len(tokens) == length:
            break
        if threshold:
            p = logits.softmax(-1, dtype=torch.float32) if sampling is None else probs[-1]
            if float(p[drafted]) < threshold:
                break
        logits = draft.feed(tokens[-1])
    return torch.cat(tokens), draft.vocabulary.target_probs(torch.stack(probs)) if probs else None


def sample_k(k: int, sampling: SamplingParams, rng: torch.Generator) -> Choose:
    """Return a rule that samples k tokens of each row without replacement."""

    def choose(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = sampling.probs(logits)
        tokens = draw(q, rng, k)
        return tokens, q.gather(-1, tokens).log(), q

    return choose


PARTIAL = "\ufffd"  # the text of a token that ends within a character


class Retokenizer:
    """The target's text in the draft's tokens."""

    ids: list[int]  # the draft's tokens
    consumed: int  # number of the target's tokens in them
    unchanged: int  # number of leading `ids` that the last `append` did not change

    def __init__(self, target: Any, draft: Any, lookbehind: int) -> None:
        self.target, self.draft, self.lookbehind = target, draft, lookbehind
        self.reset()

    def reset(self) -> None:
        """Start with a new prompt."""
        self.ids, self.consumed, self.unchanged = [], 0, 0

    def append(self, ids: list[int]) -> bool:
        """Add the target's new tokens. Return False if they end within a character."""
        if self.consumed == len(ids):
            self.unchanged = len(self.ids)
            return True
        text = added_text(
            self.target, ids[max(0, self.consumed - self.lookbehind) : self.consumed], ids[self.consumed :]
        )
        if text.endswith(PARTIAL):
            return False
        if self.consumed:
            self.unchanged = max(0, len(self.ids) - self.lookbehind)
            self.ids = append_text(self.draft, self.ids, text, self.lookbehind)
        else:
            self.ids = list(self.draft(text)["input_ids"])  # with the draft's special tokens
        self.consumed = len(ids)
        return bool(self.ids)

    def candidates(self, ids: list[int], drafted: list[int]) -> list[int]:
        """Convert drafted tokens to the target's tokens that follow `ids`."""
        text = added_text(self.draft, self.ids[-self.lookbehind :], drafted).rstrip(PARTIAL)
        return encode_after(self.target, ids[-self.lookbehind :], text)


def decode(tokenizer: Any, ids: list[int]) -> str:
    """Return the text of ids without special tokens."""
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a piece of text, without special tokens."""
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def added_text(tokenizer: Any, before: list[int], new: list[int]) -> str:
    """Return the text that `new` adds to the text of `before`."""
    prefix, whole = decode(tokenizer, before), decode(tokenizer, before + new)
    return whole[len(prefix) :] if whole.startswith(prefix) else decode(tokenizer, new)


def encode_after(tokenizer: Any, before: list[int], text: str) -> list[int]:
    """Return the tokens of a text that follows `before`."""
    prefix = decode(tokenizer, before)
    alone, whole = encode(tokenizer, prefix), encode(tokenizer, prefix + text)
    return whole[len(alone) :] if whole[: len(alone)] == alone else encode(tokenizer, text)


def append_text(tokenizer: Any, ids: list[int], text: str, lookbehind: int) -> list[int]:
    """Return ids with the text appended; the last `lookbehind` ids may change, as tokenization requires."""
    cut = max(0, len(ids) - lookbehind)
    tail = ids[cut:]
    new_tail = encode(tokenizer, decode(tokenizer, tail) + text)
    if tail and new_tail[:1] != tail[:1]:  # the window begins within a word: keep all earlier tokens
        return ids + encode_after(tokenizer, tail, text)
    return ids[:cut] + new_tail


T = TypeVar("T", bound=ModelInfo)

DRAFT_TOKENS_PER_TOKEN = 4  # cache capacity of the draft per token of the target, with different vocabularies
NODES = (4, 6, 8, 12, 16, 24, 32, 48)


class TwoModel(Decoder):
    """Decoder with a draft model, whose own cache has the accepted tokens except the newest one or two."""

    name = "sd"
    summary = "two-model speculative decoding: a small model drafts a chain or a tree"
    paper = "Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318"
    Options = TwoModelOptions
    node_options = ("gamma", "nodes")
    bundled_folder: ClassVar[str] = "draft"  # name of the folder bundled with a model

    def __init__(
        self, target: Target, options: TwoModelOptions, draft: Target, frequent_tokens: Tensor | None = None
    ) -> None:
        super().__init__(target, options)
        self.frequent_tokens = frequent_tokens
        self.draft = Draft(draft, self.vocabulary_of(options, target, draft, frequent_tokens))
        self.gamma = options.gamma  # length of the next chain
        self.retokenizer: Retokenizer | None = None
        if check_pair(options, target, draft):
            self.retokenizer = Retokenizer(target.tokenizer, draft.tokenizer, options.lookbehind)
        self.logits = torch.empty(0)  # [draft vocabulary] after the draft's input
        self.fed: list[int] = []  # with a retokenizer: the draft's tokens in its cache
        self.topology: AnyTopology | None = None  # of the last tree; node tags are rows of the draft's cache

    def drafter_weights(self) -> Iterable[torch.Tensor]:
        """Return the draft model's weights, which each of its passes reads once; of the LM head the selected rows."""
        weights, rows = read_by_a_pass(self.draft.model.model), self.draft.head_rows
        head = self.draft.model.unembed.data_ptr() if rows else 0
        return [*(weight for weight in weights if weight.data_ptr() != head), *(copy.weight for copy in rows)]

    @classmethod
    def vocabulary_of(
        cls, options: TwoModelOptions, base: ModelInfo, draft: ModelInfo, frequent_tokens: Tensor | None
    ) -> DraftVocabulary:
        """Return the tokens that are drafted: those of both models, or the draft's own if drafts are tokenised again.

        Raise UserError for an unsupported option.
        """
        vocab = draft.vocab_size if mismatch(base, draft) else base.vocab_size
        common = min(vocab, draft.vocab_size)
        chosen = draft_vocabulary(options.draft_vocab, common, cls.name, frequent=frequent_tokens)
        vocabulary = replace(chosen, vocab=vocab)
        if options.form == "tree" and vocabulary.selected:
            vocabulary.require(options.k, cls.name)
        return vocabulary

    @classmethod
    def _limits_nodes(cls, given: Mapping[str, str]) -> bool:
        return "nodes" in given or ("gamma" in given and given.get("form") != "tree")  # of a tree gamma is the depth

    @classmethod
    def with_nodes(cls, given: Mapping[str, str], nodes: int) -> dict[str, str]:
        """Return the options with the length of a chain, or the nodes of a tree."""
        options = parse_options(cls.Options, dict(given), "method 'sd'")
        tree = options.form == "tree"
        open_ended = {"candidates": "drawn"} if tree else {"schedule": "heuristic", "retokenise": True}
        for name, value in open_ended.items():
            if getattr(options, name) == value:
                raise UserError(f"sd: {name}={value_text(value)} sets no limit of nodes; leave out {name} or nodes")
        return {**given, "nodes": str(nodes)} if tree else super().with_nodes(given, min(nodes, LONGEST))

    @classmethod
    def check(cls, options: Any, base: ModelInfo) -> None:
        path = draft_path(options, base)
        if path is not None:
            draft = load_draft_model(str(path), base, load_model_info, check_lora_fits)
            check_pair(options, base, draft)
            cls.vocabulary_of(options, base, draft, read_frequent_tokens(path, draft.vocab_size))

    @classmethod
    def load(cls, target: Target, options: Any) -> TwoModel:
        """Load the draft that the user named, or the bundled one, in the target's dtype and on its device."""
        path = draft_path(options, target)
        load = partial(load_target, dtype=target.number_format, device=str(target.device))
        source = str(path or options.weights)
        draft = load_draft_model(source, target, load, merged_lora)
        decoder = cls(target, options, draft, read_frequent_tokens(Path(source), draft.vocab_size))
        stored = getattr(decoder.draft.model.model.config, "ssbench", {})
        config = read_config(Path(source)) if is_bundled_lora(Path(source)) else stored
        decoder.training_info = read_training_info(config)
        return decoder

    @classmethod
    def test_instances(cls, target: Target) -> Mapping[str, Callable[[], Decoder]]:
        """Return chains and trees of a random draft; the target as its own draft; a draft with a short context."""
        random, short = random_draft(target, target.context_length), random_draft(target, 24)
        o, part = TwoModelOptions, str(target.vocab_size * 3 // 4)
        shapes = {
            "chain": (o(), random),
            "adaptive": (o(gamma=6, threshold=0.3), random),
            "heuristic": (o(gamma=2, schedule="heuristic"), random),
            "tree": (o(form="tree", gamma=3, k=2, nodes=6), random),
            "tree-drawn": (o(form="tree", gamma=3, k=2, candidates="drawn"), random),
            "short-draft": (o(candidates="top"), short),
            "same-model": (o(form="tree", gamma=3, k=3, nodes=0), target),
            "draft-vocabulary": (o(gamma=3, draft_vocab=part), target),
            "draft-vocabulary-tree": (o(form="tree", gamma=2, k=2, candidates="drawn", draft_vocab=part), random),
        }
        listed = torch.arange(target.vocab_size - 1, -1, -1)
        return {label: partial(cls, target, options, draft, listed) for label, (options, draft) in shapes.items()}

    def with_options(self, options: Any) -> TwoModel:
        other = type(self)(self.target, options, self.draft.whole, self.frequent_tokens)
        if other.draft.vocabulary.selected == self.draft.vocabulary.selected:
            other.draft = self.draft
        return other

    def clone(self) -> TwoModel:
        other = type(self)(self.target, self.options, self.draft.whole, self.frequent_tokens)
        other.draft.model = self.draft.model  # concurrent requests share its passes
        return other

    def search_space(self) -> Mapping[str, Sequence[Any]]:
        if self.options.form == "tree":
            tree = {"gamma": (1, 2, 3, 4, 5, 6), "k": (1, 2, 3, 4, 6), "nodes": NODES, "form": ("chain", "tree")}
            return {**tree, **self.draft.vocabulary.search_space()}
        chain: dict[str, Sequence[Any]] = {"gamma": (1, 2, 3, 4, 5, 6, 8, 10), "threshold": (0.0, 0.2, 0.4, 0.6, 0.8)}
        chain |= self.draft.vocabulary.search_space()
        return chain if self.retokenizer else {**chain, "form": ("chain", "tree")}

    def metadata(self) -> dict[str, Any]:
        used = ("gamma", "k", "nodes") if self.options.form == "tree" else ("gamma", "threshold", "schedule")
        lookbehind = {"lookbehind": self.options.lookbehind} if self.retokenizer else {}
        model = self.draft.model
        return {
            "form": self.options.form,
            **{name: getattr(self.options, name) for name in used},
            "drawn": self._samples(greedy=False),
            "retokenised": self.retokenizer is not None,
            **self.draft.vocabulary.metadata(),
            **lookbehind,
            "draft_parameters": model.parameter_count,
            "draft_context": model.context_length,
            "draft_hash": model.weights_hash or hash_weights(model.model),
        }

    def max_tokens_per_step(self) -> int:
        o = self.options
        if o.form == "chain":
            return 1 + (LONGEST if o.retokenise or o.schedule == "heuristic" else int(o.gamma))
        full = int(o.full_tree_size())
        return 1 + (full if o.candidates == "drawn" else min(o.nodes, full) or full)  # sampled nodes are not dropped

    # -- decoding -----------------------------------------------------------------------------------------------

    def on_prefill(self, state: DecodeState) -> None:
        """Feed the prompt and the first token to the draft."""
        from specbench_ss.engine.engines import enable_draft_cuda_graphs

        o = self.options
        extra = o.gamma * o.k if o.form == "tree" else 0  # cache rows of rejected tree nodes
        capacity = state.cache.capacity * (DRAFT_TOKENS_PER_TOKEN if self.retokenizer else 1)
        enable_draft_cuda_graphs(self.draft.model, self.target)
        self.draft.reset(min(capacity, self.draft.model.context_length) + extra)
        self.gamma = o.gamma
        self.fed = []
        if self.retokenizer:
            self.retokenizer.reset()
        self._catch_up(state)
        state.num_draft_forwards = self.draft.calls

    def propose(self, state: DecodeState) -> DraftTree:
        """Draft as far as both models have positions; draft nothing beyond the draft's context."""
        self.topology = None
        room = self.target.context_length - 1 - state.position
        if room < 1 or not self._catch_up(state):
            return DraftTree.root_only(state.root)
        tree = self._draft_tree(state, min(self.gamma, room, self.draft.room + 1))  # the last token is not fed
        state.num_draft_forwards = self.draft.calls
        return tree

    def update(self, state: DecodeState, result: VerifyResult, output: Output) -> None:
        """Drop rejected tokens from the draft's cache."""
        assert output.tree is not None
        drafted = len(output.tree) - 1
        if self.options.schedule == "heuristic" and drafted:  # as in transformers
            all_accepted = result.accepted == drafted
            self.gamma = min(LONGEST, self.gamma + 2) if all_accepted else max(1, self.gamma - 1)
        rows = self.topology.node_tags if isinstance(self.topology, DeviceTopology) else []
        if max(rows, default=-1) >= 0:
            self.draft.compact(state.position - result.accepted, [rows[i] for i in result.path if rows[i] >= 0])
        elif self.retokenizer is None:
            self.draft.rewind(state.position)

    def _draft_tree(self, state: DecodeState, length: int) -> DraftTree:
        o, sampling = self.options, state.sampling if self._samples(state.sampling.greedy) else None
        if o.form == "tree":
            choose = self.draft.vocabulary.select(best(o.k) if sampling is None else sample_k(o.k, sampling, state.rng))
            nodes = o.nodes if sampling is None else 0  # a selection among sampled ones is not exact

            def expand(tokens: Tensor, visible: Tensor, parent_rows: Tensor, level: int) -> Tensor:
                return self.draft.feed_level(tokens, visible, level)

            tree = grow(state.root, self.logits, choose, expand, length, nodes)
            self.topology = tree.topology
            return tree
        tokens, probs = draft_chain(self.draft, self.logits, length, o.threshold, sampling, state)
        if self.retokenizer is None:
            return DraftTree.chain(state.root, tokens, probs)
        return self._retokenized(state, tokens.tolist())

    def _samples(self, greedy: bool) -> bool:
        return self.retokenizer is None and bool(self.options.samples(greedy))

    def _catch_up(self, state: DecodeState) -> bool:
        """Feed new tokens to the draft. Return False if it has no room, or the text ends within a character."""
        ids = state.ids
        if self.retokenizer:
            if not self.retokenizer.append(state.ids):
                return False
            ids, start = self.retokenizer.ids, self.retokenizer.unchanged
            equal = takewhile(lambda pair: pair[0] == pair[1], zip(self.fed[start:], ids[start:-1], strict=False))
            self.draft.rewind(start + sum(1 for _ in equal))
            self.fed = ids
        new = ids[self.draft.fed :]
        if len(new) > self.draft.room:
            return False
        if new:
            root_only = len(new) == 1 and self.retokenizer is None  # the root is on the device already
            self.logits = self.draft.feed(state.root if root_only else indices(new, state.root.device))
        return True

    def _retokenized(self, state: DecodeState, drafted: list[int]) -> DraftTree:
        """Return a chain of the drafted text in the target's tokens."""
        assert self.retokenizer is not None
        self.fed = self.retokenizer.ids + drafted[:-1]
        ends = self.draft.model.eos_ids
        text_tokens = list(takewhile(lambda token: token not in ends, drafted))
        ids = self.retokenizer.candidates(state.ids, text_tokens) if text_tokens else []
        ids = list(takewhile(lambda token: token < self.target.vocab_size, ids[:LONGEST]))
        return DraftTree.chain(state.root, indices(ids, state.root.device)) if ids else DraftTree.root_only(state.root)


def check_pair(options: TwoModelOptions, base: ModelInfo, draft: ModelInfo) -> bool:
    """Return True if the vocabularies differ. Raise UserError if the options do not allow that."""
    if options.form == "tree" and options.k > base.vocab_size:
        raise UserError(f"sd: k must be at most {base.vocab_size}, the size of the vocabulary, not {options.k}")
    problem = mismatch(base, draft)
    if problem and not options.retokenise:
        raise UserError(f"sd: the draft {draft.name!r} has another vocabulary: {problem}; use --set sd.retokenise=on")
    if problem and (base.tokenizer is None or draft.tokenizer is None):
        raise UserError("sd: retokenise=on requires the tokenizers of both models")
    return bool(problem)


def draft_path(options: TwoModelOptions, base: ModelInfo) -> Path | None:
    """Return the draft model's folder or file, None for a hub id. Raises UserError if there is none."""
    if options.weights in fetchable() and not Path(options.weights).exists():
        return find_folder(options.weights)
    return find_drafter(options.weights, TwoModel.name, base, TwoModel.bundled_folder)


def load_draft_model(source: str, base: ModelInfo, load: Callable[[str], T], with_lora: Callable[[T, Path], T]) -> T:
    """Return the draft in a folder or at the hub, or the bundled draft with the LoRA in the folder.

    Raise UserError if it is missing or does not fit.
    """
    with prefixed("sd"):
        only_lora = is_bundled_lora(Path(source))
        bundled = base.bundled_drafter(TwoModel.bundled_folder) if only_lora else None
        if only_lora and bundled is None:
            raise UserError(f"{source} has a LoRA that names no model, and {base.name!r} has no bundled draft")
        if not only_lora:
            check_adapter(Path(source))
        with prefixed("sd: the draft"):
            draft = load(str(bundled or source))
        return with_lora(draft, Path(source)) if only_lora else draft


def random_draft(target: Target, context: int) -> Target:
    """Return a tiny Llama with the target's vocabulary and fixed random weights that prefer some tokens."""
    special = {"bos": None, "eos": None, "pad": None}
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(1)
        model = new_llama(32, 2, 4, 2, 48, target.vocab_size, context, special)
        for p in model.parameters():
            if p.ndim > 1:
                torch.nn.init.normal_(p, std=0.15)
    return Target(model.to(target.device, target.dtype), target.tokenizer, name="random draft")
