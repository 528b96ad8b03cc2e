"""Draft vocabulary: the tokens that are drafted, the LM-head rows for them, and the mask token.

It is a drafter's own (d2t, t2d), or chosen by the option `draft_vocab` (FR-Spec: Zhao et al. 2025, arXiv:2502.14856).
d2t int64 [draft vocabulary]: draft token d is the target's token d + d2t[d]. t2d bool [V]: marks the drafted tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from specbench_ss.engine.layers.linear import PrepackedLinear
from specbench_ss.engine.tree import DraftTree
from specbench_ss.engine.weights import holds_numbers
from specbench_ss.errors import UserError, prefixed
from specbench_ss.models.checkpoint import Keep, read_shapes
from specbench_ss.models.frequent_tokens import FILE, read_token_ids
from specbench_ss.models.tiny import randomise
from specbench_ss.options import option

if TYPE_CHECKING:
    from specbench_ss.engine.architectures import ModelInfo
    from specbench_ss.engine.target import Target
    from specbench_ss.methods._shared.tree_growth import Choose

VOCAB_MAPS = ("d2t", "t2d")
SPREAD = 0.15  # standard deviation of random weights: with more, a drafter puts all probability on one token
N = TypeVar("N", bound=torch.nn.Module)
D = TypeVar("D")
ALL = "all"  # value of the option: the whole vocabulary, whatever the folder advises
SIZES = tuple(1 << bits for bits in range(8, 18))  # for tuning
HELP = (
    "Draft vocabulary: tokens that the LM head of drafts is restricted to (FR-Spec). N: the N most frequent tokens of "
    "the training answers, by the list in the drafter's folder. FILE: token ids as a JSON list, as a safetensors file, "
    "or as a tensor or list saved by torch.save (SGLang's token maps). all: all tokens. Empty: {empty}."
)


def vocabulary_option(empty: str = "as the folder advises, else all") -> Any:
    """Return the field of the option `draft_vocab`. empty: meaning of the default."""
    return option("", HELP.format(empty=empty))


@dataclass(frozen=True)
class DraftVocabulary:
    """Tokens that are drafted: column i of draft logits is token ids[i].

    vocab: size of the target's vocabulary. ids: int64 [n], distinct; None = all tokens in order. selected: hash of the
    ids if the option chose them, so that rows of a whole LM head are selected; '' for the drafter's own vocabulary.
    ranked: the drafter's folder lists all tokens by frequency, so that there can be any number.
    """

    vocab: int
    ids: Tensor | None = None
    selected: str = ""
    ranked: bool = False

    @property
    def size(self) -> int:
        """Return the number of tokens."""
        return self.vocab if self.ids is None else len(self.ids)

    @cached_property
    def columns(self) -> Tensor:
        """Return each token's column, int64 [V]; 0 for tokens that are not drafted."""
        assert self.ids is not None
        return self.ids.new_zeros(self.vocab).index_copy_(0, self.ids, torch.arange(self.size, device=self.ids.device))

    def to(self, device: torch.device) -> DraftVocabulary:
        """Return the vocabulary with its ids on the device."""
        return self if self.ids is None else replace(self, ids=self.ids.to(device))

    def metadata(self) -> dict[str, Any]:
        """Return size and hash for the manifest; nothing for the whole vocabulary."""
        size = {} if self.ids is None else {"draft_vocab": self.size}
        return size | ({"draft_vocab_hash": self.selected} if self.selected else {})

    def search_space(self) -> dict[str, list[str]]:
        """Return the option with values for tuning, {} without frequent tokens."""
        sizes = [str(size) for size in SIZES if self.vocab // 16 <= size <= self.vocab // 2]
        usable = self.ranked and (bool(self.selected) or self.ids is None)
        return {"draft_vocab": [ALL, *sizes]} if usable and sizes else {}

    def require(self, candidates: int, method: str) -> None:
        """Raise UserError if a node's candidates are more than the tokens."""
        if candidates > self.size:
            raise UserError(f"{method}: draft_vocab has {self.size} tokens, a node has {candidates} candidates")

    def token_ids(self, drafted: Tensor) -> Tensor:
        """Map columns of draft logits to token ids."""
        return drafted if self.ids is None else self.ids[drafted]

    def target_probs(self, q: Tensor) -> Tensor:
        """Return distributions [.., V] over all tokens of q [.., n], with 0 for tokens that are not drafted."""
        return q if self.ids is None else q.new_zeros(*q.shape[:-1], self.vocab).index_copy_(-1, self.ids, q)

    def target_tree(self, tree: DraftTree) -> DraftTree:
        """Return the tree of a draft whose tokens below the root are columns, and whose q is over columns."""
        if self.ids is None:
            return tree
        q = None if tree.draft_probs is None else self.target_probs(tree.draft_probs)
        return replace(tree, tokens=torch.cat((tree.tokens[:1], self.token_ids(tree.tokens[1:]))), draft_probs=q)

    def draft_columns(self, tree: DraftTree) -> DraftTree:
        """Return the tree with columns in place of its drafted tokens; the root's number has no meaning then."""
        return tree if self.ids is None else replace(tree, tokens=self.columns[tree.tokens])

    def select(self, choose: Choose) -> Choose:
        """Return a rule that selects candidates of draft logits as `choose` does, as token ids."""
        if self.ids is None:
            return choose

        def candidates(logits: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
            drafted, log_p, q = choose(logits)
            return self.token_ids(drafted), log_p, None if q is None else self.target_probs(q)

        return candidates


def draft_vocabulary(
    given: str, vocab: int, method: str, own: Tensor | None = None, frequent: Tensor | None = None
) -> DraftVocabulary:
    """Return the draft vocabulary of the option `draft_vocab`, else the drafter's own.

    Raise UserError, naming the method, for a value that this drafter does not support.

    Args:
        given: N, a file of token ids, `all` or ''.
        vocab: size of the target's vocabulary.
        method: for messages.
        own: token ids of the drafter's own draft vocabulary, int64 [n], if any.
        frequent: token ids, int64 [V], the most frequent first, if the drafter's folder has them.
    """
    ranked = frequent is not None
    if given in ("", ALL):
        return DraftVocabulary(vocab, own, ranked=ranked)
    if own is not None:
        problem = f"the drafter has its own draft vocabulary of {len(own)} tokens"
        raise UserError(f"{method}: {problem}; leave out draft_vocab, also for fewer tokens")
    if not given.isdecimal():
        with prefixed(method):
            return _chosen(vocab, read_token_ids(Path(given), vocab), ranked)
    count = int(given)
    if not 1 <= count <= vocab:
        raise UserError(f"{method}: draft_vocab must be 1 to {vocab}, the size of the vocabulary, not {given}")
    if frequent is None:
        how = "give a file of token ids, draft_vocab=FILE, or train the drafter again"
        raise UserError(f"{method}: draft_vocab={given} requires {FILE} in the drafter's folder; {how}")
    return _chosen(vocab, frequent[:count], ranked)


def _chosen(vocab: int, ids: Tensor, ranked: bool) -> DraftVocabulary:
    content = repr(len(ids)).encode() if ids.is_meta else ids.cpu().numpy().tobytes()  # meta: of a file's header alone
    return DraftVocabulary(vocab, ids, hashlib.sha256(content).hexdigest()[:16], ranked)


Key = tuple[int, torch.Size, str]  # address and shape of the weight, hash of the tokens
_rows: WeakValueDictionary[Key, PrepackedLinear] = WeakValueDictionary()


def head_rows(
    vocabulary: DraftVocabulary, heads: Sequence[tuple[Tensor, Tensor | None]], target: Target, method: str
) -> list[PrepackedLinear]:
    """Return copies of the selected rows of a drafter's LM heads, or of the target's if it has none; [] = all rows.

    Each maps states [.., h] to logits [.., n]. Copies are shared while one is in use. heads: weight [V, h] and bias.
    Raise UserError for an LM head of the target that is not a plain linear layer.
    """
    if not vocabulary.selected:
        return []
    if not heads:
        head = target.family.head
        if not isinstance(head, torch.nn.Linear) or not holds_numbers(head.weight):
            problem = f"the LM head of {target.name!r} is quantized, or more than a linear layer"
            raise UserError(f"{method}: draft_vocab is not supported, since {problem}")
        heads = [(head.weight, head.bias)]
    return [_selected(weight, bias, vocabulary, target) for weight, bias in heads]


def _selected(weight: Tensor, bias: Tensor | None, vocabulary: DraftVocabulary, target: Target) -> PrepackedLinear:
    assert vocabulary.ids is not None
    key = weight.data_ptr(), weight.shape, vocabulary.selected
    if (found := _rows.get(key)) is None:
        ids, weight = vocabulary.ids.to(weight.device), weight.detach()  # `parts` keep the weight, so the key is unique
        found = PrepackedLinear(weight[ids], None if bias is None else bias.detach()[ids], target.prepack, (weight,))
        _rows[key] = found
    return found


def with_frequent_tokens(drafter: D, vocab: int) -> D:
    """Give a drafter of a test instance a list of frequent tokens, the last ids first."""
    drafter.frequent_tokens = torch.arange(vocab - 1, -1, -1)  # type: ignore[attr-defined]
    return drafter


@torch.no_grad()
def set_draft_vocab(drafter: Any, token_ids: Tensor) -> None:
    """Set the draft vocabulary to these token ids of the target, int64 [draft vocabulary], ascending."""
    drafter.d2t.copy_(token_ids - torch.arange(len(token_ids), device=token_ids.device))
    drafter.get_buffer("t2d").zero_()[token_ids.to(drafter.d2t.device)] = True


def randomize_drafter(drafter: N, vocab: int) -> N:
    """Give a drafter random weights; a reduced draft vocabulary lacks some of the target's `vocab` first tokens."""
    if "d2t" in (tensors := drafter.state_dict()):
        set_draft_vocab(drafter, torch.arange(vocab - len(tensors["d2t"]), vocab))
    randomise(drafter, 3, SPREAD)
    return drafter


def read_shapes_and_vocab_maps(path: Path, keep: Keep | None = None) -> dict[str, Tensor]:
    """Read the shapes of a drafter's tensors, and the values of d2t and t2d, which `check_draft_vocab` needs."""
    return read_shapes(path, keep, valued=lambda name: name.rpartition(".")[2] in VOCAB_MAPS)


def check_draft_vocab(tensors: Mapping[str, Tensor], vocab: int) -> None:
    """Raise UserError if d2t leaves the model's vocabulary, maps to a token twice, or disagrees with t2d.

    tensors: a drafter's, by name, of the right shapes; if d2t has no values, nothing is checked.
    """
    d2t, t2d = tensors.get("d2t"), tensors.get("t2d")
    if d2t is None or d2t.is_meta:
        return
    if not torch.equal(d2t, d2t.long().to(d2t.dtype)):
        raise UserError("d2t contains numbers that are not integers")
    token_ids = d2t.long() + torch.arange(len(d2t), device=d2t.device)
    least, most = int(token_ids.min()), int(token_ids.max())
    if least < 0 or most >= vocab:
        outside = least if least < 0 else most
        raise UserError(f"d2t maps to token {outside}, the model has a vocabulary of {vocab}")
    unique, counts = token_ids.unique(return_counts=True)
    if len(unique) < len(token_ids):
        raise UserError(f"d2t maps to token {int(unique[counts > 1][0])} more than once")
    if t2d is not None and not torch.equal(unique, t2d.nonzero()[:, 0]):
        raise UserError(f"d2t maps to other tokens than the {int((t2d != 0).sum())} that t2d marks")


def vocabulary_fields(config_size: int | None, tensors: Mapping[str, Tensor], base: ModelInfo) -> dict[str, Any]:
    """Return the `VocabularyShape` fields of a drafter, which may lack an embedding or LM head and use the base's.

    Raise UserError if tensors, configuration and base do not fit together.

    Args:
        config_size: size of the draft vocabulary in config.json, None if it has none.
        tensors: the drafter's, by name.
        base: the model that is drafted for.
    """
    names = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")
    embedding, head, d2t, t2d = (len(tensors[n]) if n in tensors and tensors[n].ndim else 0 for n in names)
    for name in VOCAB_MAPS:
        if name in tensors and tensors[name].ndim != 1:
            raise UserError(f"{name} has shape {tuple(tensors[name].shape)}, it should have one dimension")
    draft_vocab = config_size or head or d2t or base.vocab_size
    if draft_vocab > base.vocab_size:
        raise UserError(f"the drafter's vocabulary has {draft_vocab} words, the model's {base.vocab_size}")
    for name, length in (("lm_head.weight", head), ("d2t", d2t)):
        if length and length != draft_vocab:
            raise UserError(f"config.json states that the drafter has {draft_vocab} words, {name} has {length}")
    if t2d and t2d != base.vocab_size:
        raise UserError(f"t2d is for a vocabulary of {t2d}, the model has {base.vocab_size}")
    if embedding and embedding != base.vocab_size:
        raise UserError(f"the drafter is for a vocabulary of {embedding}, the model has {base.vocab_size}")
    reduced = draft_vocab < base.vocab_size
    required = [("lm_head.weight", head, reduced or d2t), ("d2t", d2t, reduced)]
    if missing := [name for name, length, needed in required if needed and not length]:
        sizes = f"the drafter has {draft_vocab} words, the model {base.vocab_size}, and it"
        raise UserError(f"{sizes if reduced else 'the drafter'} lacks tensors: {', '.join(missing)}")
    fc = tensors.get("fc.weight")
    if not head and fc is not None and len(fc) != base.hidden_size:
        raise UserError(f"the drafter has no lm_head.weight, and the model's is {base.hidden_size} wide, not {len(fc)}")
    return {"vocab": embedding, "draft_vocab": head, "mapped": bool(d2t), "marked": bool(t2d)}


def mask_token(base: ModelInfo, embedding: Tensor) -> int:
    """Return the mask token used at draft positions: the tokenizer's, else the last with a nonzero embedding."""
    token = None if base.tokenizer is None else base.tokenizer.mask_token_id
    return int(embedding.any(-1).nonzero()[-1]) if token is None else int(token)


def token_problem(token: int, base: ModelInfo) -> str:
    """Return what is wrong with a token id that the base lacks, else ''."""
    return "" if 0 <= token < base.vocab_size else f"the model has tokens 0 to {base.vocab_size - 1}"
