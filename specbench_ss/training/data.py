"""Training text: conversation files and hub data sets, packed rows, and their cache.

`load_rows` is all that a trainer needs. Rows are made once and then read from disk; a process that is killed at any
moment leaves no half-written ones.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from specbench_ss import user_files
from specbench_ss.conversations import Conversation, read_conversation
from specbench_ss.errors import UserError, os_reason
from specbench_ss.models.checkpoint import HUB_ID
from specbench_ss.models.load import template_hash
from specbench_ss.storage import cache_folder, replacing, sync_folder
from specbench_ss.training.chat_format import Rendered, Renderer
from specbench_ss.training.self_distill import ResponseCache, own_documents
from specbench_ss.user_files import Row, read_bytes, read_rows, read_text


@dataclass(frozen=True, slots=True)
class Counts:
    """What became of the conversations on one side of the split, and the number of tokens without padding.

    out_of_order: turns were left out where roles do not alternate. cut: shortened to a row. too_long: no answer begins
    within a row. unanswered: the assistant says nothing.
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
        """Return all counts that are not zero, on one line."""
        said = [f"{self.documents} of {self.conversations} conversations"]
        said += [f"{self.tokens} tokens, {self.completion_tokens} of them in completions"] if self.tokens else []
        lost = {
            "cut to a row": self.cut,
            "with turns out of order left out": self.out_of_order,
            "dropped as too long": self.too_long,
            "dropped without an answer": self.unanswered,
        }
        return ", ".join([*said, *(f"{count} {what}" for what, count in lost.items() if count)])


@dataclass(frozen=True, slots=True)
class TrainingRows:
    """R rows of L tokens with several whole conversations ("documents") each, padded at the end; memory-mapped or not.

    ids: int32 [R, L]. mask: bool [R, L], True in completions, end-of-turn tokens included and padding not; each run of
    True is one completion, since two never touch. documents: int32 [R, L], the number of the document in its row, from
    0; -1 in padding.

    Under a plain causal mask a document sees those before it in its row; the lab's base is trained so. With the masks
    and positions of `batch.Documents` every document stands alone, as prompts do in decoding.
    """

    ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    documents: NDArray[np.int32]
    counts: Counts = Counts()

    def __len__(self) -> int:
        """Return the number of rows, R."""
        return len(self.ids)


def positions(documents: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return each token's position in its own document, [B, L], from 0. documents: [B, L].

    Padding counts from 0 too.
    """
    at = np.broadcast_to(np.arange(documents.shape[1]), documents.shape)
    begins = np.ones(documents.shape, bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    found: NDArray[np.int64] = at - np.maximum.accumulate(np.where(begins, at, 0), axis=1)
    return found


def pack_documents(documents: Sequence[Rendered], length: int, pad: int) -> TrainingRows:
    """Pack whole documents, none longer than `length`, into rows. The counts are left empty."""
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
    """Decide which documents share a row: return the numbers of each row's documents, in the order they are laid out.

    A document is never split, and one longer than `length` is left out. A row starts with the oldest document that
    waits; then the longest of the `window` oldest that still fits goes next.
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
            # the first of a row is the oldest, so that no long one waits for ever
            best = fits[0] if not row else max(fits, key=lambda i: waiting[i][1])
            taken, n = waiting.pop(best)
            row.append(taken)
            room -= n
        if row:
            plan.append(row)
    return plan


def lay_out(documents: Sequence[NDArray[Any]], plan: Sequence[Sequence[int]], rows: NDArray[Any]) -> None:
    """Write the documents into rows [R, length] as planned. What follows a row's last document is left as it is."""
    for row, numbers in zip(rows, plan, strict=True):
        end = 0
        for number in numbers:
            document = documents[number]
            row[end : end + len(document)] = document
            end += len(document)


Built = tuple[TrainingRows, TrainingRows]  # to train on, held out
SIDES = ("train", "held_out")
ARRAYS = ("ids", "mask", "documents")


class _About(msgspec.Struct):
    """The fields of about.json that reading needs."""

    counts: dict[str, Counts]


def cached(folder: Path, about: Mapping[str, Any], build: Callable[[Path], Built]) -> Built:
    """Return the rows that `about` describes: read from the folder where they are there, else built and stored there.

    build: is given a folder for what it wants to find again after being cut off; the folder is removed when the rows
    are done. One process builds at a time while the others wait. Raises UserError where the folder cannot be used.
    """
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:24]
    done, work = folder / key, folder / f"{key}.work"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{key}.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # the system releases it however the process ends
            if not done.exists():
                work.mkdir(exist_ok=True)
                _keep(build(work), about, folder / f"{key}.part", done)
                shutil.rmtree(work)
    except OSError as error:
        raise UserError(f"cannot keep training rows in {folder}: {os_reason(error)}") from None
    return _read(done, SIDES[0]), _read(done, SIDES[1])


