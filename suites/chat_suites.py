"""Chat suites: MT-Bench, Spec-Bench, SPEED-Bench, long contexts and prompts of a user."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from specbench_ss.conversations import FORMS, SYSTEM, form_of, text_in, unread_keys
from specbench_ss.errors import UserError, printable
from specbench_ss.prompt_files import SUFFIXES as ROW_SUFFIXES
from specbench_ss.prompt_files import Row, read_rows
from specbench_ss.suite import MT_BENCH, Question, Suite, SuiteData, SuiteRequest
from specbench_ss.suites.base import (
    IDS,
    SPECBENCH_CATEGORIES,
    FileSuite,
    Published,
    check_categories,
    check_limit,
    is_hub,
)
from specbench_ss.user_files import read_text

MTBENCH_COMMIT = "587d5cfa1609a43d192cedb8441cac3c17db105d"
FOLDER = f"https://raw.githubusercontent.com/lm-sys/FastChat/{MTBENCH_COMMIT}/fastchat/llm_judge/data"
QUESTIONS = Published(
    f"{FOLDER}/mt_bench/question.jsonl", "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7"
)
REFERENCES = Published(
    f"{FOLDER}/mt_bench/reference_answer/gpt-4.jsonl",
    "f957a5bc977badb66885ec970e6cd08527845780313f0995764260e5777b9b3f",
    "reference_answer_gpt-4.jsonl",
)
PROMPTS = Published(f"{FOLDER}/judge_prompts.jsonl", "fd283293406d024f44c174b094ef48031d0687a4682fd3a56b29b138f80281b6")


class MTBench(FileSuite):
    """The suite `mtbench`."""

    name = "mtbench"
    title = "MT-Bench"
    summary = "MT-Bench: 80 questions of two turns in eight tasks, graded by a judge (`ssbench judge`)"
    categories = MT_BENCH
    files = (QUESTIONS, REFERENCES, PROMPTS)
    lab_categories = MT_BENCH

    def read(self, data: Path) -> tuple[Question, ...]:
        """Return the questions, with reference answers if their file is in the same folder."""
        questions = super().read(data)
        references = self.question_file(data).parent / REFERENCES.name
        if is_hub(data) or not references.is_file():
            return questions
        answers = dict(_answer(place, row) for place, row in read_rows(references))
        return tuple(replace(q, references=answers[q.id]) if q.id in answers else q for q in questions)

    def judge_prompts(self, data: Path | None) -> Path | None:
        """Return MT-Bench's judge prompts: next to the data, else the fetched ones."""
        local = None if data is None or is_hub(data) else self.question_file(data).with_name(PROMPTS.name)
        return next((path for path in (local, self._cached(PROMPTS)) if path is not None and path.is_file()), None)


def _answer(place: str, row: Row) -> tuple[str, tuple[tuple[str, ...], ...]]:
    """Return a question's id and the reference answer of each of its turns."""
    try:
        turns = row["choices"][0]["turns"]
        return str(row["question_id"]), tuple((str(turn),) for turn in turns)
    except (KeyError, IndexError, TypeError):
        raise UserError(f"{place}: expected 'question_id' and 'choices' with 'turns'") from None


SPECBENCH_COMMIT = "fd2c1cd7d2201ef71db4c5f4e455008f017967bf"
URL = f"https://raw.githubusercontent.com/hemingkx/Spec-Bench/{SPECBENCH_COMMIT}/data/spec_bench/question.jsonl"
SHA256 = "4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04"

# MT-Bench's references are hints for a judge, not texts to compare with.
METRICS = {
    "translation": "bleu",
    "summarization": "rouge_l",
    "qa": "token_f1",
    "math_reasoning": "numeric",
    "rag": "token_f1",
}


class SpecBench(FileSuite):
    """The suite `specbench`."""

    name = "specbench"
    title = "Spec-Bench"
    summary = "Spec-Bench: multi-turn chat, translation, summarization, QA, math and RAG (480 questions)"
    categories = SPECBENCH_CATEGORIES
    files = (Published(URL, SHA256),)
    max_new_tokens = 1024  # as Spec-Bench itself
    lab_categories = SPECBENCH_CATEGORIES
    metrics = METRICS


MASKED = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"  # placeholder where a source's licence forbids a copy


class SpeedBench(FileSuite):
    """The suite `speedbench`."""

    name = "speedbench"
    title = "SPEED-Bench"
    summary = "SPEED-Bench's file form: eleven domains, or prompts of 1k to 32k tokens in three classes of entropy"
    categories = (
        "coding", "humanities", "math", "multilingual", "qa", "rag", "reasoning", "roleplay", "stem", "summarization",
        "writing", "low_entropy", "mixed", "high_entropy",
    )  # fmt: skip
    needs = "a Parquet or JSONL file of SPEED-Bench, or hub:nvidia/SPEED-Bench:qualitative"
    default_limit = 80

    def question(self, place: str, number: int, row: Row) -> Question:
        """Return the question of a row. Raise UserError if its text is masked."""
        question = super().question(place, number, row)
        if any(turn.startswith(MASKED) for turn in question.turns):
            raise UserError(f"{place}: the text is masked; prepare the data with NVIDIA's specdec_bench first")
        return question


CONTEXT = "context"  # the category of prompts with the longest length that the model's context allows
LENGTHS = {"1k": 1024, "2k": 2048, "4k": 4096, "8k": 8192, "16k": 16384, "32k": 32768}  # tokens of a prompt
ASK = "Summarize the main points of this text."
MAX_NEW_TOKENS = 256
TEMPLATE_TOKENS = 64  # upper bound of the tokens that chat templates add
LEAST = 64  # tokens of text: with less room there is nothing to summarize
CHARS_PER_TOKEN = 4  # of English text, for runs without a tokenizer
DEFAULT_LIMIT = 2
SUFFIXES = (".txt", ".md", ".rst")

