"""Checks of a run before the model is loaded, its prompts, and the conditions of presets."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from specbench_ss import registry
from specbench_ss.conversations import read_columns
from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.engine.decoder import check_reference, reference_spec
from specbench_ss.engine.engines import check_engine
from specbench_ss.engine.generate import StopParams
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError, plugin_code, prefixed
from specbench_ss.models.cpu_dtype import chosen_dtype
from specbench_ss.models.devices import check_divided, device_class, resolve_device, resolve_dtype
from specbench_ss.models.load import check_template, load_model_info
from specbench_ss.models.published_drafters import with_published_drafter
from specbench_ss.models.quantize import check_quantize
from specbench_ss.models.resolve import check_model
from specbench_ss.options import MethodSpec, encodable
from specbench_ss.prompt_files import usable
from specbench_ss.runs.config import OutputOptions, RunConfig, decoding
from specbench_ss.runs.environment import environment
from specbench_ss.runs.manifest import MANIFEST, check_same_config, check_same_plugins, read_manifest
from specbench_ss.runs.preset import Preset
from specbench_ss.runs.run_dir import check_out, read_run
from specbench_ss.suite import Question, Suite, SuiteData, SuiteRequest

GREEDY = decoding({"temperature": 0})  # of presets


def conditions(target: Target, decoded: str = GREEDY) -> dict[str, Any]:
    """Return the conditions of a measurement, JSON-ready. decoded: the decoding, as from `config.decoding`."""
    here, on_gpu = environment(), target.device.type == "cuda"
    gpus = ", ".join(map(torch.cuda.get_device_name, target.layer_devices)) if on_gpu else ""
    return {
        "model": target.name,
        "weights_hash": target.weights_hash,
        "device": target.device.type,
        "device_name": gpus or str(here["cpu"]["model"]),
        "dtype": target.number_format,
        "engine": target.engine,
        "threads": (here["threads"] or {}).get("intra_op"),
        "torch": here["packages"]["torch"],
        "decoding": decoded,
    }


def preset_notes(config: RunConfig, target: Target, data: SuiteData, methods: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes on the run's presets: at most one each on conditions, weights and questions. methods: by label."""
    here = conditions(target, decoding(config.as_dict() | {"stop": ()})) if config.presets else {}
    marks = {question.mark for question in data.questions}
    for preset in config.presets:
        name = f"preset {preset.file}"
        hashes = [file.sha256 for file in config.plugin if preset.method in file.methods]
        if preset.plugin and hashes and hashes != [preset.plugin["sha256"]]:
            yield f"{name} was measured with another content of {preset.plugin['file']}"
        differences = changed(preset.made_for, here)
        if differences:
            yield f"{name} was made for other conditions: {differences}"
        settings = "" if differences else _settings(preset, config, methods)
        if settings:
            yield f"{name} was made for other weights or settings of {preset.method}: {settings} differ"
        shared = len(marks.intersection(preset.prompts))
        if shared:
            yield f"{name} was chosen on {shared} of these {len(marks)} questions, which favours it"


