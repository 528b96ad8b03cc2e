"""Training of the lab's base model, and shared code of the pipeline's stages."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from lab.example import Example
from lab.text import WEIGHTS, conversations
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.small_llama import new_llama
from specbench_ss.models.cpu_dtype import has_bfloat16
from specbench_ss.models.load import load_target
from specbench_ss.storage import ordinary_mode, replacing
from specbench_ss.training.chat_format import Rendered
from specbench_ss.training.data import TrainingRows, pack_documents
from specbench_ss.training.distributed import DistributedContext
from specbench_ss.training.loop import PackedText, Resumable, digest
from specbench_ss.training.losses import weighted_loss
from specbench_ss.training.self_distill import GenerationOptions, regenerate_responses

# The lab's byte-level BPE tokenizer: single digits, five special tokens, a chat template.

SPECIAL = ("<|pad|>", "<|bos|>", "<|end|>", "<|user|>", "<|assistant|>")

CHAT_TEMPLATE = (
    "<|bos|>{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """Return a PreTrainedTokenizerFast of exactly vocab_size entries, special tokens first."""
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


def special_ids(tokenizer: Any) -> dict[str, int]:
    """Return the ids of the special tokens by role."""
    ids = {role: tokenizer.convert_tokens_to_ids(f"<|{role}|>") for role in ("pad", "bos", "user", "assistant")}
    return {**ids, "eos": tokenizer.eos_token_id}


def tokenize(tokenizer: Any, examples: Iterable[Example]) -> list[NDArray[np.int32]]:
    """Return the token ids of conversations in the chat format."""
    turns = (zip(e.turns, e.answers, strict=True) for e in examples)
    texts = ["<|bos|>" + "".join(f"<|user|>{q}<|assistant|>{a[0]}<|end|>" for q, a in pairs) for pairs in turns]
    encoded = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    return [np.asarray(each.ids, np.int32) for each in encoded]


def completion_mask(ids: NDArray[np.int32], special: Mapping[str, int]) -> NDArray[np.bool_]:
    """Return True for each token of an answer with its end token, which may be missing. ids, result: [.., T]."""
    at = np.arange(ids.shape[-1])
    opened = np.maximum.accumulate(np.where(ids == special["assistant"], at, -1), -1)
    closes = np.where((ids == special["bos"]) | (ids == special["pad"]), at, -1)
    closes[..., 1:] = np.maximum(closes[..., 1:], np.where(ids[..., :-1] == special["eos"], at[1:], -1))
    closed = np.maximum.accumulate(closes, -1)
    mask: NDArray[np.bool_] = (opened >= 0) & (opened >= closed) & (ids != special["assistant"])
    return mask


def pack(docs: Iterable[NDArray[np.int32]], length: int, pad: int) -> NDArray[np.int32]:
    """Pack whole conversations into rows [R, length]."""
    return pack_documents([Rendered(ids, ()) for ids in docs], length, pad).ids


# The lab's base model: configuration and training from random weights on packed rows.


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
    """Return a freshly initialised Llama of this size."""
    torch.manual_seed(seed)
    return new_llama(size.hidden, size.layers, size.heads, size.kv_heads, size.ffn, size.vocab, size.context, special)


def optimizers(model: torch.nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """Return optimizers: Muon for the matrices inside the layers, AdamW for embeddings and norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and "lm_head" not in n]
    ids = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in ids]
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def trapezoid(step: int, total: int, warmup: int = 50, decay_share: float = 0.35) -> float:
    """Return the learning-rate factor: linear warm-up, constant, linear decay to zero at the end."""
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
        total = len(rows) // size.rows_per_step
        super().__init__(folder, [self.model], optimizers(self.model, size.lr), total, about)

    def _loss(self, ids: Tensor, weights: Tensor) -> Tensor:
        logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits
        return weighted_loss(logits, ids[:, 1:], weights)

    def _batch(self) -> tuple[Tensor, Tensor]:
        n = self.size.rows_per_step
        rows = self.rows[self.step * n : (self.step + 1) * n]
        mask = completion_mask(rows, self.special)
        real = rows != self.special["pad"]
        self.counts["tokens"] += int(real.sum())
        weights = np.where(mask, 1.0, self.size.prompt_weight) * real
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


Log = Callable[[str], None]


