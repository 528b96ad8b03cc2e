"""Training text: packed rows of conversations, and their cache.

Trainers only need `load_rows`. Rows are built once and then read from disk; a killed process leaves no partial rows.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from specbench_ss import user_files
from specbench_ss.conversations import Conversation, Message, read_conversation
from specbench_ss.errors import UserError, os_errors
from specbench_ss.models.load import template_hash
from specbench_ss.prompt_files import FileSource, HubSource, Row, open_source, usable
from specbench_ss.storage import cache_folder, replacing, replacing_folder, write_json
from specbench_ss.training.chat_format import Rendered, Renderer
from specbench_ss.training.self_distill import ResponseCache, own_documents


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers of conversations of one split by outcome, and of tokens without padding.

    out_of_order: turns were dropped since roles do not alternate. cut: shortened to a row. too_long: no answer begins
    within a row. unanswered: no assistant message.
    """

    conversations: int = 0
    unanswered: int = 0
    too_long: int = 0
    out_of_order: int = 0
    cut: int = 0
    documents: int = 0
    tokens: int = 0
    completion_tokens: int = 0

    def line(self) -> str:
        """Return all non-zero counts on one line."""
        left_out = f" of {self.conversations}" if self.documents != self.conversations else ""
        parts = [f"{self.documents}{left_out} conversation{'' if self.conversations == 1 else 's'}"]
        parts += [f"{self.tokens} tokens, {self.completion_tokens} of them in completions"] if self.tokens else []
        other = {
            "cut to a row": self.cut,
            "with turns out of order left out": self.out_of_order,
            "dropped as too long": self.too_long,
            "dropped without an answer": self.unanswered,
        }
        return ", ".join([*parts, *(f"{count} {text}" for text, count in other.items() if count)])


COUNTED_ROWS = 1 << 12  # whose tokens are counted at a time


@dataclass(frozen=True, slots=True)
class TrainingRows:
    """R rows of L tokens with several whole conversations ("documents") each, padded at the end; may be memory-mapped.

    ids: int32 [R, L]. mask: bool [R, L], True in completions with their end-of-turn tokens; each run of True is one
    completion, since two never touch. documents: int32 [R, L], index of the document in its row; -1 in padding.

    Under a plain causal mask a document attends to earlier ones of its row, as in the training of the lab's base. With
    the masks and positions of `masks.Documents` documents are independent, as prompts are in decoding.
    """

    ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    documents: NDArray[np.int32]
    counts: Counts = Counts()

    def __len__(self) -> int:
        """Return the number of rows, R."""
        return len(self.ids)

    def completion_counts(self, vocab: int) -> NDArray[np.int64]:
        """Return how often each of `vocab` tokens occurs in completions, [vocab]."""
        counts = np.zeros(vocab, np.int64)
        for start in range(0, len(self.ids), COUNTED_ROWS):  # rows may be larger than memory
            rows = slice(start, start + COUNTED_ROWS)
            counts += np.bincount(self.ids[rows][self.mask[rows]], minlength=vocab)
        return counts