def _keep(built: Built, about: Mapping[str, Any], part: Path, done: Path) -> None:
    """Write everything into a folder of another name, flush it to the disk, then rename the folder."""
    shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
    part.mkdir()
    for side, rows in zip(SIDES, built, strict=True):
        for name in ARRAYS:
            with replacing(part / f"{side}-{name}.npy") as file:
                np.save(file, getattr(rows, name))
    counts = {side: asdict(rows.counts) for side, rows in zip(SIDES, built, strict=True)}
    with replacing(part / "about.json") as file:
        file.write(json.dumps({"about": about, "counts": counts}, indent=1).encode())
    os.rename(part, done)
    sync_folder(done.parent)


def _read(done: Path, side: str) -> TrainingRows:
    try:
        counts = user_files.decoder(_About)((done / "about.json").read_bytes()).counts[side]
        ids, mask, documents = (np.load(done / f"{side}-{name}.npy", mmap_mode="r") for name in ARRAYS)
    except (OSError, EOFError, ValueError, KeyError) as error:
        raise UserError(f"the training rows in {done} are damaged ({error}): remove that folder") from None
    return TrainingRows(ids, mask, documents, counts)


SUFFIXES = (".jsonl", ".json")


def open_source(given: str | Path | Sequence[str | Path]) -> FileSource | HubSource:
    """Open files, folders (their .jsonl and .json files, sub-folders too), or the id of one hub data set.

    The hub is asked for an id only where no file or folder has that name. Raises UserError for what is neither.
    """
    names = [given] if isinstance(given, str | Path) else list(given)
    if not names:
        raise UserError("no training data given")
    first, alone = str(names[0]), len(names) == 1 and isinstance(names[0], str)
    may_be_hub = alone and HUB_ID.fullmatch(first) and not first.endswith((*SUFFIXES, ".csv"))
    if may_be_hub and not Path(first).exists():
        return HubSource(first)
    return FileSource(tuple(file for name in names for file in _files(Path(name))))


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise UserError(f"no training data {str(path)!r}: neither a file, a folder nor a hub id (owner/name)")
    if path.is_file():
        return [path]
    found = sorted(p for p in path.rglob("*") if p.suffix in SUFFIXES and p.is_file())
    if not found:
        raise UserError(f"{path} holds no {' or '.join(SUFFIXES)} file")
    return found


@dataclass(frozen=True, slots=True)
class FileSource:
    """JSONL files, and .json files that hold a list of objects (or lines of them)."""

    paths: tuple[Path, ...]

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Yield rows in the order of the files. The place is FILE:LINE, or in a list 'FILE, entry N'."""
        for path in self.paths:
            text = read_text(path) if path.suffix == ".json" else ""
            yield from _entries(path, text) if text.lstrip().startswith("[") else read_rows(path)

    def digest(self) -> str:
        """Return a sha256 of the files' bytes, in their order; their names do not matter."""
        whole = hashlib.sha256()
        for path in self.paths:
            whole.update(hashlib.sha256(read_bytes(path)).digest())
        return whole.hexdigest()


def _entries(path: Path, text: str) -> Iterator[tuple[str, Row]]:
    try:
        entries = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        where = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise UserError(f"{path}{where}: not valid JSON") from None
    for number, entry in enumerate(entries, start=1):
        if not isinstance(entry, dict):
            raise UserError(f"{path}, entry {number}: expected a JSON object")
        yield f"{path}, entry {number}", entry


