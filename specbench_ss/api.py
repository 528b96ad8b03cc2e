"""The functions of the public API that load a model and a method and decode; docs/api.md shows each in use.

Each imports what it needs when it is called. A mistake in what is given is a `UserError`, one clear line.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import torch

from specbench_ss import registry
from specbench_ss.benchmark import requests
from specbench_ss.decoding import loop
from specbench_ss.decoding.decoder import Decoder
from specbench_ss.decoding.generation import Generation
from specbench_ss.decoding.loop import Limits
from specbench_ss.decoding.sampling import Sampling
from specbench_ss.decoding.target import Target
from specbench_ss.errors import UserError
from specbench_ss.method_spec import MethodSpec
from specbench_ss.models.devices import device_names
from specbench_ss.models.loading import load_target
from specbench_ss.options import MOST_SEED, parse_options, plain_number, takes_none, type_name, value_text, whole_number


def load_model(
    model: str | Path = "lab",
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    engine: str = "auto",
    quantize: str = "none",
    chat_template: str | Path | None = None,
    trust_remote_code: bool = False,
) -> Target:
    """A target: a causal language model with its tokenizer, ready for decoding methods.

    model: `lab`, which is part of the package, `smollm2`, once it is fetched, a folder, a GGUF file, or a hub id.
    dtype: float32, bfloat16, float16, float16-weights (rounded weights, float32 arithmetic, on CPUs), or auto:
    bfloat16 on a GPU, on a CPU the fastest one as measured. device: auto, cpu, cuda or cuda:N, or several GPUs that
    layers are divided over: cuda:0,cuda:1 or cuda:all. engine: eager, graph, which replays steps by CUDA
    graphs, or auto: graph on one CUDA device where that proves itself when the model is loaded, else eager.
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
    """A decoding method with its options and weights, bound to a target.

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
    parsed = parse_options(kind.Options, texts, owner)
    kind.check(parsed, target)
    return kind.load(target, parsed)


def _method(method: str | type[Decoder]) -> tuple[type[Decoder], str, dict[str, str]]:
    """The class, its name, and the options that came with the name."""
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
    """Raises UserError for a None that an option cannot have; as text it might be a file of that name."""
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
    stop_strings: str | Sequence[str] = (),
    stop_ids: Sequence[int] | frozenset[int] | None = None,
) -> Generation:
    """The answer to one prompt: its tokens, and what every step did and took.

    ids: the prompt, a list of token ids or a tensor [S] or [1, S]. temperature 0 is greedy; top_p 1 and top_k 0 leave
    these filters out. stop_strings: texts that end an answer with the token that completes one. stop_ids: tokens that
    end it, the model's own end tokens unless given; () is none. Raises UserError for a prompt that is empty, too long
    for the model's context or no prompt of this model, and for a setting that it cannot have.
    """
    if not isinstance(decoder, Decoder):
        raise UserError(f"generate takes a decoder, as load_method gives it, not {_kind(decoder)}")
    target = decoder.target
    prompt = _prompt(ids, target.vocab_size)
    if whole_number("seed", seed, 0) > MOST_SEED:
        raise UserError(f"seed must be below 2**63, not {seed}")
    limits = _limits(target, whole_number("max_new_tokens", max_new_tokens, 1), stop_strings, stop_ids)
    numbers = plain_number("temperature", temperature), plain_number("top_p", top_p)
    sampling = Sampling(*numbers, whole_number("top_k", top_k, 0), seed)
    return loop.generate(decoder, prompt, limits, sampling)


def _prompt(ids: Any, vocab_size: int) -> list[int]:
    """Token ids as a plain list. Raises UserError for what is none of this vocabulary."""
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


def _limits(target: Target, max_new_tokens: int, stop_strings: str | Sequence[str], stop_ids: Any) -> Limits:
    """Where answers end, as in a run; with other end tokens where they are given."""
    for name, value in (("stop_strings", stop_strings), ("stop_ids", () if stop_ids is None else stop_ids)):
        if not isinstance(value, Iterable):
            raise UserError(f"{name} must be a list, not {value!r}")
    stops = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)
    if not all(isinstance(text, str) and text for text in stops):
        raise UserError("a stop string is text that is not empty")
    if stops and target.tokenizer is None:
        raise UserError(f"stop strings need a tokenizer, and {target.name!r} has none: Target(model, tokenizer)")
    limits = requests.limits(target, max_new_tokens, stops)
    if stop_ids is None:
        return limits
    of_texts = requests.stop_ids(target.tokenizer, stops).values()
    return replace(limits, stop_ids=frozenset(whole_number("stop_ids", i, 0) for i in stop_ids).union(of_texts))


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"an object of type {type(value).__name__}"
