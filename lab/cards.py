"""Model cards of the lab family: held-out loss, task scores and tau, measured, with the command that repeats them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from lab.text import APP_CATEGORIES, APP_WEIGHTS, SPECBENCH_CATEGORIES, WEIGHTS, conversations, questions
from specbench_ss.engine.decoder import Decoder
from specbench_ss.engine.generate import Limits, generate
from specbench_ss.engine.sampling import Sampling
from specbench_ss.engine.target import Target
from specbench_ss.options import MethodSpec
from specbench_ss.registry import load_method
from specbench_ss.suite import Question
from specbench_ss.suites.scorers import score_turn
from specbench_ss.training.data import completion_mask, render, tokenize
from specbench_ss.training.self_distill import Answering, answer_batch


@dataclass(frozen=True, slots=True)
class Measured:
    """losses: by model, nats per answer token, held out. scores: category -> (metric, mean, n). taus: by method.

    apps: of the drafts that are compared on the applications, by method, their loss and tau there.
    """

    losses: Mapping[str, float]
    scores: Mapping[str, tuple[str, float, int]]
    taus: Mapping[str, float]
    apps: Mapping[str, tuple[float, float]]


SMALL_DRAFT = "draft-2m"
APP_DRAFT_FOLDER = "draft-apps"
APP_DRAFT = f"sd[weights={APP_DRAFT_FOLDER}]"
DRAFTS = {"draft": "sd", SMALL_DRAFT: f"sd[weights={SMALL_DRAFT}]"}  # models that draft, and the methods that use them
# methods whose weights come with the lab, each with its folder there
WITH_THE_LAB = {
    "medusa": "medusa", "ss": "ss", "ss-shared": "ss-shared", "hydra": "hydra", "eagle": "eagle", "eagle2": "eagle",
    "eagle3": "eagle3", "dflash": "dflash", "peagle": "peagle", "medusa2": "medusa2", "space": "space", "rest": "rest",
    "ss[parent=on]": "ss-parent", "ss-shared[weights=ss-shared-eq1]": "ss-shared-eq1",
    **{method: folder for folder, method in DRAFTS.items()},
}  # fmt: skip


@torch.inference_mode()
def held_out_loss(
    model: Any, tokenizer: Any, special: Mapping[str, int], count: int = 400, weights: Mapping[str, float] = WEIGHTS
) -> float:
    """Mean cross-entropy, nats per answer token, on evaluation conversations, mixed by these weights."""
    total, tokens = 0.0, 0
    for ids in tokenize(tokenizer, [render(e) for e in islice(conversations("eval", 0, weights), count)]):
        mask = torch.from_numpy(completion_mask(ids, special))[1:]
        row = torch.from_numpy(ids).long()[None].to(model.device)
        losses = F.cross_entropy(model(row).logits[0, :-1].float(), row[0, 1:], reduction="none").cpu()
        total, tokens = total + float(losses[mask].sum()), tokens + int(mask.sum())
    return total / tokens


def task_scores(
    target: Target, per_category: int = 60, limit: int = 256, batch: int = 60
) -> dict[str, tuple[str, float, int]]:
    """Mean score of greedy answers to evaluation questions, by category, all turns, history the model's own."""
    scores: dict[str, tuple[str, float, int]] = {}
    for category in (*SPECBENCH_CATEGORIES, *APP_CATEGORIES):
        asked = questions([category], "eval", per_category)
        found = [s for i in range(0, len(asked), batch) for s in _scores_of(target, asked[i : i + batch], limit)]
        if found:
            scores[category] = (asked[0].metric or "", sum(found) / len(found), len(found))
    return scores


