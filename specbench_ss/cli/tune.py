"""Command `ssbench tune`."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from specbench_ss import registry
from specbench_ss.bench import preflight
from specbench_ss.bench.build_config import suite_and_data
from specbench_ss.bench.preflight import check_history, check_room, conditions, prompt_ids, suite_request
from specbench_ss.bench.timed_sample import frozen_heap
from specbench_ss.cli import shared
from specbench_ss.cli.shared import Plugin, interrupted
from specbench_ss.engine.architectures import Outline
from specbench_ss.engine.decoder import Decoder
from specbench_ss.engine.engines import check_engine
from specbench_ss.engine.generate import Limits
from specbench_ss.engine.numerics import Dtype
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.models.devices import check_divided, resolve_device
from specbench_ss.models.load import check_template, load_target
from specbench_ss.models.resolve import check_model
from specbench_ss.options import MOST_SEED, REFERENCE, MethodSpec, PluginFile
from specbench_ss.results.terminal import result_table, widen
from specbench_ss.results.text import interval, number, times
from specbench_ss.runs.config import Engine, RunConfig, TuneConfig
from specbench_ss.runs.preset import check_writable, write_preset
from specbench_ss.suite import SuiteData
from specbench_ss.tuning.search import Comparison
from specbench_ss.tuning.session import DecoderBench, Tuned, content, sentence, tune

REDRAW_S = 0.5


class TuneProgress:
    """The `Watch` of a session, shown on a console, as a context manager. Without a terminal, each race gets a line."""

    def __init__(self, budget: float, console: Console) -> None:
        self.budget, self.console = budget, console
        self.live = Live(console=console, auto_refresh=False, transient=True)
        self.what, self.labels, self.samples = "warming up", 0, 0
        self._started, self._drawn = time.monotonic(), 0.0

    def __enter__(self) -> TuneProgress:
        self._started = time.monotonic()
        self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.live.stop()

    def on_race(self, what: str, labels: Sequence[str]) -> None:
        """Show that these configurations run against each other from now on."""
        if not self.console.is_terminal and what != self.what:
            self.console.print(f"{what}: {', '.join(labels)}", highlight=False, markup=False, soft_wrap=True)
        self.what, self.labels = what, len(labels)
        self._draw()

    def on_sample(self, label: str) -> None:
        """Count an answer, and redraw the line if it is time."""
        self.samples += 1
        self._draw()

    def on_warning(self, text: str) -> None:
        """Print something that the user should know; it stays on the screen."""
        self.console.print(f"[yellow]warning:[/] {escape(text)}", highlight=False, soft_wrap=True)

    def _draw(self) -> None:
        now = time.monotonic()
        if self.console.is_terminal and now - self._drawn >= REDRAW_S:
            spent = f"{now - self._started:.0f} of {self.budget:.0f} s"
            line = f"{self.what}: {self.labels} configurations left, {self.samples} answers, {spent}"
            self.live.update(Text(line), refresh=True)
            self._drawn = time.monotonic()


def print_tuned(tuned: Tuned, console: Console) -> None:
    """Print what was tried, then how the finalist did on the other prompts."""
    widen(console)
    if tuned.search.labels() or tuned.failed:
        console.print(_search_table(tuned))
    if tuned.confirmation.labels():
        console.print(_confirmation_table(tuned))


def _search_table(tuned: Tuned) -> Table:
    """List the configurations, the fastest first, each compared with the default on the prompts that it answered."""
    book, default = tuned.search, tuned.default.label
    over = {label: book.compare(label, default) for label in book.labels() if label not in tuned.failed}
    table = result_table("Tried", ("configuration", "over default", "95% interval", "prompts"))
    for label in sorted(over, key=lambda x: -(over[x].speedup or 0.0)):
        table.add_row(_name(label, default), *_speedup(over[label]), f"{over[label].prompts}")
    for label, why in tuned.failed.items():
        table.add_row(escape(label), "failed", escape(why), "")
    return table


def _confirmation_table(tuned: Tuned) -> Table:
    book, default = tuned.confirmation, tuned.default.label
    columns = ("configuration", "tokens/s", "over ar", "95% interval", "over default", "95% interval", "prompts")
    table = result_table("On prompts that it was not chosen on", columns)
    for label in tuned.entrants:
        of_ar, of_default = book.compare(label, REFERENCE), book.compare(label, default)
        cells = (number(of_ar.tokens_per_s, 1), *_speedup(of_ar), *_speedup(of_default), f"{of_ar.prompts}")
        table.add_row(_name(label, default), *cells)
    return table


def _name(label: str, default: str) -> str:
    return escape(f"{label} (default)" if label == default else label)


def _speedup(found: Comparison) -> tuple[str, str]:
    return times(found.speedup), interval(found.interval) or found.verdict


FEW = 4  # prompts per task, unless they come from a file of the user's


def run(config: TuneConfig, out: Path | None) -> None:
    """Tune, write the preset, and print what was tried. The user's mistakes are found before anything is measured."""
    _check_method(config.method)
    check_divided(config.model, config.device, config.engine)
    device = resolve_device(config.device)
    check_engine(config.engine, device)
    path = out or default_out(config.method.name, config.model, device)
    check_writable(path)
    check_model(config.model)
    outline = _outline(config)
    check_template(outline.tokenizer, outline.name)
    asked = _questions(config, outline)
    check_history(outline, asked)
    check_room(outline, asked)
    target = load_target(
        config.model,
        dtype=config.dtype,
        device=config.device,
        engine=config.engine,
        trust_remote_code=config.trust_remote_code,
        chat_template=config.chat_template,
    )
    bench, console = _bench(config, target, asked), Console(stderr=True)
    for note in asked.notes:
        console.print(f"prompts: {note}", style="dim", highlight=False, markup=False, soft_wrap=True)
    with frozen_heap(), TuneProgress(config.budget, console) as progress:
        categories = [question.category for question in asked.questions]
        tuned = tune(bench, config.method, categories, config.budget, config.seed, progress)
    if tuned.interrupted and not (tuned.search.labels() or tuned.confirmation.labels()):
        raise interrupted("; nothing was measured before that, so no preset is written")
    print_tuned(tuned, Console())
    _write(path, tuned, bench, target, asked, config)
    _tell(tuned, path, bench.decoder(config.method).lossless, config.plugin)


