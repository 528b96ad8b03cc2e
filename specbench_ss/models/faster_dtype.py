"""The dtype in which a CPU decodes a model faster. It depends on the processor, so it is measured, and then kept.

Plain decoding multiplies one row by each matrix, verification a few rows. Where a processor has products in bfloat16,
these read half of the bytes; where it has none, they are emulated and many times slower.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from specbench_ss.decoding.products import Product, may_pack
from specbench_ss.files import crash_safe, records
from specbench_ss.files.cache_folder import cache_folder
from specbench_ss.models.devices import resolve_dtype
from specbench_ss.models.machine_limits import best_time, device_file
from specbench_ss.models.model_folder import is_lab

ROWS = (1, 16)  # of plain decoding, and of a draft that is verified
READ = 256 << 20  # bytes of float32 weights in one pass, so that they come from memory and not from the cache
PROBE, PROBE_S = 256, 0.01  # side of a square product that shows an emulated dtype at once; seconds that it is repeated
PASS_S = 0.15  # seconds that a pass is repeated
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Choice:
    """dtype: the faster one. ms: of one pass over the measured matrices, by dtype and by number of rows."""

    dtype: str
    ms: dict[str, dict[str, float]]

    def in_words(self) -> str:
        """Say what was chosen and why."""
        rows = " and ".join(map(str, ROWS))
        times = [
            f"{' and '.join(f'{value:.1f}' for value in ms.values())} ms in {form}" for form, ms in self.ms.items()
        ]
        return (
            f"--dtype auto takes {self.dtype}: products of this model's shapes with {rows} rows took {', '.join(times)}"
        )


def chosen_dtype(asked: str, device: str, model: str, config: Callable[[], Any]) -> tuple[str, str]:
    """Return the dtype that a model is computed with, and words on its choice; '' where nothing was measured.

    asked: 'auto' or a dtype's name. config: gives the model's configuration, asked only where there is a choice. The
    lab stays in float32: that answers are identical token by token is its point. Raises UserError for an unknown name.
    """
    named = str(resolve_dtype(asked, device)).removeprefix("torch.")
    if asked != "auto" or torch.device(device).type != "cpu" or is_lab(model) or not has_bfloat16():
        return named, ""
    shape = _shape(config())
    if shape is None:
        return named, ""
    choice = faster_dtype(*shape)
    return choice.dtype, choice.in_words()


@functools.cache
def has_bfloat16() -> bool:
    """Say whether this processor multiplies matrices in bfloat16 at least as fast as in float32. Some milliseconds."""
    bfloat16, float32 = (torch.ones(PROBE, PROBE, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    return best_time(lambda: bfloat16 @ bfloat16, CPU, PROBE_S) <= best_time(lambda: float32 @ float32, CPU, PROBE_S)


def faster_dtype(hidden: int, inner: int, layers: int) -> Choice:
    """Return the faster dtype for a model of these sizes: measured once, about a second, and read from the cache later.

    So a run that goes on computes as it began. hidden, inner: of the MLP's matrices.
    """
    key = hashlib.sha256(repr((hidden, inner, layers, torch.__version__)).encode()).hexdigest()[:8]
    file = cache_folder() / "limits" / f"dtype-{device_file(CPU).stem}-{key}.json"
    with contextlib.suppress(OSError, ValueError):
        return records.decoder(Choice)(file.read_bytes())
    matrices = max(1, min(3 * layers, READ // (4 * hidden * inner)))
    ms = {name: _pass_ms(dtype, matrices, hidden, inner) for name, dtype in _forms()}
    choice = Choice(min(ms, key=lambda name: sum(ms[name].values())), ms)
    _keep(file, choice)
    return choice


def _forms() -> list[tuple[str, torch.dtype]]:
    return [("float32", torch.float32), ("bfloat16", torch.bfloat16)]


def _keep(file: Path, choice: Choice) -> None:
    with contextlib.suppress(OSError):  # where it cannot be kept it is measured again
        file.parent.mkdir(parents=True, exist_ok=True)
        crash_safe.write_json(file, asdict(choice))


def _shape(config: Any) -> tuple[int, int, int] | None:
    """Return hidden size, inner size of the MLP, and layers; None where the configuration does not say."""
    hidden, inner, layers = (
        getattr(config, name, None) for name in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    if not isinstance(hidden, int) or not isinstance(layers, int) or hidden < 1:
        return None
    return hidden, inner if isinstance(inner, int) and inner > 0 else 4 * hidden, layers


@torch.inference_mode()
def _pass_ms(dtype: torch.dtype, matrices: int, hidden: int, inner: int) -> dict[str, float]:
    """Return milliseconds of multiplying rows by all matrices [inner, hidden], by the number of rows."""
    weights = [torch.full((inner, hidden), 0.01, dtype=dtype) for _ in range(matrices)]
    pack = may_pack(weights[0], 4 * matrices * hidden * inner)
    products = [Product(weight, None, pack) for weight in weights]

    def milliseconds(rows: int) -> float:
        x = torch.ones(1, rows, hidden, dtype=dtype)
        return 1e3 * best_time(lambda: [product(x) for product in products], CPU, PASS_S)

    return {str(rows): milliseconds(rows) for rows in ROWS}
