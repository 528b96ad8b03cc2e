"""Fastest dtype of a model on a CPU, measured.

Products alone would mislead: in bfloat16 what lies between them takes longer than in float32 (docs/log.md).

Autoregressive decoding multiplies one row by each matrix, verification a few. Where a processor has products in
bfloat16, these read half of the bytes; where it has none, they are emulated and many times slower. Weights rounded to
float16 numbers can be read as such while everything is computed in float32: half of the bytes too, on any processor
that torch has these products for, in layers that are computed lean. Whole layers are measured, since what lies
between products differs too.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor
from transformers import AutoModelForCausalLM

from specbench_ss import storage, user_files
from specbench_ss.engine.architectures import LLAMA_LIKE
from specbench_ss.engine.attention import NAME
from specbench_ss.engine.cpu_kernels import has_room, supports_fp16_gemm
from specbench_ss.engine.generic_model import HfDecoder, smaller
from specbench_ss.engine.numerics import HALF_WEIGHTS, arithmetic
from specbench_ss.engine.target import Target
from specbench_ss.models.devices import resolve_dtype
from specbench_ss.models.limits import best_time, device_file
from specbench_ss.models.resolve import is_lab
from specbench_ss.storage import cache_folder

PAST = 128  # tokens in the cache
WORDS = 8  # of the vocabulary of the layers that are measured
READ = 256 << 20  # bytes of float32 weights in a pass, so that they come from memory and not from the cache
PASS_S = 0.15  # seconds that a pass is repeated
CPU = torch.device("cpu")


def few_layers(config: Any, form: str, weights_bytes: int) -> Target:
    """A model of some of these layers with random weights and hardly any words.

    weights_bytes: of the whole model in float32, which decide whether there is room for copies.
    """
    layer = HfDecoder(_empty(config)).layers[0]
    count = READ // (4 * sum(p.numel() for p in layer.parameters()))
    dtype = getattr(torch, arithmetic(form))
    with torch.random.fork_rng(devices=[]):
        few = smaller(config, max(1, min(config.num_hidden_layers, count)), WORDS)
        model: Any = AutoModelForCausalLM.from_config(few).to(dtype)
    whole = weights_bytes * dtype.itemsize // torch.float32.itemsize
    return Target(model, fp16_weights=form == HALF_WEIGHTS, part_of=whole, attention=NAME)


def _empty(config: Any) -> Any:
    """Return a model of this configuration without weights."""
    with init_empty_weights():
        return AutoModelForCausalLM.from_config(config)


@torch.inference_mode()
def pass_ms(form: str, config: Any, weights_bytes: int, rows: tuple[int, ...]) -> dict[str, float]:
    """Milliseconds of a pass over so many rows behind some others, by the number of rows."""
    target = few_layers(config, form, weights_bytes)
    return {str(count): 1e3 * best_time(a_pass(target, count), CPU, PASS_S) for count in rows}


def a_pass(target: Target, rows: int) -> Callable[[], Tensor]:
    """A pass over so many rows, which leaves the cache as it was."""
    cache = target.new_cache(PAST + rows)
    target.prefill(torch.zeros(1, PAST, dtype=torch.long), cache)
    positions = torch.arange(PAST, PAST + rows)[None]
    x, rotary = target.embed(torch.zeros_like(positions), positions), target.rotary(positions, PAST + rows)
    mask = None if rows == 1 else target.causal_mask(rows, PAST)
    return lambda: target.run(x, 0, target.n_layers, cache, mask, rotary)


ROWS = (1, 16)  # of autoregressive decoding, and of a draft that is verified
PROBE, PROBE_S = 256, 0.01  # side of a square product that shows an emulated dtype at once; seconds that it is repeated
ROUNDING = ("float32", HALF_WEIGHTS, "bfloat16")  # what rounds more comes later (docs/models.md)
CLEARLY = 1.1  # times as long as the fastest one a format may take that rounds less: noise alone is not to choose


@dataclass(frozen=True, slots=True)
class Choice:
    """dtype: the faster one. ms: of one pass over the measured layers, by dtype and by number of rows."""

    dtype: str
    ms: dict[str, dict[str, float]]

    def describe(self) -> str:
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
    own = config()
    try:
        weights_bytes = 4 * sum(p.numel() for p in _empty(own).parameters())
    except Exception:  # whatever an architecture raises that cannot be made; loading it will say so
        return usual, ""
    forms = _forms(own.model_type, weights_bytes)
    if quantised:  # float16 weights are another way of holding them
        forms = tuple(form for form in forms if form != HALF_WEIGHTS)
    if len(forms) == 1:
        return usual, ""
    choice = faster_dtype(forms, own, weights_bytes)
    return choice.dtype, choice.describe()


@functools.cache
def has_bfloat16() -> bool:
    """Say whether this processor multiplies matrices in bfloat16 at least as fast as in float32. Some milliseconds."""
    bfloat16, float32 = (torch.ones(PROBE, PROBE, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    return best_time(lambda: bfloat16 @ bfloat16, CPU, PROBE_S) <= best_time(lambda: float32 @ float32, CPU, PROBE_S)


def faster_dtype(forms: tuple[str, ...], config: Any, weights_bytes: int) -> Choice:
    """Return the fastest of these number formats for a model of this configuration: measured once, in some seconds.

    It is read from the cache later, so a run that goes on computes as it began. weights_bytes: of the model in float32,
    which decide whether there is room for a second copy.
    """
    room = has_room(weights_bytes), has_room(weights_bytes // 2)  # in float32, in bfloat16
    asked = ("whole layers", forms, config.to_json_string(), room, torch.__version__)
    key = hashlib.sha256(repr(asked).encode()).hexdigest()[:8]
    file = cache_folder() / "limits" / f"dtype-{device_file(CPU).stem}-{key}.json"
    with contextlib.suppress(OSError, ValueError):
        return user_files.decoder(Choice)(file.read_bytes())
    ms = {form: pass_ms(form, config, weights_bytes, ROWS) for form in forms}
    choice = Choice(_clearly_fastest({form: sum(times.values()) for form, times in ms.items()}), ms)
    with contextlib.suppress(OSError):  # where it cannot be kept it is measured again
        file.parent.mkdir(parents=True, exist_ok=True)
        storage.write_json(file, asdict(choice))
    return choice


def _clearly_fastest(ms: dict[str, float]) -> str:
    """Return the format that rounds least of those that are nearly as fast as the fastest."""
    return next(form for form in sorted(ms, key=ROUNDING.index) if ms[form] <= CLEARLY * min(ms.values()))


def _forms(model_type: str, weights_bytes: int) -> tuple[str, ...]:
    """Return the number formats that this machine may compute such a model in faster than in others.

    weights_bytes: of the model in float32.
    """
    half = (HALF_WEIGHTS,) if model_type in LLAMA_LIKE and has_room(weights_bytes) and supports_fp16_gemm() else ()
    return ("float32", *(("bfloat16",) if has_bfloat16() else ()), *half)