@dataclass(frozen=True)  # no slots: `dist` is measured once
class LabTraining:
    """Settings shared by the stages of one training of the lab's models.

    out: the work folder, with one folder per stage. size: "s" or "m". scale: multiplies every number of steps.
    """

    out: Path
    size: str
    device: str
    seed: int
    scale: float
    log: Log

    def scaled(self, count: int, least: int) -> int:
        """Return a count of examples or steps under the budget."""
        return max(least, int(count * self.scale))

    @property
    def compile(self) -> bool:
        """Return True if compiling is worthwhile: not for a trial run, and on a CPU only with a C++ compiler."""
        return self.scale >= 0.1 and (self.device != "cpu" or any(map(shutil.which, ("g++", "clang++", "c++"))))

    @cached_property
    def dist(self) -> DistributedContext:
        """Return the device context of drafter training: bfloat16 if that is faster, else float32."""
        device = torch.device(self.device)
        return DistributedContext(device, exact=device.type == "cpu" and not has_bfloat16())

    def folder(self, stage: str) -> Path:
        """Return the work folder of a stage."""
        path = self.out / stage
        path.mkdir(parents=True, exist_ok=True)
        return path

    def made(self, path: str, stage: str) -> Path:
        """Return a file of an earlier stage in the work folder. Raise UserError naming the stage if it is missing."""
        file = self.out / path
        if not file.exists():
            raise UserError(f"no {path} in {self.out}: run stage {stage!r} first")
        return file

    def base_size(self, name: str) -> BaseSize:
        """Return the named size, with its budget scaled."""
        size = SIZES[name]
        return replace(size, tokens=self.scaled(size.tokens, size.rows_per_step * size.row_length))

    def tokenizer(self) -> Any:
        """Return the tokenizer that the first stage made."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.made("tokenizer/tokenizer.json", "tokenizer").parent)

    def base_target(self) -> Target:
        """Return the base as shipped: float16 weights, float32 compute."""
        path = self.made("polish/model/model.safetensors", "polish").parent
        return load_target(str(path), dtype="float32", device=self.device)


def training_rows(
    lab: LabTraining, least: int, step: int, seed: int, weights: Mapping[str, float] = WEIGHTS
) -> NDArray[np.int32]:
    """Return packed rows [R, length] of at least `least` tokens, for steps of `step` rows.

    They are generated once for a tokenizer, then read from disk.
    """
    length = lab.base_size(lab.size).row_length
    made_by = hashlib.sha256(lab.made("tokenizer/tokenizer.json", "tokenizer").read_bytes()).hexdigest()[:12]
    path = lab.folder("text") / f"rows-{least}-{length}-{seed}-{made_by}.npy"
    if path.exists():
        rows: NDArray[np.int32] = np.load(path, mmap_mode="r")
        return rows
    tokenizer = lab.tokenizer()
    docs: list[NDArray[np.int32]] = []
    tokens, source = 0, conversations("train", seed, weights)
    while tokens < least:
        new = tokenize(tokenizer, islice(source, min(2_000, 16 + least // 200)))
        docs += new
        tokens += sum(map(len, new))
    rows = pack(docs, length, special_ids(tokenizer)["pad"])
    rows = rows[: -(len(rows) % step) or None]  # whole steps
    save_rows(path, rows)
    lab.log(f"text: {len(docs)} conversations, {tokens} tokens, {len(rows)} rows of {length}")
    return rows


def save_rows(path: Path, rows: NDArray[np.int32]) -> None:
    """Write an .npy file atomically."""
    with replacing(path) as file:
        np.save(file, rows)


def save_model(model: Any, tokenizer: Any, path: Path) -> None:
    """Write a float16 safetensors checkpoint with its tokenizer in Hugging Face format."""
    import copy

    half = copy.deepcopy(model).to("cpu", torch.float16)
    half.save_pretrained(path, safe_serialization=True)
    ordinary_mode(path)
    tokenizer.save_pretrained(path)


def drafter_text(lab: LabTraining, split: str) -> PackedText:
    """Return rows of the split 'train' or 'calibration'."""
    rows = np.load(lab.made(f"answers/{split}.npy", "answers"), mmap_mode="r")
    return answers_in(lab, rows, lab.seed + 3)


def answers_in(lab: LabTraining, rows: NDArray[np.int32], seed: int) -> PackedText:
    """Return packed rows [R, T] with losses on answers, in the order of the seed."""
    special = special_ids(lab.tokenizer())
    documents = np.where(rows == special["pad"], -1, 0).astype(np.int32)
    return PackedText(TrainingRows(rows, completion_mask(rows, special), documents), seed, plain=True)


@dataclass(slots=True)
class LabConversation:
    """A generated example with answers by the model; an answer beyond the limit ends it."""

    example: Example
    backend: Any
    ids: list[int] = field(default_factory=list)
    turn: int = 0
    going: bool = True

    def prompt(self) -> list[int] | None:
        """Return the conversation up to the marker that opens the next answer."""
        if not self.going or self.turn == len(self.example.turns):
            return None
        text = f"<|user|>{self.example.turns[self.turn]}<|assistant|>"
        start = "" if self.turn else "<|bos|>"
        self.ids = self.ids + self.backend.encode(start + text, add_special_tokens=False).ids
        return self.ids

    def answered(self, answer: list[int], ended: bool) -> None:
        """Append the answer."""
        self.ids = self.ids + answer
        self.turn, self.going = self.turn + 1, ended


def own_conversations(
    target: Target, examples: Iterator[Example], count: int, batch: int = 128, limit: int = 192
) -> Iterator[list[LabConversation]]:
    """Yield conversations with all answers by the model; one list per batch, `count` conversations in all."""
    pool = sorted(islice(examples, count), key=lambda e: (e.category, len(e.turns[0])))
    talks = [LabConversation(example, target.tokenizer.backend_tokenizer) for example in pool]
    for _, answered in regenerate_responses(
        target, talks, GenerationOptions((target.tokenizer.eos_token_id,), limit), batch
    ):
        yield answered
