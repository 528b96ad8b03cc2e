"""SmolLM2's own greedy answers to public prompts, kept as a datastore of REST, so that a training need not make them.

    python benchmarks/own_answers.py prompts PROMPTS.jsonl --public train_prompts.jsonl --gsm8k train.jsonl
    python benchmarks/own_answers.py save DATASTORE --data PROMPTS.jsonl
    python benchmarks/own_answers.py load DATASTORE --data PROMPTS.jsonl [--eval-fraction 0.01] [--seed 0]

`prompts` adds 1,400 questions of GSM8K's training set to the public prompts. `save` makes the answers, or goes on with
those that an interrupted `ssbench train --regenerate-responses` has stored, and writes them in the order of the
prompts, one document each; the end token alone stands for a prompt that leaves no room for an answer. `load` builds the
training rows from such a datastore (that of SmolLM2: specbench_ss/drafters/smollm2/rest) and stores them in ssbench's
cache, where `ssbench train --regenerate-responses` with the same data, length, answer limit and seed finds them.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specbench_ss import load_model
from specbench_ss.conversations import Conversation
from specbench_ss.methods.rest.datastore import SEPARATOR, build, open_datastore
from specbench_ss.prompt_files import read_rows
from specbench_ss.training import data
from specbench_ss.training.chat_format import Rendered, Renderer
from specbench_ss.training.self_distill import ChatConversation, ResponseCache, own_documents

MORE_QUESTIONS = 1400  # of GSM8K
MODEL, LENGTH, LIMIT = "smollm2", 512, 128  # tokens of a row and of an answer
Documents = list[Rendered | None]


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("prompts", "save", "load"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--public", type=Path)
    parser.add_argument("--gsm8k", type=Path)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--eval-fraction", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    needed = ("public", "gsm8k") if a.part == "prompts" else ("data",)
    for name in needed:
        if getattr(a, name) is None:
            parser.error(f"{a.part} needs --{name}")
    if a.part == "prompts":
        write_prompts(a.file, a.public, a.gsm8k)
        return

    def documents(own: ResponseCache, renderer: Renderer, chats: Sequence[Conversation], *more: Any) -> Documents:
        if a.part == "load":
            return read_answers(a.file, own, renderer, chats)
        made = own_documents(own, renderer, chats, *more)
        write_answers(a.file, made, own, a.data.name)
        return made

    build_rows(a.data, a.eval_fraction, a.seed, documents)


def write_prompts(file: Path, public: Path, gsm8k: Path) -> None:
    """Write the public prompts, and questions of GSM8K that are not among them."""
    rows = [row for _, row in read_rows(public)]
    known = {row["messages"][0]["content"].strip() for row in rows}
    questions = [row["question"].strip() for _, row in read_rows(gsm8k)]
    new = [question for question in questions if question not in known]
    random.Random(0).shuffle(new)
    for i, question in enumerate(new[:MORE_QUESTIONS]):
        message = {"role": "user", "content": question}
        rows.append({"id": f"g{i:05d}", "source": "gsm8k", "kind": "math", "messages": [message]})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def build_rows(source: Path, eval_fraction: float, seed: int, documents: Callable[..., Documents]) -> None:
    """Build the training rows of the answers that `documents` returns, in the cache."""
    target = load_model(MODEL, dtype="bfloat16")
    built = False

    def once(*given: Any) -> Documents:
        nonlocal built
        built = True
        return documents(*given)

    data.own_documents = once  # type: ignore[assignment, attr-defined]
    data.load_rows(
        source, target.tokenizer, LENGTH, eval_fraction=eval_fraction, seed=seed, own=ResponseCache(target, LIMIT)
    )
    if not built:
        raise SystemExit("the cache has these rows already")


def write_answers(folder: Path, documents: Documents, own: ResponseCache, prompts: str) -> None:
    """Write the answers as a datastore."""
    answers = []
    for document in documents:
        assert document is None or len(document.spans) == 1, "one answer per conversation"
        answers.append(
            np.array([min(own.target.eos_ids)]) if document is None else document.ids[slice(*document.spans[0])]
        )
    build(answers, own.target, f"own answers to {prompts}", folder)


def read_answers(folder: Path, own: ResponseCache, renderer: Renderer, chats: Sequence[Conversation]) -> Documents:
    """Return the conversations with the answers of a datastore."""
    tokens = np.concatenate([chunk.tokens for chunk in open_datastore(folder).chunks])
    answers = np.split(tokens, np.flatnonzero(tokens == SEPARATOR) + 1)[:-1]
    if len(answers) != len(chats):
        raise SystemExit(f"{folder} answers {len(answers)} prompts, and there are {len(chats)}")
    documents = Documents()
    for i, (chat, answer) in enumerate(zip(chats, answers, strict=True)):
        talk, ids = ChatConversation(i, chat, renderer, LENGTH - LIMIT), answer[:-1].tolist()
        if talk.prompt() is not None:
            talk.answered(ids, ids[-1] in own.target.eos_ids)
        documents.append(talk.document)
    return documents


if __name__ == "__main__":
    main()
