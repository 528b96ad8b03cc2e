"""Command `ssbench tune`."""

from __future__ import annotations

import re
import shlex
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from specbench_ss import registry
from specbench_ss.bench import preflight
from specbench_ss.bench.build_config import listed, suite_and_data
from specbench_ss.bench.preflight import conditions, prompt_ids, suite_request, usable_questions
from specbench_ss.bench.timed_sample import frozen_heap
from specbench_ss.cli.printing import result_table, widen
from specbench_ss.cli.shared import LiveView, interrupted, print_text, take_options
from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.engine.decoder import Decoder
from specbench_ss.engine.engines import check_engine
from specbench_ss.engine.generate import StopParams
from specbench_ss.engine.numerics import Dtype
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.models.devices import check_divided, resolve_device
from specbench_ss.models.load import check_template, load_target
from specbench_ss.models.published_drafters import with_published_drafter
from specbench_ss.models.resolve import check_model
from specbench_ss.options import REFERENCE, MethodSpec, PluginFile
from specbench_ss.registry import load_plugins
from specbench_ss.results.text import format_number, format_speedup, interval
from specbench_ss.runs.config import RunConfig
from specbench_ss.runs.preset import check_writable, write_preset
from specbench_ss.runs.run_options import AtLeast0, CommandOptions, Count, Engine, Seconds, Seed, option, same
from specbench_ss.suite import SuiteData
from specbench_ss.tuning.search import Comparison
from specbench_ss.tuning.session import DecoderBench, TuneResult, content, sentence, tune


class TuneProgress(LiveView):
    """The `Watch` of a session on a console, as a context manager. Without a terminal, each race prints a line."""

    def __init__(self, budget: float, console: Console) -> None:
        super().__init__(console)
        self.budget, self.started = budget, time.monotonic()
        self.stage, self.labels, self.samples = "warming up", 0, 0

    def on_race(self, stage: str, labels: Sequence[str]) -> None:
        """Show the configurations of a new race."""
        if not self.console.is_terminal and stage != self.stage:
            print_text(self.console, f"{stage}: {', '.join(labels)}")
        self.stage, self.labels = stage, len(labels)
        self.draw_soon()

    def on_sample(self, label: str) -> None:
        """Count an answer and redraw the line if due."""
        self.samples += 1
        self.draw_soon()

    def view(self) -> Text:
        """Return the progress line."""
        spent = f"{time.monotonic() - self.started:.0f} of {self.budget:.0f} s"
        return Text(f"{self.stage}: {self.labels} configurations left, {self.samples} outputs, {spent}")


def print_tuned(tuned: TuneResult, console: Console) -> None:
    """Print the tried configurations, then the finalist's results on the other prompts."""
    widen(console)
    if tuned.search.labels() or tuned.failed:
        console.print(_search_table(tuned))
    if tuned.confirmation.labels():
        console.print(_confirmation_table(tuned))


def _search_table(tuned: TuneResult) -> Table:
    """List the configurations, fastest first, each compared with the default on the same prompts."""
    measurements, default = tuned.search, tuned.default.label
    over = {label: measurements.compare(label, default) for label in measurements.labels() if label not in tuned.failed}
    table = result_table("Tried", ("configuration", "over default", "95% CI", "prompts"))
    for label in sorted(over, key=lambda x: -(over[x].speedup or 0.0)):
        table.add_row(_name(label, default), *_speedup(over[label]), f"{over[label].prompts}")
    for label, reason in tuned.failed.items():
        table.add_row(escape(label), "failed", escape(reason), "")
    return table


def _confirmation_table(tuned: TuneResult) -> Table:
    measurements, default = tuned.confirmation, tuned.default.label
    columns = ("configuration", "tok/s", "over ar", "95% CI", "over default", "95% CI", "prompts")
    table = result_table("Confirmed on prompts that the search did not use", columns)
    for label in tuned.entrants:
        of_ar, of_default = measurements.compare(label, REFERENCE), measurements.compare(label, default)
        cells = (format_number(of_ar.tokens_per_s, 1), *_speedup(of_ar), *_speedup(of_default), f"{of_ar.prompts}")
        table.add_row(_name(label, default), *cells)
    return table


def _name(label: str, default: str) -> str:
    return escape(f"{label} (default)" if label == default else label)


def _speedup(comparison: Comparison) -> tuple[str, str]:
    return format_speedup(comparison.speedup), interval(comparison.interval) or comparison.verdict


_what, _how = partial(same, panel="What to tune"), partial(same, panel="How to measure")


