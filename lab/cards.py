"""Model cards of the lab family: validation loss, task scores and tau, with the command that measures them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from lab.drafters import RECIPES
from lab.example import load
from lab.text import APP_CATEGORIES, APP_WEIGHTS, SPECBENCH_CATEGORIES, WEIGHTS, conversations, questions
from lab.training import LabTraining, completion_mask, special_ids, tokenize
from specbench_ss.engine.decoder import Decoder
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.models.checkpoint import advice_card, read_config
from specbench_ss.models.load import load_target
from specbench_ss.options import MethodSpec
from specbench_ss.registry import load_method
from specbench_ss.suite import Question
from specbench_ss.suites.scorers import score_turn
from specbench_ss.training.self_distill import GenerationOptions, answer_batch


@dataclass(frozen=True, slots=True)
class Measured:
    """losses: validation loss by model, nats per answer token. scores: category -> (metric, mean, n). taus: by method.

    apps: loss and tau on the applications, by method.
    """

    losses: Mapping[str, float]
    scores: Mapping[str, tuple[str, float, int]]
    taus: Mapping[str, float]
    apps: Mapping[str, tuple[float, float]]


APP_DRAFT = "sd[weights=draft-apps]"
MODELS = ("base", "draft", "draft-2m")  # those with a loss of their own
# methods whose weights come with the lab, each with its folder there
METHODS = {
    **{method: name for name, recipe in RECIPES.items() for method in recipe.methods},
    "rest": "rest",
    "sd": "draft",
}
DRAFT = "It learnt from 24 million tokens of the base's kind of text, ten times as much as the other drafters."


@torch.inference_mode()
def validation_loss(
    model: Any, tokenizer: Any, special: Mapping[str, int], count: int, weights: Mapping[str, float] = WEIGHTS
) -> float:
    """Return mean cross-entropy, nats per answer token, on evaluation conversations mixed by these weights."""
    total, tokens = 0.0, 0
    for ids in tokenize(tokenizer, islice(conversations("eval", 0, weights), count)):
        mask = torch.from_numpy(completion_mask(ids, special))[1:]
        row = torch.from_numpy(ids).long()[None].to(model.device)
        losses = F.cross_entropy(model(row).logits[0, :-1].float(), row[0, 1:], reduction="none").cpu()
        total, tokens = total + float(losses[mask].sum()), tokens + int(mask.sum())
    return total / tokens


def task_scores(target: Target, per_category: int, limit: int) -> dict[str, tuple[str, float, int]]:
    """Return the mean score of greedy answers to evaluation questions by category, over all turns."""
    scores: dict[str, tuple[str, float, int]] = {}
    for category in (*SPECBENCH_CATEGORIES, *APP_CATEGORIES):
        asked = questions([category], "eval", per_category)
        found = _scores_of(target, asked, limit)
        if found:
            scores[category] = (asked[0].metric or "", sum(found) / len(found), len(found))
    return scores


def _scores_of(target: Target, asked: Sequence[Question], limit: int) -> list[float]:
    talks: list[list[dict[str, str]]] = [[] for _ in asked]
    found: list[float] = []
    for turn in range(len(asked[0].turns)):  # equal within a category
        for q, talk in zip(asked, talks, strict=True):
            talk.append({"role": "user", "content": q.turns[turn]})
        answers = answer_batch(
            target, [target.encode_chat(talk) for talk in talks], GenerationOptions(target.eos_ids, limit)
        )
        for q, talk, ids in zip(asked, talks, answers, strict=True):
            text = target.decode_text(ids)
            talk.append({"role": "assistant", "content": text})
            score = score_turn(q, turn, text)
            if score is not None:
                found.append(score)
    return found


def taus(target: Target, per_category: int, limit: int) -> dict[str, float]:
    """Return tau of every drafter over first turns of the 13 categories' evaluation questions, greedy, by default."""
    available = [name for name, folder in METHODS.items() if target.bundled_drafter(folder)]  # `peagle` does not ship
    prompts = _prompts(target, SPECBENCH_CATEGORIES, per_category)
    return {name: _tau(load_method(MethodSpec.parse(name), target), prompts, limit) for name in ("ar", *available)}


