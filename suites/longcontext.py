"""Long prompts: text of one's own files, cut to 1k, 2k, 4k, 8k, 16k and 32k tokens, and to what the model can hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from specbench_ss.errors import UserError
from specbench_ss.suite import Question, Suite, SuiteData, SuiteRequest
from specbench_ss.suites.questions import check_categories, check_limit
from specbench_ss.user_files import read_rows, read_text

CONTEXT = "context"  # the category of prompts that are as long as the model's context allows, where that is known
LENGTHS = {"1k": 1024, "2k": 2048, "4k": 4096, "8k": 8192, "16k": 16384, "32k": 32768}  # tokens of a prompt
ASK = "Summarize the main points of this text."
MAX_NEW_TOKENS = 256
TEMPLATE_TOKENS = 64  # what a chat template adds, at most, to all that is known of
LEAST = 64  # tokens of text: with less room there is nothing to summarize
CHARS_PER_TOKEN = 4  # of English text, where no tokenizer is there to ask
DEFAULT_LIMIT = 2
SUFFIXES = (".txt", ".md", ".rst")

Count = Callable[[str], int]


class LongContext(Suite):
    """The suite `longcontext`."""

    name = "longcontext"
    summary = "long prompts from text files of yours, cut to 1k to 32k tokens or to the model's context; speed only"
    categories = (*LENGTHS, CONTEXT)

    def load(self, request: SuiteRequest) -> SuiteData:
        """Return questions of every length that the context holds. Raises UserError where the text is too short.

        Without categories, the first length that it does not hold gives way to prompts as long as the context allows.
        """
        check_limit(request.limit)
        check_categories(request.categories, self.categories, f"suite {self.name!r}")
        if request.data is None:
            raise UserError(
                "suite 'longcontext' needs --data: a text file, a folder of them, or a JSONL file with `text`"
            )
        text = "\n\n".join(_documents(request.data))
        sizes, notes = _fitting(request.categories, request.context_length)
        limit = DEFAULT_LIMIT if request.limit is None else request.limit
        count = request.count_tokens or _guess
        if request.count_tokens is None:
            notes.append(f"lengths are estimates, {CHARS_PER_TOKEN} characters a token: there is no tokenizer to ask")
        questions, short = _questions(text, sizes, limit, count)
        notes += [f"{name}: the text of {request.data.name} is too short for one prompt" for name in short]
        if not questions:
            raise UserError(f"{request.data} holds too little text: about {count(text):,} tokens")
        return SuiteData(self.name, "files", tuple(questions), MAX_NEW_TOKENS, tuple(notes))


def _fitting(asked: Sequence[str], context: int | None) -> tuple[dict[str, int], list[str]]:
    """Return the lengths to ask, in tokens of a whole prompt, and what there is to say of the others."""
    sizes = {name: size for name, size in LENGTHS.items() if name in (asked or LENGTHS)}
    if context is None:
        if not sizes:
            raise UserError(f"the model's context is not known, so there are no prompts of category {CONTEXT!r}")
        return sizes, []
    room = context - MAX_NEW_TOKENS - TEMPLATE_TOKENS
    if room < LEAST:
        raise UserError(f"the model's context of {context} tokens leaves no room for a long prompt and its answer")
    beyond = [name for name, size in sizes.items() if size > room]
    held = f"the model's context of {context:,} tokens holds no more than {room:,} beside an answer"
    notes = [f"{', '.join(beyond)} left out: {held}"] if beyond else []
    sizes = {name: size for name, size in sizes.items() if size <= room}
    if CONTEXT in asked or (beyond and not asked):
        sizes[CONTEXT] = room
        notes.append(f"{CONTEXT}: prompts of {room:,} tokens, as {held}")
    if not sizes:
        raise UserError(f"{notes[0]}; category {CONTEXT!r} has prompts of that length")
    return sizes, notes


def _questions(text: str, sizes: dict[str, int], limit: int, count: Count) -> tuple[list[Question], list[str]]:
    """Return up to `limit` questions of each length, 0 for all, and the names of lengths that the text is short of."""
    questions: list[Question] = []
    short: list[str] = []
    for name, size in sizes.items():
        begin, made = 0, 0
        while not (limit and made == limit) and (piece := _piece(text, begin, size - count(ASK), count)):
            questions.append(Question(f"{name}-{made:03d}", name, (f"{piece.text}\n\n{ASK}",)))
            begin, made = piece.end, made + 1
        short += [] if made else [name]
    return questions, short


@dataclass(frozen=True, slots=True)
class _Piece:
    """A piece of the text, and where it ends there."""

    text: str
    end: int


def _piece(text: str, begin: int, tokens: int, count: Count) -> _Piece | None:
    """Return the text from `begin` on, to the last whole word within so many tokens; None where there is less text."""
    low, high = begin, min(len(text), begin + 8 * tokens)
    while count(text[begin:high]) < tokens:
        if high == len(text):
            return None
        high = min(len(text), begin + 2 * (high - begin))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if count(text[begin:middle]) <= tokens else (low, middle)
    end = max(text.rfind(" ", begin, low), text.rfind("\n", begin, low))
    end = end if end > begin else low
    return _Piece(text[begin:end].strip(), end) if text[begin:end].strip() else None


def _guess(text: str) -> int:
    return len(text) // CHARS_PER_TOKEN


def _documents(data: Path) -> Iterator[str]:
    """Yield the texts of a file, or of a folder's text files in the order of their names."""
    if data.is_dir():
        files = sorted(path for path in data.rglob("*") if path.suffix in SUFFIXES and path.is_file())
        if not files:
            raise UserError(f"{data} holds no {', '.join(SUFFIXES)} file")
        for file in files:
            yield read_text(file)
    elif data.suffix in (".jsonl", ".gz"):
        for place, row in read_rows(data):
            if not isinstance(row.get("text"), str):
                raise UserError(f"{place}: 'text' must be a text")
            yield row["text"]
    else:
        yield read_text(data)
