"""What `ssbench tune` does once it knows what is wanted: check, load, measure, write, and print the outcome."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from specbench_ss import registry
from specbench_ss.benchmark import preflight
from specbench_ss.benchmark.preset_conditions import conditions
from specbench_ss.benchmark.quiet_timing import frozen_heap
from specbench_ss.benchmark.requests import check_history, check_room, prompt_ids, suite_request
from specbench_ss.commands.shared import interrupted
from specbench_ss.decoding.decoder import Decoder
from specbench_ss.decoding.engines import check_engine
from specbench_ss.decoding.loop import Limits
from specbench_ss.decoding.outline import Outline
from specbench_ss.decoding.target import Target
from specbench_ss.errors import UserError
from specbench_ss.method_spec import REFERENCE, MethodSpec, PluginFile
from specbench_ss.models.chat_templates import check_template
from specbench_ss.models.devices import resolve_device
from specbench_ss.models.dividing import check_divided
from specbench_ss.models.loading import load_target
from specbench_ss.models.model_folder import check_model
from specbench_ss.runs.config import RunConfig, TuneConfig
from specbench_ss.runs.preset import check_writable, write_preset
from specbench_ss.runs.suite import SuiteData
from specbench_ss.tuning.bench import DecoderBench
from specbench_ss.tuning.display import TuneProgress, print_tuned
from specbench_ss.tuning.preset_content import content, sentence
from specbench_ss.tuning.session import Tuned, tune

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
