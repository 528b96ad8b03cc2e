"""Making a run: load the target and its methods, measure, and fill the run directory. Prints nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specbench_ss import registry
from specbench_ss.benchmark import runner
from specbench_ss.benchmark.events import Silent
from specbench_ss.benchmark.preflight import Plan
from specbench_ss.benchmark.preset_conditions import preset_notes
from specbench_ss.benchmark.runner import Events
from specbench_ss.decoding.decoder import Decoder
from specbench_ss.decoding.engines import AUTO, EAGER
from specbench_ss.decoding.finite import own_logits
from specbench_ss.decoding.model_shape import drafter_shape, model_shape
from specbench_ss.decoding.target import Target
from specbench_ss.decoding.together import check_together, set_aside
from specbench_ss.decoding.unchanged import check_unchanged, difference
from specbench_ss.errors import UserError
from specbench_ss.method_spec import MethodSpec
from specbench_ss.models.loading import load_target
from specbench_ss.models.machine_limits import known_limits
from specbench_ss.results.parquet_files import write_parquet
from specbench_ss.runs.config import RunTarget
from specbench_ss.runs.manifest import manifest_for
from specbench_ss.runs.run_directory import RunDir


@dataclass(frozen=True, slots=True)
class Ready:
    """A run about to start. labels: of its methods, in order. notes: what its readers should know, a sentence each."""

    plan: Plan
    target: Target
    labels: tuple[str, ...]
    notes: tuple[str, ...]
    run_dir: RunDir


Watch = Callable[[Ready], AbstractContextManager["Events"]]


@contextmanager
def unwatched(ready: Ready) -> Iterator[Events]:
    """Nobody is told anything: the notes are kept beside the run's own warnings, in its manifest."""
    for note in (*ready.plan.notes, *ready.notes):
        ready.run_dir.keep_warning(note)
    yield Silent()


def measure(plan: Plan, where: RunTarget, command: Sequence[str], watch: Watch = unwatched) -> None:
    """Make the run that was checked, or go on with it. command: how it was asked for, for its manifest.

    watch: gives, once the run may start, who is told of its progress. Raises UserError as the loaders do.
    """
    given = plan.loaded if plan.config.concurrency else None  # a model by name is then loaded with engine eager
    with nullcontext() if given is None else set_aside(given):
        _measure(plan, where, command, watch)


def _measure(plan: Plan, where: RunTarget, command: Sequence[str], watch: Watch) -> None:
    config, data = plan.config, plan.data
    loaded = load(plan)
    target, decoders = loaded.target, loaded.decoders
    if config.concurrency:
        _check_batches(decoders)
    notes = tuple(preset_notes(config, target, data, decoders))
    with (
        RunDir.open(where, loaded.manifest(plan, command), data.questions) as run_dir,
        watch(Ready(plan, target, tuple(decoders), notes, run_dir)) as events,
    ):
        run_dir.update(recording=where.recording.as_dict())
        runner.run(config, target, plan.suite, data, decoders, run_dir, events, where)
        if off := loaded.changed():
            run_dir.update(target_changed=off)
        write_run_parquet(run_dir, events)


def _check_batches(decoders: Mapping[str, Decoder]) -> None:
    """Raise UserError where a method cannot answer several requests at a time."""
    for label, decoder in decoders.items():
        try:
            check_together(decoder)
        except UserError as error:
            raise UserError(f"--batch-size: {label}: {error}") from None


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model and its methods by label. before: the model's own logits, before any method was loaded."""

    target: Target
    decoders: dict[str, Decoder]
    before: Tensor

    def manifest(self, plan: Plan, command: Sequence[str]) -> dict[str, Any]:
        """Return what the run directory says of the run."""
        made = manifest_for(plan.config, self.target, plan.data, self.decoders, command)
        made["model"]["dtype_choice"] = plan.dtype_choice
        return made | {"machine": machine_of(self.target, self.decoders)}

    def changed(self) -> str:
        """Return by how much the model's logits differ from before, as text, for it may be NaN; '' for no change."""
        off = difference(self.target, self.before)
        return f"{off:.2g}" if off else ""


def load(plan: Plan) -> Loaded:
    """Load the model and every method of a run that was checked. Raises UserError as the loaders do."""
    target = plan.loaded or _load(plan)
    before = own_logits(target)
    return Loaded(target, {spec.label: _loaded(spec, target, before) for spec in plan.config.methods}, before)


def _loaded(spec: MethodSpec, target: Target, before: Tensor) -> Decoder:
    """Return the method, loaded. before: the target's own logits. Raises UserError where loading changed them."""
    decoder = registry.load_method(spec, target)
    check_unchanged(target, before, spec.label)
    return decoder


def machine_of(target: Target, decoders: Mapping[str, Decoder]) -> dict[str, Any]:
    """What results are counted from later: shapes of each method's model and drafter, and this device's limits."""
    limits = known_limits(target.device)
    shapes = {
        label: {
            **model_shape(decoder.target),
            "drafter": drafter_shape(decoder.drafter_weights(), decoder.target),
            "own": decoder.own_work().as_dict(),
        }
        for label, decoder in decoders.items()
    }
    return {"limits": None if limits is None else limits.as_dict(), "shapes": shapes}


def write_run_parquet(run_dir: RunDir, events: Events) -> None:
    """Write the run's Parquet files. Where that fails, the run is complete all the same, and a warning says so."""
    if problem := write_parquet(run_dir.path):
        events.on_warning(problem)
        run_dir.keep_warning(problem)


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
    )