def positions(documents: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return each token's position in its document, [B, L]; padding counts from 0 too. documents: [B, L]."""
    columns = np.broadcast_to(np.arange(documents.shape[1]), documents.shape)
    begins = np.ones(documents.shape, bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    result: NDArray[np.int64] = columns - np.maximum.accumulate(np.where(begins, columns, 0), axis=1)
    return result


def pack_documents(documents: Sequence[Rendered], length: int, pad: int) -> TrainingRows:
    """Pack whole documents into rows, without counts. Documents of more than `length` tokens are dropped."""
    documents = [document for document in documents if len(document.ids) <= length]
    plan = plan_rows([len(d.ids) for d in documents], length)
    ids = np.full((len(plan), length), pad, np.int32)
    mask = np.zeros(ids.shape, bool)
    numbers = np.full(ids.shape, -1, np.int32)
    place = {document: number for row in plan for number, document in enumerate(row)}
    lay_out([d.ids for d in documents], plan, ids)
    lay_out([d.mask for d in documents], plan, mask)
    lay_out([np.full(len(d.ids), place[i], np.int32) for i, d in enumerate(documents)], plan, numbers)
    return TrainingRows(ids, mask, numbers)


def plan_rows(lengths: Iterable[int], length: int, window: int = 64) -> list[list[int]]:
    """Return the indices of the documents of each row, in order.

    A document is never split, and one longer than `length` is dropped. A row starts with the oldest waiting document;
    then the longest of the `window` oldest that fits is next.
    """
    plan: list[list[int]] = []
    waiting: list[tuple[int, int]] = []  # (document, its length), oldest first
    source = ((i, n) for i, n in enumerate(lengths) if n <= length)
    exhausted = False
    while waiting or not exhausted:
        row: list[int] = []
        room = length
        while True:
            while len(waiting) < window and not exhausted:
                document = next(source, None)
                exhausted = document is None
                if document is not None:
                    waiting.append(document)
            fits = [i for i, (_, n) in enumerate(waiting) if n <= room]
            if not fits:
                break
            # a row starts with the oldest, so that no long document waits forever
            best = fits[0] if not row else max(fits, key=lambda i: waiting[i][1])
            chosen, n = waiting.pop(best)
            row.append(chosen)
            room -= n
        if row:
            plan.append(row)
    return plan


def lay_out(documents: Sequence[NDArray[Any]], plan: Sequence[Sequence[int]], rows: NDArray[Any]) -> None:
    """Write the documents into rows [R, length] as planned; the rest of a row is unchanged."""
    for row, numbers in zip(rows, plan, strict=True):
        end = 0
        for number in numbers:
            document = documents[number]
            row[end : end + len(document)] = document
            end += len(document)


Built = tuple[TrainingRows, TrainingRows]  # training, validation
SPLITS = ("train", "validation")  # as in file names
ARRAYS = ("ids", "mask", "documents")


class _Metadata(msgspec.Struct):
    """Fields of about.json that are needed for reading."""

    counts: dict[str, Counts]


def cached(folder: Path, about: Mapping[str, Any], build: Callable[[Path], Built]) -> Built:
    """Return the rows that `about` describes, from the folder if stored there, else built and stored.

    build: gets a folder for intermediate results that survive an interruption; it is removed at the end. One process
    builds while the others wait. Raises UserError if the folder cannot be used.
    """
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]
    done, work = folder / key, folder / f"{key}.work"
    with os_errors(f"cannot store training rows in {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{key}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # released by the system when the process ends
            if not done.exists():
                work.mkdir(exist_ok=True)
                _store(build(work), about, done)
                shutil.rmtree(work)
    return _read(done, SPLITS[0]), _read(done, SPLITS[1])


def _store(built: Built, about: Mapping[str, Any], done: Path) -> None:
    """Write everything into the new folder, and flush it to the disk."""
    with replacing_folder(done) as part:
        for split, rows in zip(SPLITS, built, strict=True):
            for name in ARRAYS:
                with replacing(part / f"{split}-{name}.npy") as file:
                    np.save(file, getattr(rows, name))
        counts = {split: asdict(rows.counts) for split, rows in zip(SPLITS, built, strict=True)}
        write_json(part / "about.json", {"about": about, "counts": counts})


def _read(done: Path, split: str) -> TrainingRows:
    try:
        counts = user_files.decoder(_Metadata)((done / "about.json").read_bytes()).counts[split]
        ids, mask, documents = (np.load(done / f"{split}-{name}.npy", mmap_mode="r") for name in ARRAYS)
    except (OSError, EOFError, ValueError, KeyError) as error:
        raise UserError(f"the training rows in {done} are damaged ({error}); remove that folder") from None
    return TrainingRows(ids, mask, documents, counts)


CHECKOUT = Path(__file__).parents[2]


def lab_conversations(split: str, seed: int) -> Iterator[list[Message]]:
    """Yield the messages of the lab's conversations of a split endlessly, reproducible by seed.

    The generators are in the folder `lab` of a checkout, which the package never imports: `python -m lab text` runs in
    another process. Raises UserError if they are missing, as in an installed wheel.
    """
    if not (CHECKOUT / "lab" / "__main__.py").is_file():
        raise UserError("the lab's training text needs the generators in lab/; run ssbench from a checkout")
    command = [sys.executable, "-m", "lab", "text", "--split", split, "--seed", str(seed)]
    with subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True, encoding="utf-8") as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                yield json.loads(line)["messages"]
        finally:
            process.kill()
    raise UserError(f"`python -m lab text` ended with exit code {process.returncode}")


FORMAT = 4  # of the stored rows and their construction: a change rebuilds all rows

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TrainingText:
    """Rows for training, and rows of other conversations for validation ([0, L] for an eval_fraction of 0)."""

    train: TrainingRows
    validation: TrainingRows


@dataclass(frozen=True, slots=True)
class _Recipe:
    """Settings for building rows."""

    length: int
    eval_fraction: float
    seed: int
    columns: Mapping[str, str]
    own: ResponseCache | None


def load_rows(
    source: str | Path | Sequence[str | Path],
    tokenizer: Any,
    length: int,
    *,
    eval_fraction: float = 0.02,
    seed: int = 0,
    columns: Mapping[str, str] | None = None,
    own: ResponseCache | None = None,
    cache: Path | None = None,
    log: Log = print,
) -> TrainingText:
    """Return packed rows of `length` tokens of conversations, built once, then memory-mapped from disk.

    Raises UserError for data that cannot be read, has no completion, or does not fit the chat template.

    Args:
        source: files, folders, or a Hugging Face data set, as `prompt_files.open_source` takes them.
        tokenizer: with a chat template.
        length: tokens per row.
        eval_fraction: share of the conversations for validation.
        seed: of the order of conversations in the rows, and of sampled answers.
        columns: {the format's column name: the data's}.
        own: a model that regenerates the answers.
        cache: folder of the rows, by default in the user's cache folder.
        log: gets one line of counts, and one on rows that cannot be used.
    """
    if own is not None and not 0 < own.limit < length:
        raise UserError(
            f"regenerated answers of up to {own.limit} tokens leave no room for a prompt in {length} tokens"
        )
    recipe, data = _Recipe(length, eval_fraction, seed, columns or {}, own), open_source(source)
    about = {
        "format": FORMAT,
        "data": data.digest(),
        "tokenizer": tokenizer_hash(tokenizer),
        "template": template_hash(tokenizer),
        "length": length,
        "eval_fraction": eval_fraction,
        "seed": seed,
        "columns": dict(recipe.columns),
        "own": None if own is None else own.about(),
    }
    folder = cache or cache_folder() / "rows"
    text = TrainingText(*cached(folder, about, lambda work: _build(recipe, data, Renderer(tokenizer), work, log)))
    validation = text.validation.counts.line() if text.validation.counts.conversations else "none"
    log(f"training text: {text.train.counts.line()}; validation: {validation}")
    return text


def tokenizer_hash(tokenizer: Any) -> str:
    """Return a short sha256 of the tokenizer without its chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = json.dumps(sorted(tokenizer.get_vocab().items())) if backend is None else backend.to_str()
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _build(recipe: _Recipe, data: FileSource | HubSource, renderer: Renderer, work: Path, log: Log) -> Built:
    own = recipe.own

    def read(place: str, row: Row) -> tuple[Conversation, Rendered | None]:
        talk = read_conversation(place, row, recipe.columns, own is not None)
        rendered = own is None and talk.has_completion
        return talk, renderer.render(talk.answered, place) if rendered else None

    pairs = list(usable(data.rows(), read, log))
    talks_read = [talk for talk, _ in pairs]
    if not pairs:
        raise UserError(f"{data.name}: no conversations; give one JSON object per line (docs/suites.md)")
    pairs = [(talk, document) for talk, document in pairs if (talk.messages if own else document)]
    if not pairs:
        raise UserError(f"{data.name}: no {'prompt' if own else 'completion'} in any conversation")
    if own is not None:
        talks = [talk for talk, _ in pairs]
        documents = own_documents(own, renderer, talks, recipe.length, recipe.seed, work, log)
        pairs = list(zip(talks, documents, strict=True))
    splits = []
    for split in (False, True):
        total = sum(c.in_validation(recipe.eval_fraction) is split for c in talks_read)
        chosen = [(c, d) for c, d in pairs if c.in_validation(recipe.eval_fraction) is split]
        splits.append(_split_rows(recipe, total, chosen, renderer.pad))
    train, validation = splits
    if not len(train) and len(validation):
        raise UserError(
            f"all of the data ({validation.counts.line()}) is in the validation share; "
            "add conversations or lower --eval-fraction"
        )
    if not len(train):
        raise UserError(f"no conversation is left for training: {train.counts.line()}")
    return train, validation


def _split_rows(
    recipe: _Recipe, read: int, documents: Sequence[tuple[Conversation, Rendered | None]], pad: int
) -> TrainingRows:
    """Return the rows of one split, with the counts of its conversations."""
    fitted = [None if document is None else document.fit(recipe.length) for _, document in documents]
    complete = [document for document in fitted if document is not None]
    order = np.random.default_rng(recipe.seed).permutation(len(complete))
    rows = pack_documents([complete[i] for i in order], recipe.length, pad)
    counts = Counts(
        conversations=read,
        unanswered=read - len(documents),
        too_long=len(documents) - len(complete),
        out_of_order=sum(c.out_of_order for c, _ in documents),
        cut=sum(
            f is not None and d is not None and f.spans != d.spans for (_, d), f in zip(documents, fitted, strict=True)
        ),
        documents=len(complete),
        tokens=int((rows.documents >= 0).sum()),
        completion_tokens=int(rows.mask.sum()),
    )
    return replace(rows, counts=counts)
