"""Records of a run: samples, steps in columns, output matches, concurrency levels.

A *prompt* is one turn of one question; a *sample* is one method answering one prompt once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal
from typing import Annotated as Col

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from specbench_ss import user_files
from specbench_ss.engine.decoder import Generation, Step
from specbench_ss.options import REFERENCE
from specbench_ss.suite import Question

Key = tuple[str, int, str, int]  # question id, turn, method label, repeat
KEY = ("question_id", "turn", "method", "repeat")  # its parts, as columns


def baseline_of(manifest: Mapping[str, Any]) -> str:
    """Return the label of the run's reference: `ar`, or in a run of servers the first endpoint."""
    return str(manifest.get("baseline") or REFERENCE)


Count = Annotated[int, Meta(ge=0, le=2**53)]  # whatever is counted; a line with another number is refused
ConcurrencyKey = tuple[str, int, int]  # method, requests in flight, repeat


@dataclass(slots=True)
class ConcurrencyResult:
    """The whole suite asked of one server or method, so many requests at a time.

    wall_s: from the first request to the end of the last answer. requests: how many were made. drafts, draft_nodes,
    accepted_tokens: what the server's counters grew by meanwhile, None where that was not measured; of a method in this
    process its steps, and what these drafted and accepted. started, ended: Unix times.
    """

    method: str
    concurrency: Annotated[int, Meta(ge=1)]
    repeat: Count
    started: float
    ended: float
    wall_s: Annotated[float, Meta(ge=0)]
    requests: Count
    drafts: Count | None = None
    draft_nodes: Count | None = None
    accepted_tokens: Count | None = None

    @property
    def key(self) -> ConcurrencyKey:
        """Return what makes the level unique in a run."""
        return (self.method, self.concurrency, self.repeat)

    def as_dict(self) -> dict[str, Any]:
        """Return the level as JSON-ready data."""
        return asdict(self)


Array = NDArray[Any]
COUNTS = ("draft_nodes", "verified_nodes", "draft_depth", "accepted_tokens", "tokens")
TIMES = ("draft_s", "verify_s", "accept_s", "host_s", "total_s")
DTYPES = {**dict.fromkeys(COUNTS, np.int32), **dict.fromkeys(TIMES, np.float64)}


@dataclass(frozen=True, slots=True, eq=False)
class StepColumns:
    """Some steps, one after the other: the fields of `Step` as arrays [n]. Times are in seconds."""

    draft_nodes: Array
    verified_nodes: Array
    draft_depth: Array
    accepted_tokens: Array
    tokens: Array
    draft_s: Array
    verify_s: Array
    accept_s: Array
    host_s: Array
    total_s: Array

    @classmethod
    def of(cls, steps: Iterable[Any]) -> StepColumns:
        """Return the columns of objects that have the fields of `Step`."""
        made = list(steps)
        return cls(*(np.fromiter(map(attrgetter(name), made), kind, len(made)) for name, kind in DTYPES.items()))

    @classmethod
    def joined(cls, parts: Iterable[StepColumns]) -> StepColumns:
        """Return the columns of all the parts, one after the other."""
        made = list(parts) or [cls.of(())]
        return cls(*(np.concatenate([getattr(part, name) for part in made]) for name in DTYPES))

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, which: Any) -> StepColumns:
        """Return the steps of a slice, which shares memory, or those at an array of places."""
        return StepColumns(*(getattr(self, name)[which] for name in DTYPES))

    def steps(self) -> list[Step]:
        """Return the steps as objects."""
        return [Step(*values) for values in zip(*(getattr(self, name).tolist() for name in DTYPES), strict=True)]


