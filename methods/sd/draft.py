"""Draft models: KV cache, LoRA adapters, and vocabulary checks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.engine.forward import ForwardPass, ancestor_context
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.methods._shared import fine_tuned
from specbench_ss.methods._shared.draft_vocabulary import DraftVocabulary, head_rows
from specbench_ss.models.checkpoint import check_base, read_config
from specbench_ss.models.load import adapted_model, config_of
from specbench_ss.user_files import read_json

ADAPTER, ADAPTER_CONFIG = fine_tuned.ADAPTER, fine_tuned.ADAPTER_CONFIG


class Draft:
    """A causal LM with its KV cache. `calls` are its forward passes since `reset`.

    vocabulary: the drafted tokens among the target's, or the draft's own if drafts are tokenised again. Logits over all
    tokens are cut to it, or padded with zero probability. Ids without an embedding are replaced by its last one.
    """

    def __init__(self, model: Target, vocabulary: DraftVocabulary) -> None:
        self.whole, self.vocabulary = model, vocabulary.to(model.device)
        self.head_rows = head_rows(self.vocabulary, (), model, "sd")
        self.model = model.with_head(self.head_rows[0]) if self.head_rows else model
        self.cache = model.new_cache(0)
        self.calls = 0

    def reset(self, capacity: int) -> None:
        """Empty the cache, with room for this number of tokens."""
        self.model.empty(self.cache, capacity)
        self.calls = 0

    @property
    def fed(self) -> int:
        """Return the number of tokens in the cache."""
        return self.cache.get_seq_length()

    @property
    def room(self) -> int:
        """Return the number of tokens that may still be fed."""
        return min(self.model.context_length, self.cache.capacity) - self.fed

    def rewind(self, length: int) -> None:
        """Truncate the cache to `length` tokens."""
        self.cache.compact(min(length, self.fed), ())

    def compact(self, start: int, rows: list[int]) -> None:
        """Keep only these rows, in order, of the tree after the first `start` tokens."""
        self.cache.compact(start, rows)

    def feed(self, tokens: Tensor) -> Tensor:
        """Append tokens int64 [q] on the device; return logits [n] after the last one, without synchronization."""
        self.calls += 1
        return self._fit(self.model.prefill(self._clamped(tokens)[None], self.cache).logits[0, 0])

    def feed_level(self, tokens: Tensor, visible: Tensor, level: int) -> Tensor:
        """Append nodes [k] of a tree level (1 = children of the newest token); return logits [k, n].

        The cache has k rows of each earlier level. visible bool [k, level * k]: the nodes' rows and their ancestors'.
        """
        self.calls += 1
        model, (k, rows) = self.model, visible.shape
        before = self.fed - (rows - k)  # tokens before the tree
        level_pass, inputs = partial(self._level_pass, level), (self._clamped(tokens), visible)
        longest = before + level - 1
        (logits,) = model.run_pass((self, level, k), level_pass, self.cache, inputs, longest=longest, rows=k)
        self.cache.commit(k)
        return self._fit(logits)

    def _level_pass(self, level: int, current: ForwardPass, tokens: Tensor, visible: Tensor) -> tuple[Tensor]:
        """Return logits [k, V] of a level's nodes, as `feed_level`."""
        model, (k, rows) = self.model, visible.shape
        earlier = rows - k  # cached rows of the tree
        positions = current.positions(torch.full((k,), level - 1 - earlier, device=model.device))
        x, rotary = model.embed(tokens[None], positions), current.rotary(positions)
        if any(model.windows):  # sliding windows depend on depths, not on rows
            masks = self._masks(visible, self.fed - earlier, level)
            for block, mask in zip(model.family.blocks, masks, strict=True):
                x = block(x, self.cache, mask, rotary)
        else:
            tree_mask = current.mask(visible[:, earlier:], ancestor_context(visible[:, :earlier]))
            (x,) = current.run(x, 0, model.n_layers, tree_mask, rotary)
        return (model.logits(model.family.norm(x))[0],)

    def _masks(self, visible: Tensor, before: int, level: int) -> list[Tensor]:
        """Return additive masks [1, 1, k, before + rows] of every layer with its window; row j has depth j // k + 1."""
        model, (k, rows) = self.model, visible.shape
        whole = model.block_mask(visible, before)
        windowed: dict[int, Tensor] = {}
        for window in {w for w in model.windows if w is not None}:
            levels = torch.arange(rows, device=model.device) // k
            positions = torch.cat((torch.arange(before, device=model.device), before + levels))
            masked = before + level - 1 - positions >= window
            windowed[window] = whole.masked_fill(masked, torch.finfo(model.dtype).min)
        return [whole if w is None else windowed[w] for w in model.windows]

    def _clamped(self, tokens: Tensor) -> Tensor:
        """Return tokens with ids beyond the draft's embedding replaced by its last id."""
        have = self.model.vocab_size
        return tokens if have >= self.vocabulary.vocab else tokens.clamp_max(have - 1)

    def _fit(self, logits: Tensor) -> Tensor:
        """Cut or pad logits [.., the draft's width] to [.., V]; leave those of part of the vocabulary."""
        more = self.vocabulary.size - logits.shape[-1]
        return logits if more == 0 else torch.nn.functional.pad(logits, (0, more), value=float("-inf"))


