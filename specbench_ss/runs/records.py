"""Records of a run: samples, steps in columns, output matches, load levels.

A *prompt* is one turn of one question; a *sample* is one request of one method for one prompt.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
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
from specbench_ss.runs.config import Load
from specbench_ss.stats.betting import SampledTokens
from specbench_ss.suite import Question
from specbench_ss.user_files import Count, NonNegative

Key = tuple[str, int, str, int]  # question id, turn, method label, repeat
KEY = ("question_id", "turn", "method", "repeat")  # columns of a Key


def baseline_of(manifest: Mapping[str, Any]) -> str:
    """Return the label of the run's baseline: `ar`, or the first endpoint in a run of servers."""
    return str(manifest.get("baseline") or REFERENCE)


ConcurrencyKey = tuple[str, Load, int]  # method, load, repeat


@dataclass(slots=True)
class ConcurrencyResult:
    """The whole suite on one server or method at one load.

    concurrency, rate: the load; one of them is None. wall_s: from the first request, or from the start of the arrivals,
    to the end of the last output. requests: number of requests. steps, drafts, draft_nodes, accepted_tokens: sums over
    the requests, or None where not measured; a server's requests add their steps, so a pass over several of them counts
    for each. started, ended: Unix times.
    """

    method: str
    concurrency: Annotated[int, Meta(ge=1)] | None
    repeat: Count
    started: float
    ended: float
    wall_s: Annotated[float, Meta(ge=0)]
    requests: Count
    steps: Count | None = None
    drafts: Count | None = None
    draft_nodes: Count | None = None
    accepted_tokens: Count | None = None
    rate: Annotated[float, Meta(gt=0)] | None = None

    @property
    def load(self) -> Load:
        """Return the load of the level."""
        return Load(self.concurrency, self.rate)

    @property
    def key(self) -> ConcurrencyKey:
        """Return the level's unique key in a run."""
        return (self.method, self.load, self.repeat)


Array = NDArray[Any]
COUNTS = ("draft_nodes", "verified_nodes", "draft_depth", "accepted_tokens", "tokens")
TIMES = ("draft_s", "verify_s", "accept_s", "host_s", "total_s")
DTYPES = {**dict.fromkeys(COUNTS, np.int32), **dict.fromkeys(TIMES, np.float64)}


@dataclass(frozen=True, slots=True, eq=False)
class StepColumns:
    """Consecutive steps: the fields of `Step` as arrays [n]. Times are in seconds."""

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
        """Return the columns of objects with the fields of `Step`."""
        items = list(steps)
        return cls(*(np.fromiter(map(attrgetter(name), items), kind, len(items)) for name, kind in DTYPES.items()))

    @classmethod
    def joined(cls, parts: Iterable[StepColumns]) -> StepColumns:
        """Concatenate the columns of all parts."""
        items = list(parts) or [cls.of(())]
        return cls(*(np.concatenate([getattr(part, name) for part in items]) for name in DTYPES))

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, index: Any) -> StepColumns:
        """Return the steps of a slice (a view) or of an array of indices."""
        return StepColumns(*(getattr(self, name)[index] for name in DTYPES))

    def steps(self) -> list[Step]:
        """Return the steps as objects."""
        return [Step(*values) for values in zip(*(getattr(self, name).tolist() for name in DTYPES), strict=True)]