def _scores_of(target: Target, asked: Iterable[Question], limit: int) -> list[float]:
    talks: list[tuple[Question, list[dict[str, str]]]] = [(q, []) for q in asked]
    found: list[float] = []
    for turn in range(max(len(q.turns) for q, _ in talks)):
        going = [(q, talk) for q, talk in talks if turn < len(q.turns)]
        for q, talk in going:
            talk.append({"role": "user", "content": q.turns[turn]})
        prompts = [target.encode_chat(talk) for _, talk in going]
        how = Answering(target.eos_ids, limit)
        answers = answer_batch(target, prompts, how)
        for (q, talk), ids in zip(going, answers, strict=True):
            text = target.decode_text(ids)
            talk.append({"role": "assistant", "content": text})
            score = score_turn(q, turn, text)
            if score is not None:
                found.append(score)
    return found


def taus(target: Target, per_category: int = 3, limit: int = 256) -> dict[str, float]:
    """Tau of every drafter over evaluation questions of the 13 categories, first turns, greedy, default settings."""
    here = [name for name, folder in WITH_THE_LAB.items() if target.companion(folder)]  # an older family has fewer
    prompts = _prompts(target, SPECBENCH_CATEGORIES, per_category)
    return {name: _tau(load_method(MethodSpec.parse(name), target), prompts, limit) for name in ("ar", *here)}


def on_the_applications(
    target: Target, special: Mapping[str, int], count: int = 400, per_category: int = 3, limit: int = 256
) -> dict[str, tuple[float, float]]:
    """Held-out loss and tau of the draft and of the tuned one on the applications; nothing for a family without it."""
    found: dict[str, tuple[float, float]] = {}
    prompts = _prompts(target, APP_CATEGORIES, per_category)
    for name in ("sd", APP_DRAFT) if target.companion(APP_DRAFT_FOLDER) else ():
        decoder: Any = load_method(MethodSpec.parse(name), target)
        loss = held_out_loss(decoder.draft.model.model, target.tokenizer, special, count, APP_WEIGHTS)
        found[name] = loss, _tau(decoder, prompts, limit)
    return found


def _prompts(target: Target, categories: Sequence[str], per_category: int) -> list[list[int]]:
    asked = questions(categories, "eval", per_category)
    return [target.encode_chat([{"role": "user", "content": q.turns[0]}]) for q in asked]


def _tau(decoder: Decoder, prompts: Iterable[list[int]], limit: int) -> float:
    runs = [generate(decoder, p, Limits(limit, decoder.target.eos_ids), Sampling()) for p in prompts]
    steps = [s for r in runs for s in r.steps]
    return sum(s.tokens for s in steps) / len(steps)


