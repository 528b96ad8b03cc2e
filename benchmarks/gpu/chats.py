"""Conversations of the lab's generators as chat JSONL, for trainings without a network.

PYTHONPATH=. python benchmarks/gpu/chats.py COUNT FILE.jsonl
"""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path

from lab.example import Example
from lab.text import conversations
from specbench_ss.storage import replacing


def messages(example: Example) -> list[dict[str, str]]:
    """Its turns, each with the first of its answers."""
    pairs = zip(example.turns, example.answers, strict=True)
    return [m for turn, answers in pairs for m in (said("user", turn), said("assistant", answers[0]))]


def said(role: str, content: str) -> dict[str, str]:
    """A message."""
    return {"role": role, "content": content}


def main() -> None:
    """Write them."""
    count, path = int(sys.argv[1]), Path(sys.argv[2])
    with replacing(path) as file:
        for example in islice(conversations("train", 0), count):
            file.write(json.dumps({"messages": messages(example)}).encode() + b"\n")


if __name__ == "__main__":
    main()
