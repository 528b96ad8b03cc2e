"""Fastest dtype of a model on a CPU, measured.

Autoregressive decoding multiplies one row by each matrix, verification a few. With processor support, bfloat16 GEMMs
read half of the bytes; without it they are emulated and many times slower. fp16 weights with fp32 compute also read
half of the bytes, on any processor that torch supports, in fused layers. Whole layers are measured, since the operators
between the GEMMs differ as well: in bfloat16 they take longer than in float32 (docs/log.md).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor
from transformers import AutoModelForCausalLM

from specbench_ss import storage, user_files
from specbench_ss.engine import native_cpu
from specbench_ss.engine.architectures import LLAMA_LIKE
from specbench_ss.engine.attention import NAME
from specbench_ss.engine.cpu_kernels import has_room, supports_fp16_gemm
from specbench_ss.engine.generic_model import HfDecoder, smaller
from specbench_ss.engine.numerics import HALF_WEIGHTS, arithmetic
from specbench_ss.engine.target import Target
from specbench_ss.models.devices import IDLE_CORES, other_cpu_seconds, resolve_dtype
from specbench_ss.models.limits import best_time, device_file
from specbench_ss.models.resolve import is_lab
from specbench_ss.storage import cache_folder

PREFIX = 128  # tokens in the KV cache
VOCAB = 8  # vocabulary size of the measured model
READ_BYTES = 256 << 20  # float32 weights of a pass, enough that they come from memory and not from the cache
TURNS = 3  # measurements of each pass; the shortest time counts
PASS_S = 0.05  # total time of the repeats of one measurement
CPU = torch.device("cpu")


def few_layers(config: Any, dtype_name: str, weights_bytes: int) -> Target:
    """Return a model of some of these layers with random weights and a tiny vocabulary.

    weights_bytes: of the whole model in float32, which decide about prepacked copies.
    """
    layer = HfDecoder(_empty(config)).layers[0]
    count = READ_BYTES // (4 * sum(p.numel() for p in layer.parameters()))
    dtype = getattr(torch, arithmetic(dtype_name))
    with torch.random.fork_rng(devices=[]):
        small = smaller(config, max(1, min(config.num_hidden_layers, count)), VOCAB)
        model: Any = AutoModelForCausalLM.from_config(small).to(dtype)
    total_bytes = weights_bytes * dtype.itemsize // torch.float32.itemsize
    return Target(model, fp16_weights=dtype_name == HALF_WEIGHTS, part_of=total_bytes, attention=NAME)


def _empty(config: Any) -> Any:
    """Return a model of this configuration without weights."""
    with init_empty_weights():
        return AutoModelForCausalLM.from_config(config)


Milliseconds = dict[str, dict[str, float]]  # of a pass, by dtype and number of query tokens


@torch.inference_mode()
def pass_ms(dtype_names: tuple[str, ...], config: Any, weights_bytes: int, rows: tuple[int, ...]) -> Milliseconds:
    """Return the milliseconds of a pass with cached tokens, measured for all dtypes in turns."""
    targets = {dtype_name: few_layers(config, dtype_name, weights_bytes) for dtype_name in dtype_names}
    passes = [(dtype_name, count, a_pass(target, count)) for dtype_name, target in targets.items() for count in rows]
    ms = {dtype_name: {str(count): math.inf for count in rows} for dtype_name in dtype_names}
    for _ in range(TURNS):
        for dtype_name, count, one_pass in passes:
            measured = 1e3 * best_time(one_pass, CPU, PASS_S)
            ms[dtype_name][str(count)] = min(ms[dtype_name][str(count)], measured)
    return ms


def a_pass(target: Target, rows: int) -> Callable[[], Tensor]:
    """Return a pass over this many query tokens, fewer in a short context, which leaves the cache unchanged."""
    rows = max(1, min(rows, target.context_length - 1))
    prefix = min(PREFIX, target.context_length - rows)
    cache = target.new_cache(prefix + rows)
    target.prefill(torch.zeros(1, prefix, dtype=torch.long), cache)
    positions = torch.arange(prefix, prefix + rows)[None]
    x, rotary = target.embed(torch.zeros_like(positions), positions), target.rotary(positions, prefix + rows)
    mask = None if rows == 1 else target.causal_mask(rows, prefix)
    return lambda: target.run(x, 0, target.n_layers, cache, mask, rotary)


ROWS = (1, 16)  # query tokens of autoregressive decoding, and of a verification pass
PROBE, PROBE_S = 256, 0.01  # matrix size that reveals an emulated dtype, and total time of its repeats
ROUNDING = ("float32", HALF_WEIGHTS, "bfloat16")  # most precise first (docs/models.md)
CLEARLY = 1.1  # maximum time relative to the fastest dtype for a more precise one, so that noise does not decide
EQUAL = 1.03  # ratio of times up to which two dtypes take as long
IMPOSSIBLE = 1.05  # time for one token relative to that for more tokens, beyond which a measurement is not cached


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen dtype. ms: of one pass over the measured layers. doubt: reason why it is not cached, or ''."""

    dtype: str
    ms: Milliseconds
    doubt: str = ""

    def describe(self) -> str:
        """Return the choice and its reason as a line."""
        tokens = " and with ".join(map(str, ROWS))
        times = [f"{name} {', '.join(f'{value:.1f}' for value in ms.values())}" for name, ms in self.ms.items()]
        chose = f"--dtype auto chose {self.dtype} by the time of one token, and among equals of {ROWS[1]}"
        only_now = f"; only for this run: {self.doubt}" if self.doubt else ""
        return f"{chose} (ms of some layers with {tokens} tokens: {'; '.join(times)}{only_now})"