@dataclass(frozen=True, eq=False)
class Steps:
    """All steps of a run, in the order in which they were made.

    keys: the samples that have steps. starts: [samples + 1], where the steps of each begin; the last entry is the
    number of all steps.
    """

    keys: tuple[Key, ...]
    starts: Array
    columns: StepColumns

    @classmethod
    def from_samples(cls, steps: Mapping[Key, list[Step]]) -> Steps:
        """Return the steps of samples that have some."""
        made = {key: some for key, some in steps.items() if some}
        columns = StepColumns.of(step for some in made.values() for step in some)
        return cls(tuple(made), starts_of([len(some) for some in made.values()]), columns)

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def counts(self) -> Array:
        """Return the number of steps of each sample of `keys`."""
        return np.asarray(np.diff(self.starts))

    @property
    def index(self) -> Array:
        """Return the number of each step within its sample, from 0."""
        return np.asarray(np.arange(len(self)) - np.repeat(self.starts[:-1], self.counts))

    @cached_property
    def place(self) -> dict[Key, int]:
        """Return where each sample stands in `keys`."""
        return {key: i for i, key in enumerate(self.keys)}

    def of(self, key: Key) -> StepColumns:
        """Return the steps of one sample, in order; none for a sample without steps. Nothing is copied."""
        at = self.place.get(key)
        return self.columns.take(slice(0, 0) if at is None else slice(*self.starts[at : at + 2].tolist()))

    def together(self, keys: Iterable[Key]) -> StepColumns:
        """Return the steps of several samples, one after the other."""
        return self.columns.take(self.steps_of(self.places(keys)))

    @cached_property
    def totals(self) -> StepColumns:
        """Return the sums of every column over the steps of each sample: columns [samples]."""
        starts = self.starts[:-1]
        columns = (getattr(self.columns, name) for name in DTYPES)
        wide = (x.astype(np.int64) if x.dtype.kind == "i" else x for x in columns)
        return StepColumns(*(np.add.reduceat(x, starts) if len(starts) else x[:0] for x in wide))

    def places(self, keys: Iterable[Key]) -> Array:
        """Return where these samples stand in `keys`; samples without steps are left out."""
        return np.array([at for key in keys if (at := self.place.get(key)) is not None], dtype=np.int64)

    def only(self, keep: Array) -> Steps:
        """Return those samples whose places in `keys` are given."""
        keys = tuple(self.keys[i] for i in keep.tolist())
        return Steps(keys, starts_of(self.counts[keep]), self.columns.take(self.steps_of(keep)))

    def steps_of(self, samples: Array) -> Array:
        """Return the places of all steps of these samples. samples: their places in `keys`."""
        counts = self.counts[samples]
        offset = self.starts[samples] - (np.cumsum(counts) - counts)
        return np.asarray(np.arange(int(counts.sum())) + np.repeat(offset, counts))


def starts_of(counts: Any) -> Array:
    """Return where each of some samples begins, and the number of all steps. counts: steps of each, none of them 0."""
    return np.concatenate([[0], np.cumsum(np.asarray(counts, dtype=np.int64))]).astype(np.int64)


assert tuple(DTYPES) == tuple(field.name for field in fields(Step)) == tuple(f.name for f in fields(StepColumns))


Agreement = Literal[
    "identical", "numerical tie", "length differs", "mismatch", "text differs", "sampled", "not compared"
]
NonNegative = Annotated[float, Meta(ge=0)]
Seconds = NonNegative
Number = float | None  # None: it was not measured
Known = Count | None

KILLED = "killed"  # what read_run makes of a status `running` where no process holds the directory
MEASURED = (  # what every good sample has
    "prompt_tokens", "tokens", "prefill_tokens", "steps", "draft_nodes", "verified_nodes", "draft_depth",
    "accepted_tokens", "tokens_past_stop", "num_draft_forwards", "finish", "prefill_s", "decode_s", "wall_s",
    "token_ids",
)  # fmt: skip
SERVED = ("tokens", "prefill_tokens", "finish", "prefill_s", "decode_s", "wall_s", "text")  # and of a server


