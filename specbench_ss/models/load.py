"""Loading of targets and tokenizers, from safetensors or weights-only files."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from huggingface_hub import constants, try_to_load_from_cache
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, GenerationConfig
from transformers.utils import logging

from specbench_ss.engine.architectures import ModelInfo, check_config
from specbench_ss.engine.checks import check_target
from specbench_ss.engine.engines import check_engine, use_engine
from specbench_ss.engine.numerics import HALF_WEIGHTS
from specbench_ss.engine.target import Target
from specbench_ss.engine.weights import Quantization
from specbench_ss.errors import UserError, did_you_mean, error_text, first_line
from specbench_ss.models.bundled import bundled_drafters
from specbench_ss.models.cpu_dtype import chosen_dtype
from specbench_ss.models.devices import check_divided, device_map, resolve_device, resolve_dtype, without_hooks
from specbench_ss.models.gguf import (
    clear_gguf_state,
    dequantize_arguments,
    gguf_file,
    set_pre_tokenizer,
    source_arguments,
)
from specbench_ss.models.quantize import check_quantize, quantise
from specbench_ss.models.resolve import (
    check_files,
    check_model,
    check_reachable,
    find_folder,
    is_lab,
    model_origin,
    weight_files,
)
from specbench_ss.time_limit import TimeIsOver, memory_limit, time_limit
from specbench_ss.user_files import read_json

FOLDER = Path(__file__).parents[1] / "templates"
NAMES = ("plain", "vicuna", "llama-2")
CHOICES = "|".join((*NAMES, "FILE"))
TEMPLATE_S, TEMPLATE_BYTES = 5.0, 1 << 30  # limits of filling a chat template, which may loop for ever
_TEST_MESSAGES = [  # several turns, as in a run
    {"role": "user", "content": "first question"},
    {"role": "assistant", "content": "its answer"},
    {"role": "user", "content": "second question"},
]


def template_text(given: str) -> str:
    """Return the Jinja text of a template's name or file. Raises UserError for anything else."""
    path = FOLDER / f"{given}.jinja" if given in NAMES else Path(given)
    if not path.is_file():
        hint = did_you_mean(given, NAMES)
        raise UserError(f"--chat-template {given!r} is neither {', '.join(NAMES)} nor a file{hint}")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read --chat-template {given}: {error}") from error


def check_template(tokenizer: Any, model: str, variables: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Raise UserError if the tokenizer has no chat template, an invalid one, or one without one of the variables."""
    if (template := getattr(tokenizer, "chat_template", None)) is None:
        raise UserError(f"the tokenizer of {model} has no chat template; use --chat-template {CHOICES}")
    if unused := [name for name in variables if name not in str(template)]:
        raise UserError(f"--chat-template-kwargs: the chat template of {model} has no variable {unused[0]!r}")
    arguments = {"add_generation_prompt": True, "tokenize": False, **variables}
    endless = f"the chat template of {model} does not work: it takes more than {TEMPLATE_S:.0f} s"
    seconds = TEMPLATE_S if threading.current_thread() is threading.main_thread() else None
    try:
        with time_limit(seconds, lambda: endless), memory_limit(TEMPLATE_BYTES):
            rendered = tokenizer.apply_chat_template(_TEST_MESSAGES, **arguments)
    except TimeIsOver:
        raise UserError(endless) from None
    except Exception as error:  # Jinja's errors and those that a template raises
        raise UserError(f"the chat template of {model} does not work: {error_text(error)}") from error
    questions = [message["content"] for message in _TEST_MESSAGES if message["role"] == "user"]
    missing = next((text for text in questions if text not in rendered), None)
    if missing is not None:
        raise UserError(f"the chat template of {model} omits user messages: {missing!r} is not in {rendered[:999]!r}")


def template_hash(tokenizer: Any) -> str | None:
    """Return a short sha256 of the tokenizer's chat template, or None."""
    template = getattr(tokenizer, "chat_template", None)
    if template is None:
        return None
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:16]


HASH_WORDS = 1 << 18  # 64-bit words per checksum: 2 MiB, which fit a cache; part of the hash's definition