def chosen_dtype(
    requested: str, device: str, model: str, config: Callable[[], Any], quantized: bool = False
) -> tuple[str, str]:
    """Return the dtype of a model and a line on its choice ('' if nothing was measured).

    requested: 'auto' or a dtype's name. config: returns the configuration, called only if there is a choice. The lab
    stays in float32, so that outputs are identical token by token. Raises UserError for an unknown name.
    """
    default = str(resolve_dtype(requested, device)).removeprefix("torch.")
    if requested != "auto":
        return requested, ""
    if device.partition(":")[0] != "cpu" or is_lab(model):
        return default, ""
    model_config = config()
    try:
        weights_bytes = 4 * sum(p.numel() for p in _empty(model_config).parameters())
    except Exception:  # from an architecture that cannot be built; loading it reports the error
        return default, ""
    dtype_names = _candidate_dtypes(model_config.model_type, weights_bytes)
    if quantized:  # fp16 weights are another quantization
        dtype_names = tuple(dtype_name for dtype_name in dtype_names if dtype_name != HALF_WEIGHTS)
    if len(dtype_names) == 1:
        return default, ""
    choice = faster_dtype(dtype_names, model_config, weights_bytes)
    return choice.dtype, choice.describe()


@functools.cache
def has_bfloat16() -> bool:
    """Return True if bfloat16 GEMMs are at least as fast as float32 ones on this processor; takes milliseconds."""
    bfloat16, float32 = (torch.ones(PROBE, PROBE, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    return best_time(lambda: bfloat16 @ bfloat16, CPU, PROBE_S) <= best_time(lambda: float32 @ float32, CPU, PROBE_S)


def faster_dtype(dtype_names: tuple[str, ...], config: Any, weights_bytes: int) -> Choice:
    """Return the fastest of these dtypes for one token of a model of this configuration, measured in some seconds.

    Read from the cache later. A doubtful measurement is used with a warning and not cached. weights_bytes: of the model
    in float32, which decide about a prepacked copy.
    """
    room = has_room(weights_bytes), has_room(weights_bytes // 2)  # in float32, in bfloat16
    native = native_cpu.kernels()
    inputs = (
        "one token, then more",
        dtype_names,
        config.to_json_string(),
        room,
        torch.__version__,
        native and native.key,
    )
    key = hashlib.sha256(repr(inputs).encode()).hexdigest()[:8]
    file = cache_folder() / "limits" / f"dtype-{device_file(CPU).stem}-{key}.json"
    with contextlib.suppress(OSError, ValueError):
        return user_files.decoder(Choice)(file.read_bytes())
    before, began = other_cpu_seconds(), time.perf_counter()
    ms = pass_ms(dtype_names, config, weights_bytes, ROWS)
    doubt = _doubt(ms, (other_cpu_seconds() - before) / (time.perf_counter() - began))
    fastest = _fastest(ms)
    choice = Choice(fastest, ms, doubt)
    if doubt:
        warnings.warn(
            f"--dtype auto: {doubt}; {fastest} is used this time only; a stated dtype is not measured", stacklevel=2
        )
        return choice
    with contextlib.suppress(OSError):  # if it cannot be stored it is measured again
        file.parent.mkdir(parents=True, exist_ok=True)
        storage.write_json(file, asdict(choice))
    return choice


def _fastest(ms: Milliseconds) -> str:
    """Return the most precise dtype of those nearly as fast as the fastest for one token.

    Another one is returned if it takes as long for one token, so that the baseline is not slower, and clearly less for
    a verification pass.
    """
    one, more = map(str, ROWS)
    least = min(times[one] for times in ms.values())
    precise = next(name for name in sorted(ms, key=ROUNDING.index) if ms[name][one] <= CLEARLY * least)
    better = [
        name
        for name, times in ms.items()
        if times[one] <= EQUAL * ms[precise][one] and CLEARLY * times[more] < ms[precise][more]
    ]
    return min(better, key=lambda name: ms[name][more], default=precise)


def _doubt(ms: Milliseconds, other_cores: float) -> str:
    """Return why a measurement is unreliable, or ''. other_cores: load of other processes during it."""
    if other_cores >= IDLE_CORES:
        return f"other processes used {other_cores:.1f} cores while it was measured"
    one, more = map(str, ROWS)
    wrong = [dtype_name for dtype_name, times in ms.items() if times[one] > IMPOSSIBLE * times[more]]
    return f"{wrong[0]} took less time for {more} tokens than for {one}" if wrong else ""


def _candidate_dtypes(model_type: str, weights_bytes: int) -> tuple[str, ...]:
    """Return the dtypes that may be the fastest for such a model on this machine.

    weights_bytes: of the model in float32.
    """
    fp16_products = native_cpu.supports(torch.float32, torch.float16) or supports_fp16_gemm()
    half = (HALF_WEIGHTS,) if model_type in LLAMA_LIKE and has_room(weights_bytes) and fp16_products else ()
    return ("float32", *(("bfloat16",) if has_bfloat16() else ()), *half)