def on_the_applications(
    target: Target, special: Mapping[str, int], count: int, per_category: int, limit: int
) -> dict[str, tuple[float, float]]:
    """Return validation loss and tau of the draft and of the tuned one on the applications."""
    found: dict[str, tuple[float, float]] = {}
    prompts = _prompts(target, APP_CATEGORIES, per_category)
    for name in ("sd", APP_DRAFT):
        decoder: Any = load_method(MethodSpec.parse(name), target)
        loss = validation_loss(decoder.draft.model.model, target.tokenizer, special, count, APP_WEIGHTS)
        found[name] = loss, _tau(decoder, prompts, limit)
    return found


def _prompts(target: Target, categories: Sequence[str], per_category: int) -> list[list[int]]:
    asked = questions(categories, "eval", per_category)
    return [target.encode_chat([{"role": "user", "content": q.turns[0]}]) for q in asked]


def _tau(decoder: Decoder, prompts: Iterable[list[int]], limit: int) -> float:
    runs = [generate(decoder, p, StopParams(limit, decoder.target.eos_ids), SamplingParams()) for p in prompts]
    steps = [s for r in runs for s in r.steps]
    return sum(s.tokens for s in steps) / len(steps)


def measure(lab: LabTraining, family: Path) -> None:
    """Measure the models of a folder and write its cards."""
    models = {name: load_target(str(family / name), dtype="float32", device=lab.device) for name in MODELS}
    base, longest = models["base"], min(256, lab.scaled(256, 8))
    special, count = special_ids(base.tokenizer), lab.scaled(400, 8)
    losses = {name: validation_loss(t.model, t.tokenizer, special, count) for name, t in models.items()}
    lab.log("cards: validation loss " + ", ".join(f"of {name} {loss:.4f}" for name, loss in losses.items()))
    scores = task_scores(base, lab.scaled(60, 1), longest)
    lab.log("cards: " + ", ".join(f"{c} {m} {v:.3f}" for c, (m, v, _) in scores.items()))
    found = taus(base, lab.scaled(3, 1), longest)
    lab.log("cards: " + ", ".join(f"{name} tau {value:.2f}" for name, value in found.items()))
    apps = on_the_applications(base, special, count, lab.scaled(20, 1), longest)
    text = ", ".join(f"{name} loss {loss:.4f} tau {value:.2f}" for name, (loss, value) in apps.items())
    lab.log(f"cards: on the applications {text}")
    sizes = {name: model.parameter_count for name, model in models.items()}
    write_cards(family, sizes, Measured(losses, scores, found, apps))


def write_cards(out: Path, sizes: Mapping[str, int], measured: Measured) -> None:
    """Write README.md in every folder, and all numbers in lab.json. sizes: parameters of the models."""
    texts = load("cards.texts", dict[str, str])
    first = {folder: method for method, folder in reversed(METHODS.items())}  # eagle2 reads eagle's
    for folder in filter(Path.is_dir, (out / name for name in ("base", "draft", "rest", *RECIPES))):
        name, method, recipe = folder.name, first.get(folder.name, ""), RECIPES.get(folder.name)
        card = texts.get(name, texts["drafter"]).format(
            name=name,
            method=method,
            what=recipe.what if recipe else DRAFT,
            text="the base's own greedy answers" if recipe and not recipe.course.weights else "the base's kind of text",
            parameters=sizes.get(name, 0),
            loss=measured.losses.get(name, 0.0),
            scores="\n".join(f"| {c} | {m} | {v:.3f} | {n} |" for c, (m, v, n) in measured.scores.items()),
            tau=measured.taus.get(method, 0.0),
            others=", ".join(f"{other} {tau:.2f}" for other, tau in measured.taus.items() if other != method),
            before=measured.apps["sd"],
            after=measured.apps[APP_DRAFT],
        )
        advice = advice_card(read_config(folder)) if (folder / "config.json").is_file() else ""
        (folder / "README.md").write_text("\n".join(filter(None, (card, advice, texts["again"]))))
    stored = json.loads((out / "lab.json").read_text())
    (out / "lab.json").write_text(json.dumps({**stored, "measured": asdict(measured)}, indent=1) + "\n")