@dataclass(slots=True)
class KeyedRecord:
    """Says which sample a line of a run directory belongs to. turn and repeat count from 0."""

    question_id: str
    turn: Count
    method: str
    repeat: Count

    @property
    def key(self) -> Key:
        """Return what makes the sample unique in a run."""
        return (self.question_id, self.turn, self.method, self.repeat)

    @property
    def prompt(self) -> tuple[str, int, int]:
        """Return what it has in common with the samples of other methods: question, turn and repeat."""
        return (self.question_id, self.turn, self.repeat)

    def as_dict(self) -> dict[str, Any]:
        """Return the line as JSON-ready data."""
        return asdict(self)


@dataclass(slots=True)
class SampleRecord(KeyedRecord):
    """One sample; in a failed one every number is None.

    Of a server prefill_s is the time to the first piece of text, and what it does not tell is None.
    """

    category: Col[str, "task of the suite that the question belongs to"]
    index: Col[Count, "place of the sample in the schedule of the whole run, from 0"]
    position: Col[Count, "place of the method among those that answered this prompt, from 0"]
    seed: Col[int, "seed of the sample's random numbers, the same for every method"]
    suite_edition: Col[str, "edition of the suite"]
    suite_hash: Col[str, "sha256 of the suite's questions as asked"]
    status: Col[Literal["ok", "failed"], "`ok` or `failed`; of a failed sample every number is missing"]
    error: Col[str | None, "what the failed sample raised"] = None
    started: Col[Number, "Unix time at which the sample began", "s"] = None
    ended: Col[Number, "Unix time at which the sample ended", "s"] = None
    prompt_tokens: Col[Known, "length of the prompt", "tokens"] = None
    tokens: Col[Known, "length of the answer, its end token included", "tokens"] = None
    prefill_tokens: Col[Known, "tokens of the answer that came from prefill, not from a step", "tokens"] = None
    steps: Col[Known, "forward passes of the model that verify a draft", "steps"] = None
    draft_nodes: Col[Known, "nodes of all draft trees, roots left out", "nodes"] = None
    verified_nodes: Col[Known, "of these, nodes that reached the model's last layer", "nodes"] = None
    draft_depth: Col[Known, "sum of the depths of all draft trees", "tokens"] = None
    accepted_tokens: Col[Known, "drafted tokens that were accepted, before the answer was cut at its end", "tokens"] = (
        None
    )
    tokens_past_stop: Col[Known, "accepted tokens that lay beyond the end of the answer", "tokens"] = None
    num_draft_forwards: Col[Known, "forward passes of a draft model", "passes"] = None
    finish: Col[str | None, "why the answer ended: `eos`, `stop`, `length` or `context`"] = None
    prefill_s: Col[Seconds | None, "time to read the prompt, up to the first token", "s"] = None
    decode_s: Col[Seconds | None, "time of all steps", "s"] = None
    wall_s: Col[Seconds | None, "prefill_s + decode_s", "s"] = None
    peak_memory_bytes: Col[Known, "peak of the CUDA memory that it took besides; missing where replayed", "bytes"] = (
        None
    )
    quality: Col[
        Annotated[float, Meta(ge=0, le=1)] | None,
        "the suite's score of the answer; missing where the question has no reference",
        "0 to 1",
    ] = None
    text: Col[str | None, "the answer as text, special tokens left out"] = None
    token_ids: Col[list[int] | None, "the answer as a list of token ids"] = None
    noise_reason: Col[
        str | None, "what disturbed the sample, in words; empty where nothing did, missing without telemetry"
    ] = None
    n_reruns: Col[int | None, "how often it was made again since it was disturbed; missing without telemetry"] = None
    host_cpu_share: Col[
        Number, "share of the usable cores that this process took, its mean over the sample", "0 to 1"
    ] = None
    host_foreign_share: Col[Number, "share of the usable cores that everything else took", "0 to 1"] = None
    host_rss_bytes: Col[int | None, "most memory that this process had resident when it was read", "bytes"] = None
    host_page_faults: Col[int | None, "page faults of this process, minor ones included"] = None
    nvml_kernel_busy: Col[Number, "share of the time in which any kernel ran, as NVML samples it", "0 to 1"] = None
    nvml_memory_busy: Col[Number, "share of the time in which device memory was read or written, by NVML", "0 to 1"] = (
        None
    )
    nvml_sm_mhz: Col[Number, "mean clock of the multiprocessors", "MHz"] = None
    nvml_power_w: Col[Number, "mean power of the device", "W"] = None
    energy_j: Col[Number, "energy of the device: the difference of NVML's counter", "J"] = None
    joules_per_token: Col[Number, "energy_j over tokens of the answer", "J"] = None
    gpm_sm_active: Col[
        Number, "share of the multiprocessors that were busy, by the device's GPM counters", "0 to 1"
    ] = None
    gpm_tensor_active: Col[Number, "share of the time in which tensor cores worked, by GPM", "0 to 1"] = None
    gpm_dram_active: Col[Number, "share of the device memory's bandwidth that was used, by GPM", "0 to 1"] = None
    counted: Col[
        Literal["usage", "chunks"] | None,
        "of a server: `usage` where it told the number of tokens, `chunks` where pieces were counted",
    ] = None
    chunks: Col[Known, "of a server: pieces of text that came", "chunks"] = None
    drafts: Col[
        Known, "of a server: how often it drafted, by its own counters; missing where not measured", "drafts"
    ] = None
    concurrency: Col[Known, "requests at a time, where more than one; missing in this frame", "requests"] = None
    n_eager_fallbacks: Col[Known, "passes run eagerly where steps are replayed; missing where none are", "passes"] = (
        None
    )
    eager_fallback_reason: Col[
        str | None, "why they were not replayed; empty where all were, missing where no steps are replayed"
    ] = None

    @property
    def ok(self) -> bool:
        """Whether the sample succeeded, so that its numbers are there."""
        return self.status == "ok"

    @property
    def later(self) -> int:
        """The tokens that came from steps."""
        return (self.tokens or 0) - (self.prefill_tokens or 0)

    def fill(self, generation: Generation) -> None:
        """Copy every count and time of a finished request into the sample."""
        steps = generation.steps
        self.prompt_tokens, self.tokens = generation.prompt_tokens, len(generation.tokens)
        self.prefill_tokens, self.steps = generation.prefill_tokens, len(steps)
        self.draft_nodes, self.verified_nodes = sum(s.draft_nodes for s in steps), sum(s.verified_nodes for s in steps)
        self.draft_depth, self.accepted_tokens = (
            sum(s.draft_depth for s in steps),
            sum(s.accepted_tokens for s in steps),
        )
        self.tokens_past_stop, self.num_draft_forwards = generation.tokens_past_stop, generation.num_draft_forwards
        self.finish, self.token_ids = generation.finish, list(generation.tokens)
        self.prefill_s, self.decode_s, self.wall_s = generation.prefill_s, generation.decode_s, generation.wall_s

    @classmethod
    def read(cls, line: bytes) -> SampleRecord:
        """Return the sample that was written as this line of JSON. Unknown fields are ignored.

        Raises ValueError where a field is missing or of another type, where a count is negative, or where a successful
        sample lacks a number.
        """
        row = _read_row(line)
        needed = SERVED if row.counted else MEASURED
        if row.ok and (lacking := [name for name in needed if getattr(row, name) is None]):
            raise ValueError(f"it lacks {lacking[0]}")
        return row


