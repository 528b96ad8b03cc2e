"""GGUF files: recognition, checks before loading, and loading through transformers.

transformers dequantizes the file's weights. Only the file itself is read, no configuration next to it.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import transformers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

from specbench_ss.errors import UserError, first_line, os_reason

if TYPE_CHECKING:
    from gguf import GGUFReader


MAGIC = b"GGUF"
# llama.cpp's names of pre-tokenizers that split single digits before GPT-2's rule; transformers omits that step.
SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")


def gguf_file(model: str) -> Path | None:
    """Return the GGUF file of that name, by its suffix or its first bytes, or None.

    Raises UserError for a name that ends in .gguf without such a file.
    """
    path = Path(model)
    has_suffix = path.suffix.lower() == ".gguf"
    if path.is_dir():
        return None
    if not path.is_file():
        if has_suffix:
            raise UserError(f"no GGUF file {model}")
        return None
    return path if has_suffix or _has_magic(path) else None


def _has_magic(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class GgufFacts:
    """Metadata of a file.

    types: number of tensors by type, most frequent first. pre_tokenizer: llama.cpp's name, or ''. turn_end: token that
    ends a turn, or None. unread_tensors: RoPE factors for long texts, which transformers ignores.
    """

    types: tuple[tuple[str, int], ...]
    pre_tokenizer: str
    turn_end: int | None
    unread_tensors: tuple[str, ...]


def check_gguf(path: Path) -> None:
    """Raise UserError for a truncated file, an unsupported weight type, or one part of a split model.

    Reads no weights except the first rows of each type.
    """
    gguf_facts(path)


def gguf_origin(path: Path) -> dict[str, Any]:
    """Return the manifest entry of the file: its name, and its number of tensors by type."""
    return {"gguf": {"file": path.name, "types": dict(gguf_facts(path).types)}}


def gguf_facts(path: Path) -> GgufFacts:
    """Return the file's metadata. Raises UserError as `check_gguf` does."""
    try:
        stat = path.stat()
    except OSError as error:
        raise UserError(f"cannot read {path}: {os_reason(error)}") from None
    return _facts(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=8)
def _facts(path: Path, size: int, changed: int) -> GgufFacts:
    """Return the metadata; size and time of change are part of the cache key."""
    reader = _read(path)

    def value(key: str) -> Any:
        field = reader.get_field(key)
        return None if field is None else field.contents()

    if (value("split.count") or 1) > 1:
        raise UserError(f"{path} is one of {value('split.count')} parts of a model; merge them into one file")
    _check_dequantised(path, reader)
    types = Counter(tensor.tensor_type.name for tensor in reader.tensors)
    turn_end = value("tokenizer.ggml.eot_token_id")
    unread_tensors = tuple(
        tensor.name for tensor in reader.tensors if tensor.name.startswith(("rope_freqs", "rope_factors"))
    )
    return GgufFacts(
        tuple(types.most_common()), value("tokenizer.ggml.pre") or "", turn_end and int(turn_end), unread_tensors
    )


def _read(path: Path) -> GGUFReader:
    library = require_gguf(path.name)
    if not _has_magic(path):
        raise UserError(f"{path} is not a GGUF file: wrong first bytes")
    try:
        reader: GGUFReader = library.GGUFReader(path)
        return reader
    except Exception as error:  # numpy's and the reader's errors
        if "GGMLQuantizationType" in str(error):
            number = re.findall(r"\d+", str(error))[-1:]
            raise UserError(f"{path} has weights of an unknown type, {' '.join(['number', *number])}") from error
        raise UserError(f"{path} is truncated or damaged: {first_line(error)}") from error


def require_gguf(what: str) -> Any:
    """Return the package gguf. Raises UserError if it is not installed."""
    try:
        import gguf
    except ImportError:
        raise UserError(
            f"reading {what} needs the package gguf: pip install gguf, or -e '.[gguf]' in the folder of this package"
        ) from None
    return gguf


def _check_dequantised(path: Path, reader: GGUFReader) -> None:
    dequantize = require_gguf(path.name).dequantize
    for kind, tensor in {tensor.tensor_type: tensor for tensor in reader.tensors}.items():
        try:
            dequantize(tensor.data[:1], kind)
        except Exception as error:
            raise UserError(f"{path} has weights of type {kind.name}, which cannot be dequantized") from error


@contextmanager
def source_arguments(source: str) -> Iterator[dict[str, Any]]:
    """Yield the arguments of `from_pretrained` for a folder, a hub id or a GGUF file.

    transformers would read a tokenizer and settings next to a GGUF file, so it gets a folder with only a link to it.
    """
    path = gguf_file(source)
    if path is None:
        yield {"pretrained_model_name_or_path": source}
        return
    with TemporaryDirectory(prefix="ssbench-gguf-") as folder:
        Path(folder, path.name).symlink_to(path.resolve())
        yield {"pretrained_model_name_or_path": folder, "gguf_file": path.name}


def dequantize_arguments() -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that dequantize a GGUF file."""
    config = getattr(transformers, "GgufConfig", None)  # since 5.23 some architectures keep their blocks without it
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def clear_gguf_state(model: Any, path: Path) -> None:
    """Remove the GGUF state of a loaded model, so that it can be saved as an ordinary one."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    model.name_or_path = model.config._name_or_path = str(path)
    _add_turn_end(model, path)
    if unread_tensors := gguf_facts(path).unread_tensors:
        warnings.warn(
            f"{path.name}: {unread_tensors[0]} is not read; positions of long texts differ from the original",
            stacklevel=2,
        )


def _add_turn_end(model: Any, path: Path) -> None:
    """Add the file's end-of-turn token to the model's end tokens."""
    turn_end, eos = gguf_facts(path).turn_end, model.generation_config.eos_token_id
    eos_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if turn_end is not None and turn_end not in eos_ids:
        model.generation_config.eos_token_id = [*eos_ids, turn_end]


def set_pre_tokenizer(tokenizer: Any, path: Path) -> None:
    """Split single digits as the file requires, since transformers ignores that setting."""
    if gguf_facts(path).pre_tokenizer not in SINGLE_DIGITS:
        return

    parts = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(parts)
