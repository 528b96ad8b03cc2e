"""Loading of targets and tokenizers, from safetensors or weights-only files."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import try_to_load_from_cache
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from transformers.utils import logging

from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.engine.checks import check_target
from specbench_ss.engine.cpu_kernels import Quantization
from specbench_ss.engine.engines import check_engine, use_engine
from specbench_ss.engine.numerics import HALF_WEIGHTS
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError, did_you_mean, error_text, first_line
from specbench_ss.models.cpu_dtype import chosen_dtype
from specbench_ss.models.devices import check_divided, device_map, resolve_device, resolve_dtype, without_hooks
from specbench_ss.models.gguf import as_float, divide_text, forget_blocks, gguf_file, source_arguments
from specbench_ss.models.quantize import check_quantize, quantise
from specbench_ss.models.resolve import (
    bundled_drafters,
    check_files,
    check_model,
    check_reachable,
    find_folder,
    is_lab,
    model_origin,
)
from specbench_ss.user_files import read_json

FOLDER = Path(__file__).parents[1] / "templates"
NAMES = ("plain", "vicuna", "llama-2")
CHOICES = "|".join((*NAMES, "FILE"))
_TRIAL = [  # what every run asks of a template: several turns, and room for the answer
    {"role": "user", "content": "first question"},
    {"role": "assistant", "content": "its answer"},
    {"role": "user", "content": "second question"},
]


def template_text(given: str) -> str:
    """Return the Jinja text of a template's name or file. Raises UserError for what is neither."""
    path = FOLDER / f"{given}.jinja" if given in NAMES else Path(given)
    if not path.is_file():
        hint = did_you_mean(given, NAMES)
        raise UserError(f"--chat-template {given!r} is neither {', '.join(NAMES)} nor a file{hint}")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read --chat-template {given}: {error}") from error


def check_template(tokenizer: Any, model: str) -> None:
    """Raise UserError where the tokenizer has no chat template, or one that cannot be filled in."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise UserError(f"the tokenizer of {model} has no chat template; give one with --chat-template {CHOICES}")
    try:
        rendered = tokenizer.apply_chat_template(_TRIAL, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # Jinja's own errors, and whatever a template raises by itself
        raise UserError(f"the chat template of {model} does not work: {error_text(error)}") from error
    asked = [message["content"] for message in _TRIAL if message["role"] == "user"]
    lost = next((text for text in asked if text not in rendered), None)
    if lost is not None:
        raise UserError(f"the chat template of {model} leaves out what was asked: {lost!r} is not in {rendered!r}")


def template_hash(tokenizer: Any) -> str | None:
    """Return a short sha256 of the tokenizer's chat template; None where there is none."""
    template = getattr(tokenizer, "chat_template", None)
    if template is None:
        return None
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:16]


HASH_WORDS = 1 << 18  # 64-bit words in one checksum: 2 MiB, which stay in a cache; part of what the hash is


def hash_weights(model: Any) -> str:
    """Return a short sha256 over the names, shapes and a checksum of all bits of every parameter.

    The checksum of a tensor is the sum of its 64-bit words, each times an odd random number, modulo 2^64. It is exact,
    so it is the same on every device, and it differs whenever any single word changes. It is computed on the tensor's
    own device in one pass over memory: hundredths of a second for the lab's models, a few seconds for 7B parameters on
    a CPU, less on a GPU.
    """
    return hash_tensors(dict(model.named_parameters()))


def hash_tensors(tensors: Mapping[str, torch.Tensor]) -> str:
    """Hash any tensors as `hash_weights` does; buffers too, where they hold what no parameter does."""
    digest = hashlib.sha256()
    for name, p in sorted(tensors.items()):
        digest.update(f"{name}{tuple(p.shape)}".encode())
        for checksum in _checksums(p.detach()):
            digest.update(checksum.to_bytes(8, "little", signed=True))
    return digest.hexdigest()[:16]


def _checksums(tensor: torch.Tensor) -> list[int]:
    """Return one checksum for each HASH_WORDS words of a tensor. Its last word is filled up with zeros."""
    bits = tensor.reshape(-1).view(torch.uint8)
    if bits.numel() % 8 or bits.storage_offset() % 8:
        bits = torch.nn.functional.pad(bits, (0, -bits.numel() % 8)).clone()
    words = bits.view(torch.int64)
    factors = _odd_factors(min(HASH_WORDS, len(words))).to(tensor.device)
    sums = [(part * factors[: len(part)]).sum() for part in words.split(HASH_WORDS)]
    return torch.stack(sums).tolist() if sums else []