def hash_weights(model: Any) -> str:
    """Return a short sha256 over the names, shapes and a checksum of all bits of every parameter.

    The checksum is the sum of the tensor's 64-bit words, each times an odd random number, modulo 2^64. It is exact,
    equal on every device, and differs if any single word changes. One pass over memory on the tensor's own device:
    hundredths of a second for the lab's models, a few seconds for 7B parameters on a CPU, less on a GPU.
    """
    return hash_tensors(dict(model.named_parameters()))


def hash_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """Hash any tensors as `hash_weights` does, such as buffers."""
    digest = hashlib.sha256()
    for name, p in sorted(tensors.items()):
        digest.update(f"{name}{tuple(p.shape)}".encode())
        for checksum in _checksums(p.detach()):
            digest.update(checksum.to_bytes(8, "little", signed=True))
    return digest.hexdigest()[:16]


def _checksums(tensor: torch.Tensor) -> list[int]:
    """Return one checksum per HASH_WORDS words of a tensor, padded with zeros."""
    bits = tensor.reshape(-1).view(torch.uint8)
    if bits.numel() % 8 or bits.storage_offset() % 8:
        bits = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).clone()
    bits64 = bits.view(torch.int64)
    factors = _odd_factors(min(HASH_WORDS, len(bits64))).to(tensor.device)
    sums = [(part * factors[: len(part)]).sum() for part in bits64.split(HASH_WORDS)]
    return torch.stack(sums).tolist() if sums else []


def _odd_factors(n: int) -> torch.Tensor:
    """Return the first n of a fixed sequence of odd random int64, independent of library versions."""
    return torch.from_numpy((np.random.PCG64(0).random_raw(n) | 1).view(np.int64))


TOKENIZER_FILES = ("tokenizer.json", "vocab*", "*.model", "*.tiktoken")  # files with a vocabulary


def load_model_info(model: str, *, trust_remote_code: bool = False, chat_template: str | None = None) -> ModelInfo:
    """Return configuration and tokenizer of a target. Raises UserError if it cannot be loaded.

    For a hub id, both are downloaded if they are not in the cache.
    """
    template = None if chat_template is None else template_text(chat_template)
    check_model(model)
    folder = find_folder(model)
    source = _source(model, folder)
    config = config_of(source, trust_remote_code)
    with _loading(source):
        info = ModelInfo(config, None, model, folder)
    info.tokenizer = tokenizer_of(source, trust_remote_code, template)
    check_vocabulary(info.tokenizer, config, model)
    info.is_lab, info.bundled_drafters = is_lab(model), bundled_drafters(model)
    return info


def load_target(
    model: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    engine: str = "eager",
    quantize: str = "none",
    trust_remote_code: bool = False,
    chat_template: str | None = None,
    chat_template_kwargs: str | None = None,
    generation_config: str = "auto",
    nf4: bool = False,
) -> Target:
    """Load a target: an embedded or fetched model by name, a folder, a GGUF file, or a hub id.

    Raises UserError if it cannot be loaded, or if its logits after a short prompt are not finite.

    Args:
        model: name, folder, file or hub id.
        dtype: 'auto' is bfloat16 on a GPU and float32 for the lab; on a CPU the most precise of float32,
            float16-weights and bfloat16 that is nearly as fast as the fastest, measured once (`cpu_dtype`).
        device: one or several devices (`devices.device_names`).
        engine: one of `engines.ENGINES`.
        quantize: one of `quantize.QUANTIZE`; the target's hash is that of the original weights.
        trust_remote_code: allow code of the model's repository.
        chat_template: name or Jinja file of a template that replaces the tokenizer's.
        chat_template_kwargs: JSON object with variables of the chat template.
        generation_config: `none` leaves out the logits processors of the model's generation_config.json.
        nf4: load linear layers in 4 bits (NF4, double quantization) with bitsandbytes; compute in `dtype`.
    """
    template = None if chat_template is None else template_text(chat_template)
    check_divided(model, device, engine, quantize)
    device_name = resolve_device(device)
    resolve_dtype(dtype, device_name)
    check_engine(engine, device_name)
    check_quantize(quantize, device_name, dtype)
    check_model(model)
    folder = find_folder(model)
    source = _source(model, folder)
    config = config_of(source, trust_remote_code)
    kind, _ = chosen_dtype(dtype, device_name, model, lambda: config, quantize != "none")
    tokenizer = tokenizer_of(source, trust_remote_code, template)
    check_vocabulary(tokenizer, config, model)
    read = partial(load_model, source, resolve_dtype(kind, device_name), device_name, trust_remote_code, nf4)
    weights = read()
    if generation_config == "none":
        weights.generation_config = GenerationConfig(eos_token_id=weights.generation_config.eos_token_id)
    weights_hash = hash_weights(weights)  # before rounding: drafters were trained for the original model
    parameter_count, description = sum(p.numel() for p in weights.parameters()), quantise(weights, quantize)
    fp16_weights = kind == HALF_WEIGHTS and not nf4
    target = Target(weights, tokenizer, name=model, folder=folder, fp16_weights=fp16_weights)
    target.parameter_count = parameter_count
    if description:
        target.quantization = Quantization(description, partial(quantise, how=quantize), read)
    target.is_lab, target.origin, target.bundled_drafters = is_lab(model), model_origin(model), bundled_drafters(model)
    target.weights_hash, target.template_variables = weights_hash, json.loads(chat_template_kwargs or "{}")
    check_target(target)
    use_engine(target, engine)
    return target


