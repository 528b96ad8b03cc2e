"""Where memory runs out: what is told of it in one line, and what is given back before the next sample."""

from __future__ import annotations

import gc
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from specbench_ss.decoding.decoder import Decoder
from specbench_ss.decoding.held import drop_caches
from specbench_ss.errors import UserError, error_text

UNTOLD = re.compile(  # torch raises a RuntimeError, not its OutOfMemoryError, where one of these says it
    r"can't allocate memory"  # the allocator of CPUs
    r"|CUDA( driver)? error: out of memory"  # the driver, as at a launch or when a graph is made
    r"|\bCU[A-Z]+(_[A-Z]+)*_ALLOC(ATION)?_FAILED\b"  # cuBLAS, cuDNN, cuSOLVER
)
LESS = (
    "fewer drafted nodes, a smaller --max-new-tokens or --batch-size, --dtype bfloat16, --quantize or shorter prompts "
    "take less"
)


class OutOfMemory(UserError):  # noqa: N818 - not named after torch's, which it stands for
    """There is not enough memory for what was asked. Its text says what would take less."""


def ran_out(error: BaseException) -> bool:
    """Say whether an error means that there was not enough memory."""
    known = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return known or (isinstance(error, RuntimeError) and UNTOLD.search(str(error)) is not None)


@contextmanager
def memory_given_back(decoder: Decoder) -> Iterator[None]:
    """Within: memory that runs out is OutOfMemory, with what the method held for this request given back."""
    try:
        yield
    except Exception as error:
        if not ran_out(error):
            raise
        raise OutOfMemory(told(error, decoder)) from None


def told(error: BaseException, decoder: Decoder) -> str:
    """Return what a row says of an error. Where memory ran out, what the method held is given back first."""
    if not ran_out(error):
        return error_text(error)
    _give_back(error, decoder)
    wanted = re.search(r"[Tt]ried to allocate (\d[\d.]* \w+)", str(error))
    more = f" ({wanted[1]} more were wanted)" if wanted else ""
    full = re.search(r"GPU (\d+) has", str(error)) if decoder.target.divided else None  # which one of them
    where = f"cuda:{full[1]}" if full else decoder.target.device_names
    return f"out of memory on {where}{more}: {LESS}"


def _give_back(error: BaseException, decoder: Decoder) -> None:
    """Drop what the broken pass and the method's caches hold, then the blocks that torch keeps for later."""
    seen: BaseException | None = error
    while seen is not None:  # tensors of a pass are variables of its frames, which the error holds
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__context__
    drop_caches(decoder)
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
