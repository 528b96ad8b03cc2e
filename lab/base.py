"""Tokenizer and base model of the lab."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from specbench_ss.methods._shared.small_llama import new_llama
from specbench_ss.training.losses import weighted_loss
from specbench_ss.training.resumable import Resumable, digest
from specbench_ss.training.text.lab_text import completion_mask

# The lab's byte-level BPE tokenizer: single digits, five special tokens, a chat template.

SPECIAL = ("<|pad|>", "<|bos|>", "<|end|>", "<|user|>", "<|assistant|>")

CHAT_TEMPLATE = (
    "<|bos|>{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """A PreTrainedTokenizerFast of exactly vocab_size entries, special tokens first."""
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    # digits stand alone, so that arithmetic sees every digit
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=SPECIAL[0],
        bos_token=SPECIAL[1],
        eos_token=SPECIAL[2],
        additional_special_tokens=list(SPECIAL[3:]),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


# The lab's base model: configuration and training from nothing. Knows packed rows, not where they come from.


@dataclass(frozen=True, slots=True)
class BaseSize:
    """Shape and budget of one lab base."""

    hidden: int = 256
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    ffn: int = 640
    vocab: int = 4096
    context: int = 1024
    tokens: int = 8_000_000
    rows_per_step: int = 12
    row_length: int = 512
    lr: float = 3e-3
    prompt_weight: float = 0.2


SIZES = {
    "s": BaseSize(),
    "draft": BaseSize(hidden=96, layers=2, heads=2, kv_heads=2, ffn=256, tokens=24_000_000),
    "m": BaseSize(
        hidden=768, layers=12, heads=12, kv_heads=4, ffn=2048, tokens=200_000_000, rows_per_step=64, lr=1.5e-3
    ),
}


def new_model(size: BaseSize, special: dict[str, int], seed: int) -> Any:
    """A freshly initialised Llama of this size."""
    torch.manual_seed(seed)
    return new_llama(size.hidden, size.layers, size.heads, size.kv_heads, size.ffn, size.vocab, size.context, special)


def optimizers(model: torch.nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings and norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    ids = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in ids]
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def trapezoid(step: int, total: int, warmup: int = 50, decay_share: float = 0.35) -> float:
    """Learning-rate factor: linear warm-up, flat, linear decay to zero over the last share of the steps."""
    decay = max(1, int(total * decay_share))
    return min(1.0, (step + 1) / warmup, (total - step) / decay)


class BaseTrainer(Resumable):
    """Trains a base on packed rows [R, T]; resumable from its checkpoint at any step."""

    def __init__(
        self, model: Any, size: BaseSize, rows: NDArray[np.int32], special: dict[str, int], device: str, folder: Path,
        compile_it: bool = False,
    ) -> None:  # fmt: skip
        self.model = model.to(device)
        self.size, self.rows, self.special, self.device = size, rows, special, device
        self.compiled = torch.compile(self._loss) if compile_it else self._loss
        about = {**asdict(size), "text": digest(rows)}
        total, tokens = len(rows) // size.rows_per_step, size.rows_per_step * rows.shape[1]
        super().__init__(folder, [self.model], optimizers(self.model, size.lr), total, tokens, about)

    def _loss(self, ids: Tensor, weights: Tensor) -> Tensor:
        logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits
        return weighted_loss(logits, ids[:, 1:], weights)

    def _batch(self) -> tuple[Tensor, Tensor]:
        n = self.size.rows_per_step
        rows = self.rows[self.step * n : (self.step + 1) * n]
        mask = np.stack([completion_mask(r, self.special) for r in rows])
        weights = np.where(mask, 1.0, self.size.prompt_weight) * (rows != self.special["pad"])
        ids = torch.from_numpy(rows.astype(np.int64)).to(self.device)
        return ids, torch.from_numpy(weights[:, 1:].astype(np.float32)).to(self.device)

    def _update(self) -> str:
        factor = trapezoid(self.step, self.total)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.size.lr * factor
        with torch.autocast(self.device.split(":")[0], dtype=torch.bfloat16):
            loss = self.compiled(*self._batch())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return f"loss {float(loss.detach()):.4f}"