def _check_method(spec: MethodSpec) -> None:
    registry.method_options(spec)
    if registry.method_class(spec.name).tunable is Decoder.tunable:
        raise UserError(f"nothing to tune: method {spec.name!r} has no option whose value depends on the device")


def _outline(config: TuneConfig) -> Outline:
    """Return the model's outline, without weights, after a check that the method could decode with it."""
    model = {name: getattr(config, name) for name in ("model", "trust_remote_code", "chat_template")}
    return preflight.check_methods(RunConfig((config.method,), **model))


def _questions(config: TuneConfig, outline: Outline) -> SuiteData:
    limit = config.limit if config.limit is not None else FEW if config.data is None else 0
    request = suite_request(config.categories, limit, config.data, outline)
    return registry.load_suite(config.suite).calibration(request)


def _bench(config: TuneConfig, target: Target, asked: SuiteData) -> DecoderBench:
    return DecoderBench(
        config.method,
        registry.load_method(config.method, target),
        registry.load_method(MethodSpec(REFERENCE), target),
        [prompt_ids(target, question) for question in asked.questions],
        Limits(config.max_new_tokens, target.eos_ids),
    )


def _write(path: Path, tuned: Tuned, bench: DecoderBench, target: Target, asked: SuiteData, config: TuneConfig) -> None:
    resolved = bench.decoder(tuned.chosen).described()
    how = {"budget_s": config.budget, "max_new_tokens": config.max_new_tokens, "seed": config.seed}
    found = content(tuned, resolved, conditions(target), asked, **how)
    plugin = [file.as_dict() for file in config.plugin if config.method.name in file.methods]
    write_preset(path, found | ({"plugin": plugin[0]} if plugin else {}))


