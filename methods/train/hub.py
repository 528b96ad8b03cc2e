"""Putting a folder into a repository of the Hugging Face hub. The network is used because the user asked for it."""

from __future__ import annotations

from pathlib import Path

from specbench_ss.errors import UserError, first_line
from specbench_ss.methods.checkpoint import HUB_ID

KEPT_HERE = ["checkpoint.pt*", "*.tmp"]


def check(repo: str) -> None:
    """Raises UserError for what cannot be a repository, or where there is no token to write with."""
    from huggingface_hub import get_token

    if HUB_ID.fullmatch(repo) is None:
        raise UserError(f"--push-to-hub {repo!r} is no hub repository: expected OWNER/NAME")
    if get_token() is None:
        raise UserError("--push-to-hub needs a token that may write: run `hf auth login`, or set HF_TOKEN")


def push(folder: Path, repo: str) -> str:
    """All but checkpoints into the repository, made if need be; its address. Raises UserError; the folder stays."""
    from huggingface_hub import HfApi

    try:
        api = HfApi()
        made = api.create_repo(repo, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, ignore_patterns=KEPT_HERE)
    except Exception as error:  # the hub's own kinds and the network's
        raise UserError(f"{folder} is written, but cannot be put into {repo}: {first_line(error)}") from error
    return str(made)