@dataclass(frozen=True, slots=True)
class HubSource:
    """One split of a data set of the Hugging Face hub, read through the package `datasets`.

    config, revision: which of its configurations and which commit; None takes the data set's own default.
    """

    name: str
    config: str | None = None
    split: str = "train"
    revision: str | None = None

    def _load(self) -> Any:
        try:
            datasets: Any = import_module("datasets")  # needed by those alone who name a data set of the hub
        except ImportError:
            raise UserError(
                f"no file or folder {self.name!r}; to read a data set of the Hugging Face hub: pip install datasets"
            ) from None
        try:
            chosen = {"name": self.config, "revision": self.revision}
            given = {key: value for key, value in chosen.items() if value is not None}
            return datasets.load_dataset(self.name, split=self.split, **given)
        except Exception as error:  # a dozen kinds, all of them about what the user named or about the network
            first = next(iter(str(error).strip().splitlines()), "")
            raise UserError(f"cannot load data set {self.name!r}: {type(error).__name__}: {first}") from error

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Yield rows in the data set's order. The place is 'NAME, row N'."""
        for number, row in enumerate(self._load(), start=1):
            yield f"{self.name}, row {number}", row

    def digest(self) -> str:
        """Return a sha256 of all rows as JSON."""
        whole = hashlib.sha256()
        for _, row in self.rows():
            whole.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
        return whole.hexdigest()


CHECKOUT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class LabConversation:
    """One conversation: the user's messages, and for each the acceptable answers, the one to train on first."""

    turns: tuple[str, ...]
    answers: tuple[tuple[str, ...], ...]


def conversations(split: str, seed: int) -> Iterator[LabConversation]:
    """Yield the lab's conversations of a split without end, the same ones for the same seed.

    The generators are the folder `lab` of a checkout, which the package never imports: `python -m lab text` runs in
    another process. Raises UserError where they are missing, as in an installed wheel.
    """
    if not (CHECKOUT / "lab" / "__main__.py").is_file():
        raise UserError("the lab's training text needs the generators in lab/: run ssbench from a checkout")
    command = [sys.executable, "-m", "lab", "text", "--split", split, "--seed", str(seed)]
    with subprocess.Popen(command, cwd=CHECKOUT, stdout=subprocess.PIPE, text=True, encoding="utf-8") as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                row = json.loads(line)
                yield LabConversation(tuple(row["turns"]), tuple(map(tuple, row["answers"])))
        finally:
            process.kill()
    raise UserError(f"`python -m lab text` ended with exit code {process.returncode}")


def special_ids(tokenizer: Any) -> dict[str, int]:
    """Return the ids of the lab's special tokens by role."""
    ids = {role: tokenizer.convert_tokens_to_ids(f"<|{role}|>") for role in ("pad", "bos", "user", "assistant")}
    return {**ids, "eos": tokenizer.eos_token_id}


def render(example: Any) -> str:
    """Return a conversation with turns and answers as one string, in the form of the lab's chat template."""
    parts = [
        f"<|user|>{turn}<|assistant|>{answers[0]}<|end|>"
        for turn, answers in zip(example.turns, example.answers, strict=True)
    ]
    return "<|bos|>" + "".join(parts)


def completion_mask(ids: NDArray[np.int32], special: Mapping[str, int]) -> NDArray[np.bool_]:
    """Return True for each token of an answer, its end token included; an answer may lack its end."""
    at = np.arange(len(ids))
    opened = np.maximum.accumulate(np.where(ids == special["assistant"], at, -1))
    closes = np.where((ids == special["bos"]) | (ids == special["pad"]), at, -1)
    closes[1:] = np.maximum(closes[1:], np.where(ids[:-1] == special["eos"], at[1:], -1))
    closed = np.maximum.accumulate(closes)
    mask: NDArray[np.bool_] = (opened >= 0) & (opened >= closed) & (ids != special["assistant"])
    return mask


def tokenize(tokenizer: Any, texts: list[str]) -> list[NDArray[np.int32]]:
    """Return the token ids of rendered conversations."""
    return [
        np.asarray(e.ids, np.int32) for e in tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    ]


