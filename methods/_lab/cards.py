"""Model cards of the lab family: held-out loss, task scores and tau, measured, with the command that repeats them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from specbench_ss.decoding.loop import Limits, generate
from specbench_ss.decoding.sampling import Sampling
from specbench_ss.decoding.target import Target
from specbench_ss.method_spec import MethodSpec
from specbench_ss.registry import load_method
from specbench_ss.runs.suite import Question
from specbench_ss.suites.lab_text.catalog import APP_CATEGORIES, SPECBENCH_CATEGORIES, questions
from specbench_ss.suites.lab_text.training_text import completion_mask, conversations, render, tokenize
from specbench_ss.suites.scorers import score_turn
from specbench_ss.training.text.answering import Answering, answer_batch


@dataclass(frozen=True, slots=True)
class Measured:
    """losses: by model, nats per answer token, held out. scores: category -> (metric, mean, n). taus: by method."""

    losses: Mapping[str, float]
    scores: Mapping[str, tuple[str, float, int]]
    taus: Mapping[str, float]


SMALL_DRAFT = "draft-2m"
DRAFTS = {"draft": "sd", SMALL_DRAFT: f"sd[weights={SMALL_DRAFT}]"}  # models that draft, and the methods that use them
# methods whose weights come with the lab, each with its folder there
WITH_THE_LAB = {
    "medusa": "medusa", "ss": "ss", "ss-shared": "ss-shared", "hydra": "hydra", "eagle": "eagle", "eagle2": "eagle",
    "eagle3": "eagle3", "dflash": "dflash", "peagle": "peagle", "medusa2": "medusa2", "space": "space", "rest": "rest",
    "ss[parent=on]": "ss-parent", **{method: folder for folder, method in DRAFTS.items()},
}  # fmt: skip


@torch.inference_mode()
def held_out_loss(model: Any, tokenizer: Any, special: Mapping[str, int], count: int = 400) -> float:
    """Mean cross-entropy, nats per answer token, on evaluation conversations."""
    total, tokens = 0.0, 0
    for ids in tokenize(tokenizer, [render(e) for e in islice(conversations("eval", 0), count)]):
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
    decoders = {name: load_method(MethodSpec.parse(name), target) for name in ("ar", *here)}
    prompts = [
        target.encode_chat([{"role": "user", "content": q.turns[0]}])
        for q in questions(SPECBENCH_CATEGORIES, "eval", per_category)
    ]
    found = {}
    for name, decoder in decoders.items():
        runs = [generate(decoder, p, Limits(limit, target.eos_ids), Sampling()) for p in prompts]
        steps = [s for r in runs for s in r.steps]
        found[name] = sum(s.tokens for s in steps) / len(steps)
    return found


BASE = """# Lab base

Llama architecture, {parameters:,} parameters, trained from nothing on generated text (`ssbench lab train`). It speaks
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
}  # fmt: skip
NEXT_TOKEN = """# Lab next-token

LoRA for the lab base that learnt next tokens alone, from the very batches of `ss-shared` and at its rank: the fine-tune
that shared mode's quality is held against (ACL table 3). It drafts nothing: `ss-shared-ar[weights=next-token]` decodes
with it.
"""
AGAIN = """
Measured by `ssbench lab train --stages cards --out DIR`; float32. DIR is the folder of a training run; with an empty
one, the weights that come with the package are measured.
"""


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
    if (out / "next-token").is_dir():  # an older family has none
        cards["next-token"] = NEXT_TOKEN
    for name, text in cards.items():
        (out / name / "README.md").write_text(text + AGAIN)
    known = json.loads((out / "lab.json").read_text())
    known["measured"] = asdict(measured)
    (out / "lab.json").write_text(json.dumps(known, indent=1) + "\n")
