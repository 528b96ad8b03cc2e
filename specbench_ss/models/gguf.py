"""GGUF files: recognition, checks before loading, and loading through transformers.

transformers makes float weights of the file's blocks. The file alone says what the model and its tokenizer are: what
lies beside it is not read.
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
# What llama.cpp calls a text's division into single digits, then GPT-2's, which transformers reads as GPT-2's alone.
DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")


def gguf_file(model: str) -> Path | None:
    """Return the GGUF file of that name, by its ending or its first bytes; None for what names none.

    Raises UserError for a name that ends in .gguf where there is no such file.
    """
    path = Path(model)
    named = path.suffix.lower() == ".gguf"
    if path.is_dir():
        return None
    if not path.is_file():
        if named:
            raise UserError(f"no GGUF file {model}")
        return None
    return path if named or _begins_as_one(path) else None


def _begins_as_one(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class GgufFacts:
    """What a file says of itself.

    types: of its tensors, with the number of each, most frequent first. division: how text is divided before it becomes
    tokens, '' where that is not said. turn_end: the token that ends a turn, None where there is none of its own.
    unread: tensors of rope's factors for long texts, which transformers leaves out.
    """

    types: tuple[tuple[str, int], ...]
    division: str
    turn_end: int | None
    unread: tuple[str, ...]


def check_gguf(path: Path) -> None:
    """Raise UserError for a file that is cut short, has weights of a type that cannot be read, or is a part of a model.

    No weights are read, but for the first rows of each type.
    """
    gguf_facts(path)


def gguf_origin(path: Path) -> dict[str, Any]:
    """Return what a manifest records of the file: its name, and how many tensors it holds of each type."""
    return {"gguf": {"file": path.name, "types": dict(gguf_facts(path).types)}}


def gguf_facts(path: Path) -> GgufFacts:
    """Return what the file says of itself. Raises UserError as `check_gguf` does."""
    try:
        stat = path.stat()
    except OSError as error:
        raise UserError(f"cannot read {path}: {os_reason(error)}") from None
    return _facts(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=8)
def _facts(path: Path, size: int, changed: int) -> GgufFacts:
    """Return the facts of the file as it is now: another size or time of change is another file."""
    reader = _read(path)

    def said(key: str) -> Any:
        field = reader.get_field(key)
        return None if field is None else field.contents()

    if (said("split.count") or 1) > 1:
        raise UserError(f"{path} is one of {said('split.count')} parts of a model: only a model in one file is read")
    _check_dequantised(path, reader)
    types = Counter(tensor.tensor_type.name for tensor in reader.tensors)
    turn_end = said("tokenizer.ggml.eot_token_id")
    unread = tuple(tensor.name for tensor in reader.tensors if tensor.name.startswith(("rope_freqs", "rope_factors")))
    return GgufFacts(tuple(types.most_common()), said("tokenizer.ggml.pre") or "", turn_end and int(turn_end), unread)


def _read(path: Path) -> GGUFReader:
    library = need_library(path.name)
    if not _begins_as_one(path):
        raise UserError(f"{path} is not a GGUF file: its first bytes are others")
    try:
        reader: GGUFReader = library.GGUFReader(path)
        return reader
    except Exception as error:  # numpy's and the reader's own kinds, for whatever stands in the file
        if "GGMLQuantizationType" in str(error):
            number = re.findall(r"\d+", str(error))[-1:]
            raise UserError(f"{path} holds weights of an unknown type, {' '.join(['number', *number])}") from error
        raise UserError(f"{path} is cut short or damaged: {first_line(error)}") from error


def need_library(what: str) -> Any:
    """Return the package gguf. Raises UserError where it is not installed."""
    try:
        import gguf
    except ImportError:
        raise UserError(
            f"reading {what} needs the package gguf: pip install gguf, or -e '.[gguf]' in the folder of this package"
        ) from None
    return gguf


def _check_dequantised(path: Path, reader: GGUFReader) -> None:
    dequantize = need_library(path.name).dequantize
    for kind, tensor in {tensor.tensor_type: tensor for tensor in reader.tensors}.items():
        try:
            dequantize(tensor.data[:1], kind)
        except Exception as error:
            raise UserError(f"{path} holds weights of type {kind.name}, which cannot be made float") from error


@contextmanager
def source_arguments(source: str) -> Iterator[dict[str, Any]]:
    """Give the arguments of `from_pretrained` that name a folder, a hub id or a GGUF file.

    transformers would take a tokenizer and settings beside a GGUF file for the file's own: it is shown the file alone.
    """
    path = gguf_file(source)
    if path is None:
        yield {"pretrained_model_name_or_path": source}
        return
    with TemporaryDirectory(prefix="ssbench-gguf-") as alone:
        Path(alone, path.name).symlink_to(path.resolve())
        yield {"pretrained_model_name_or_path": alone, "gguf_file": path.name}


def as_float() -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that make a GGUF file's weights float."""
    config = getattr(transformers, "GgufConfig", None)  # since 5.23 some architectures would else keep their blocks
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def forget_blocks(model: Any, path: Path) -> None:
    """Let a model that was read from a GGUF file be an ordinary one, which can be saved."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    model.name_or_path = model.config._name_or_path = str(path)
    _end_answers(model, path)
    if unread := gguf_facts(path).unread:
        warnings.warn(
            f"{path.name}: {unread[0]} is not read: long texts mean other positions than in the original", stacklevel=2
        )


def _end_answers(model: Any, path: Path) -> None:
    """Have the token that ends a turn end an answer too, where the file names one beside the end of a text."""
    turn_end, given = gguf_facts(path).turn_end, model.generation_config.eos_token_id
    ends = given if isinstance(given, list) else [] if given is None else [given]
    if turn_end is not None and turn_end not in ends:
        model.generation_config.eos_token_id = [*ends, turn_end]


def divide_text(tokenizer: Any, path: Path) -> None:
    """Have the tokenizer divide text as the file says, where transformers does not know what the file names."""
    if gguf_facts(path).division not in DIGITS_APART:
        return

    parts = [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(parts)
