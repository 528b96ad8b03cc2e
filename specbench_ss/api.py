"""Public Python interface: load a model and a method, decode, and run a benchmark.

A mistake in what is given is a `UserError`, one clear line.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import torch

from specbench_ss import registry
from specbench_ss.bench import preflight
from specbench_ss.bench import preflight as requests
from specbench_ss.bench import ray as sharded
from specbench_ss.bench import server_run as served
from specbench_ss.bench.build_config import asked_run
from specbench_ss.bench.runner import measure
from specbench_ss.bench.sessions import run_sessions
from specbench_ss.engine import generate as loop
from specbench_ss.engine.checks import check_target
from specbench_ss.engine.decoder import Decoder, Generation
from specbench_ss.engine.generate import StopParams
from specbench_ss.engine.sampling import TOKEN, SamplingParams, VerificationRule
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.models.devices import device_names
from specbench_ss.models.load import hash_weights, load_target
from specbench_ss.options import MethodSpec, checked_value, takes_none, type_name, value_text
from specbench_ss.results.analysis import Results, load_run
from specbench_ss.runs.run_options import PYTHON, AtLeast0, Count, RunOptions, Seed, given_options, keywords


def load_model(
    model: str | Path = RunOptions.model,
    *,
    dtype: str | torch.dtype = RunOptions.dtype,
    device: str | torch.device = RunOptions.device,
    engine: str = RunOptions.engine,
    quantize: str = RunOptions.quantize,
    chat_template: str | Path | None = RunOptions.chat_template,
    trust_remote_code: bool = RunOptions.trust_remote_code,
) -> Target:
    """Return a target: a causal language model with its tokenizer, ready for decoding methods.

    model: `lab`, which is part of the package, the name of a fetched model, a folder, a GGUF file, or a hub id.
    dtype: float32, bfloat16, float16, float16-weights (rounded weights, float32 arithmetic, on CPUs), or auto:
    bfloat16 on a GPU, on a CPU the fastest one as measured. device: auto, cpu, cuda or cuda:N, or several GPUs that
    layers are divided over: cuda:0,cuda:1 or cuda:all. engine: eager, graph, which replays steps by CUDA
    graphs, or auto: graph on one CUDA device if the model supports it, else eager.
    quantize: none, int8, int4 or nf4, for weights of linear layers.
    chat_template: plain, vicuna, llama-2 or a Jinja file, instead of the tokenizer's own.
    Raises UserError where the model cannot be loaded.

    A model that is loaded already becomes a target by `Target(hf_model, tokenizer)`.
    """
    device_names(device)
    return load_target(
        str(model),
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        engine=engine,
        quantize=quantize,
        trust_remote_code=trust_remote_code,
        chat_template=None if chat_template is None else str(chat_template),
    )


def load_method(method: str | type[Decoder], target: Target, **options: Any) -> Decoder:
    """Return a decoding method with its options and weights, bound to a target.

    method: a registered name (`ssbench methods` lists them), which may carry options as on the command line
    (`pld[length=4]`), or a Decoder class. options: Python values by the names of the method's options. Raises UserError
    for an unknown name or option, a value that the option cannot have, and weights that are missing or do not fit.
    """
    if not isinstance(target, Target):
        raise UserError(f"a method decodes with a target, as load_model gives it, not with {_kind(target)}")
    kind, name, given = _method(method)
    twice = [option for option in options if option in given]
    if twice:
        raise UserError(f"option {twice[0]!r} is given twice: in {method!r} and as {twice[0]}=")
    owner = f"method {name!r}"
    _check_none(kind.Options, options, owner)
    texts = given | {option: value_text(value) for option, value in options.items()}
    parsed = registry.read_method_options(kind, texts)
    kind.check(parsed, target)
    return kind.load(target, parsed)


def _method(method: str | type[Decoder]) -> tuple[type[Decoder], str, dict[str, str]]:
    """Return the class, its name, and the options that the name includes."""
    if isinstance(method, str):
        spec = MethodSpec.parse(method)
        return registry.method_class(spec.name), spec.name, spec.options
    if not (isinstance(method, type) and issubclass(method, Decoder)):
        raise UserError(f"a method is a name or a subclass of Decoder, not {_kind(method)}")
    name = getattr(method, "name", None)
    problem = registry.method_problem(method, name)
    if problem:
        raise UserError(f"method {method.__name__}: {problem}")
    return method, str(name), {}


def _check_none(kind: type[Any], options: Mapping[str, Any], owner: str) -> None:
    """Raise UserError for a None that an option cannot have; as text it might be a file of that name."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if options.get(name, ...) is None and not takes_none(hint):
            raise UserError(f"{owner}: option {name}=None is not {type_name(hint)}")


