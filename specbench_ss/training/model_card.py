"""Model card of a trained drafter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError, first_line
from specbench_ss.models.checkpoint import HUB_ID
from specbench_ss.options import options_text
from specbench_ss.storage import write_text
from specbench_ss.training.data import TrainingText
from specbench_ss.training.loop import LOG, Budget, DrafterLoop
from specbench_ss.training.trainer import DrafterTrainer, TrainConfig
from specbench_ss.version import __version__

CARD = """# {title} for {base}

{summary}. Trained with `ssbench train {name}`, version {version}, torch {torch}, on {device}.

| | |
|---|---|
| base | {base}, weights {base_hash}, {base_dtype} |
| training text | {text} |
| validation text | {validation} |
| budget | {steps} steps of {rows} rows, each of at most {length} tokens and {anchors} anchors |
| trained on | {tokens:,} tokens and {draft_positions:,} draft positions, repeats counted, padding not |
| peak learning rate, seed | {lr:g}, {seed} |
| learning-rate schedule | {course} |
| options | {options} |
| trainable parameters | {learnt:,} |

## Results

{measured}

`{log}` has a line for every step. Measure the speed with `ssbench run`.
"""
VALIDATION_RESULT = """At the last step, on validation conversations: loss {loss:.4f}; top-1 accuracies {right};
estimated tau {tau:.2f}.

The estimate is 1 + a_1 + a_1 a_2 + ... of these accuracies: τ of a single chain if its drafts were independent. Nothing
was decoded for it: `ssbench run` measures τ on your prompts."""
TRAINING_RESULT = (
    "At the last step, on training text: loss {loss:.4f}; top-1 accuracies {right}. There was no validation text."
)


def write_card(
    trainer: DrafterTrainer, config: TrainConfig, loop: DrafterLoop, text: TrainingText, folder: Path
) -> None:
    """Write the README.md of a drafter's folder."""
    last = json.loads((folder / LOG).read_text().splitlines()[-1])
    target, own = loop.target, "the base's own answers: " if config.regenerate_responses else ""
    fields = {
        "title": trainer.name, "base": base_name(target),
        "summary": trainer.summary[:1].upper() + trainer.summary[1:],
        "name": type(trainer).name, "version": __version__, "torch": torch.__version__, "device": _device(loop),
        "base_hash": target.weights_hash, "base_dtype": "NF4" if config.load_in_4bit else str(target.dtype),
        "text": own + text.train.counts.line(), "validation": text.validation.counts.line(), "steps": loop.total,
        "rows": config.batch_size, "length": config.length, "anchors": config.anchors, "lr": trainer.lr,
        "seed": config.seed, **loop.trained_on(trainer), "options": options_text(trainer.options), "log": LOG,
        "course": _schedule(loop.budget), "learnt": trainer.n_learning, "measured": _results(last),
    }  # fmt: skip
    write_text(folder / "README.md", CARD.format(**fields))


def base_name(target: Target) -> str:
    """Return the name of the base without local paths."""
    if "gguf" in target.origin and target.folder is None:
        return str(target.origin["gguf"]["file"])
    return target.name if target.folder is None or target.is_lab else target.folder.name


def _results(last: dict[str, Any]) -> str:
    if "validation_loss" in last:
        right, tau = _shares(last["validation_accuracy"]), last["estimated_tau"]
        return VALIDATION_RESULT.format(loss=last["validation_loss"], right=right, tau=tau)
    accuracy = last["top1_accuracy"] if "top1_accuracy" in last else last["right"]  # in older logs
    return TRAINING_RESULT.format(loss=last["loss"], right=_shares(accuracy))


def _shares(right: list[float]) -> str:
    return ", ".join(f"{share:.3f}" for share in right)


def _schedule(budget: Budget) -> str:
    rise = f"up to the peak in {budget.warmup} steps"
    if budget.falls_from is None:
        return f"{rise}, and to 0 along a cosine"
    return f"{rise}, and to 0 in a line from step {budget.falls_from} on"


def _device(loop: DrafterLoop) -> str:
    kind, count = loop.target.device.type, loop.dist.count
    name = kind
    if kind == "cuda":
        peak = torch.cuda.max_memory_allocated(loop.target.device) / 2**30
        name = f"{torch.cuda.get_device_name(loop.target.device)} ({peak:.1f} GiB of memory at peak)"
    return name if count == 1 else f"{count} x {name}"


NOT_UPLOADED = ["checkpoint.pt*", "*.tmp"]


def check_repository(repo: str) -> None:
    """Raise UserError for an invalid repository name, or without a write token."""
    from huggingface_hub import get_token

    if HUB_ID.fullmatch(repo) is None:
        raise UserError(f"--push-to-hub {repo!r} is not a hub repository; use OWNER/NAME")
    if get_token() is None:
        raise UserError("--push-to-hub needs a write token; run `hf auth login`, or set HF_TOKEN")


def push_to_hub(folder: Path, repo: str) -> str:
    """Upload the folder without its checkpoints, create the repository if necessary, and return its address.

    Raises UserError if that fails; the folder is unchanged.
    """
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        url = api.create_repo(repo, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, ignore_patterns=NOT_UPLOADED)
    except Exception as error:  # errors of the hub and the network
        raise UserError(f"{folder} is written, but cannot be uploaded to {repo}: {first_line(error)}") from error
    return str(url)