Count = Callable[[str], int]


class LongContext(Suite):
    """The suite `longcontext`."""

    name = "longcontext"
    summary = "long prompts from text files of yours, cut to 1k to 32k tokens or to the model's context; speed only"
    categories = (*LENGTHS, CONTEXT)

    def load(self, request: SuiteRequest) -> SuiteData:
        """Return questions of every length that fits the context. Raise UserError if the text is too short.

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
        count = request.count_tokens or (lambda text: len(text) // CHARS_PER_TOKEN)
        if request.count_tokens is None:
            notes.append(f"lengths are estimates, {CHARS_PER_TOKEN} characters a token: there is no tokenizer to ask")
        questions, short = _questions(text, sizes, limit, count)
        notes += [f"{name}: the text of {request.data.name} is too short for one prompt" for name in short]
        if not questions:
            raise UserError(f"{request.data} has too little text: about {count(text):,} tokens")
        return SuiteData(self.name, "files", tuple(questions), MAX_NEW_TOKENS, tuple(notes))


def _fitting(asked: Sequence[str], context: int | None) -> tuple[dict[str, int], list[str]]:
    """Return the prompt lengths in tokens, and notes on omitted lengths."""
    sizes = {name: size for name, size in LENGTHS.items() if name in (asked or LENGTHS)}
    if context is None:
        if not sizes:
            raise UserError(f"the model's context length is unknown, so there are no prompts of task {CONTEXT!r}")
        return sizes, []
    room = context - MAX_NEW_TOKENS - TEMPLATE_TOKENS
    if room < LEAST:
        raise UserError(f"the model's context of {context} tokens leaves no room for a long prompt and its answer")
    beyond = [name for name, size in sizes.items() if size > room]
    limit = f"the model's context of {context:,} tokens fits at most {room:,} in addition to an answer"
    notes = [f"{', '.join(beyond)} left out: {limit}"] if beyond else []
    sizes = {name: size for name, size in sizes.items() if size <= room}
    if CONTEXT in asked or (beyond and not asked):
        sizes[CONTEXT] = room
        notes.append(f"{CONTEXT}: prompts of {room:,} tokens, as {limit}")
    if not sizes:
        raise UserError(f"{notes[0]}; task {CONTEXT!r} has prompts of that length")
    return sizes, notes


def _questions(text: str, sizes: dict[str, int], limit: int, count: Count) -> tuple[list[Question], list[str]]:
    """Return up to `limit` questions of each length (0 = all), and the lengths with too little text."""
    questions: list[Question] = []
    short: list[str] = []
    for name, size in sizes.items():
        begin, made = 0, 0
        while not (limit and made == limit) and (piece := _piece(text, begin, size - count(ASK), count)):
            questions.append(Question(f"{name}-{made:03d}", name, (f"{piece[0]}\n\n{ASK}",)))
            begin, made = piece[1], made + 1
        short += [] if made else [name]
    return questions, short


def _piece(text: str, begin: int, tokens: int, count: Count) -> tuple[str, int] | None:
    """Return the text from `begin` to the last whole word within `tokens`, and its end; None if there is less text."""
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
    return (text[begin:end].strip(), end) if text[begin:end].strip() else None


def _documents(data: Path) -> Iterator[str]:
    """Yield the texts of a file, or of a folder's text files in the order of their names."""
    files = sorted(path for path in data.rglob("*") if path.suffix in SUFFIXES) if data.is_dir() else [data]
    if not files:
        raise UserError(f"{data} has no {', '.join(SUFFIXES)} file")
    for file in files:
        if file.suffix in (*ROW_SUFFIXES, ".gz"):
            yield from (text_in(place, row, "text") for place, row in read_rows(file))
        else:
            yield read_text(file)


OWN_COLUMNS = {*SYSTEM, *IDS, "category", "reference", "metric", "tools"}
MOST_NAMED = 6  # keys that one note lists


class Prompts(FileSuite):
    """The suite `jsonl`."""

    name = "jsonl"
    title = "jsonl"
    summary = "prompts of your own: jsonl:FILE in any format of docs/suites.md, such as `prompt`, `messages` or `turns`"
    categories = ()  # those of the file
    needs = "jsonl:FILE, a file of rows that have `prompt`, `messages` or `turns`"
    max_new_tokens = 256

    def read(self, data: Path) -> tuple[Question, ...]:
        """Return the questions of a file; an id, `category`, `reference`, `metric` are optional."""
        self.unread: dict[str, set[str]] = {"columns": set(), "keys of messages": set()}
        return super().read(data)

    def notes(self) -> tuple[str, ...]:
        """Return notes on rows that are left out, and on fields that are not used."""
        unread = (f"{kind} that are not read: {_listed(names)}" for kind, names in self.unread.items() if names)
        return (*super().notes(), *unread)

    def question(self, place: str, number: int, row: Row) -> Question:
        """Return the question of a row."""
        question, name = super().question(place, number, row), form_of(place, row)
        known = {*FORMS[name].texts, *FORMS[name].answers, *OWN_COLUMNS}
        self.unread["columns"].update(key for key in row if key not in known and row[key])
        self.unread["keys of messages"].update(unread_keys(row[name]))
        return question


def _listed(names: Iterable[str]) -> str:
    names = sorted(map(printable, names))
    more = [f"{len(names) - MOST_NAMED} more"] if len(names) > MOST_NAMED else []
    return ", ".join([*names[:MOST_NAMED], *more])
