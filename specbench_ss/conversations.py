"""Conversations in the rows of published data sets, for `run`, `train` and `datastore`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from reprlib import repr as shortened
from typing import Any, NamedTuple

from specbench_ss.errors import UserError
from specbench_ss.options import encodable

Message = dict[str, Any]  # role and content, as for chat templates, and the keys of tool messages


class Form(NamedTuple):
    """A published format: columns of the prompt in order, columns with its answer, words before the prompt."""

    texts: tuple[str, ...]
    answers: tuple[str, ...] = ()
    ask: str = ""


FORMS = {  # by the identifying column; the first one in a row counts
    "messages": Form(("messages",)),
    "conversations": Form(("conversations",)),
    "conversation": Form(("conversation",)),
    "turns": Form(("turns",)),
    "prompt": Form(("prompt",), ("completion", "response")),
    "instruction": Form(("instruction", "question", "input", "context"), ("output", "response", "answer")),
    "data": Form(("data",)),  # UltraChat
    "question": Form(("context", "question"), ("response", "answer", "answers")),
    "query": Form(("query",), ("response",)),
    "problem": Form(("problem",), ("solution",)),
    "problem_statement": Form(("problem_statement",)),
    "article": Form(("article",), ("highlights",), "Summarize this text:\n"),
    "document": Form(("document",), ("summary",), "Summarize this text:\n"),
    "dialogue": Form(("dialogue",), ("summary",), "Summarize this dialogue:\n"),
    "input": Form(("context", "input"), ("answers", "output")),  # LongBench
    "text": Form(("text",), ("code",)),  # MBPP
}
CHATS = ("messages", "conversations", "conversation", "turns", "prompt", "instruction")  # a row has one of these
LISTS = ("messages", "conversations", "conversation", "turns", "data")
SYSTEM = ("system", "system_prompt")  # columns of the system message, in every format
TOOL_KEYS = ("tool_calls", "tool_call_id", "name")  # of a message, in addition to role and content
MESSAGE_KEYS = {"role", "content", "from", "value", *TOOL_KEYS}
ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")} | {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "function_call"), "assistant"),
    **dict.fromkeys(("function", "observation"), "tool"),
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

    columns: as `renamed` takes them. prompts_only: answers are ignored and may be missing.
    """
    row = renamed(place, row, columns or {})
    return _alternating(place, read_messages(place, row, prompts_only), prompts_only)