def generate(
    decoder: Decoder,
    ids: Sequence[int] | torch.Tensor,
    *,
    max_new_tokens: int = 40,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    verification: VerificationRule = TOKEN,
    stop_strings: str | Sequence[str] = (),
    stop_ids: Sequence[int] | frozenset[int] | None = None,
) -> Generation:
    """Return the output for one prompt: its tokens, and the counts and times of every step.

    ids: the prompt, a list of token ids or a tensor [S] or [1, S]. temperature 0 is greedy; top_p 1 and top_k 0 leave
    these filters out. verification: of sampled chains, token or block. stop_strings: texts that end an answer with the
    token that completes one. stop_ids: tokens that end it, the model's own end tokens unless given; () is none. Raises
    UserError for a prompt that is empty, too long for the model's context or no prompt of this model, and for a setting
    that it cannot have.
    """
    if not isinstance(decoder, Decoder):
        raise UserError(f"generate takes a decoder, as load_method gives it, not {_kind(decoder)}")
    target = decoder.target
    prompt = _prompt(ids, target.vocab_size)
    limits = _limits(target, checked_value("max_new_tokens", Count, max_new_tokens), stop_strings, stop_ids)
    sampling = SamplingParams(
        checked_value("temperature", float, temperature),
        checked_value("top_p", float, top_p),
        checked_value("top_k", AtLeast0, top_k),
        checked_value("seed", Seed, seed),
        checked_value("verification", VerificationRule, verification),
    )
    return loop.generate(decoder, prompt, limits, sampling)


def _prompt(ids: Any, vocab_size: int) -> list[int]:
    """Return token ids as a plain list. Raise UserError for a value that is no token of the vocabulary."""
    if isinstance(ids, (str, Mapping)) or not (hasattr(ids, "tolist") or isinstance(ids, Iterable)):
        raise UserError(f"a prompt is token ids, not {_kind(ids)}: see target.encode_chat and target.tokenizer")
    listed = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if not isinstance(listed, list):
        raise UserError("a prompt is token ids: whole numbers, a list or a tensor [S] or [1, S] of them")
    if listed and isinstance(listed[0], list):
        if len(listed) > 1:
            raise UserError(f"one prompt at a time: these are {len(listed)}")
        listed = listed[0]
    try:
        prompt = [operator.index(token) for token in listed]
    except TypeError:
        raise UserError("a prompt is token ids: whole numbers, a list or a tensor [S] or [1, S] of them") from None
    strange = [token for token in prompt if not 0 <= token < vocab_size]
    if strange:
        raise UserError(f"token {strange[0]} is not in the model's vocabulary of {vocab_size:,}")
    return prompt


def _limits(target: Target, max_new_tokens: int, stop_strings: str | Sequence[str], stop_ids: Any) -> StopParams:
    """Return the stop conditions of a run, with other end tokens if they are given."""
    if not isinstance(stop_ids, Iterable | None):
        raise UserError(f"stop_ids must be a list, not {stop_ids!r}")
    texts = [stop_strings] if isinstance(stop_strings, str) else stop_strings
    stops = checked_value("stop_strings", list[str], texts) or []
    if "" in stops:
        raise UserError("a stop string is text that is not empty")
    if stops and target.tokenizer is None:
        raise UserError(f"stop strings need a tokenizer, and {target.name!r} has none: Target(model, tokenizer)")
    limits = requests.limits(target, max_new_tokens, stops)
    if stop_ids is None:
        return limits
    of_texts = requests.stop_ids(target.tokenizer, stops).values()
    return replace(limits, stop_ids=frozenset(checked_value("stop_ids", AtLeast0, i) for i in stop_ids).union(of_texts))


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"an object of type {type(value).__name__}"


