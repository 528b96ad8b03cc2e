"""Runs of every method on every prompt, interleaved, with each sample committed when finished.

Warm-up comes first and is never recorded; garbage collection runs before each sample and is off during it; scoring,
comparing and writing happen between samples.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from specbench_ss import registry, user_files
from specbench_ss.bench import run_loop
from specbench_ss.bench.draft_recording import SecondPasses
from specbench_ss.bench.preflight import Plan, check_questions, limits, preset_notes, prompt_ids
from specbench_ss.bench.run_loop import ConcurrencySweep, Session, Watch, unwatched
from specbench_ss.bench.run_loop import RunCallbacks as RunCallbacks
from specbench_ss.bench.sampled_tokens import judge_sampled
from specbench_ss.bench.schedule import Sample, sample_seed, warmup_prompts
from specbench_ss.bench.telemetry import MachineRecord, Seen, noise_of
from specbench_ss.bench.timed_sample import (
    Decode,
    Request,
    RequestRunner,
    eager_fallbacks,
    gc_disabled,
    n_attempts,
    oom_message,
    peak_memory,
    recorded,
    warm_up,
)
from specbench_ss.engine.batching import BatchEngine, BatchRequest, RequestOutput, check_together, graphs_disabled
from specbench_ss.engine.checks import check_unchanged, difference, own_logits
from specbench_ss.engine.costs import drafter_shape, model_shape
from specbench_ss.engine.decoder import Decoder, Generation, Step, check_references
from specbench_ss.engine.engines import AUTO, EAGER
from specbench_ss.engine.generate import decode as decode_once
from specbench_ss.engine.generate import with_nan_probe
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.engine.timing import check_device, now, unix_time
from specbench_ss.engine.verify import Offer
from specbench_ss.errors import PluginError, UserError, error_text, failure_text, plugin_code, prefixed
from specbench_ss.models.devices import unseen_gpu
from specbench_ss.models.limits import known_limits
from specbench_ss.models.load import load_target
from specbench_ss.options import REFERENCE, option_values
from specbench_ss.runs import output_match
from specbench_ss.runs.config import Load, OutputOptions, RunConfig
from specbench_ss.runs.manifest import SHAPE, manifest_for, method_entry, plain
from specbench_ss.runs.output_match import check_readable
from specbench_ss.runs.records import ConcurrencyResult, Key, OutputMatch, SampleRecord
from specbench_ss.runs.run_dir import RunDir, RunStore
from specbench_ss.stats.betting import BIASED, bound, pool, too_coarse
from specbench_ss.suite import Question, Suite, SuiteData
from specbench_ss.time_limit import check_thread


def run(
    config: RunConfig,
    target: Target,
    suite: Suite,
    suite_data: SuiteData,
    decoders: dict[str, Decoder],
    run_dir: RunDir,
    events: RunCallbacks,
    output: OutputOptions,
    decode: Decode = decode_once,
) -> None:
    """Make every sample that is not yet committed and compare its output, question by question.

    output: recordings, timeout and stopping rule; `run_dir` is its open folder. A method that fails leaves a failed
    record and the run continues; a broken device ends it. After an exception, KeyboardInterrupt included, the
    directory stays resumable, with the reason in its status.
    """
    check_questions(suite_data)
    if output.timeout is not None:
        check_thread()
    session = LocalSession(config, target, suite, suite_data, decoders, run_dir, events, output, decode)
    with contextlib.closing(session):
        session.run()


class LocalSession(Session):
    """Decodes in this process."""

    def __init__(
        self,
        config: RunConfig,
        target: Target,
        suite: Suite,
        data: SuiteData,
        decoders: dict[str, Decoder],
        run_dir: RunStore,
        events: RunCallbacks,
        output: OutputOptions,
        decode: Decode = decode_once,
    ) -> None:
        # what the methods declared, read once: a later answer of a plugin may be another one
        self.methods = {entry["label"]: entry for entry in run_dir.manifest["methods"]}
        super().__init__(config, data, list(self.methods), run_dir, events, output.goal)
        self.suite, self.part = suite, output.session
        self.target, self.decoders, self.recording = target, decoders, output.recording
        self.dropped = {x: entry.get("error", "") for x, entry in self.methods.items() if x not in decoders}
        self.targets = {label: decoder.target for label, decoder in decoders.items()}
        self.stateful = {label: bool(entry.get("stateful")) for label, entry in self.methods.items()}
        self.answering = RequestRunner(decode, target, output.timeout, run_dir.path)
        self.limits = limits(target, config.max_new_tokens or data.max_new_tokens, config.stop)
        self._offers: dict[Key, Sequence[Offer]] = {}  # of sampled outputs that are not tested yet
        for model in self.targets.values():
            model.longest_request = max(map(self._most_tokens, data.questions), default=0)
        # last, for it has a thread
        self.machine = MachineRecord(self.recording, [*target.layer_devices], run_dir, self.warn_and_keep)

    def close(self) -> None:
        """Stop telemetry, and reserve no more for requests of this run."""
        self.machine.close()
        for model in self.targets.values():
            model.longest_request = 0

    @property
    def baseline(self) -> str:
        return REFERENCE

    def lossless_reference(self, label: str) -> str:
        return str(self.methods[label].get("reference", self.baseline))

    def lossless_methods(self, label: str) -> bool:
        return bool(self.methods[label]["lossless"])

    def notes(self) -> None:
        """Keep warnings on the device and on stateful methods, before all samples."""
        if self.config.device == "auto" and (unseen := unseen_gpu()):
            self.run_dir.keep_warning(unseen)  # given as a warning when the device was chosen
        for text in dict.fromkeys(text for decoder in self.decoders.values() for text in decoder.load_warnings):
            self.run_dir.keep_warning(text)  # given when the method was loaded
        for label in (label for label, stateful in self.stateful.items() if stateful):
            self.warn_and_keep(f"{label} is stateful: its speed depends on earlier prompts")
        for label, why in self.dropped.items():
            self.events.on_warning(f"{label} is dropped: {why}")  # as its records do

    def warm_up(self) -> None:
        prompts = warmup_prompts(self.target, self.data.questions, self.config.warmup)
        warm_up(self.decoders, prompts, self._warm_sample, self.warn_and_keep, self._drop)
        for label in [label for label in self.decoders if label not in self.dropped]:
            try:
                with plugin_code("reset_history"):
                    self.decoders[label].reset_history()
            except UserError as error:
                self._drop(label, error)

    def _most_tokens(self, question: Question) -> int:
        """Return the most tokens of a question's conversation, with answers that reach the limit."""
        turns = len(question.turns)
        return len(prompt_ids(self.target, question, ["-"] * (turns - 1))) + turns * self.limits.max_new_tokens

    def _drop(self, label: str, error: BaseException) -> None:
        """Exclude a method that failed in warm-up from the run. Raises UserError for the baseline."""
        check_device(*self.target.layer_devices)
        why = f"failed in warm-up: {failure_text(error)}"
        if label == self.baseline:
            raise UserError(f"{label} {why}; no method can be compared without it") from error
        self.dropped[label] = why
        self.token_s.pop(label, None)
        self.events.on_warning(f"{label} is dropped: it {why}")  # as its records do

    def prepare(self, samples: Sequence[Sample]) -> None:
        if self.recording.trace:
            SecondPasses(self).trace(warmup_prompts(self.target, self.data.questions, 1)[0])

    def finalize(self, samples: Sequence[Sample]) -> None:
        SecondPasses(self).make(samples, self.events.on_recording)
        if self.config.concurrency:
            BatchedConcurrencySweep(self, cast("RunDir", self.run_dir)).make()

    def failed(self, error: BaseException, row: SampleRecord) -> None:
        self._offers.pop(row.key, None)
        check_device(*self.target.layer_devices)

    def _warm_sample(self, label: str, prompt: list[int], max_new_tokens: int) -> float:
        """Return the seconds per token of one unrecorded request."""
        self.events.on_warm_up(label)
        with gc_disabled():
            done = self.answer_prompt(label, prompt, max_new_tokens)
        self.token_s[label] = done.wall_s / max(1, len(done.tokens))
        return self.token_s[label]

    def run_sample(self, blank: SampleRecord, sample: Sample) -> tuple[SampleRecord, list[Step]]:
        """Decode, with re-runs of noisy samples. If a re-run fails, the sample before it counts.

        Each try fills a new record, so that none has numbers of another one.
        """
        row, steps = self._decode_once(replace(blank), sample)
        while self.machine.again(row, self.stateful[sample.method]):
            try:
                row, steps = self._decode_once(replace(blank, n_reruns=(row.n_reruns or 0) + 1), sample)
            except (Exception, SystemExit) as e:
                check_device(*self.target.layer_devices)
                label = f"{row.method} on {row.question_id} turn {row.turn + 1}"
                self.events.on_warning(f"{label} was noisy, and its re-run failed: {error_text(e)}")
                break
        return row, steps

    def _decode_once(self, row: SampleRecord, sample: Sample) -> tuple[SampleRecord, list[Step]]:
        """Decode, check and fill the record of this try."""
        asked = self.request(sample)
        seen: Seen | None = None
        target, before = self.targets[sample.method], 0

        def measured() -> Generation:
            nonlocal seen, before
            before, plain, row.started = recorded(target), eager_fallbacks(target), unix_time()
            with gc_disabled(), peak_memory(*self.target.layer_devices) as peak, self.machine.watch() as seen:
                done = self.answering.answer(asked, self.events.on_tokens)
            row.ended, row.peak_memory_bytes = unix_time(), peak() if plain is None else None
            done.check()
            if plain is not None:
                found = (eager_fallbacks(target) or Counter()) - plain
                row.n_eager_fallbacks, row.eager_fallback_reason = found.total(), "; ".join(sorted(found))
            return done

        for _ in n_attempts(target, self.stateful[sample.method]):
            done = with_nan_probe(measured, lambda: self.answering.probe(asked))
        self.fill(row, asked, done)
        if self.config.temperature:
            self._offers[row.key] = done.offers
        self.machine.note(row, seen)
        if recorded(target) != before:
            row.noise_reason = row.noise_reason or "a CUDA graph was captured during the sample"
        return row, done.steps

    def fill(self, row: SampleRecord, asked: Request, done: Generation) -> None:
        """Fill the record of a finished request."""
        row.fill(done)
        row.text = self.target.decode_text(done.tokens)
        row.thinking_tokens = self.target.thinking_tokens(asked.prompt, done.tokens)

    def request(self, sample: Sample) -> Request:
        """Return the request of a sample. Raises LookupError if the history is missing."""
        seed, label = sample_seed(self.config.seed, sample.question.id, sample.turn, sample.repeat), sample.method
        return Request(label, self.decoders[label], self._prompt(sample), self.limits, self._sampling(seed))

    def answer_again(self, decoder: Decoder, sample: Sample) -> Generation:
        """Decode a prompt again, unrecorded."""
        return self.answering.answer(replace(self.request(sample), decoder=decoder))

    def answer_prompt(self, label: str, prompt: list[int], most: int) -> Generation:
        """Decode a prompt of no sample, unrecorded. most: tokens, if fewer than the run's own limit."""
        limits = replace(self.limits, max_new_tokens=min(most, self.limits.max_new_tokens))
        asked = Request(label, self.decoders[label], prompt, limits, self._sampling(self.config.seed))
        return self.answering.answer(asked)

    def _sampling(self, seed: int) -> SamplingParams:
        config = self.config
        return SamplingParams(config.temperature, config.top_p, config.top_k, seed, config.verification)

    def _prompt(self, sample: Sample) -> list[int]:
        return prompt_ids(self.target, sample.question, self.history(sample))

    def sampled(self, sample: Sample, row: SampleRecord) -> OutputMatch:
        offers = self._offers.pop(row.key, ())
        return self.tested(row, self._prompt(sample), self._sampling(row.seed), offers)

    def tested(
        self, row: SampleRecord, prompt: Sequence[int], sampling: SamplingParams, offers: Sequence[Offer]
    ) -> OutputMatch:
        """Test sampled tokens against the model of the method's reference, or its own model if it is a reference."""
        references = {self.baseline, *map(self.lossless_reference, self.methods)}
        label = row.method if row.method in references else self.lossless_reference(row.method)
        found = judge_sampled(self.decoders[label], prompt, row, sampling, offers)
        check_device(*self.target.layer_devices)
        return found

    def verdict(self, sample: Sample, row: SampleRecord, reference: SampleRecord) -> OutputMatch:
        return output_match.judge(self.decoders[reference.method], self._prompt(sample), reference, row)

    def without_comparison(self, sample: Sample, row: SampleRecord, reason: str) -> OutputMatch:
        """Return the verdict; check one token against the method's own next_logits."""
        decoder = self.decoders.get(row.method)
        if row.tokens and decoder and type(decoder).autoregressive and not self.config.temperature:
            return output_match.judge_alone(decoder, self._prompt(sample), row, reason)
        return super().without_comparison(sample, row, reason)