def is_bundled_lora(path: Path) -> bool:
    """Return True if a folder has a LoRA that names no model, which is for the bundled draft."""
    config = path / ADAPTER_CONFIG
    if not config.is_file() and (path / ADAPTER).is_file():
        raise UserError(f"sd: {path} has {ADAPTER} without {ADAPTER_CONFIG}")
    return config.is_file() and not read_json(config).get("base_model_name_or_path")


def check_lora_fits(draft: ModelInfo, folder: Path) -> ModelInfo:
    """Return the draft. Raise UserError if the folder's LoRA is damaged, or for a model of another shape."""
    read_config(folder)
    fine_tuned.check_lora(folder, "sd")
    fine_tuned.check_fits(folder, fine_tuned.without_weights(draft.config), "sd")
    return draft


def check_adapter(folder: Path) -> None:
    """Raise UserError for an adapter whose named model is missing or does not fit."""
    if not (folder / ADAPTER_CONFIG).is_file():
        return
    model = read_json(folder / ADAPTER_CONFIG)["base_model_name_or_path"]
    try:
        config = config_of(adapted_model(folder / ADAPTER_CONFIG))
        if fine_tuned.is_plain_lora(folder):
            fine_tuned.check_fits(folder, fine_tuned.without_weights(config), "sd")
    except UserError as error:
        raise UserError(
            f"sd: the adapter in {folder} is for {model!r} ({ADAPTER_CONFIG}): {str(error).removeprefix('sd: ')}"
        ) from error


def merged_lora(draft: Target, folder: Path) -> Target:
    """Return the draft with the LoRA merged in. Raise UserError if it was trained for another draft."""
    check_base(read_config(folder), draft, f"sd: the LoRA in {folder}", "draft")
    return fine_tuned.merged_target(draft, folder, "sd")


def mismatch(base: ModelInfo, draft: ModelInfo) -> str:
    """Describe the difference between the vocabularies of draft and base, '' for none.

    Padded embeddings, ids that only one of them has, and special tokens with another name that no prompt or end of an
    answer has do not count. Without tokenizers the widths are compared.
    """
    if base.tokenizer is None or draft.tokenizer is None:
        sizes = (draft.vocab_size, base.vocab_size)
        return "" if sizes[0] == sizes[1] else f"{sizes[0]} tokens, the model has {sizes[1]}"
    base_vocab, draft_vocab = (o.tokenizer.get_vocab() for o in (base, draft))
    if base_vocab == draft_vocab:
        return ""
    token_of = {i: token for token, i in base_vocab.items()}
    differing = [(i, token) for token, i in draft_vocab.items() if token_of.get(i, token) != token]
    if differing:
        unused = special_ids(base.tokenizer) & special_ids(draft.tokenizer) - ids_of_chats(base)
        differing = [(i, token) for i, token in differing if i not in unused]
    if not differing:
        return ""
    i, token = min(differing)
    return f"{len(differing)} ids have other tokens, id {i} is {token!r}, not {token_of[i]!r}"


def special_ids(tokenizer: Any) -> set[int]:
    """Return the ids of all special tokens."""
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added.union(tokenizer.all_special_ids)


def ids_of_chats(base: ModelInfo) -> set[int]:
    """Return ids of special tokens that occur: those of a conversation's prompt, and ends of text and of answers."""
    messages = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
    prompt = base.encode_chat(messages) if base.tokenizer.chat_template is not None else base.tokenizer("a").input_ids
    ends = getattr(base, "eos_ids", None) or (base.tokenizer.eos_token_id,)
    stated = getattr(base.config, "eos_token_id", None)
    return {*prompt, *ends, *(stated if isinstance(stated, list) else [stated])}