def read_columns(texts: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Return the names and columns of `--columns`. Raise UserError for a text that is not NAME=COLUMN."""
    pairs = [(text, *text.partition("=")[::2]) for text in texts]
    for text, name, column in pairs:
        if not (name and column):
            raise UserError(f"cannot read --columns {text}: expected NAME=COLUMN")
    return tuple((name, column) for _, name, column in pairs)


def renamed(place: str, row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Return a row with the columns of a format. columns: {the format's column name: the row's}. Raise UserError."""
    for column in columns.values():
        if column not in row:
            raise UserError(f"{place}: no column {column!r}; there are {_listed(row)}")
    others = {name: value for name, value in row.items() if name not in columns.values()}
    return {**others, **{name: row[column] for name, column in columns.items()}}


def read_messages(place: str, row: Mapping[str, Any], prompts_only: bool = False) -> list[Message]:
    """Return every message in a row of any known format, in the given order. Raise UserError for any other row."""
    name = form_of(place, row)
    messages = _messages(place, name, row)
    if not prompts_only and (name == "turns" or name not in LISTS) and messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": _answer(place, name, row)})
    system = next((key for key in SYSTEM if row.get(key)), None)
    if system is None:
        return messages
    if any(message["role"] == "system" for message in messages):
        raise UserError(f"{place}: both {system!r} and a system message; keep one")
    return [{"role": "system", "content": text_in(place, row, system)}, *messages]


def read_turns(place: str, row: Mapping[str, Any]) -> tuple[list[Message], list[str], list[str]]:
    """Return earlier messages, the user messages to be answered in turn, and acceptable answers to the last one.

    Only the last user message is to be answered, or each one of several in a row. Answers before the first user message
    are dropped, as FastChat does, and tool calls and results after the last one.
    """
    name, messages = form_of(place, row), read_messages(place, row, prompts_only=True)
    roles = [message["role"] for message in messages]
    if "user" not in roles:
        raise UserError(f"{place}: {name!r} has no user message")
    begin, end = roles.index("user"), len(roles) - roles[::-1].index("user")
    answers = [answer for key in FORMS[name].answers for answer in _acceptable(row.get(key))]
    if roles[end:] == ["assistant"] and messages[end]["content"]:
        answers = _acceptable(messages[end]["content"])
    elif roles[end:] and "tool" not in roles[end:] and not messages[end].get("tool_calls"):
        ending = ", ".join(roles[-2:])
        raise UserError(f"{place}: {name!r} ends with {ending}; it must end with user, or with user, assistant")
    messages = [m for i, m in enumerate(messages[:end]) if i > begin or m["role"] != "assistant"]
    first = next((i for i in range(len(messages), 0, -1) if messages[i - 1]["role"] != "user"), 0)
    turns, roles = [message["content"] for message in messages[first:]], [m["role"] for m in messages[:first]]
    if not all(turn.strip() for turn in turns):
        raise UserError(f"{place}: {name!r}: a user message to be answered is empty")
    if ("user", "user") in zip(roles, roles[1:], strict=False):
        raise UserError(f"{place}: {name!r} has two user messages in a row before an answer; split the row")
    return messages[:first], turns, answers


def read_tools(place: str, row: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return the definitions in the column `tools`, a list or its JSON. Raise UserError for anything else."""
    tools = row.get("tools") or []
    try:
        tools = json.loads(tools) if isinstance(tools, str) else tools
        valid = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
        valid = valid and encodable(json.dumps(tools, ensure_ascii=False))
    except (ValueError, TypeError, RecursionError):
        valid = False
    if not valid:
        raise UserError(f"{place}: 'tools' must be a list of objects, or its JSON")
    return tuple(tools)


def form_of(place: str, row: Mapping[str, Any]) -> str:
    """Return the format of a row, a key of FORMS.

    Raise UserError for no or two formats, unless the second one repeats a text of the first.
    """
    if "message_tree_id" in row and "messages" not in row:
        raise UserError(f"{place}: OpenAssistant's rows are single messages of a tree; convert each path to 'messages'")
    names = [name for name in FORMS if row.get(name) is not None]
    names = [name for name in names if row[name] and (isinstance(row[name], list) or name not in LISTS)] or names
    if not names:
        known = ", ".join(map(repr, FORMS))
        raise UserError(
            f"{place}: none of the known columns: {known}; there are {_listed(row)}; rename one (run, train: --columns)"
        )
    chats = [name for name in names if name in CHATS]
    if len(chats) > 1 and not _repeats(row[chats[0]], row[chats[1]]):
        raise UserError(f"{place}: both {chats[0]!r} and {chats[1]!r}; keep one")
    return names[0]


def _repeats(value: Any, other: Any) -> bool:
    """Return True if the entries of one column are or contain the other column."""
    entries = value if isinstance(value, list) else [value]
    contents = [e.get("content", e.get("value")) if isinstance(e, Mapping) else e for e in entries]
    return other in contents or (isinstance(other, list) and all(e in entries or e in contents for e in other))


def unread_keys(entries: object) -> list[str]:
    """Return the non-empty keys of messages that are not read."""
    rows = [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list) else []
    return [key for entry in rows for key in set(entry) - MESSAGE_KEYS if entry[key]]


def _listed(row: Mapping[str, Any]) -> str:
    """Return the names of the first columns, each shortened."""
    names = [str(name)[:40] for name in row]
    return ", ".join([*names[:12], *([f"{len(names) - 12} more"] if len(names) > 12 else [])]) or "none"


def _messages(place: str, name: str, row: Mapping[str, Any]) -> list[Message]:
    """Return the messages of the prompt and of a completion that is a list of messages."""
    value = row[name]
    if name in LISTS and not isinstance(value, list):
        raise UserError(f"{place}: {name!r} must be a list, not {_kind(value)}")
    if isinstance(value, list):
        speakers = {"data": ("user", "assistant"), "turns": ("user",), "prompt": ("user",)}.get(name, ("",))
        messages = [_message(f"{place}: {name}[{i}]", e, speakers[i % len(speakers)]) for i, e in enumerate(value)]
        if not messages:
            raise UserError(f"{place}: {name!r} is empty")
    else:
        texts = [text_in(place, row, key) for key in FORMS[name].texts if key == name or row.get(key)]
        messages = [{"role": "user", "content": FORMS[name].ask + "\n\n".join(texts)}]
    answers = [(key, row[key]) for key in FORMS[name].answers if isinstance(row.get(key), list)]
    entries = [(f"{place}: {key}[{i}]", e) for key, value in answers for i, e in enumerate(value)]
    return messages + [_message(place, entry, "") for place, entry in entries if isinstance(entry, Mapping)]


def _answer(place: str, name: str, row: Mapping[str, Any]) -> str:
    """Return the first answer in the columns of the format. Raise UserError if there is none."""
    key = next((key for key in FORMS[name].answers if row.get(key) is not None), None)
    if key is None:
        lacking = "".join(f", no column {column!r}" for column in FORMS[name].answers)
        raise UserError(
            f"{place}: {name!r} has no answers{lacking}; there are {_listed(row)}; use --regenerate-responses"
        )
    return next(iter(_acceptable(row.get(key))), "") or text_in(place, row, key)


def _acceptable(value: Any) -> list[str]:
    """Return the texts in a column of answers: a text, a list of texts, or SQuAD's and TriviaQA's objects."""
    if isinstance(value, Mapping):
        value = value.get("text", value.get("value"))
    return [text for text in (value if isinstance(value, list) else [value]) if isinstance(text, str) and text.strip()]


def _message(place: str, entry: Any, speaker: str) -> Message:
    """Return a message. speaker: role of an entry that is a text, or that has no role; '' for none."""
    if speaker and isinstance(entry, str):
        entry = {"content": entry}
    if not isinstance(entry, Mapping):
        raise UserError(f"{place} is not a message with a role and a content")
    role = entry.get("role") or entry.get("from") or speaker or None
    if not isinstance(role, str) or role not in ROLES:
        raise UserError(f"{place} has role {shortened(role)}; known roles: {', '.join(ROLES)}")
    content = entry.get("value") if entry.get("content") is None else entry["content"]
    if isinstance(content, list):
        other = next((p for p in content if not isinstance(p, Mapping) or not isinstance(p.get("text"), str)), None)
        if other is not None:
            kind = shortened(other.get("type") if isinstance(other, Mapping) else other)
            raise UserError(f"{place}: 'content' has a part of type {kind}; only parts with a 'text' are read")
        content = "".join(part["text"] for part in content)
    tools = {key: entry[key] for key in TOOL_KEYS if entry.get(key)}
    kinds = all(isinstance(value, list if key == "tool_calls" else str) for key, value in tools.items())
    calls = tools.get("tool_calls") or ()
    kinds = kinds and all(isinstance(e, Mapping) and isinstance(e.get("function") or {}, Mapping) for e in calls)
    if tools and not (kinds and encodable(json.dumps(tools, ensure_ascii=False, default=str))):
        raise UserError(f"{place}: 'tool_calls' must be a list of objects; 'name' texts that can be encoded")
    if content is not None or not tools.get("tool_calls") or ROLES[role] != "assistant":
        content = text_in(place, {"content": content}, "content")
    return {"role": ROLES[role], "content": content, **tools}


def text_in(place: str, row: Mapping[str, Any], key: str) -> str:
    """Return a text of a row. Raise UserError for anything else, and for one that cannot be encoded."""
    if key not in row:
        raise UserError(f"{place}: no column {key!r}; there are {_listed(row)}")
    if not isinstance(row[key], str):
        raise UserError(f"{place}: {key!r} must be a text, not {_kind(row[key])}")
    if not encodable(row[key]):
        raise UserError(f"{place}: {key!r} has half of a surrogate pair, which is not a character")
    return str(row[key])


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
        if message["role"] != expected or not (message["content"] or "").strip():
            break
        turns.append(message)
    messages_kept = (*[m for m in system if (m["content"] or "").strip()], *turns) if turns else ()
    return Conversation(place, messages_kept, len(turns) < total)
