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
| text | {text} |
| held out | {held_out} |
| budget | {steps} steps of {rows} rows of {length} tokens, {anchors} positions of each to draft from |
| peak learning rate, seed | {lr:g}, {seed} |
| course of the learning rate | {course} |
| options | {options} |
| parameters that learnt | {learnt:,} |

## Measured

{measured}

`{log}` has a line for every step. Speed was not measured here: `ssbench run` does.
"""
LOOK = """At the last step, on held-out conversations: loss {loss:.4f}; right top-1 guesses {right};
estimated tau {tau:.2f}.

The estimate is 1 + a_1 + a_1 a_2 + ... of these shares: tokens a pass of a single chain, if guesses were right
independently of each other. Nothing was decoded for it: `ssbench run` counts the true one, on your prompts."""
NOTHING = (
    "At the last step, on text it was trained on: loss {loss:.4f}; right top-1 guesses {right}. Nothing was held out."
)


def write_card(
    trainer: DrafterTrainer, config: TrainConfig, loop: DrafterLoop, text: TrainingText, folder: Path
) -> None:
    """Write the README.md of a drafter's folder."""
    last = json.loads((folder / LOG).read_text().splitlines()[-1])
    target, own = loop.target, "the base's own answers: " if config.regenerate_responses else ""
    words = {
        "title": trainer.name, "base": base_name(target),
        "summary": trainer.summary[:1].upper() + trainer.summary[1:],
        "name": type(trainer).name, "version": __version__, "torch": torch.__version__, "device": _device(loop),
        "base_hash": target.weights_hash, "base_dtype": "NF4" if config.load_in_4bit else str(target.dtype),
        "text": own + text.train.counts.line(), "held_out": text.held_out.counts.line(), "steps": loop.total,
        "rows": config.batch_size, "length": config.length, "anchors": config.anchors, "lr": trainer.lr,
        "seed": config.seed,        "options": options_text(trainer.options), "log": LOG,
        "course": _course(loop.budget), "learnt": trainer.n_learning, "measured": _measured(last),
    }  # fmt: skip
    write_text(folder / "README.md", CARD.format(**words))


def base_name(target: Target) -> str:
    """Return the name of the base without any path of this machine."""
    if "gguf" in target.origin and target.folder is None:
        return str(target.origin["gguf"]["file"])
    return target.name if target.folder is None or target.is_lab else target.folder.name


def _measured(last: dict[str, Any]) -> str:
    if "held_out_loss" in last:
        right, tau = _shares(last["held_out_right"]), last["estimated_tau"]
        return LOOK.format(loss=last["held_out_loss"], right=right, tau=tau)
    return NOTHING.format(loss=last["loss"], right=_shares(last["right"]))


def _shares(right: list[float]) -> str:
    return ", ".join(f"{share:.3f}" for share in right)


def _course(budget: Budget) -> str:
    rise = f"up to the peak in {budget.warmup} steps"
    if budget.falls_from is None:
        return f"{rise}, and to 0 along a cosine"
    return f"{rise}, and to 0 in a line from step {budget.falls_from} on"


def _device(loop: DrafterLoop) -> str:
    kind, count = loop.target.device.type, loop.machine.count
    name = kind
    if kind == "cuda":
        most = torch.cuda.max_memory_allocated(loop.target.device) / 2**30
        name = f"{torch.cuda.get_device_name(loop.target.device)} ({most:.1f} GiB of memory at most)"
    return name if count == 1 else f"{count} x {name}"


KEPT_HERE = ["checkpoint.pt*", "*.tmp"]


def check_repository(repo: str) -> None:
    """Raise UserError for what cannot be a repository, or where there is no token to write with."""
    from huggingface_hub import get_token

    if HUB_ID.fullmatch(repo) is None:
        raise UserError(f"--push-to-hub {repo!r} is no hub repository: expected OWNER/NAME")
    if get_token() is None:
        raise UserError("--push-to-hub needs a token that may write: run `hf auth login`, or set HF_TOKEN")


def push_to_hub(folder: Path, repo: str) -> str:
    """Upload the folder without its checkpoints, make the repository if need be, and return its address.

    Raises UserError where that fails; the folder stays as it is.
    """
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        made = api.create_repo(repo, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, ignore_patterns=KEPT_HERE)
    except Exception as error:  # the hub's own kinds and the network's
        raise UserError(f"{folder} is written, but cannot be put into {repo}: {first_line(error)}") from error
    return str(made)