def pack(docs: list[NDArray[np.int32]], length: int, pad: int) -> NDArray[np.int32]:
    """Pack whole conversations into rows [R, length]. Those of one row see each other, as in the lab's own training."""
    plan = plan_rows(map(len, docs), length)
    rows = np.full((len(plan), length), pad, np.int32)
    lay_out(docs, plan, rows)
    return rows


FORMAT = 2  # of what is kept on disk, and of how it is made: a change makes all rows anew

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TrainingText:
    """Rows to learn from, and rows of other conversations to evaluate on (none, [0, L], for an eval_fraction of 0)."""

    train: TrainingRows
    held_out: TrainingRows


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How rows are made of the data."""

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
    """Return packed rows of `length` tokens from conversation data. They are made once, then memory-mapped from disk.

    Raises UserError for data that cannot be read, has no completion, or does not fit the chat template.

    Args:
        source: files (.jsonl, .json), folders, or the id of a Hugging Face data set, in the forms that
            `conversations.read_conversation` reads.
        columns: {a form's name of a column: the data's own name}.
        own: let a model give the answers, in place of those in the data.
        cache: folder to keep rows in, by default in the user's cache folder.
        seed: for the order of the conversations in the rows, and for sampled answers.
        log: is given one line of counts.
    """
    if own is not None and not 0 < own.limit < length:
        raise UserError(f"own answers of up to {own.limit} tokens do not fit behind a prompt in a row of {length}")
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
    log(f"training text: {text.train.counts.line()}; held out: {text.held_out.counts.line()}")
    return text


def tokenizer_hash(tokenizer: Any) -> str:
    """Return a short sha256 of all that a tokenizer does to text, except its chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    whole = json.dumps(sorted(tokenizer.get_vocab().items())) if backend is None else backend.to_str()
    return hashlib.sha256(whole.encode()).hexdigest()[:16]


def _build(recipe: _Recipe, data: FileSource | HubSource, renderer: Renderer, work: Path, log: Log) -> Built:
    own = recipe.own
    read = [read_conversation(place, row, recipe.columns, own is not None) for place, row in data.rows()]
    if not read:
        raise UserError("the training data is empty: there is no conversation in it")
    talks = [c for c in read if (c.messages if own else c.has_completion)]
    if not talks:
        raise UserError("the training data has no prompt" if own else "the training data has no completion")
    made: Sequence[Rendered | None]
    if own is None:
        made = [renderer.render(c.answered, c.place) for c in talks]
    else:
        made = own_documents(own, renderer, talks, recipe.length, recipe.seed, work, log)
    sides = []
    for side in (False, True):
        given = sum(c.held_out(recipe.eval_fraction) is side for c in read)
        pairs = [(c, d) for c, d in zip(talks, made, strict=True) if c.held_out(recipe.eval_fraction) is side]
        sides.append(_side(recipe, given, pairs, renderer.pad))
    train, held_out = sides
    if not len(train) and len(held_out):
        raise UserError(
            f"nothing is left to train on: all of the data ({held_out.counts.line()}) falls into the held-out share. "
            "Give more conversations, or hold out fewer: see --eval-fraction"
        )
    if not len(train):
        raise UserError(f"no conversation is left to train on: {train.counts.line()}")
    return train, held_out


def _side(recipe: _Recipe, read: int, made: Sequence[tuple[Conversation, Rendered | None]], pad: int) -> TrainingRows:
    """Return the rows of one side of the split, and count what became of the conversations on that side."""
    fitted = [None if document is None else document.fit(recipe.length) for _, document in made]
    kept = [document for document in fitted if document is not None]
    order = np.random.default_rng(recipe.seed).permutation(len(kept))
    rows = pack_documents([kept[i] for i in order], recipe.length, pad)
    counts = Counts(
        conversations=read,
        unanswered=read - len(made),
        too_long=len(made) - len(kept),
        out_of_order=sum(c.out_of_order for c, _ in made),
        cut=sum(f is not None and d is not None and f.spans != d.spans for (_, d), f in zip(made, fitted, strict=True)),
        documents=len(kept),
        tokens=int((rows.documents >= 0).sum()),
        completion_tokens=int(rows.mask.sum()),
    )
    return replace(rows, counts=counts)