def step_line(key: Key, index: int, step: Step) -> dict[str, Any]:
    """Return one decoding step of a sample as flat, JSON-ready data. index: its number within the sample, from 0."""
    return {**dict(zip(KEY, key, strict=True)), "index": index, **asdict(step)}


PIT_BINS = 10  # of the histogram of PIT values
OUTSIDE = PIT_BINS  # the place behind these bins: tokens that the sampling filters exclude
TILTS = (-1 / 4, -1 / 16, 1 / 16, 1 / 4, 1.0)  # exponents of the alternatives p^(1 + tilt)

ACCEPT_TILTS = (-1 / 2, 1 / 8, 1 / 2, 2.0)  # log-odds by which the alternatives accept more often


@dataclass(slots=True)
class SampledTokens:
    """Sums over the tokens x of sampled answers, each compared with the distribution p that it should be drawn from.

    pit_counts: the most probable token comes first in the cumulative distribution; the last entry is of tokens that the
    filters exclude, beyond rounding. log_ratios: for each of `TILTS`, log p^(1 + tilt)(x) / (Z p(x)). accept_ratios:
    for each of `ACCEPT_TILTS`, of accepting with so much larger log-odds.
    """

    pit_counts: Col[
        list[Count], "they by tenth of the cumulative distribution; last, those that filters exclude", "tokens"
    ] = field(default_factory=lambda: [0] * (PIT_BINS + 1))
    log_ratios: Col[
        list[float], "log-likelihood ratios of tempered distributions to the model's: the test's terms", "nats"
    ] = field(default_factory=lambda: [0.0] * len(TILTS))
    surplus: Col[float, "their log-likelihood minus its expectation", "nats"] = 0.0
    variance: Col[NonNegative, "the variance of that under the model's distribution", "nats²"] = 0.0
    offered: Col[Count, "tokens of the answer for which something was drafted", "tokens"] = 0
    accepted: Col[Count, "of these, tokens that were drafted", "tokens"] = 0
    expected: Col[NonNegative, "as many as should have been, by the model's distribution", "tokens"] = 0.0
    accept_variance: Col[NonNegative, "the variance of their number"] = 0.0
    accept_ratios: Col[list[float], "log-likelihood ratios of accepting more, or less, often", "nats"] = field(
        default_factory=lambda: [0.0] * len(ACCEPT_TILTS)
    )
    rounding: Col[NonNegative, "the sum over the tokens of the numerical tie bound over the temperature"] = 0.0

    @property
    def tokens(self) -> int:
        """Return how many tokens were compared."""
        return sum(self.pit_counts)

    def __add__(self, other: SampledTokens) -> SampledTokens:
        """Return the sums over the tokens of both."""
        sums: list[Any] = []
        for a, b in ((getattr(self, one.name), getattr(other, one.name)) for one in fields(self)):
            sums.append([x + y for x, y in zip(a, b, strict=True)] if isinstance(a, list) else a + b)
        return SampledTokens(*sums)