WARM_TOKENS = 4  # of each output before a level is measured


class BatchedConcurrencySweep(ConcurrencySweep[Request]):
    """Decodes in this process."""

    session: LocalSession

    def __init__(self, session: LocalSession, run_dir: RunDir) -> None:
        super().__init__(session, run_dir)
        self.decoders, self.target, self.answering = session.decoders, session.target, session.answering

    def prompt(self, sample: Sample) -> Request:
        """Return the request of the sample's own method."""
        return self.session.request(sample)

    def level(self, label: str, load: Load, repeat: int) -> None:
        """Make one level after a short warm-up. A level that exceeds the time limit is left out."""
        session, wanted, concurrency = self.session, list(self.asked(label, load, repeat)), load.concurrency or 1
        session.events.on_sample_start(label, f"{concurrency} at a time")
        sent = [(row, asked) for row, asked in wanted if asked is not None]
        answers: dict[int, RequestOutput] = {}

        def ended(place: int, answered: RequestOutput) -> None:
            answers[place] = answered
            session.events.on_sample(sent[place][0])

        try:
            at_once = BatchEngine(self.decoders[label], concurrency)
            few = [_asked(asked, WARM_TOKENS) for _, asked in sent[:concurrency]]
            with self.answering.in_time(label, max(1, len(few))):
                at_once.answer(few, lambda *_: None)
            with (
                self.answering.in_time(label, max(1, len(sent))),
                gc_disabled(),
                session.machine.watch() as seen,
            ):
                started, began = unix_time(), now()
                at_once.answer([_asked(one) for _, one in sent], ended)
                done, wall_s = unix_time(), now() - began
        except (Exception, SystemExit) as error:  # the samples are committed already
            check_device(*self.target.layer_devices)
            why = oom_message(error, self.decoders[label])
            session.warn_and_keep(f"{label} with {concurrency} requests at a time: {why}")
            return
        check_device(*self.target.layer_devices)  # its outputs would all be failed ones
        unasked = [row for row, asked in wanted if asked is None]
        made = [self._filled(*sent[place], answered) for place, answered in answers.items()]
        rows = sorted((*made, *unasked), key=lambda row: row.index)
        good = [row for row in rows if row.ok]
        names = ("steps", "draft_nodes", "accepted_tokens")
        counts = {name: sum(getattr(row, name) or 0 for row in good) for name in names}
        level = ConcurrencyResult(label, concurrency, repeat, started, done, wall_s, len(rows), **counts)
        self.run_dir.append_concurrency(level, rows)
        self._compare(label, concurrency, good)
        self._test(
            label,
            concurrency,
            [(row, sent[place][1], answers[place]) for place, row in zip(answers, made, strict=True) if row.ok],
        )
        if seen is not None and (why := noise_of(seen)):
            session.warn_and_keep(f"{label} with {concurrency} requests at a time is noisy: {why}")

    def _filled(self, blank: SampleRecord, asked: Request, answered: RequestOutput) -> SampleRecord:
        """Return the record of an output; a failed one without output, or if the record is not readable."""
        try:
            if answered.generation is None:
                raise answered.error or RuntimeError("no answer")
            row = replace(blank)
            self.session.fill(row, asked, answered.generation)
            row.started, row.ended = answered.started, answered.started + answered.wall_s
            row.prefill_s, row.wall_s = answered.first_s, answered.wall_s  # from its start, waiting for others included
            row.decode_s = answered.wall_s - answered.first_s
            check_readable(row, ())
        except (Exception, SystemExit) as error:
            row = replace(blank, status="failed", error=oom_message(error, self.decoders[blank.method]))
            self.session.events.on_warning(f"{row.method} failed on {row.question_id}: {row.error}")
        return row

    def _compare(self, label: str, concurrency: int, good: list[SampleRecord]) -> None:
        """Warn of greedy outputs that differ from those with one request: other batches round differently."""
        if self.session.config.temperature > 0:
            return
        alone = [self.run_dir.rows.get(row.key) for row in good]
        pairs = [(row, other) for row, other in zip(good, alone, strict=True) if other is not None and other.ok]
        differ = sum(row.token_ids != other.token_ids for row, other in pairs)
        if differ:
            self.session.warn_and_keep(
                f"{label}: {differ} of {len(pairs)} outputs differ between {concurrency} requests at a time and one"
            )

    def _test(self, label: str, concurrency: int, good: list[tuple[SampleRecord, Request, RequestOutput]]) -> None:
        """Warn of biased sampled outputs of a lossless method."""
        if self.session.config.temperature == 0 or not self.session.lossless_methods(label):
            return
        verdicts = [
            self.session.tested(row, asked.prompt, asked.sampling, done.generation.offers).sampled
            for row, asked, done in good
            if done.generation is not None
        ]
        pooled = pool(one for one in verdicts if one is not None)
        config = self.session.config
        if bound(pooled) < BIASED and not too_coarse(pooled, bool(config.top_k) or config.top_p < 1):
            self.session.warn_and_keep(
                f"{label}: {pooled.tokens:,} sampled tokens with {concurrency} requests at a time are biased"
            )


