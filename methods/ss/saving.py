"""Writing what was trained: streams with their config, and in shared mode the LoRA beside them as peft saves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from specbench_ss.methods.checkpoint import write_checkpoint
from specbench_ss.methods.ss.shared import ADAPTER
from specbench_ss.methods.ss.shared_training import SharedTrainee


def save_shared(folder: Path, trainee: SharedTrainee, about: dict[str, Any]) -> None:
    """model.safetensors and config.json (streams), adapter_model.safetensors and adapter_config.json (LoRA)."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    write_checkpoint(folder, trainee.streams, {**about, "streams": trainee.config.as_dict()})
    model = trainee.tuned.model
    tensors = {k: v.detach().to("cpu", torch.float16).contiguous() for k, v in get_peft_model_state_dict(model).items()}
    save_file(tensors, folder / ADAPTER)
    config = model.peft_config["default"].to_dict()
    config["base_model_name_or_path"] = ""  # a path of the machine that trained it says nothing elsewhere
    config["inference_mode"] = True
    plain = {k: sorted(v) if isinstance(v, set) else v for k, v in config.items()}
    (folder / "adapter_config.json").write_text(json.dumps(plain, indent=1, default=str) + "\n")