def run(methods: str | Sequence[str] | None = None, **options: Any) -> Results:
    """Decode a suite's questions with several methods, as `ssbench run` does, without printing.

    methods: `ss,medusa` or a list; the baseline `ar` is always added. options: those of the command line, under the
    same names, with lists and numbers in place of texts with commas. set: `{"ss.k": 2}` or `{"ss": {"k": 2}}`. model:
    also a target that is loaded already, which then decides dtype, device and engine. `timeout`, in seconds, works in
    the main thread alone. Writes the same run directory, by default a new one under `runs/`, and returns it as
    `load_run` does. Warnings of the command are in `manifest["warnings"]`.

    Raises UserError for every mistake that the command reports, before anything is measured. After an interruption,
    `resume=True` with the same `out` continues the run.
    """
    given = {"methods": methods, **options}
    loaded = None if isinstance(given.get("model", ""), (str, Path)) else _loaded(given)
    named = given if loaded is None else {**given, "model": loaded.name}
    asked = RunOptions(**given_options(RunOptions, named, PYTHON, "run()"))
    if asked.has_both:
        raise UserError("run() measures methods or servers: call it once for each, then compare by `ssbench parity`")
    config, where, access = asked_run(asked)
    command = [_called(given)]
    if access is not None:
        return _finished(served.measure(served.check(config, where), where, access, command))
    if loaded is not None:
        if where.workers is not None:
            raise UserError("executor='ray' loads the model in its workers: give model= as a name or a folder")
        quantize = loaded.quantised.partition(":")[0] or "none"
        config = replace(config, dtype=loaded.number_format, device=loaded.device_names, quantize=quantize)
    if where.sessions > 1:
        if loaded is not None:
            raise UserError("sessions load the model in processes of their own: give model= as a name or a folder")
        run_sessions(asked, where, command, shown=False)
        return _finished(where.out)
    plan = preflight.check(config, where, loaded)
    make = measure if where.workers is None else sharded.measure
    return _finished(make(plan, where, command))


run.__signature__ = keywords(RunOptions, "methods")  # type: ignore[attr-defined]


def _finished(path: Path) -> Results:
    """Return the results of a run that was just made, and write its Parquet files."""
    results = load_run(path)
    results.write_parquet()
    return results


def _loaded(given: Mapping[str, Any]) -> Target:
    """Return the model that was given as a target, with its hash. Raise UserError for what is none."""
    target = given["model"]
    if not isinstance(target, Target):
        raise UserError(f"model= is a name, a folder or a target, as load_model gives it, not {_kind(target)}")
    for name in inspect.signature(load_model).parameters:
        if name != "model" and given.get(name) not in (None, getattr(RunOptions, name)):
            raise UserError(f"{name}= has no effect on a model that is loaded; give it to load_model")
    try:
        target.weights_hash = target.weights_hash or hash_weights(target.model)
    except NotImplementedError:  # of classes of weights that hold other things than numbers
        raise UserError("model=: its weights cannot be read: quantise with load_model(quantize=...)") from None
    check_target(target)
    return target


def _called(given: Mapping[str, Any]) -> str:
    """Return the call as text, without options that have their defaults."""
    words = [] if given["methods"] is None else [repr(given["methods"])]
    for name, value in given.items():
        shown = f"<{value.name}>" if isinstance(value, Target) else value
        if name != "methods" and value is not None and shown != getattr(RunOptions, name):
            words.append(f"{name}={(str(shown) if isinstance(shown, Path) else shown)!r}")
    return f"specbench_ss.run({', '.join(words)})"