def _tell(tuned: Tuned, path: Path, lossless: bool, plugin: Sequence[PluginFile] = ()) -> None:
    """Print the outcome, and last what to do."""
    files = [word for file in plugin for word in ("--plugin", file.file)]
    if tuned.interrupted:
        print("ssbench: interrupted; this is what was measured until then", file=sys.stderr)
    if not lossless:
        print("ssbench: warning: the method may change the output; only speed was measured", file=sys.stderr)
    print(sentence(tuned))
    command = shlex.join(["ssbench", "run", "--methods", tuned.chosen.name, "--preset", str(path), *files])
    kept = tuned.chosen.label == tuned.default.label
    print(f"no preset is needed; the measurements are in {path}" if kept else f"use it: {command}")


def default_out(method: str, model: str, device: str) -> Path:
    """Return METHOD-MODEL-DEVICE.yaml in the current folder, with plain characters only."""
    parts = (method, Path(model).name or model, device)
    return Path("-".join(re.sub(r"[^A-Za-z0-9._]+", "-", part).strip("-.") or "x" for part in parts) + ".yaml")


RUN, DEFAULT = RunConfig(methods=()), TuneConfig(MethodSpec(REFERENCE))
WHAT, HOW = "What to tune", "How to measure"


def command(
    ctx: typer.Context,
    method: Annotated[
        str,
        typer.Argument(
            metavar="METHOD", help="Method to tune: NAME, or NAME[option=value] to keep some of its options fixed."
        ),
    ],
    model: Annotated[str, typer.Option(help=shared.MODEL, rich_help_panel=WHAT)] = RUN.model,
    suite: Annotated[
        str,
        typer.Option(
            help="Suite that the calibration prompts are taken from. They differ from those it evaluates, "
            "where it has others.",
            rich_help_panel=WHAT,
        ),
    ] = RUN.suite,
    categories: Annotated[str | None, typer.Option(metavar="A,B", help=shared.CATEGORIES, rich_help_panel=WHAT)] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="File with prompts of your own, in the suite's format.", rich_help_panel=WHAT),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Prompts of each task; 0 takes all of them.  [default: 4; with --data all of them]",
            rich_help_panel=WHAT,
        ),
    ] = None,
    budget: Annotated[float, typer.Option(help="Seconds to spend on measuring.", rich_help_panel=HOW)] = DEFAULT.budget,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Longest answer, in tokens.", rich_help_panel=HOW)
    ] = DEFAULT.max_new_tokens,
    seed: Annotated[
        int,
        typer.Option(
            min=0,
            max=MOST_SEED,
            help="Seed of the order in which prompts and configurations are measured.",
            rich_help_panel=HOW,
        ),
    ] = RUN.seed,
    dtype: Annotated[Dtype, typer.Option(help=shared.DTYPE, rich_help_panel=HOW)] = "auto",
    device: Annotated[str, typer.Option(help=shared.DEVICES, rich_help_panel=HOW)] = RUN.device,
    engine: Annotated[Engine, typer.Option(help=shared.ENGINE, rich_help_panel=HOW)] = "auto",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help=shared.TRUST, rich_help_panel=HOW)
    ] = RUN.trust_remote_code,
    chat_template: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help=shared.CHAT_TEMPLATE,
            rich_help_panel=HOW,
        ),
    ] = RUN.chat_template,
    plugin: Plugin = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.yaml", help="Preset file to write.  [default: METHOD-MODEL-DEVICE.yaml]"),
    ] = None,
) -> None:
    """Choose a method's options for this model and device by measured tokens per second, and write a preset file."""
    if not 0 < budget < float("inf"):
        raise UserError(f"--budget must be a number of seconds above 0, not {budget:g}")
    own = ("method", "suite", "categories", "data", "out")
    given = {name: value for name, value in ctx.params.items() if name not in own}
    suite, carried = suite_and_data(suite, data)
    wanted = TuneConfig(
        method=MethodSpec.parse(method),
        categories=tuple(part.strip() for part in (categories or "").split(",") if part.strip()),
        suite=suite,
        data=carried,
        **given,
    )

    run(wanted, out)