def _odd_factors(n: int) -> torch.Tensor:
    """Return the first n of a fixed sequence of odd random int64 that no version of any library changes."""
    return torch.from_numpy((np.random.PCG64(0).random_raw(n) | 1).view(np.int64))


TOKENIZER_FILES = ("tokenizer.json", "vocab*", "*.model", "*.tiktoken")  # what may hold a vocabulary


def outline_of(model: str, *, trust_remote_code: bool = False, chat_template: str | None = None) -> ModelInfo:
    """Return what can be known of a target without its weights. Raises UserError where it cannot be loaded.

    For a hub id, the configuration and the tokenizer are downloaded if they are not in the cache.
    """
    template = None if chat_template is None else template_text(chat_template)
    check_model(model)
    folder = find_folder(model)
    source = _source(model, folder)
    outline = ModelInfo(config_of(source, trust_remote_code), None, model, folder)
    outline.tokenizer = tokenizer_of(source, trust_remote_code, template)
    outline.is_lab, outline.bundled_drafters = is_lab(model), bundled_drafters(model)
    return outline


def load_target(
    model: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    engine: str = "eager",
    quantize: str = "none",
    trust_remote_code: bool = False,
    chat_template: str | None = None,
    nf4: bool = False,
) -> Target:
    """Load a target: an embedded or fetched model by name, a folder, a GGUF file, or a hub id.

    Raises UserError where it cannot be loaded.

    dtype: 'auto' is bfloat16 on a GPU; on a CPU the fastest one of float32, bfloat16 and float16-weights, measured
    once, for the lab always float32.

    It answers a short prompt once: a model whose logits are not finite is refused.

    engine: how steps are made, one of `engines.ENGINES`. quantize: how weights of linear layers are held, one of
    `quantize.QUANTIZE`; the target's hash is that of the weights as they were published.

    chat_template: name or Jinja file of a template that replaces the tokenizer's own. nf4: hold linear layers in 4 bits
    (NF4, double quantisation) with bitsandbytes and compute in `dtype`.
    """
    template = None if chat_template is None else template_text(chat_template)
    check_divided(model, device, engine, quantize)
    where = resolve_device(device)
    resolve_dtype(dtype, where)
    check_engine(engine, where)
    check_quantize(quantize, where, dtype)
    check_model(model)
    folder = find_folder(model)
    source = _source(model, folder)
    kind, _ = chosen_dtype(dtype, where, model, lambda: config_of(source, trust_remote_code), quantize != "none")
    tokenizer = tokenizer_of(source, trust_remote_code, template)
    read = partial(load_model, source, resolve_dtype(kind, where), where, trust_remote_code, nf4)
    weights = read()
    loaded = hash_weights(weights)  # before they are rounded: drafters were trained for the model as it was published
    parameters, held = sum(p.numel() for p in weights.parameters()), quantise(weights, quantize)
    fp16_weights = kind == HALF_WEIGHTS and not nf4
    target = Target(weights, tokenizer, name=model, folder=folder, fp16_weights=fp16_weights)
    target.parameter_count = parameters
    if held:
        target.quantization = Quantization(held, partial(quantise, how=quantize), read)
    target.is_lab, target.origin, target.bundled_drafters = is_lab(model), model_origin(model), bundled_drafters(model)
    target.weights_hash = loaded
    check_target(target)
    use_engine(target, engine)
    return target


def _source(model: str, folder: Path | None) -> str:
    """Return the folder, the GGUF file or the hub id that the model is loaded from.

    Raises UserError for a hub id that is not in the cache while the hub does not answer.
    """
    if folder is not None:
        return str(folder)
    if gguf_file(model) is None:
        check_reachable(model)
    return model