@dataclass(frozen=True, eq=False)
class Steps:
    """All steps of a run, in order.

    keys: samples with steps. starts: [samples + 1], index of the first step of each; the last entry is the number of
    all steps.
    """

    keys: tuple[Key, ...]
    starts: Array
    columns: StepColumns

    @classmethod
    def from_samples(cls, steps: Mapping[Key, list[Step]]) -> Steps:
        """Return the steps of the samples that have any."""
        with_steps = {key: sample_steps for key, sample_steps in steps.items() if sample_steps}
        columns = StepColumns.of(step for sample_steps in with_steps.values() for step in sample_steps)
        return cls(tuple(with_steps), starts_of([len(sample_steps) for sample_steps in with_steps.values()]), columns)

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def counts(self) -> Array:
        """Return the number of steps of each sample of `keys`."""
        return np.asarray(np.diff(self.starts))

    @property
    def index(self) -> Array:
        """Return the index of each step within its sample."""
        return np.asarray(np.arange(len(self)) - np.repeat(self.starts[:-1], self.counts))

    @cached_property
    def place(self) -> dict[Key, int]:
        """Return the index of each sample in `keys`."""
        return {key: i for i, key in enumerate(self.keys)}

    def of(self, key: Key) -> StepColumns:
        """Return the steps of one sample as a view; none for a sample without steps."""
        index = self.place.get(key)
        return self.columns.take(slice(0, 0) if index is None else slice(*self.starts[index : index + 2].tolist()))

    def together(self, keys: Iterable[Key]) -> StepColumns:
        """Return the steps of several samples, concatenated."""
        return self.columns.take(self.steps_of(self.places(keys)))

    @cached_property
    def totals(self) -> StepColumns:
        """Return the sums of every column over the steps of each sample: columns [samples]."""
        starts = self.starts[:-1]
        columns = (getattr(self.columns, name) for name in DTYPES)
        wide = (x.astype(np.int64) if x.dtype.kind == "i" else x for x in columns)
        return StepColumns(*(np.add.reduceat(x, starts) if len(starts) else x[:0] for x in wide))

    def places(self, keys: Iterable[Key]) -> Array:
        """Return the indices of these samples in `keys`; samples without steps are skipped."""
        return np.array([index for key in keys if (index := self.place.get(key)) is not None], dtype=np.int64)

    def only(self, keep: Array) -> Steps:
        """Return the samples at these indices of `keys`."""
        keys = tuple(self.keys[i] for i in keep.tolist())
        return Steps(keys, starts_of(self.counts[keep]), self.columns.take(self.steps_of(keep)))

    def steps_of(self, samples: Array) -> Array:
        """Return the indices of all steps of these samples. samples: indices in `keys`."""
        counts = self.counts[samples]
        offset = self.starts[samples] - (np.cumsum(counts) - counts)
        return np.asarray(np.arange(int(counts.sum())) + np.repeat(offset, counts))


def starts_of(counts: Any) -> Array:
    """Return the start index of each sample, and the total. counts: steps of each sample, none 0."""
    return np.concatenate([[0], np.cumsum(np.asarray(counts, dtype=np.int64))]).astype(np.int64)


assert tuple(DTYPES) == tuple(field.name for field in fields(Step)) == tuple(f.name for f in fields(StepColumns))


Agreement = Literal[
    "identical", "numerical tie", "length differs", "mismatch", "text differs", "sampled", "not compared"
]
Seconds = NonNegative
Number = float | None  # None: not measured
Known = Count | None

KILLED = "killed"  # status set by read_run for `running` without a process
MEASURED = (  # required of every successful sample
    "prompt_tokens", "tokens", "prefill_tokens", "steps", "draft_nodes", "verified_nodes", "draft_depth",
    "accepted_tokens", "tokens_past_stop", "num_draft_forwards", "finish", "prefill_s", "decode_s", "wall_s",
    "token_ids",
)  # fmt: skip
SERVED = ("tokens", "prefill_tokens", "finish", "prefill_s", "wall_s", "text")  # required with a server


@dataclass(slots=True)
class KeyedRecord:
    """Key of a line of a run directory. turn and repeat count from 0."""

    question_id: str
    turn: Count
    method: str
    repeat: Count

    @property
    def key(self) -> Key:
        """Return the sample's unique key in a run."""
        return (self.question_id, self.turn, self.method, self.repeat)

    @property
    def prompt(self) -> tuple[str, int, int]:
        """Return the part of the key shared by all methods: question, turn and repeat."""
        return (self.question_id, self.turn, self.repeat)


