"""Conversations in JSON lines of the common formats, for `run` and `train`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specbench_ss.errors import UserError

Message = dict[str, str]  # role and content, as for chat templates

COLUMNS = {  # columns of each format, the identifying one first; a row with several formats is read as the first
    "messages": ("messages",),
    "conversations": ("conversations",),
    "prompt": ("prompt", "completion", "response"),
    "instruction": ("instruction", "input", "output"),
    "turns": ("turns",),
}
SYSTEM = "system"  # column of the system message, in every format
MESSAGE_KEYS = {"role", "content", "from", "value"}
FORMS = "'messages', 'conversations', 'prompt' and 'completion' (or 'response'), 'instruction' and 'output', or 'turns'"
ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
}


@dataclass(frozen=True, slots=True)
class Conversation:
    """An optional system message, then alternating user and assistant. place: source location, for messages.

    out_of_order: messages of the row were dropped, since roles did not alternate or a text was empty.
    """

    place: str
    messages: tuple[Message, ...]
    out_of_order: bool = False

    @property
    def has_completion(self) -> bool:
        """Return True if there is an assistant message."""
        return any(m["role"] == "assistant" for m in self.messages)

    @property
    def answered(self) -> tuple[Message, ...]:
        """Return all messages up to the assistant's last one."""
        return self.messages if self.messages[-1:] and self.messages[-1]["role"] == "assistant" else self.messages[:-1]

    @property
    def questions(self) -> tuple[Message, ...]:
        """Return all messages except the assistant's."""
        return tuple(m for m in self.messages if m["role"] != "assistant")

    def in_validation(self, fraction: float) -> bool:
        """Return True if it belongs to the validation share, by a hash of the messages before the first answer.

        So conversations with the same beginning are on the same side, independent of answers and other data, and a
        larger fraction adds conversations to the same share.
        """
        first = next((i for i, m in enumerate(self.messages) if m["role"] == "assistant"), len(self.messages))
        text = json.dumps([[m["role"], m["content"]] for m in self.messages[:first]])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") < fraction * 2**64


def read_conversation(
    place: str, row: Mapping[str, Any], columns: Mapping[str, str] | None = None, prompts_only: bool = False
) -> Conversation:
    """Return the conversation in a row of any known format. Raises UserError, with the place, for any other row.

    columns: {the format's column name: the row's}. prompts_only: answers are ignored and may be missing.
    """
    return _alternating(place, read_messages(place, row, columns, prompts_only), prompts_only)


def read_messages(
    place: str, row: Mapping[str, Any], columns: Mapping[str, str] | None = None, prompts_only: bool = False
) -> list[Message]:
    """Return every message in a row of any known format, in the given order and roles.

    Arguments and errors are those of `read_conversation`.
    """
    row = _with_form_names(place, row, columns or {})
    messages = _messages(place, row, prompts_only)
    if not row.get(SYSTEM):
        return messages
    if any(message["role"] == "system" for message in messages):
        raise UserError(f"{place}: both {SYSTEM!r} and a system message; keep one")
    return [{"role": "system", "content": _text(place, row, SYSTEM)}, *messages]


def unread_keys(row: Mapping[str, Any]) -> list[str]:
    """Return the non-empty keys of a row's messages that are not read."""
    entries = [entry for key in COLUMNS if isinstance(row.get(key), list) for entry in row[key]]
    return [key for entry in entries if isinstance(entry, Mapping) for key in set(entry) - MESSAGE_KEYS if entry[key]]


def _with_form_names(place: str, row: Mapping[str, Any], columns: Mapping[str, str]) -> Mapping[str, Any]:
    for column in columns.values():
        if column not in row:
            raise UserError(f"{place}: no column {column!r}; there are {', '.join(map(str, row))}")
    return {**row, **{name: row[column] for name, column in columns.items()}}


