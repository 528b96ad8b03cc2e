"""Writing what was trained: streams with their config, and in shared mode the LoRA beside them as peft saves it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specbench_ss.methods.checkpoint import write_checkpoint
from specbench_ss.methods.lora import save_lora
from specbench_ss.methods.ss.shared_training import SharedTrainee


def save_shared(folder: Path, trainee: SharedTrainee, about: dict[str, Any]) -> None:
    """model.safetensors and config.json (streams), adapter_model.safetensors and adapter_config.json (LoRA)."""
    write_checkpoint(folder, trainee.streams, {**about, "streams": trainee.config.as_dict()})
    save_lora(folder, trainee.tuned)