def config_of(source: str, trust_remote_code: bool = False) -> Any:
    """Return the model's configuration. For an adapter's folder it is that of the adapted model. Raises UserError."""
    _quiet()
    adapter = Path(source, "adapter_config.json")
    own = Path(source, "config.json")
    if adapter.is_file() and not (own.is_file() and "model_type" in read_json(own)):
        source = adapted_model(adapter)
    try:
        with source_arguments(source) as where:
            return AutoConfig.from_pretrained(**where, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise _cannot_load(source, error) from error


def adapted_model(adapter: Path) -> str:
    """Return the folder or hub id of the model that an adapter's configuration names. Raises UserError for none."""
    named = read_json(adapter).get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        raise UserError(f"{adapter} does not name the model that it adapts (base_model_name_or_path)")
    if not Path(named).exists():
        check_reachable(named)
    return named


def tokenizer_of(source: str, trust_remote_code: bool = False, template: str | None = None) -> Any:
    """Load the tokenizer of a folder, GGUF file or hub id, with another chat template where one is given.

    Raises UserError where there is none.
    """
    _quiet()
    try:
        with source_arguments(source) as where:
            tokenizer = AutoTokenizer.from_pretrained(**where, trust_remote_code=trust_remote_code)
    except Exception as error:
        if Path(source).is_dir() and not _has_tokenizer(Path(source)):
            raise UserError(f"model {source!r} has no tokenizer: the folder holds no tokenizer.json") from error
        raise _cannot_load(source, error) from error
    file = gguf_file(source)
    if file is not None:
        divide_text(tokenizer, file)
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def _has_tokenizer(folder: Path) -> bool:
    return any(next(folder.glob(pattern), None) for pattern in TOKENIZER_FILES)


def _quiet() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def load_model(source: str, dtype: torch.dtype, device: str, trust_remote_code: bool = False, nf4: bool = False) -> Any:
    """Load a causal LM from a folder, GGUF file or hub id, without its tokenizer. device: or several, as resolved.

    Raises UserError where it cannot be loaded.
    """
    _quiet()
    file, several = gguf_file(source), "," in device
    if file is not None and nf4:
        raise UserError(f"{source!r} is not loaded in 4 bits: a GGUF file's weights are made float")
    where_to = _divided(source, device, dtype, trust_remote_code) if several else {}
    # transformers would else ask a third party to convert a hub model that has only pickles; read at every call
    os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")
    auto: Any = AutoModelForCausalLM
    try:
        with source_arguments(source) as where:
            model, info = auto.from_pretrained(
                **where,
                dtype=dtype,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                **where_to,
                **(_nf4(dtype, device) if nf4 else {} if file is None else as_float()),
            )
    except Exception as error:
        raise _cannot_load(source, error) from error
    _check_download(source)
    missing = [k for k in info["missing_keys"] if "rotary" not in k]
    if missing:
        raise UserError(f"model {source!r} lacks weights: {', '.join(sorted(missing)[:3])} ({len(missing)} in all)")
    if file is not None:
        forget_blocks(model, file)
    if several:
        return without_hooks(model)
    return model if nf4 else _placed(model, source, device)


def _divided(source: str, device: str, dtype: torch.dtype, trust_remote_code: bool) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that put layers on several devices. Raises UserError for no room."""
    config = config_of(source, trust_remote_code)
    return {"device_map": device_map(config, device.split(","), dtype, trust_remote_code)}


def _cannot_load(source: str, error: Exception) -> UserError:
    """Return a UserError for any of the many kinds that the loaders raise, since all are about what the user named."""
    _check_download(source)
    if isinstance(error, pickle.UnpicklingError) or "weights_only" in str(error):  # torch's text advises to run it
        return UserError(f"cannot load model {source!r}: its weights hold more than tensors, which may run code")
    return UserError(f"cannot load model {source!r}: {first_line(error)}")


def _nf4(dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that quantise weights as they are read, straight onto the device."""
    config: Any = BitsAndBytesConfig
    quantised = config(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": quantised, "device_map": {"": device}}


def _check_download(source: str) -> None:
    """Raise UserError that names a weight file in the hub's cache which is damaged."""
    config = None if Path(source).exists() else try_to_load_from_cache(source, "config.json")
    if isinstance(config, str):
        check_files(Path(config).parent)


def _placed(model: Any, source: str, device: str) -> Any:
    """Move the model to the device. Raises UserError where it does not fit there."""
    try:
        return model.to(device)
    except (RuntimeError, MemoryError) as error:  # torch's out-of-memory errors are RuntimeErrors
        full = isinstance(error, (torch.OutOfMemoryError, MemoryError))
        first = next(iter(str(error).strip().splitlines()), type(error).__name__)
        problem = "does not fit on" if full else "cannot be put on"
        raise UserError(f"model {source!r} {problem} device {device!r}: {first}") from error