@dataclass(slots=True)
class OutputMatch(KeyedRecord):
    """One answer compared with the reference's; docs/metrics.md says what the verdicts mean.

    sampled: of an answer at a temperature above 0, its tokens compared with the target's distribution.
    """

    verdict: Col[
        Agreement, "`identical`, `numerical tie`, `length`, `mismatch`, `text differs`, `sampled` or `not compared`"
    ]
    first_difference: Col[Count | None, "index of the first token that differs from the reference's answer"] = None
    gap: Col[float | None, "there, the model's best logit minus its second best", "logits"] = None
    drop: Col[float | None, "there, the model's best logit minus the lower one of the two tokens chosen", "logits"] = (
        None
    )
    reason: Col[str, "why the answers were not compared, or what else there is to say; may be empty"] = ""
    sampled: SampledTokens | None = None


def answer_hash(text: str) -> str:
    """Return the sha256 of an answer."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(slots=True)
class JudgeVerdict(KeyedRecord):
    """What a judge said of one answer. Its line in judge.jsonl is written after the run, by `ssbench judge`.

    judge: name of the judging model. prompts: which prompts it was given. digest: sha256 of the judge and of what it
    was sent. score: the rating over ten; None where it gave none. text: its whole answer. host: where it was asked.
    max_tokens: of its answer. answer: sha256 of the text that it rated; '' where that was not kept.
    """

    judge: str
    prompts: str
    digest: str
    score: Annotated[float, Meta(ge=0, le=1)] | None
    text: str = ""
    input_tokens: int | None = None
    output_tokens: int | None = None
    host: str = ""
    max_tokens: int | None = None
    answer: str = ""

    @property
    def by(self) -> tuple[str, str, str, int | None]:
        """Return what makes a judge: ratings by others are not comparable."""
        return (self.judge, self.prompts, self.host, self.max_tokens)

    def rates(self, row: SampleRecord) -> bool:
        """Whether this is of the row's text, and not of one that the sample had before it was made again."""
        return self.answer in ("", answer_hash(row.text or ""))


