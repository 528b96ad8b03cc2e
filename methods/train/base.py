"""The frozen base of a training: as `ssbench run` loads it, or in NF4 by bitsandbytes."""

from __future__ import annotations

from importlib.util import find_spec

from specbench_ss.errors import UserError
from specbench_ss.models import load_target
from specbench_ss.target import Target
from specbench_ss.trainer import TrainConfig


def check_four_bits(device: str) -> None:
    """Raises UserError where a base cannot be held in NF4."""
    if not device.startswith("cuda"):
        raise UserError("--load-in-4bit needs a CUDA device")
    if find_spec("bitsandbytes") is None:
        raise UserError("--load-in-4bit needs bitsandbytes: pip install bitsandbytes")


def load_base(config: TrainConfig, device: str) -> Target:
    """The target of the training on this device."""
    if config.load_in_4bit:
        check_four_bits(device)
    return load_target(
        config.model,
        dtype=config.dtype,
        device=device,
        trust_remote_code=config.trust_remote_code,
        chat_template=config.chat_template,
        nf4=config.load_in_4bit,
    )