def changed(then: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Return the differences between two `conditions`, as 'device cuda, here cpu; dtype ...'; '' for none."""
    names = ["device", "device_name", "dtype", "engine"]
    # the hash depends on the dtype, and one model may be in two folders
    names.append("weights_hash" if then.get("dtype") == here["dtype"] else "model")
    names += ["threads"] if here["device"] == "cpu" else []
    names += ["torch", "decoding"]
    differences = [(name, then[name], here[name]) for name in names if name in then and then[name] != here[name]]
    return "; ".join(f"{name.replace('_', ' ')} {old}, here {new}" for name, old, new in differences)


def _settings(preset: Preset, config: RunConfig, methods: Mapping[str, Any]) -> str:
    """Return the names of resolved settings of the preset's method that differ from the preset's."""
    for spec in config.methods:
        if spec.name == preset.method and spec.options == preset.options and preset.resolved:
            now = methods[spec.label]["resolved"]
            return ", ".join(name for name in now if now[name] != preset.resolved.get(name))
    return ""


def prompt_ids(target: ModelInfo, question: Question, answers: Sequence[str] = ()) -> list[int]:
    """Return the prompt ids of the turn after these answers, with the conversation before it."""
    return target.encode_chat(question.messages(answers), question.tools)


def suite_request(
    categories: Sequence[str], limit: int | None, data: str | None, target: ModelInfo, columns: Sequence[str] = ()
) -> SuiteRequest:
    """Return the request to a suite for this model."""
    return SuiteRequest(
        tuple(categories),
        limit,
        None if data is None else Path(data),
        target.is_lab,
        target.context_length,
        None if target.tokenizer is None else _counter(target.tokenizer),
        read_columns(columns),
    )


def _counter(tokenizer: Any) -> Callable[[str], int]:
    return lambda text: len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def check_questions(data: SuiteData) -> None:
    """Raise UserError for two questions with the same id, or one with lone surrogates, which cannot be encoded."""
    for name, n in Counter(q.id for q in data.questions).items():
        if n > 1:
            raise UserError(f"suite {data.name!r} has {n} questions with the id {name!r}")
    for q in data.questions:
        texts = (*q.turns, *(text for texts in q.references for text in texts), *(m.text for m in q.history))
        if not encodable("".join((q.id, q.category, *texts))):
            raise UserError(f"question {ascii(q.id)} of suite {data.name!r} has half of a surrogate pair")


def usable_questions(target: ModelInfo, data: SuiteData) -> SuiteData:
    """Return the data without questions that this model cannot be asked, with a note on them.

    Raise UserError if these are too many. The length of later turns depends on earlier answers; a sample that is too
    long fails.
    """
    notes: list[str] = []
    rows = ((q.place or f"question {q.id!r} ({q.category})", q) for q in data.questions)
    kept = tuple(usable(rows, lambda place, q: _check_question(target, place, q), notes.append, "questions"))
    return replace(data, questions=kept, notes=(*data.notes, *notes)) if notes else data


def _check_question(target: ModelInfo, place: str, question: Question) -> Question:
    """Return the question. Raise UserError if the template rejects or omits messages, or there is no room to answer."""
    with prefixed(place):
        text = target.chat_text(question.messages(), question.tools)
        if question.tools and text == target.chat_text(question.messages()):
            raise UserError("the chat template omits tools; remove them or use another --chat-template")
        for message in question.history:
            calls = [str((call.get("function") or call).get("name") or "") for call in message.tool_calls]
            stated = message.role == "assistant" or (message.content or "").strip() in text
            if not stated:  # a template may escape it, as JSON does
                other = (replace(m, content=f"{m.content}.") if m is message else m for m in question.history)
                stated = target.chat_text(replace(question, history=tuple(other)).messages(), question.tools) != text
            if not (stated and all(name in text for name in calls)):
                omitted = f"the {message.role} message or its tool calls"
                raise UserError(f"the chat template omits {omitted}; remove it or use another --chat-template")
    tokens = len(target.tokenizer(text, add_special_tokens=False)["input_ids"])
    if tokens >= (most := target.context_length):
        raise UserError(f"{place} has {tokens} tokens, too long for the context of {target.name!r} ({most})")
    return question


def limits(target: Target, max_new_tokens: int, stop: Sequence[str] = ()) -> StopParams:
    """Return the stop parameters: EOS tokens, stop texts, `max_new_tokens`. Raise UserError as `stop_ids` does."""
    special = stop_ids(target.tokenizer, stop)
    return StopParams(
        max_new_tokens, target.eos_ids.union(special.values()), tuple(x for x in stop if x not in special)
    )


def stop_ids(tokenizer: Any, stop: Sequence[str]) -> dict[str, int]:
    """Return the stop texts that are exactly one special token, with its id.

    Raise UserError for a text with a special token among other characters, which would never match.
    """
    special = special_tokens(tokenizer) if stop else {}
    for text in stop:
        inside = [token for token in special if token in text]
        if inside and text not in special:
            raise UserError(
                f"--stop {text!r} contains the special token {max(inside, key=len)!r}; give the token alone or omit it"
            )
    return {text: special[text] for text in stop if text in special}


def special_tokens(tokenizer: Any) -> dict[str, int]:
    """Return text -> id of every token omitted from decoded text; empty without a tokenizer."""
    if tokenizer is None:
        return {}
    named = {token: tokenizer.convert_tokens_to_ids(token) for token in tokenizer.all_special_tokens}
    added = {str(token): i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return {token: i for token, i in {**added, **named}.items() if token and i is not None}


MOST_SAMPLES = 10_000_000  # the schedule is in memory


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked run."""

    config: RunConfig  # with the baselines of its methods
    suite: Suite
    data: SuiteData
    options: dict[str, Any]  # of each method, by label
    advised: dict[str, Mapping[str, Any]]  # of each method, by label: options that the drafter's folder sets
    device: str  # resolved, as 'cpu'
    dtype: str  # resolved, as 'float32'
    samples: int  # of the whole run
    notes: tuple[str, ...] = ()  # for the user, one sentence each
    loaded: Target | None = None  # the model, if it was given as an object
    dtype_choice: str = ""  # reason of the dtype, if it was measured

    def whole_suite(self) -> SuiteData:
        """Return the questions of the suite without a limit."""
        info = _model_info(self.config, self.loaded)
        return self.suite.load(suite_request(self.config.categories, 0, self.config.data, info, self.config.columns))


def check(
    config: RunConfig, output: OutputOptions, loaded: Target | None = None, note: Callable[[str], None] = lambda _: None
) -> Plan:
    """Check a run without writing files: cheap checks first, the model before the questions. Raise UserError.

    note: called at once with notes for the user, also if a later check fails.
    """
    if output.resume and (output.out / MANIFEST).is_file():  # before missing methods of plugin files are reported
        check_same_plugins(output.out, read_manifest(output.out)["config"], config.as_dict())
    used: tuple[str, ...] = ()
    if loaded is None:
        check_divided(config.model, config.device, config.engine, config.quantize)
        config, used = with_published_drafters(config, output.optional)
    config, dropped = drop_unsupported(config, output.optional, loaded)
    notes = (*used, *dropped)
    for text in notes:
        note(text)
    config = with_references(config)
    suite = registry.load_suite(config.suite)
    suite.run_code = config.run_code
    device, begun = resolve_device(config.device) if loaded is None else loaded.device_names, None
    resolve_dtype(config.dtype, device)
    if loaded is None:
        check_engine(config.engine, device)
        check_quantize(config.quantize, device, config.dtype)
    if check_out(output):
        begun = read_run(output.out).manifest
        check_same_config(output.out, begun["config"], config.as_dict())
    elif output.resume:
        note(f"nothing to resume in {output.out}; starting the run")
    if loaded is None:
        check_model(config.model)
    info, advised = check_methods(config, loaded)
    options = {spec.label: registry.method_options(spec) for spec in config.methods}
    dtype, choice = _dtype(config, device, info, loaded, begun)
    check_template(info.tokenizer, info.name, info.template_variables)
    stop_ids(info.tokenizer, config.stop)
    data = suite.load(suite_request(config.categories, config.limit, config.data, info, config.columns))
    check_questions(data)
    given, data = data, usable_questions(info, data)
    if config.data is None:  # otherwise the run prints all notes on the data
        for text in data.notes[len(given.notes) :]:
            note(text)
    samples = count_samples(config, data, len(options), "--batch-size")
    return Plan(config, suite, data, options, advised, device, dtype, samples, notes, loaded, choice)


def count_samples(config: RunConfig, data: SuiteData, methods: int, option: str) -> int:
    """Return the number of samples. Raise UserError for too many, or for more in flight than there are prompts."""
    prompts = sum(len(q.turns) for q in data.questions)
    samples, in_flight = prompts * config.repeats * methods, max(config.concurrency, default=0)
    if in_flight > prompts:
        raise UserError(f"{option} {in_flight}: the suite has only {prompts} prompt{'' if prompts == 1 else 's'}")
    if samples > MOST_SAMPLES:
        raise UserError(f"the run would have {samples:,} samples, more than {MOST_SAMPLES:,}; use fewer --repeats")
    return samples


def check_methods(config: RunConfig, loaded: Target | None = None) -> tuple[ModelInfo, dict[str, Mapping[str, Any]]]:
    """Check every method with the model's info, without weights; return the info and each method's advised options."""
    info, advised = _model_info(config, loaded), dict[str, Mapping[str, Any]]()
    for spec in config.methods:
        with _naming_preset(spec, config):
            advice = registry.method_class(spec.name).check(registry.method_options(spec), info)
            advised[spec.label] = dict(advice or {})
    return info, advised


def with_published_drafters(config: RunConfig, optional: Collection[str]) -> tuple[RunConfig, tuple[str, ...]]:
    """Give each method of a hub model without weights its published ones; return the configuration and notes on them.

    optional: labels of methods that nobody named, which get none: `all` must not download every drafter.
    """
    methods, notes = list[MethodSpec](), []
    for spec in config.methods:
        made, note = (spec, "") if spec.label in optional else with_published_drafter(spec, config.model)
        if note and made.label in (other.label for other in config.methods):
            raise UserError(f"method {made.label!r} is given twice: its drafter is the published one")
        methods.append(made)
        notes += [note] if note else []
    return replace(config, methods=tuple(methods)), tuple(notes)


def drop_unsupported(
    config: RunConfig, optional: Collection[str], loaded: Target | None = None
) -> tuple[RunConfig, tuple[str, ...]]:
    """Drop optional methods that do not support the model; return the configuration and a note on each."""
    if not optional:
        return config, ()
    info = _model_info(config, loaded)
    kept, notes = [], []
    for spec in config.methods:
        try:
            if spec.label in optional:
                with _naming_preset(spec, config):
                    registry.method_class(spec.name).check(registry.method_options(spec), info)
            kept.append(spec)
        except UserError as error:
            notes.append(f"{spec.label} is left out: {error}")
    return replace(config, methods=tuple(kept)), tuple(notes)


def with_references(config: RunConfig) -> RunConfig:
    """Add the reference of every method to the configuration.

    Raise UserError for a reference that is not autoregressive.
    """
    specs = {spec.label: spec for spec in config.methods}
    for spec in config.methods:
        kind = registry.method_class(spec.name)
        with _naming_preset(spec, config):
            reference = reference_spec(kind, registry.method_options(spec))
        check_reference(kind, registry.method_class(reference.name))
        specs.setdefault(reference.label, reference)
    return replace(config, methods=tuple(specs.values()))


@contextmanager
def _naming_preset(spec: MethodSpec, config: RunConfig) -> Iterator[None]:
    """Name a method and its preset in errors of its options and of its code."""
    try:
        with plugin_code(f"method {spec.label!r}"):
            yield
    except UserError as error:
        files = "".join(f" (preset {preset.file})" for preset in config.presets if preset.method == spec.name)
        raise UserError(f"{error}{files}") from error


def _model_info(config: RunConfig, loaded: Target | None) -> ModelInfo:
    """Return the loaded model, or the info from its files."""
    if loaded is not None:
        return loaded
    info = load_model_info(config.model, trust_remote_code=config.trust_remote_code, chat_template=config.chat_template)
    info.template_variables = json.loads(config.chat_template_kwargs or "{}")
    info.device_type = device_class(resolve_device(config.device))
    return info


def _dtype(
    config: RunConfig, device: str, info: ModelInfo, loaded: Target | None, begun: Mapping[str, Any] | None
) -> tuple[str, str]:
    """Return the compute dtype's name, and the reason if it was measured. begun: manifest of a resumed run."""
    if loaded is not None:
        return loaded.number_format, ""
    if begun is not None and config.dtype == "auto":
        return str(begun["model"]["dtype"]), ""
    return chosen_dtype(config.dtype, device, config.model, lambda: info.config, config.quantize != "none")
