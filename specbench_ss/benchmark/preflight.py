"""What a run would do, with every mistake of the user that can be found without loading the model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from specbench_ss import registry
from specbench_ss.benchmark.requests import check_history, check_ids, check_room, check_texts, stop_ids, suite_request
from specbench_ss.decoding.engines import check_engine
from specbench_ss.decoding.outline import Outline
from specbench_ss.decoding.references import check_reference, reference_spec
from specbench_ss.decoding.target import Target
from specbench_ss.errors import UserError
from specbench_ss.method_spec import MethodSpec
from specbench_ss.models.chat_templates import check_template
from specbench_ss.models.devices import device_class, resolve_device, resolve_dtype
from specbench_ss.models.dividing import check_divided
from specbench_ss.models.faster_dtype import chosen_dtype
from specbench_ss.models.loading import outline_of
from specbench_ss.models.model_folder import check_model
from specbench_ss.models.quantising import check_quantize
from specbench_ss.runs.config import RunConfig, RunTarget
from specbench_ss.runs.manifest_reading import MANIFEST, check_same_config, check_same_plugins, read_manifest
from specbench_ss.runs.run_directory import check_out, read_run
from specbench_ss.runs.suite import Suite, SuiteData

MOST_SAMPLES = 10_000_000  # the schedule is held in memory


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run will do.

    config: with the references that its methods need. device, dtype: as resolved, 'cpu', 'float32'. options: of each
    method, by label. samples: of the whole run. notes: what the user should know of it, a sentence each. loaded: the
    model, where it was given as one and not as a name. dtype_choice: why this dtype, in words, where it was measured.
    """

    config: RunConfig
    suite: Suite
    data: SuiteData
    options: dict[str, Any]
    device: str
    dtype: str
    samples: int
    notes: tuple[str, ...] = ()
    loaded: Target | None = None
    dtype_choice: str = ""


def check(
    config: RunConfig, where: RunTarget, loaded: Target | None = None, note: Callable[[str], None] = lambda _: None
) -> Plan:
    """Raises UserError, the cheap checks first and the model's before the questions'. Leaves nothing behind.

    note: told at once what the user should know, also where a later check fails.
    """
    if where.resume and (where.out / MANIFEST).is_file():  # before methods are missed that only a file defines
        check_same_plugins(where.out, read_manifest(where.out)["config"], config.as_dict())
    if loaded is None:
        check_divided(config.model, config.device, config.engine, config.quantize)
    config, notes = without_unfit(config, where.optional, loaded)
    for text in notes:
        note(text)
    config = with_references(config)
    options = {spec.label: _options(spec, config) for spec in config.methods}
    suite = registry.load_suite(config.suite)
    device, begun = resolve_device(config.device) if loaded is None else loaded.device_names, None
    resolve_dtype(config.dtype, device)
    if loaded is None:
        check_engine(config.engine, device)
        check_quantize(config.quantize, device, config.dtype)
    if check_out(where):
        begun = read_run(where.out).manifest
        check_same_config(where.out, begun["config"], config.as_dict())
    elif where.resume:
        note(f"nothing to resume in {where.out}: the run begins")
    if loaded is None:
        check_model(config.model)
    outline = check_methods(config, loaded)
    dtype, choice = _dtype(config, device, outline, loaded, begun)
    check_template(outline.tokenizer, outline.name)
    stop_ids(outline.tokenizer, config.stop)
    data = _questions(config, suite, outline)
    check_ids(data)
    check_texts(data)
    check_history(outline, data)
    check_room(outline, data)
    prompts = sum(len(q.turns) for q in data.questions)
    if config.concurrency and max(config.concurrency) > prompts:
        raise UserError(f"--batch-size {max(config.concurrency)}: only {prompts} prompts are asked")
    samples = prompts * config.repeats * len(options)
    if samples > MOST_SAMPLES:
        raise UserError(f"the run would have {samples:,} samples; at most {MOST_SAMPLES:,} are made: fewer --repeats")
    return Plan(config, suite, data, options, device, dtype, samples, notes, loaded, choice)


def check_methods(config: RunConfig, loaded: Target | None = None) -> Outline:
    """What can be known of the model without its weights, once every method says that it could decode with it."""
    outline = _outline(config, loaded)
    for spec in config.methods:
        with _naming_preset(spec, config):
            registry.method_class(spec.name).check(registry.method_options(spec), outline)
    return outline


def without_unfit(
    config: RunConfig, optional: Collection[str], loaded: Target | None = None
) -> tuple[RunConfig, tuple[str, ...]]:
    """Without the optional methods that cannot decode with the model, and a sentence on each of these."""
    if not optional:
        return config, ()
    outline = _outline(config, loaded)
    kept, notes = [], []
    for spec in config.methods:
        try:
            if spec.label in optional:
                registry.method_class(spec.name).check(_options(spec, config), outline)
            kept.append(spec)
        except UserError as error:
            notes.append(f"{spec.label} is left out: {error}")
    return replace(config, methods=tuple(kept)), tuple(notes)


def with_references(config: RunConfig) -> RunConfig:
    """Add the reference of every method to the configuration.

    Raises UserError for a reference that is not autoregressive.
    """
    specs = {spec.label: spec for spec in config.methods}
    for spec in config.methods:
        kind = registry.method_class(spec.name)
        reference = reference_spec(kind, _options(spec, config))
        check_reference(kind, registry.method_class(reference.name))
        specs.setdefault(reference.label, reference)
    return replace(config, methods=tuple(specs.values()))


def _options(spec: MethodSpec, config: RunConfig) -> Any:
    with _naming_preset(spec, config):
        return registry.method_options(spec)


@contextmanager
def _naming_preset(spec: MethodSpec, config: RunConfig) -> Iterator[None]:
    """What is wrong with a method's options may stand in a preset, which is then named."""
    try:
        yield
    except UserError as error:
        files = "".join(f" (preset {preset.file})" for preset in config.presets if preset.method == spec.name)
        raise UserError(f"{error}{files}") from error


def _outline(config: RunConfig, loaded: Target | None) -> Outline:
    """The model as far as it is known: loaded already, or by its files."""
    if loaded is not None:
        return loaded
    found = outline_of(config.model, trust_remote_code=config.trust_remote_code, chat_template=config.chat_template)
    found.device_type = device_class(resolve_device(config.device))
    return found


def _dtype(
    config: RunConfig, device: str, outline: Outline, loaded: Target | None, begun: Mapping[str, Any] | None
) -> tuple[str, str]:
    """The name of the dtype to compute in, and words where it was measured. begun: manifest of the run that goes on."""
    if loaded is not None:
        return loaded.number_format, ""
    if begun is not None and config.dtype == "auto":
        return str(begun["model"]["dtype"]), ""
    return chosen_dtype(config.dtype, device, config.model, lambda: outline.config, config.quantize != "none")


def _questions(config: RunConfig, suite: Suite, outline: Outline) -> SuiteData:
    return suite.load(suite_request(config.categories, config.limit, config.data, outline))