def _messages(place: str, row: Mapping[str, Any], prompts_only: bool) -> list[Message]:
    for key in ("messages", "conversations"):
        if isinstance(row.get(key), Sequence) and not isinstance(row[key], str):
            return _chat(place, key, row[key])
    if "prompt" in row:
        answer = "response" if "response" in row else "completion"
        prompt = _part(place, row, "prompt", "user")
        return prompt if prompts_only and answer not in row else prompt + _part(place, row, answer, "assistant")
    if "instruction" in row:
        texts = [_text(place, row, "instruction"), *([_text(place, row, "input")] if row.get("input") else [])]
        question = [{"role": "user", "content": "\n\n".join(texts)}]
        return question if prompts_only and "output" not in row else question + _part(place, row, "output", "assistant")
    if isinstance(row.get("turns"), list):
        if not prompts_only:
            raise UserError(f"{place}: 'turns' has no answers; use --regenerate-responses")
        return [{"role": "user", "content": _require_text(place, "turns", turn)} for turn in row["turns"]]
    for key in ("messages", "conversations", "turns"):
        if key in row:
            raise UserError(f"{place}: {key!r} must be a list, not {_kind(row[key])}")
    raise UserError(f"{place}: none of the known columns: {FORMS}; there are {', '.join(map(str, row)) or 'none'}")


def _part(place: str, row: Mapping[str, Any], key: str, role: str) -> list[Message]:
    """Return the messages of a prompt or completion, which is a string or a list of messages."""
    if isinstance(row.get(key), Sequence) and not isinstance(row[key], str):
        return _chat(place, key, row[key])
    return [{"role": role, "content": _text(place, row, key)}]


def _chat(place: str, key: str, entries: Sequence[Any]) -> list[Message]:
    return [_message(f"{place}: {key}[{i}]", entry) for i, entry in enumerate(entries)]


def _message(place: str, entry: Any) -> Message:
    if not isinstance(entry, Mapping):
        raise UserError(f"{place} is not a message with a role and a content")
    role = entry.get("role", entry.get("from"))
    if not isinstance(role, str) or role not in ROLES:
        raise UserError(f"{place} has role {role!r}; known roles: {', '.join(ROLES)}")
    content = entry.get("content", entry.get("value"))
    if isinstance(content, list):
        content = "".join(_text_part(place, part) for part in content)
    return {"role": ROLES[role], "content": _require_text(place, "content", content)}


def _text_part(place: str, part: Any) -> str:
    """Return the text of a part of a message. Raises UserError for a part of another type, such as an image."""
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text":
        raise UserError(f"{place}: 'content' has a part of type {kind!r}; only parts of type 'text' are read")
    return _require_text(place, "text", part.get("text"))


def _text(place: str, row: Mapping[str, Any], key: str) -> str:
    if key not in row:
        raise UserError(f"{place}: no column {key!r}; there are {', '.join(map(str, row))}")
    return _require_text(place, key, row[key])


def _require_text(place: str, key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise UserError(f"{place}: {key!r} must be a text, not {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    """Return the kind of a value for an error message."""
    return "a text" if isinstance(value, str) else "nothing" if value is None else type(value).__name__


def _alternating(place: str, messages: Sequence[Message], prompts_only: bool) -> Conversation:
    """Return the part of the messages in which non-empty user and assistant messages alternate.

    Answers before the first question are dropped (ShareGPT has such conversations); the result ends where the order
    breaks. With prompts_only, each successive user message is a turn.
    """
    if prompts_only:
        messages = [m for m in messages if m["role"] != "assistant"]
    system = [m for m in messages[:1] if m["role"] == "system"]
    rest = list(messages[len(system) :])
    total = len(rest)
    while rest and rest[0]["role"] == "assistant":
        rest = rest[1:]
    turns: list[Message] = []
    for message in rest:
        expected = "user" if prompts_only or len(turns) % 2 == 0 else "assistant"
        if message["role"] != expected or not message["content"].strip():
            break
        turns.append(message)
    messages_kept = (*[m for m in system if m["content"].strip()], *turns) if turns else ()
    return Conversation(place, messages_kept, len(turns) < total)
