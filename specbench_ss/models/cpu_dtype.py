"""Fastest dtype of a model on a CPU, measured.

Products alone would mislead: in bfloat16 what lies between them takes longer than in float32 (docs/log.md).

Plain decoding multiplies one row by each matrix, verification a few rows. Where a processor has products in bfloat16,
these read half of the bytes; where it has none, they are emulated and many times slower. Weights that are rounded to
float16 numbers can be read as such while everything is computed in float32: half of the bytes too, on any processor
that torch has these products for, in layers that are computed lean. Whole layers are measured, since what lies
between products differs too.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from specbench_ss import storage, user_files
from specbench_ss.engine.architectures import LLAMA_LIKE
from specbench_ss.engine.cpu_kernels import has_room, may_halve
from specbench_ss.engine.numerics import HALF_WEIGHTS, arithmetic
from specbench_ss.engine.target import Target
from specbench_ss.models.devices import resolve_dtype
from specbench_ss.models.limits import best_time, device_file
from specbench_ss.models.resolve import is_lab
from specbench_ss.storage import cache_folder

PAST = 128  # tokens in the cache
READ = 256 << 20  # bytes of float32 weights in a pass, so that they come from memory and not from the cache
PASS_S = 0.15  # seconds that a pass is repeated
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Sizes:
    """hidden, and inner of the MLP; heads of queries, and of keys and values, and numbers of a head; layers.

    lean: whether layers of the model are computed lean, and their products by copies of the weights.
    """

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    lean: bool = True

    @property
    def parameters(self) -> int:
        """Entries of a layer's matrices."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.inner

    @property
    def measured(self) -> int:
        """Layers to measure: as many as read so much, at most all of them."""
        return max(1, min(self.layers, READ // (4 * self.parameters)))


def few_layers(sizes: Sizes, form: str, weights_bytes: int) -> Target:
    """A Llama of some of these layers with random weights and hardly any words.

    weights_bytes: of the whole model in float32, which decide whether there is room for copies.
    """
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inner,
        num_hidden_layers=sizes.measured,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        max_position_embeddings=512,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    dtype = getattr(torch, arithmetic(form))
    with torch.random.fork_rng(devices=[]):
        model: Any = LlamaForCausalLM(config).to(dtype)
    # what is not lean is computed without copies, as where there is no room for any
    whole = weights_bytes * dtype.itemsize // torch.float32.itemsize if sizes.lean else sys.maxsize
    return Target(model, rounded=form == HALF_WEIGHTS, part_of=whole)


@torch.inference_mode()
def pass_ms(form: str, sizes: Sizes, weights_bytes: int, rows: tuple[int, ...]) -> dict[str, float]:
    """Milliseconds of a pass over so many rows behind some others, by the number of rows."""
    target = few_layers(sizes, form, weights_bytes)
    return {str(count): 1e3 * best_time(a_pass(target, count), CPU, PASS_S) for count in rows}


def a_pass(target: Target, rows: int) -> Callable[[], Tensor]:
    """A pass over so many rows, which leaves the cache as it was."""
    cache = target.new_cache(PAST + rows)
    target.prefill(torch.zeros(1, PAST, dtype=torch.long), cache)
    positions = torch.arange(PAST, PAST + rows)[None]
    x, rotary = target.embed(torch.zeros_like(positions), positions), target.rotary(positions, PAST + rows)
    mask = None if rows == 1 else target.causal_mask(rows, PAST)
    return lambda: target.run(x, 0, target.n_layers, cache, mask, rotary)


ROWS = (1, 16)  # of plain decoding, and of a draft that is verified
PROBE, PROBE_S = 256, 0.01  # side of a square product that shows an emulated dtype at once; seconds that it is repeated
HEAD = 64  # numbers of a head, where a configuration does not say how many heads there are
ROUNDING = ("float32", HALF_WEIGHTS, "bfloat16")  # what rounds more comes later (docs/models.md)
CLEARLY = 1.1  # times as long as the fastest one a format may take that rounds less: noise alone is not to choose


@dataclass(frozen=True, slots=True)
class Choice:
    """dtype: the faster one. ms: of one pass over the measured layers, by dtype and by number of rows."""

    dtype: str
    ms: dict[str, dict[str, float]]

    def in_words(self) -> str:
        """Say what was chosen and why."""
        rows = " and ".join(map(str, ROWS))
        times = [
            f"{' and '.join(f'{value:.1f}' for value in ms.values())} ms in {form}" for form, ms in self.ms.items()
        ]
        what = " (weights rounded to float16, computed in float32)" if self.dtype == HALF_WEIGHTS else ""
        measured = f"some layers of this model's sizes took for {rows} rows {', '.join(times)}"
        return f"--dtype auto takes {self.dtype}{what}: {measured}"


def chosen_dtype(
    asked: str, device: str, model: str, config: Callable[[], Any], quantised: bool = False
) -> tuple[str, str]:
    """Return the dtype that a model is computed with, and words on its choice; '' where nothing was measured.

    asked: 'auto' or a dtype's name. config: gives the model's configuration, asked only where there is a choice. The
    lab stays in float32: that answers are identical token by token is its point. Raises UserError for an unknown name.
    """
    usual = str(resolve_dtype(asked, device)).removeprefix("torch.")
    if asked != "auto":
        return asked, ""
    if device.partition(":")[0] != "cpu" or is_lab(model):
        return usual, ""
    outline = config()
    shape = _shape(outline)
    if shape is None:
        return usual, ""
    weights_bytes = 4 * _parameters(outline, shape)
    forms = _forms(getattr(outline, "model_type", ""), weights_bytes)
    if quantised:  # float16 weights are another way of holding them
        forms = tuple(form for form in forms if form != HALF_WEIGHTS)
    if len(forms) == 1:
        return usual, ""
    choice = faster_dtype(forms, shape, weights_bytes)
    return choice.dtype, choice.in_words()


@functools.cache
def has_bfloat16() -> bool:
    """Say whether this processor multiplies matrices in bfloat16 at least as fast as in float32. Some milliseconds."""
    bfloat16, float32 = (torch.ones(PROBE, PROBE, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    return best_time(lambda: bfloat16 @ bfloat16, CPU, PROBE_S) <= best_time(lambda: float32 @ float32, CPU, PROBE_S)


def faster_dtype(forms: tuple[str, ...], sizes: Sizes, weights_bytes: int) -> Choice:
    """Return the fastest of these number formats for a model of these sizes: measured once, in some seconds.

    It is read from the cache later, so a run that goes on computes as it began. weights_bytes: of the model in float32,
    which decide whether there is room for a second copy.
    """
    room = has_room(weights_bytes), has_room(weights_bytes // 2)  # in float32, in bfloat16
    asked = ("whole layers", forms, sizes, room, torch.__version__)
    key = hashlib.sha256(repr(asked).encode()).hexdigest()[:8]
    file = cache_folder() / "limits" / f"dtype-{device_file(CPU).stem}-{key}.json"
    with contextlib.suppress(OSError, ValueError):
        return user_files.decoder(Choice)(file.read_bytes())
    ms = {form: pass_ms(form, sizes, weights_bytes, ROWS) for form in forms}
    choice = Choice(_clearly_fastest({form: sum(times.values()) for form, times in ms.items()}), ms)
    _keep(file, choice)
    return choice


def _clearly_fastest(ms: dict[str, float]) -> str:
    """Return the format that rounds least of those that are nearly as fast as the fastest."""
    return next(form for form in sorted(ms, key=ROUNDING.index) if ms[form] <= CLEARLY * min(ms.values()))


def _forms(model_type: str, weights_bytes: int) -> tuple[str, ...]:
    """Return the number formats that this machine may compute such a model in faster than in others.

    weights_bytes: of the model in float32.
    """
    half = (HALF_WEIGHTS,) if model_type in LLAMA_LIKE and has_room(weights_bytes) and may_halve() else ()
    return ("float32", *(("bfloat16",) if has_bfloat16() else ()), *half)


def _keep(file: Path, choice: Choice) -> None:
    with contextlib.suppress(OSError):  # where it cannot be kept it is measured again
        file.parent.mkdir(parents=True, exist_ok=True)
        storage.write_json(file, asdict(choice))


def _shape(config: Any) -> Sizes | None:
    """Return the sizes of a model's layers; None where the configuration does not say."""
    hidden, inner, heads, kv_heads, head_dim, layers = (
        value if isinstance(value := getattr(config, name, None), int) and value > 0 else 0
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "num_hidden_layers",
        )
    )
    if not hidden or not layers:
        return None
    heads = _divisor(hidden, heads or hidden // HEAD)  # as the layers that are measured have to have it
    each = max(2, (head_dim or hidden // heads) // 2 * 2)  # positions turn pairs of numbers
    lean = getattr(config, "model_type", "") in LLAMA_LIKE
    return Sizes(hidden, inner or 4 * hidden, heads, _divisor(heads, kv_heads or heads), each, layers, lean)


def _divisor(of: int, most: int) -> int:
    """Return the largest number up to `most` that divides `of`."""
    return next(n for n in range(max(1, min(most, of)), 0, -1) if of % n == 0)


def _parameters(config: Any, sizes: Sizes) -> int:
    """Return about how many weights a model has: embedding, LM head, and the matrices of its layers."""
    return 2 * int(getattr(config, "vocab_size", 0) or 0) * sizes.hidden + sizes.layers * sizes.parameters