@dataclass(slots=True)
class SampleRecord(KeyedRecord):
    """One sample; every number of a failed one is None.

    With a server prefill_s is the time to the first text, and unreported numbers are None.
    """

    category: Col[str, "task of the suite that the question belongs to"]
    index: Col[Count, "index of the sample in the schedule of the run, from 0"]
    position: Col[Count, "index of the method in the order of this prompt, from 0"]
    seed: Col[int, "seed of the sampling of this prompt, equal for all methods"]
    suite_edition: Col[str, "edition of the suite"]
    suite_hash: Col[str, "sha256 of the questions of the run"]
    status: Col[Literal["ok", "failed"], "`ok` or `failed`; a failed sample has no numbers"]
    error: Col[str | None, "error message of a failed sample"] = None
    started: Col[Number, "Unix time of the start", "s"] = None
    ended: Col[Number, "Unix time of the end", "s"] = None
    prompt_tokens: Col[Known, "length of the prompt, chat template included", "tokens"] = None
    tokens: Col[Known, "length of the output, end token included", "tokens"] = None
    prefill_tokens: Col[Known, "output tokens that prefill produced: 1; not the prompt", "tokens"] = None
    steps: Col[Known, "forward passes of the target model that verify a draft", "steps"] = None
    draft_nodes: Col[Known, "nodes of all draft trees, roots not counted", "nodes"] = None
    verified_nodes: Col[Known, "drafted nodes that are left after pruning and reach the last layer", "nodes"] = None
    draft_depth: Col[Known, "sum of the draft depths of all steps", "tokens"] = None
    accepted_tokens: Col[Known, "accepted drafted tokens, before the output is cut at its end", "tokens"] = None
    tokens_past_stop: Col[Known, "accepted tokens after the end of the output", "tokens"] = None
    num_draft_forwards: Col[Known, "forward passes of the draft model", "passes"] = None
    finish: Col[str | None, "reason of the end: `eos`, `stop`, `length` or `context`"] = None
    prefill_s: Col[Seconds | None, "prefill time, up to the first token", "s"] = None
    decode_s: Col[
        Seconds | None,
        "time of all steps; of a server, of the tokens after the first, at the rate of those after its first text",
        "s",
    ] = None
    wall_s: Col[Seconds | None, "prefill_s + decode_s; of a server, to the end of the output", "s"] = None
    peak_memory_bytes: Col[
        Known, "peak CUDA memory beyond that before the sample; missing with CUDA graphs", "bytes"
    ] = None
    quality: Col[
        Annotated[float, Meta(ge=0, le=1)] | None,
        "score of the output by the task's metric; missing without an expected answer, or tests and `--run-code`",
        "0 to 1",
    ] = None
    text: Col[str | None, "output text without special tokens"] = None
    reasoning: Col[str | None, "servers: text of the model before its output"] = None
    thinking_tokens: Col[
        Known, "output tokens up to `</think>`, the tag included; all if it is missing; 0 without thinking", "tokens"
    ] = None
    token_ids: Col[list[int] | None, "output token ids, a list"] = None
    noise_reason: Col[str | None, "reason why the time is noisy; empty without noise, missing without telemetry"] = None
    n_reruns: Col[int | None, "re-runs because of noise; missing without telemetry"] = None
    host_cpu_share: Col[Number, "share of the usable cores that this process used, mean over the sample", "0 to 1"] = (
        None
    )
    host_foreign_share: Col[Number, "share of the usable cores that other processes used", "0 to 1"] = None
    host_rss_bytes: Col[int | None, "highest resident memory of this process among the readings", "bytes"] = None
    host_page_faults: Col[int | None, "page faults of this process, minor ones included"] = None
    nvml_kernel_busy: Col[Number, "share of time with at least one running kernel (NVML utilization)", "0 to 1"] = None
    nvml_memory_busy: Col[Number, "share of time with memory traffic on the device (NVML utilization)", "0 to 1"] = None
    nvml_sm_mhz: Col[Number, "mean SM clock", "MHz"] = None
    nvml_power_w: Col[Number, "mean power of the device", "W"] = None
    energy_j: Col[Number, "energy of the device, from NVML's counter", "J"] = None
    joules_per_token: Col[Number, "energy_j / tokens", "J"] = None
    gpm_sm_active: Col[Number, "SM activity (GPM)", "0 to 1"] = None
    gpm_tensor_active: Col[Number, "tensor core activity (GPM)", "0 to 1"] = None
    gpm_dram_active: Col[Number, "used share of the memory bandwidth (GPM)", "0 to 1"] = None
    counted: Col[
        Literal["usage", "tokenizer", "chunks", "equal output", "length"] | None,
        "servers: source of `tokens`: the server's `usage`; `tokenizer` of its model; streamed `chunks`; an `equal "
        "output` with a better count; `length` of the text, at the tokens per byte of another server",
    ] = None
    chunks: Col[Known, "servers: streamed chunks of text", "chunks"] = None
    first_chunks: Col[Known, "servers: chunks that arrived together with the first one", "chunks"] = None
    first_share: Col[
        Annotated[float, Meta(ge=0, le=1)] | None, "servers: share of the output that arrived with them", "0 to 1"
    ] = None
    drafts: Col[Known, "servers: steps with a draft; missing if not reported", "drafts"] = None
    accepted_per_pos: Col[
        list[Count] | None, "servers: drafts whose token at each position was accepted, a list", "drafts"
    ] = None
    drafted_per_pos: Col[list[Count] | None, "servers: drafts with a token at each position, a list", "drafts"] = None
    concurrency: Col[
        Known, "concurrent requests, in requests.jsonl only; missing here: samples run alone", "requests"
    ] = None
    rate: Col[Number, "arrivals per second, in requests.jsonl only; missing here", "requests/s"] = None
    n_eager_fallbacks: Col[
        Known, "passes that ran eagerly instead of as CUDA graphs; missing without CUDA graphs", "passes"
    ] = None
    eager_fallback_reason: Col[
        str | None, "reason of these fallbacks; empty without one, missing without CUDA graphs"
    ] = None
    session: Col[Count, "process of the run that measured it, from 0; another one only with `--sessions`"] = 0
    block: Col[
        Count | None,
        "servers that the run starts: block of questions, from 0, in which the servers took turns; else missing",
    ] = None

    @property
    def load(self) -> Load:
        """Return the load at which the request ran."""
        return Load(self.concurrency or (None if self.rate else 1), self.rate)

    @property
    def ok(self) -> bool:
        """Return True if the sample succeeded and has its numbers."""
        return self.status == "ok"

    @property
    def later(self) -> int:
        """Return the number of tokens from steps."""
        return (self.tokens or 0) - (self.prefill_tokens or 0)

    @property
    def tpot_s(self) -> float | None:
        """Return the time per output token after the first; None without such tokens."""
        return self.decode_s / self.later if self.decode_s is not None and self.later > 0 else None

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

    def without_numbers(self) -> SampleRecord:
        """Return the failed sample that replaces this one when its steps are lost."""
        kept = {f.name: getattr(self, f.name) for f in fields(self) if f.default is MISSING}
        return SampleRecord(**kept | {"status": "failed"}, error="its steps are lost")

    @classmethod
    def read(cls, line: bytes) -> SampleRecord:
        """Parse a line of JSON. Unknown fields are ignored.

        Raises ValueError if a field is missing or of another type, if a count is negative, or if a successful sample
        lacks a number.
        """
        row = _read_row(line)
        required = SERVED if row.counted else MEASURED
        if row.ok and (missing := [name for name in required if getattr(row, name) is None]):
            raise ValueError(f"it lacks {missing[0]}")
        return row