def _asked(request: Request, most: int | None = None) -> BatchRequest:
    limits = request.limits if most is None else replace(request.limits, max_new_tokens=most)
    return BatchRequest(request.prompt, limits, request.sampling)


@dataclass(frozen=True, kw_only=True)
class PreparedRun(run_loop.PreparedRun):
    """A run about to start."""

    target: Target


def measure(plan: Plan, output: OutputOptions, command: Sequence[str], watch: Watch = unwatched) -> Path:
    """Make or resume the run of a checked plan, and return its directory. command: the command line, for the manifest.

    watch: returns the callbacks once the run may start. Raises UserError as the loaders do.
    """
    given = plan.loaded if plan.config.concurrency else None  # a model by name is then loaded with engine eager
    with nullcontext() if given is None else graphs_disabled(given):
        return _measure(plan, output, command, watch)


def _measure(plan: Plan, output: OutputOptions, command: Sequence[str], watch: Watch) -> Path:
    config, data = plan.config, plan.data
    loaded = load(plan)
    target, decoders = loaded.target, loaded.decoders
    if config.concurrency:
        _check_batches(decoders)
    notes = tuple(preset_notes(config, target, data, loaded.methods))
    with (
        RunDir.open(output, loaded.manifest(plan, command), data.questions) as run_dir,
        watch(PreparedRun(plan=plan, run_dir=run_dir, notes=notes, target=target)) as events,
    ):
        run_dir.update(recording=asdict(output.recording))
        try:
            run(config, target, plan.suite, data, decoders, run_dir, events, output)
        finally:  # after an interruption too: its samples stay
            with contextlib.suppress(RuntimeError):  # of a broken device
                if off := loaded.changed():
                    run_dir.update(target_changed=off)
        return run_dir.path