def _source(model: str, folder: Path | None) -> str:
    """Return the folder, GGUF file or hub id to load the model from.

    Raises UserError for an uncached hub id while the hub is unreachable.
    """
    if folder is not None:
        return str(folder)
    if gguf_file(model) is None:
        check_reachable(model)
    return model


def config_of(source: str, trust_remote_code: bool = False) -> Any:
    """Return the model's configuration, for an adapter that of the adapted model.

    Raises UserError for one that cannot be read, or from which no model can be built.
    """
    _quiet()
    adapter_config = Path(source, "adapter_config.json")
    config_file = Path(source, "config.json")
    if adapter_config.is_file() and not (config_file.is_file() and "model_type" in read_json(config_file)):
        source = adapted_model(adapter_config)
    with _loading(source):
        with source_arguments(source) as arguments:
            config = AutoConfig.from_pretrained(**arguments, trust_remote_code=trust_remote_code)
        check_config(config)
        _check_size(config, source, trust_remote_code)
        return config


def _check_size(config: Any, source: str, trust_remote_code: bool) -> None:
    """Raise UserError for more parameters than the weight files can have.

    Builds the model without weights, which raises errors for values that do not go together.
    """
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    needed, file = sum(p.numel() for p in model.parameters()), gguf_file(source)
    size = sum(file.stat().st_size for file in ([file] if file is not None else weight_files(Path(source))))
    per_byte = 8 if file or getattr(config, "quantization_config", None) else 1  # quantized: at least one bit a weight
    if size and needed > size * per_byte:
        described = f"the configuration of model {source!r} describes {needed / 1e6:,.1f} M parameters"
        raise UserError(f"{described}, for which its weight files of {size / 1e6:,.1f} MB are too small")


def check_vocabulary(tokenizer: Any, config: Any, model: str) -> None:
    """Raise UserError for a tokenizer without tokens, or with more than the model has, apart from added ones."""
    with _loading(model):
        tokenizer("1 a")
        ids = set(tokenizer.get_vocab().values()) - set(getattr(tokenizer, "added_tokens_decoder", ()))
        if not ids or max(ids) >= config.vocab_size:
            has = f"ids up to {max(ids):,}, the model {config.vocab_size:,} tokens" if ids else "no tokens"
            raise UserError(f"the tokenizer of {model} has {has}; use the one that the model was trained with")


def adapted_model(adapter: Path) -> str:
    """Return the folder or hub id of an adapter's base model. Raises UserError if none is named."""
    named = read_json(adapter).get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        raise UserError(f"{adapter} lacks base_model_name_or_path, the model that it adapts")
    if not Path(named).exists():
        check_reachable(named)
    return named


def tokenizer_of(source: str, trust_remote_code: bool = False, template: str | None = None) -> Any:
    """Load the tokenizer of a folder, GGUF file or hub id, with `template` as its chat template if given.

    Raises UserError if there is none.
    """
    _quiet()
    with _loading(source), source_arguments(source) as arguments:
        try:
            tokenizer = AutoTokenizer.from_pretrained(**arguments, trust_remote_code=trust_remote_code)
        except Exception as error:
            if Path(source).is_dir() and not _has_tokenizer(Path(source)):
                raise UserError(f"model {source!r} has no tokenizer: the folder has no tokenizer.json") from error
            raise
    file = gguf_file(source)
    if file is not None:
        set_pre_tokenizer(tokenizer, file)
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def _has_tokenizer(folder: Path) -> bool:
    return any(next(folder.glob(pattern), None) for pattern in TOKENIZER_FILES)


