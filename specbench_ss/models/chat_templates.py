"""Chat templates for models whose tokenizer has none: three conversation forms by name, or a Jinja file.

This module knows text and tokenizers, but no model.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from specbench_ss.errors import UserError, did_you_mean, error_text

FOLDER = Path(__file__).parents[1] / "templates"
NAMES = ("plain", "vicuna", "llama-2")
CHOICES = "|".join((*NAMES, "FILE"))
_TRIAL = [  # what every run asks of a template: several turns, and room for the answer
    {"role": "user", "content": "first question"},
    {"role": "assistant", "content": "its answer"},
    {"role": "user", "content": "second question"},
]


def template_text(given: str) -> str:
    """Return the Jinja text of a template's name or file. Raises UserError for what is neither."""
    path = FOLDER / f"{given}.jinja" if given in NAMES else Path(given)
    if not path.is_file():
        hint = did_you_mean(given, NAMES)
        raise UserError(f"--chat-template {given!r} is neither {', '.join(NAMES)} nor a file{hint}")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read --chat-template {given}: {error}") from error


def check_template(tokenizer: Any, model: str) -> None:
    """Raise UserError where the tokenizer has no chat template, or one that cannot be filled in."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise UserError(f"the tokenizer of {model} has no chat template; give one with --chat-template {CHOICES}")
    try:
        rendered = tokenizer.apply_chat_template(_TRIAL, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # Jinja's own errors, and whatever a template raises by itself
        raise UserError(f"the chat template of {model} does not work: {error_text(error)}") from error
    asked = [message["content"] for message in _TRIAL if message["role"] == "user"]
    lost = next((text for text in asked if text not in rendered), None)
    if lost is not None:
        raise UserError(f"the chat template of {model} leaves out what was asked: {lost!r} is not in {rendered!r}")


def template_hash(tokenizer: Any) -> str | None:
    """Return a short sha256 of the tokenizer's chat template; None where there is none."""
    template = getattr(tokenizer, "chat_template", None)
    if template is None:
        return None
    return hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:16]