def _check_batches(decoders: Mapping[str, Decoder]) -> None:
    """Raise UserError if a method does not support several requests at a time."""
    for label, decoder in decoders.items():
        with prefixed(f"--batch-size: {label}"):
            check_together(decoder)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model and its methods by label. before: the model's own logits, before any method was loaded.

    methods: entries of the manifest; one with an `error` has no decoder. shapes: of models and drafters, for costs.
    """

    target: Target
    decoders: dict[str, Decoder]
    before: Tensor
    methods: dict[str, dict[str, Any]]
    shapes: dict[str, dict[str, Any]]

    def manifest(self, plan: Plan, command: Sequence[str]) -> dict[str, Any]:
        """Return the manifest of the run."""
        made = manifest_for(plan.config, self.target, plan.data, [*self.methods.values()], command)
        made["model"]["dtype_choice"] = plan.dtype_choice
        limits = known_limits(self.target.device)
        return made | {"machine": {"limits": limits and limits.as_dict(), "shapes": self.shapes}}

    def changed(self) -> str:
        """Return the change of the model's logits as text, since it may be NaN; '' for no change."""
        off = difference(self.target, self.before)
        return f"{off:.2g}" if off else ""


def load(plan: Plan) -> Loaded:
    """Load the model and every method of a checked plan, and read what the methods declare.

    A method whose code fails is left out. Raises UserError as the loaders do, if loading a method changed the model,
    and if only references are left.
    """
    target = plan.loaded or _load(plan)
    made = Loaded(target, {}, own_logits(target), {}, {})
    for spec in plan.config.methods:
        label = spec.label
        try:
            decoder = registry.load_method(spec, target)
            with plugin_code(f"method {label!r} declares what cannot be stored"):
                made.methods[label], made.shapes[label] = method_entry(label, decoder), cost_shape(decoder)
            made.decoders[label] = decoder
        except PluginError as error:
            kind, own = registry.method_class(spec.name), plain(option_values(registry.method_options(spec)))
            about = {"summary": kind.summary, "paper": kind.paper, "lossless": kind.lossless is not False}
            entry = {"label": label, "name": spec.name, "options": own, "resolved": {}, "error": str(error)}
            made.methods[label] = entry | about
        check_unchanged(target, made.before, label)
    failed = [label for label in made.methods if label not in made.decoders]
    baselines = {label: made.methods[label]["reference"] for label in made.decoders}
    if failed and (
        made.decoders.keys() <= {REFERENCE, *baselines.values()} or {*failed}.intersection(baselines.values())
    ):
        raise UserError(made.methods[failed[0]]["error"])
    check_references(made.decoders, baselines)
    return made


def cost_shape(decoder: Decoder) -> dict[str, Any]:
    """Return the shapes of a method's model and drafter. Raises ValueError if they cannot be read again."""
    drafter, extra = drafter_shape(decoder.drafter_weights(), decoder.target), decoder.extra_work().as_dict()
    shape = plain({**model_shape(decoder.target), "drafter": drafter, "extra_work": extra})
    user_files.convert(shape, SHAPE)
    return dict(shape)


def _load(plan: Plan) -> Target:
    config = plan.config
    return load_target(
        config.model,
        dtype=plan.dtype,
        device=config.device,
        engine=EAGER if config.engine == AUTO and config.concurrency else config.engine,
        quantize=config.quantize,
        trust_remote_code=config.trust_remote_code,
        chat_template=config.chat_template,
        chat_template_kwargs=config.chat_template_kwargs,
        generation_config=config.generation_config,
    )
