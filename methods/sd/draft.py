"""Draft models: their own cache and states, adapters, and vocabularies that differ."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.methods._shared import fine_tuned
from specbench_ss.models.checkpoint import check_base, read_config
from specbench_ss.models.load import adapted_model, config_of
from specbench_ss.user_files import read_json

ADAPTER, ADAPTER_CONFIG = fine_tuned.ADAPTER, fine_tuned.ADAPTER_CONFIG


class Draft:
    """A causal LM that continues what it has been fed. `calls` are its forward passes since `begin`.

    vocab: width of the logits it gives, the target's: an embedding padded to another width is cut, or filled with
    tokens of no probability. Ids that it has no embedding for are read as its last one.
    """

    def __init__(self, model: Target, vocab: int) -> None:
        self.model, self.vocab = model, vocab
        self.cache = model.new_cache(0)
        self.calls = 0

    def begin(self, capacity: int) -> None:
        """Forget everything, and have room for so many tokens, as far as the model has positions."""
        self.model.empty(self.cache, capacity)
        self.calls = 0

    @property
    def fed(self) -> int:
        """Tokens in the cache."""
        return self.cache.get_seq_length()

    @property
    def room(self) -> int:
        """Tokens that may still be fed."""
        return min(self.model.context_length, self.cache.capacity) - self.fed

    def rewind(self, length: int) -> None:
        """Forget all but the first tokens."""
        self.cache.compact(min(length, self.fed), ())

    def keep(self, start: int, rows: list[int]) -> None:
        """Of what was fed as a tree after the first `start` tokens, only these rows, in order."""
        self.cache.compact(start, rows)

    def feed(self, tokens: Tensor) -> Tensor:
        """tokens int64 [q], on the device -> logits [V] of what follows the last one. Waits for nothing."""
        self.calls += 1
        return self._fit(self.model.prefill(self._known(tokens)[None], self.cache).logits[0, 0])

    def feed_level(self, tokens: Tensor, visible: Tensor, level: int) -> Tensor:
        """Nodes [k] of a level of a tree (1 = children of the newest token) -> logits [k, V].

        Earlier levels lie in the cache, k rows each. visible bool [k, level * k]: the nodes' rows and their ancestors'.
        """
        self.calls += 1
        model, (k, rows) = self.model, visible.shape
        before = self.fed - (rows - k)  # tokens before the tree
        positions = torch.full((1, k), before + level - 1, device=model.device)
        rotary = model.rotary(positions, before + level - 1)
        x = model.embed(self._known(tokens)[None], positions)
        if any(model.windows):  # whose masks go by depths, not by rows
            for block, mask in zip(model.family.blocks, self._masks(visible, before, level), strict=True):
                x = block(x, self.cache, mask, rotary)
        else:
            x = model.run(x, 0, model.n_layers, self.cache, model.block_mask(visible, before), rotary)
        self.cache.commit(k)
        return self._fit(model.logits(model.family.norm(x))[0])

    def _masks(self, visible: Tensor, before: int, level: int) -> list[Tensor]:
        """Of every layer: additive [1, 1, k, before + rows], windows folded in; the tree's row j is j // k + 1 deep."""
        model, (k, rows) = self.model, visible.shape
        whole = model.block_mask(visible, before)
        windowed: dict[int, Tensor] = {}
        for window in {w for w in model.windows if w is not None}:
            levels = torch.arange(rows, device=model.device) // k
            places = torch.cat((torch.arange(before, device=model.device), before + levels))
            hidden = before + level - 1 - places >= window
            windowed[window] = whole.masked_fill(hidden, torch.finfo(model.dtype).min)
        return [whole if w is None else windowed[w] for w in model.windows]

    def _known(self, tokens: Tensor) -> Tensor:
        """Without ids that the draft has no embedding for."""
        have = self.model.vocab_size
        return tokens if have >= self.vocab else tokens.clamp_max(have - 1)

    def _fit(self, logits: Tensor) -> Tensor:
        """[.., the draft's width] -> [.., V]."""
        more = self.vocab - logits.shape[-1]
        return logits if more == 0 else torch.nn.functional.pad(logits, (0, more), value=float("-inf"))


def holds_lora(path: Path) -> bool:
    """Whether a folder has a LoRA that names no model of its own: it is for the draft that came with the base."""
    config = path / ADAPTER_CONFIG
    if not config.is_file() and (path / ADAPTER).is_file():
        raise UserError(f"sd: {path} holds a LoRA's {ADAPTER} without the {ADAPTER_CONFIG} that it needs")
    return config.is_file() and not read_json(config).get("base_model_name_or_path")


def checked_lora(draft: ModelInfo, folder: Path) -> ModelInfo:
    """The draft. Raises UserError where the folder's files are no LoRA, or one of a model of another shape."""
    read_config(folder)
    fine_tuned.check_lora(folder, "sd")
    fine_tuned.check_fits(folder, fine_tuned.without_weights(draft.config), "sd")
    return draft


def check_named(folder: Path) -> None:
    """Raises UserError for a folder with an adapter that names a model, which is missing or does not fit it."""
    if not (folder / ADAPTER_CONFIG).is_file():
        return
    named = read_json(folder / ADAPTER_CONFIG)["base_model_name_or_path"]
    try:
        config = config_of(adapted_model(folder / ADAPTER_CONFIG))
        if fine_tuned.is_plain_lora(folder):
            fine_tuned.check_fits(folder, fine_tuned.without_weights(config), "sd")
    except UserError as error:
        raise UserError(
            f"sd: the adapter in {folder} is for the model {named!r}, as its {ADAPTER_CONFIG} says (one that names "
            f"none is for the draft that came with the target): {str(error).removeprefix('sd: ')}"
        ) from error


def merged_lora(draft: Target, folder: Path) -> Target:
    """The draft with the LoRA merged in. Raises UserError where that was trained for another draft."""
    check_base(read_config(folder), draft, f"sd: the LoRA in {folder}", "draft")
    return fine_tuned.merged_target(draft, folder, "sd")


def mismatch(base: ModelInfo, draft: ModelInfo) -> str:
    """Where the draft's vocabulary differs from the base's, '' if nowhere.

    Embeddings padded to other widths, and tokens that only one of them has at ids that the other has not, do not count.
    Without tokenizers there are only the widths to go by.
    """
    if base.tokenizer is None or draft.tokenizer is None:
        sizes = (draft.vocab_size, base.vocab_size)
        return "" if sizes[0] == sizes[1] else f"{sizes[0]} tokens, the model has {sizes[1]}"
    ours, theirs = (o.tokenizer.get_vocab() for o in (base, draft))
    if ours == theirs:
        return ""
    of_id = {i: token for token, i in ours.items()}
    differing = [(i, token) for token, i in theirs.items() if of_id.get(i, token) != token]
    if not differing:
        return ""
    i, token = min(differing)
    return f"{len(differing)} ids stand for other tokens, id {i} for {token!r}, not {of_id[i]!r}"