def _quiet() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def load_model(source: str, dtype: torch.dtype, device: str, trust_remote_code: bool = False, nf4: bool = False) -> Any:
    """Load a causal LM from a folder, GGUF file or hub id, without its tokenizer. device: one or several, resolved.

    Raises UserError if it cannot be loaded.
    """
    _quiet()
    file, several = gguf_file(source), "," in device
    if file is not None and nf4:
        raise UserError(f"a GGUF file cannot be loaded with nf4: {source!r}; its weights are dequantized")
    device_arguments = _device_arguments(source, device, dtype, trust_remote_code) if several else {}
    # otherwise transformers asks a third party to convert a hub model with only pickles; read at every call
    os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")
    auto: Any = AutoModelForCausalLM
    with _loading(source), source_arguments(source) as arguments:
        model, info = auto.from_pretrained(
            **arguments,
            dtype=dtype,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            **device_arguments,
            **(_nf4(dtype, device) if nf4 else {} if file is None else dequantize_arguments()),
        )
    _check_download(source)
    for name, stored, expected in sorted(info["mismatched_keys"])[:1]:
        raise UserError(f"model {source!r} has {name} of shape {list(stored)}, its configuration {list(expected)}")
    missing = [k for k in info["missing_keys"] if "rotary" not in k]
    if missing:
        raise UserError(f"model {source!r} lacks weights: {', '.join(sorted(missing)[:3])} ({len(missing)} in all)")
    if file is not None:
        clear_gguf_state(model, file)
    if several:
        return without_hooks(model)
    return model if nf4 else _to_device(model, source, device)


def _device_arguments(source: str, device: str, dtype: torch.dtype, trust_remote_code: bool) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for several devices. Raises UserError if memory is short."""
    config = config_of(source, trust_remote_code)
    return {"device_map": device_map(config, device.split(","), dtype, trust_remote_code)}


@contextmanager
def _loading(source: str) -> Iterator[None]:
    """Raise a UserError for any error of the block, which reads the named model."""
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":  # of Rust, in tokenizers
            raise
        raise _load_error(source, error) from error


def _load_error(source: str, error: BaseException) -> UserError:
    """Return a UserError for any of the loaders' many errors, all of which concern the named model."""
    _check_download(source)
    if isinstance(error, pickle.UnpicklingError) or "weights_only" in str(error):  # torch's own text advises to run it
        return UserError(f"cannot load model {source!r}: its weights have more than tensors and may run code")
    stated = isinstance(error, (OSError, ValueError, RuntimeError, ImportError))
    reason = "" if stated else "; a value in its files is 0 or of another kind than transformers expects"
    local = find_folder(source) is not None or gguf_file(source) is not None
    if constants.HF_HUB_OFFLINE and not local and not isinstance(try_to_load_from_cache(source, "config.json"), str):
        reason = "; the hub is offline, and its cache does not have the model"
    return UserError(f"cannot load model {source!r}: {first_line(error)}{reason}")


def _nf4(dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that quantize weights while they are loaded onto the device."""
    config: Any = BitsAndBytesConfig
    quantization = config(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": quantization, "device_map": {"": device}}


def _check_download(source: str) -> None:
    """Raise UserError for a damaged weight file in the hub's cache."""
    config = None if Path(source).exists() else try_to_load_from_cache(source, "config.json")
    if isinstance(config, str):
        check_files(Path(config).parent)


def _to_device(model: Any, source: str, device: str) -> Any:
    """Move the model to the device. Raises UserError if it does not fit."""
    try:
        return model.to(device)
    except (RuntimeError, MemoryError) as error:  # torch's out-of-memory errors are RuntimeErrors
        out_of_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        problem = "does not fit on" if out_of_memory else "cannot be moved to"
        raise UserError(f"model {source!r} {problem} device {device!r}: {first}") from error