Counted = SampleRecord | ConcurrencyResult  # with a server's counts: steps, drafts, draft_nodes, accepted_tokens


def counted(of: Sequence[Counted], name: str) -> int | None:
    """Return the sum of a count; None where one of them was not measured."""
    values = [getattr(one, name) for one in of]
    return None if not values or None in values else sum(values)


def step_line(key: Key, index: int, step: Step) -> dict[str, Any]:
    """Return one decoding step of a sample as flat, JSON-ready data. index: its number within the sample, from 0."""
    return {**dict(zip(KEY, key, strict=True)), "index": index, **asdict(step)}


@dataclass(slots=True)
class OutputMatch(KeyedRecord):
    """Comparison of one output with the reference's (verdicts: docs/metrics.md).

    sampled: at a temperature above 0, the comparison of its tokens with the target distribution.
    """

    verdict: Col[
        Agreement,
        "`identical`, `numerical tie`, `length differs`, `mismatch`, `text differs`, `sampled` or `not compared`",
    ]
    first_difference: Col[Count | None, "index of the first token that differs from the baseline's output"] = None
    gap: Col[float | None, "at that token: highest logit minus second highest logit of the target", "logits"] = None
    drop: Col[float | None, "at that token: highest logit minus the lower logit of the two chosen tokens", "logits"] = (
        None
    )
    reason: Col[str, "reason why the outputs were not compared, or a remark; may be empty"] = ""
    sampled: SampledTokens | None = None


