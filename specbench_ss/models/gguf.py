"""GGUF files: recognition, checks before loading, and loading through transformers.

transformers dequantizes the file's weights. Only the file itself is read, no configuration next to it. transformers
parses the header for the configuration, the tokenizer and the weights, with `gguf.GGUFReader`, which takes a minute for
150,000 tokens; here the header is parsed once, and long lists are only measured.
"""

from __future__ import annotations

import re
import struct
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import transformers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

from specbench_ss.errors import UserError, first_line, os_errors

if TYPE_CHECKING:
    from gguf import GGUFReader


MAGIC = b"GGUF"
# llama.cpp's names of pre-tokenizers that split single digits before GPT-2's rule; transformers omits that step.
SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
SHORT = 4096  # entries of a list that is longer than any list of layers, so that it belongs to the vocabulary
LENGTH = struct.Struct("<Q")
CHUNK = 1 << 15  # blocks that are dequantized together, which fit a cache


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


def gguf_origin(path: Path) -> dict[str, Any]:
    """Return the manifest entry of the file: its name, and its number of tensors by type."""
    return {"gguf": {"file": path.name, "types": dict(gguf_facts(path).types)}}


def gguf_facts(path: Path) -> GgufFacts:
    """Return the file's metadata, read without weights except the first rows of each type.

    Raises UserError for a damaged file, an unsupported weight type, or one part of a split model.
    """
    try:
        return _facts(*_state(path))
    except UserError:
        raise
    except Exception as error:  # of numpy, the reader, and values of another type
        if "GGMLQuantizationType" in str(error):
            number = re.findall(r"\d+", str(error))[-1:]
            raise UserError(f"{path} has weights of an unknown type, {' '.join(['number', *number])}") from error
        raise UserError(f"{path} is truncated or damaged: {first_line(error)}") from error


def _state(path: Path) -> tuple[Path, int, int]:
    """Return the path, the size and the time of change of a file, the key of what was read from it."""
    with os_errors(f"cannot read {path}"):
        stat = path.stat()
    return path, stat.st_size, stat.st_mtime_ns


@lru_cache(maxsize=8)
def _facts(path: Path, size: int, changed: int) -> GgufFacts:
    reader = _read(path, size, changed)

    def value(key: str) -> Any:
        field = reader.get_field(key)
        return None if field is None else field.contents()

    if (value("split.count") or 1) > 1:
        raise UserError(f"{path} is one of {value('split.count')} parts of a model; merge them into one file")
    _check_dequantised(path, reader)
    types = Counter(tensor.tensor_type.name for tensor in reader.tensors)
    unread_tensors = tuple(
        tensor.name for tensor in reader.tensors if tensor.name.startswith(("rope_freqs", "rope_factors"))
    )
    turn_end = value("tokenizer.ggml.eot_token_id")
    return GgufFacts(
        tuple(types.most_common()), str(value("tokenizer.ggml.pre") or ""), turn_end and int(turn_end), unread_tensors
    )


@lru_cache(maxsize=2)
def _read(path: Path, size: int, changed: int) -> GGUFReader:
    require_gguf(path.name)
    reader = _reader_class()(path)
    for before, after in pairwise(sorted(reader.tensors, key=lambda tensor: tensor.data_offset)):
        if before.data_offset + before.n_bytes > after.data_offset:
            raise ValueError(f"the weights of {before.name} and {after.name} overlap")
    return reader


@cache
def _reader_class() -> type[GGUFReader]:
    """Return a `GGUFReader` that measures long lists, checks that they end in the file, and gives zeros as entries.

    transformers reads the vocabulary itself since it has `integrations.gguf`; before, it needs the entries.
    """
    from gguf import GGUFReader, GGUFValueType

    reads_vocabulary = find_spec("transformers.integrations.gguf") is not None

    class Reader(GGUFReader):
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != GGUFValueType.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            data, end = memoryview(cast("Any", self.data)), orig_offs + 12
            kind, count = struct.unpack_from("<IQ", data, orig_offs)
            if kind == GGUFValueType.STRING:
                for _ in range(count):
                    end += 8 + LENGTH.unpack_from(data, end)[0]
            else:  # KeyError for a list of lists, which no model has
                end += count * np.dtype(self.gguf_scalar_to_np[GGUFValueType(kind)]).itemsize
            if end > len(data):
                raise ValueError("a list ends beyond the file")
            if count <= SHORT or not reads_vocabulary:
                return super()._get_field_parts(orig_offs, raw_type)
            return end - orig_offs, [np.zeros(1, np.uint8)], [0] * count, [GGUFValueType.ARRAY, GGUFValueType.UINT8]

    return Reader


def dequantize(data: Any, kind: Any) -> Any:
    """Return the weights of an array of blocks in float32, bit for bit those of `gguf.dequantize`, in less time."""
    if kind.name not in ("Q5_0", "Q8_0"):
        from gguf.quants import dequantize as of_any_type

        return of_any_type(data, kind)
    blocks = data.reshape(-1, 22 if kind.name == "Q5_0" else 34)
    weights = torch.empty(len(blocks), 32)
    for start in range(0, len(blocks), CHUNK):
        part = torch.from_numpy(np.array(blocks[start : start + CHUNK]))
        scales, numbers = part[:, :2].view(torch.float16).float(), part[:, 2:].view(torch.int8)
        if kind.name == "Q5_0":  # the fifth bits, and two numbers of four bits a byte
            high = (part[:, 2:6, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1) << 4
            numbers = (torch.cat([part[:, 6:] & 15, part[:, 6:] >> 4], 1) | high).to(torch.int8) - 16
        torch.mul(scales, numbers, out=weights[start : start + CHUNK])
    return weights.view(*data.shape[:-1], -1).numpy()


def gguf_vectors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and float32 values of every tensor of one dimension. Raises UserError as `gguf_facts` does."""
    gguf_facts(path)
    for tensor in _read(*_state(path)).tensors:
        if len(tensor.shape) == 1:
            yield tensor.name, torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))


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
    for kind, tensor in {tensor.tensor_type: tensor for tensor in reader.tensors}.items():
        try:
            dequantize(tensor.data[:1], kind)
        except Exception as error:
            raise UserError(f"{path} has weights of type {kind.name}, which cannot be dequantized") from error


@contextmanager
def source_arguments(source: str) -> Iterator[dict[str, Any]]:
    """Yield the arguments of `from_pretrained` for a folder, a hub id or a GGUF file.

    transformers would read a tokenizer and settings next to a GGUF file, so it gets a folder with only a link to it,
    and within the block the header that is parsed already.
    """
    path = gguf_file(source)
    if path is None:
        yield {"pretrained_model_name_or_path": source}
        return
    gguf_facts(path)
    reader, library = _read(*_state(path)), require_gguf(path.name)
    before = library.GGUFReader, library.dequantize
    with TemporaryDirectory(prefix="ssbench-gguf-") as folder:
        Path(folder, path.name).symlink_to(path.resolve())
        library.GGUFReader, library.dequantize = (lambda _: reader), dequantize
        try:
            yield {"pretrained_model_name_or_path": folder, "gguf_file": path.name}
        finally:
            library.GGUFReader, library.dequantize = before


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