BASE = """# Lab base

Llama architecture, {parameters:,} parameters, trained from nothing on generated text (`python -m lab train`). It speaks
English and reads a little German; it knows the lab's world and nothing else.

Held-out loss: {loss:.4f} nats per answer token.

| category | metric | score | n |
|---|---|---|---|
{scores}
"""
DRAFT = """# Lab {name}

Llama architecture, {parameters:,} parameters, the base's tokenizer: for two-model speculative decoding, `{method}`.
{text}

Held-out loss: {loss:.4f} nats per answer token.

Tau over held-out questions of the 13 categories, greedy, default options: {tau:.2f}.
"""
LEARNT = {
    "draft": "It learnt from 24 million tokens of the base's kind of text, ten times as much as the other drafters.",
    SMALL_DRAFT: "It learnt from the base's own greedy answers: 900 steps of 5 rows of 512 tokens, 2.3 million in all, "
    "the very batches of the other drafters.",
}
DRAFTER = """# Lab {name}

{what} for the lab base, made of {text}.

Tau over held-out questions of the 13 categories, greedy, default options: {tau:.2f} ({others}).
"""
OWN = "the base's own greedy answers"
DRAFTERS = {
    "medusa": ("Four Medusa-1 heads", OWN),
    "hydra": ("Hydra++, four sequential heads behind one more layer,", OWN),
    "eagle": ("EAGLE's drafter, which eagle2 uses too,", OWN),
    "eagle3": ("EAGLE-3's drafter", OWN),
    "dflash": ("DFlash's drafter of one layer and a block of eight", OWN),
    "peagle": ("P-EAGLE's drafter of one layer and seven depths", OWN),
    "ss": ("Lossless streams and the pruning map", OWN),
    "ss-parent": ("Streams that know their root and parents, as no paper has them, for `ss[parent=on]`,", OWN),
    "space": ("LoRA and masks, learnt together, which change the model,", "the base's kind of text"),
    "rest": ("A datastore", f"{OWN} to questions of the applications, so that it has none to Spec-Bench's categories"),
    "medusa2": ("LoRA and four Medusa heads, learnt together, which change the model,", "the base's kind of text"),
    "ss-shared": ("LoRA and streams, learnt together (eq. 6; main rows see their streams), which change the model,",
                  "the base's kind of text"),
    "ss-shared-eq1": ("LoRA and streams, learnt together as the 2024 paper has it (eq. 1: main rows do not see "
                      "streams), which change the model,", "the base's kind of text"),
}  # fmt: skip
NEXT_TOKEN = """# Lab next-token

LoRA for the lab base that learnt next tokens alone, from the very batches of `ss-shared` and at its rank: the fine-tune
that shared mode's quality is held against (ACL table 3). It drafts nothing: `ss-shared-ar[weights=next-token]` decodes
with it.
"""
TUNED_DRAFT = """# Lab draft-apps

LoRA (rank 32) for the lab's `draft`, for two-model speculative decoding: `{method}`. It learnt next tokens of the
training answers of SQL, dialogue summaries and meaning representations, all three together, where the papers tune their
draft model on each application by itself.

Held out, on these three:

| draft | loss, nats per answer token | tau, greedy, default options |
|---|---|---|
| `draft` | {before[0]:.4f} | {before[1]:.2f} |
| with this LoRA | {after[0]:.4f} | {after[1]:.2f} |
"""
AGAIN = """
Measured by `python -m lab train --stages cards --out DIR`; float32. DIR is the folder of a training run; with an empty
one, the weights that come with the package are measured.
"""


def tuned_draft(apps: Mapping[str, tuple[float, float]]) -> str:
    """The card of the draft that is tuned for the applications."""
    return TUNED_DRAFT.format(method=APP_DRAFT, before=apps["sd"], after=apps[APP_DRAFT])


def write_cards(out: Path, models: Mapping[str, Target], measured: Measured) -> None:
    """README.md in every folder, and all numbers in lab.json. models: the base and the drafts."""
    scores = "\n".join(f"| {c} | {m} | {v:.3f} | {n} |" for c, (m, v, n) in measured.scores.items())
    size = {name: model.parameter_count for name, model in models.items()}
    cards = {"base": BASE.format(parameters=size["base"], loss=measured.losses["base"], scores=scores)}
    for name in DRAFTS.keys() & size.keys():
        method = DRAFTS[name]
        cards[name] = DRAFT.format(
            name=name, parameters=size[name], method=method, text=LEARNT[name], loss=measured.losses[name],
            tau=measured.taus[method],
        )  # fmt: skip
    methods: dict[str, str] = {}
    for method, folder in WITH_THE_LAB.items():
        methods.setdefault(folder, method)  # the first: eagle2 reads eagle's
    for name, (what, text) in DRAFTERS.items():
        method = methods[name]
        if method not in measured.taus:
            continue
        others = ", ".join(f"{k} {v:.2f}" for k, v in measured.taus.items() if k != method)
        cards[name] = DRAFTER.format(name=name, what=what, text=text, tau=measured.taus[method], others=others)
    if (out / "next-token").is_dir():  # an older family has none; nothing of it is measured here
        (out / "next-token" / "README.md").write_text(NEXT_TOKEN)
    if APP_DRAFT in measured.apps:
        cards[APP_DRAFT_FOLDER] = tuned_draft(measured.apps)
    for name, text in cards.items():
        (out / name / "README.md").write_text(text + AGAIN)
    known = json.loads((out / "lab.json").read_text())
    known["measured"] = asdict(measured)
    (out / "lab.json").write_text(json.dumps(known, indent=1) + "\n")