def answer_hash(text: str) -> str:
    """Return the sha256 of an output text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(slots=True)
class JudgeVerdict(KeyedRecord):
    """A judge's rating of one output; its line in judge.jsonl is written after the run, by `ssbench judge`.

    judge: name of the judge model. prompts: name of its prompts. digest: sha256 of the judge and its input. score:
    rating over ten, or None. text: its whole output. host: of the judge. max_tokens: of its output. answer: sha256 of
    the rated text, or ''.
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
        """Return the judge's identity: ratings by different judges are not comparable."""
        return (self.judge, self.prompts, self.host, self.max_tokens)

    def rates(self, row: SampleRecord) -> bool:
        """Return True if it rates the sample's current text, not one from before a re-run."""
        return self.answer in ("", answer_hash(row.text or ""))


_read_row, read_output_match = user_files.decoder(SampleRecord), user_files.decoder(OutputMatch)
read_judged = user_files.decoder(JudgeVerdict)


@dataclass
class Run:
    """Everything committed in a run directory, finished or not.

    concurrency, requests: load levels, and their requests. without_steps: samples left out, since steps.jsonl lacks
    their steps.
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
    without_steps: int = 0

    @property
    def labels(self) -> list[str]:
        """Return the method labels in the requested order."""
        return [method["label"] for method in self.manifest["methods"]]

    @property
    def served(self) -> bool:
        """Return True for a run of servers."""
        return bool(self.manifest["config"].get("endpoints"))

    @property
    def processes(self) -> int:
        """Return how many processes a method and the baseline are: two of servers, else one."""
        return 2 if self.served else 1

    def entry(self, label: str) -> dict[str, Any]:
        """Return a method's entry in the manifest."""
        return next(method for method in self.manifest["methods"] if method["label"] == label)

    def reference(self, label: str) -> str:
        """Return the label of the reference, whose output this method's must equal."""
        return str(self.entry(label).get("reference", self.baseline))

    def of(self, label: str) -> list[SampleRecord]:
        """Return a method's samples."""
        return [row for row in self.rows if row.method == label]

    @property
    def baseline(self) -> str:
        """Return the label of the baseline."""
        return baseline_of(self.manifest)

    @property
    def samples(self) -> int:
        """Return the number of samples of the complete run."""
        return int(self.manifest["suite"]["prompts"]) * self.repeats * len(self.labels)

    @property
    def repeats(self) -> int:
        """Return the number of repeats in all sessions: as requested, or more for narrow intervals."""
        requested = self.manifest["config"]["repeats"] * self.sessions
        return int(self.manifest.get("repeats_made") or requested)

    @property
    def sessions(self) -> int:
        """Return the number of processes that each make all repeats."""
        return int(self.manifest.get("n_sessions") or 1)

    @property
    def categories(self) -> list[str]:
        """Return the categories in order of first appearance."""
        return list(dict.fromkeys(row.category for row in self.rows))

    @property
    def judge(self) -> str:
        """Return the last judge as 'NAME at HOST, prompts PROMPTS, N tokens', or ''."""
        if not self.judge_verdicts:
            return ""
        name, prompts, host, max_tokens = self.judge_verdicts[-1].by
        return (
            f"{name}{f' at {host}' if host else ''}, prompts {prompts}{f', {max_tokens} tokens' if max_tokens else ''}"
        )

    @cached_property
    def judged_scores(self) -> dict[Key, float]:
        """Return the ratings of the last judge, over ten: those of two judges are not comparable.

        Ratings of replaced outputs are excluded.
        """
        rows = {row.key: row for row in self.rows} if self.judge_verdicts else {}
        same = [
            v
            for v in self.judge_verdicts
            if v.by == self.judge_verdicts[-1].by and v.key in rows and v.rates(rows[v.key])
        ]
        return {v.key: v.score for v in same if v.score is not None}