_read_row, read_output_match = user_files.decoder(SampleRecord), user_files.decoder(OutputMatch)
read_judged = user_files.decoder(JudgeVerdict)


@dataclass
class Run:
    """A run directory as it was read: everything that is committed, whether the run is finished or not.

    levels, requests: of served engines, the suite sent with several requests in flight.
    """

    path: Path
    manifest: dict[str, Any]
    rows: list[SampleRecord]
    steps: Steps
    output_match: list[OutputMatch] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)
    judge_verdicts: list[JudgeVerdict] = field(default_factory=list)
    concurrency: list[ConcurrencyResult] = field(default_factory=list)
    requests: list[SampleRecord] = field(default_factory=list)

    @property
    def labels(self) -> list[str]:
        """Return the method labels in the order in which they were asked for."""
        return [method["label"] for method in self.manifest["methods"]]

    @property
    def served(self) -> bool:
        """Whether servers answered, not methods in this process."""
        return bool(self.manifest["config"].get("endpoints"))

    def entry(self, label: str) -> dict[str, Any]:
        """Return a method's entry in the manifest."""
        return next(method for method in self.manifest["methods"] if method["label"] == label)

    def reference(self, label: str) -> str:
        """Return the method whose output this one's must equal."""
        return str(self.entry(label).get("reference", self.baseline))

    def of(self, label: str) -> list[SampleRecord]:
        """Return a method's samples."""
        return [row for row in self.rows if row.method == label]

    @property
    def baseline(self) -> str:
        """Return the label of the method that the others are compared with."""
        return baseline_of(self.manifest)

    @property
    def samples(self) -> int:
        """Return how many samples the whole run has, those that are still to be made included."""
        return int(self.manifest["suite"]["prompts"]) * self.repeats * len(self.labels)

    @property
    def repeats(self) -> int:
        """Return how often every prompt is answered: as asked, or more where intervals had to become narrow."""
        return int(self.manifest.get("repeats_made") or self.manifest["config"]["repeats"])

    @property
    def categories(self) -> list[str]:
        """Return the categories in order of first appearance."""
        return list(dict.fromkeys(row.category for row in self.rows))

    @property
    def judge(self) -> str:
        """Return who judged last, as 'NAME at HOST, prompts PROMPTS, N tokens'; '' where nobody did."""
        if not self.judge_verdicts:
            return ""
        name, prompts, host, most = self.judge_verdicts[-1].by
        return f"{name}{f' at {host}' if host else ''}, prompts {prompts}{f', {most} tokens' if most else ''}"

    @cached_property
    def judged_scores(self) -> dict[Key, float]:
        """Return the ratings by the judge who judged last, over ten: those of two judges are not comparable.

        A rating of an answer that was replaced since is left out.
        """
        rows = {row.key: row for row in self.rows} if self.judge_verdicts else {}
        same = [
            v
            for v in self.judge_verdicts
            if v.by == self.judge_verdicts[-1].by and v.key in rows and v.rates(rows[v.key])
        ]
        return {v.key: v.score for v in same if v.score is not None}