@dataclass(frozen=True)
class TuneOptions(CommandOptions):
    """Options of `ssbench tune`."""

    method: str = option(
        MISSING,
        "Method to tune: NAME, or NAME[option=value] to keep some of its options fixed.",
        metavar="METHOD",
        position=True,
    )
    model: str = _what("model")
    suite: str = _what(
        "suite",
        metavar=None,
        help="Suite of the calibration prompts, which differ from the evaluation prompts if the suite has others.",
    )
    tasks: str | None = _what("tasks")
    data: Path | None = _what("data", help="File with your own prompts in the suite's format.")
    limit: AtLeast0 | None = _what("limit", help="Number of questions per task. 0: all.  [default: 4; with --data all]")
    budget: Seconds = _how("budget", default=120.0, metavar=None, help="Measuring time in seconds.")
    max_new_tokens: Count = _how("max_new_tokens", default=128, help="Maximum length of an output, in tokens.")
    seed: Seed = _how("seed", help="Seed of the order of prompts and configurations.")
    dtype: Dtype = _how("dtype")
    device: str = _how("device")
    engine: Engine = _how("engine")
    trust_remote_code: bool = _how("trust_remote_code")
    chat_template: str | None = _how("chat_template")
    plugin: list[str] | None = same("plugin")
    out: Path | None = option(None, "Preset file to write.  [default: METHOD-MODEL-DEVICE.yaml]", metavar="FILE.yaml")

    @property
    def spec(self) -> MethodSpec:
        """Return the method with its fixed options."""
        return MethodSpec.parse(self.method)


FEW = 4  # questions per task, except from a user's file


def command(ctx: typer.Context, **given: Any) -> None:
    """Choose a method's options for this model and device by measured tokens per second, and write a preset file."""
    options = TuneOptions(**given)
    run(options, load_plugins(options.plugin or ()))


take_options(command, TuneOptions)


def run(options: TuneOptions, plugin: Sequence[PluginFile] = ()) -> None:
    """Tune, write the preset, and print the results. User errors are found before measuring."""
    spec = options.spec
    _check_method(spec)
    check_divided(options.model, options.device, options.engine)
    device = resolve_device(options.device)
    check_engine(options.engine, device)
    path = options.out or default_out(spec.name, options.model, device)
    check_writable(path)
    check_model(options.model)
    model = {name: getattr(options, name) for name in ("model", "trust_remote_code", "chat_template")}
    spec, note = with_published_drafter(spec, options.model)
    if note:
        warnings.warn(note, stacklevel=2)
    info, _ = preflight.check_methods(RunConfig((spec,), **model))
    check_template(info.tokenizer, info.name)
    data = usable_questions(info, questions(options, info))
    target = load_target(**model, dtype=options.dtype, device=options.device, engine=options.engine)
    bench, console = _bench(options, spec, target, data), Console(stderr=True)
    for note in data.notes:
        print_text(console, f"{data.name}: {note}", "dim")
    with frozen_heap(), TuneProgress(options.budget, console) as progress:
        categories = [question.category for question in data.questions]
        tuned = tune(bench, spec, categories, options.budget, options.seed, progress)
    if tuned.interrupted and not (tuned.search.labels() or tuned.confirmation.labels()):
        raise interrupted("; nothing was measured, so no preset is written")
    print_tuned(tuned, Console())
    settings = {"budget_s": options.budget, "max_new_tokens": options.max_new_tokens, "seed": options.seed}
    preset = content(tuned, bench.decoder(tuned.chosen).metadata(), conditions(target), data, **settings)
    files = [asdict(file) for file in plugin if spec.name in file.methods]
    write_preset(path, preset | ({"plugin": files[0]} if files else {}))
    _print_outcome(tuned, path, bench.decoder(spec).lossless, plugin)


def _check_method(spec: MethodSpec) -> None:
    registry.method_options(spec)
    if registry.method_class(spec.name).search_space is Decoder.search_space:
        raise UserError(f"nothing to tune: method {spec.name!r} has no option whose value depends on the device")


def questions(options: TuneOptions, info: ModelInfo) -> SuiteData:
    """Return the calibration questions."""
    suite, data = suite_and_data(options.suite, options.data)
    limit = options.limit if options.limit is not None else FEW if data is None else 0
    request = suite_request(listed(options.tasks), limit, data, info)
    return registry.load_suite(suite).calibration(request)


def _bench(options: TuneOptions, spec: MethodSpec, target: Target, data: SuiteData) -> DecoderBench:
    return DecoderBench(
        spec,
        registry.load_method(spec, target),
        registry.load_method(MethodSpec(REFERENCE), target),
        [prompt_ids(target, question) for question in data.questions],
        StopParams(options.max_new_tokens, target.eos_ids),
    )


def _print_outcome(tuned: TuneResult, path: Path, lossless: bool, plugin: Sequence[PluginFile] = ()) -> None:
    """Print the outcome and the command that uses it."""
    files = [word for file in plugin for word in ("--plugin", file.file)]
    if tuned.interrupted:
        print("ssbench: interrupted; these are the results so far", file=sys.stderr)
    if not lossless:
        print("ssbench: warning: the method may change the output; only speed was measured", file=sys.stderr)
    print(sentence(tuned))
    command = shlex.join(["ssbench", "run", "--methods", tuned.chosen.name, "--preset", str(path), *files])
    is_default = tuned.chosen.label == tuned.default.label
    print(f"no preset is needed; the measurements are in {path}" if is_default else f"use it: {command}")


def default_out(method: str, model: str, device: str) -> Path:
    """Return METHOD-MODEL-DEVICE.yaml in the current folder, with plain characters only."""
    parts = (method, Path(model).name or model, device)
    return Path("-".join(re.sub(r"[^A-Za-z0-9._]+", "-", part).strip("-.")[:80] or "x" for part in parts) + ".yaml")
