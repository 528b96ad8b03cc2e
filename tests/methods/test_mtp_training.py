"""MTP training: the loss is FastMTP's, step 1 is decoding's first draft, texts stand alone, what is saved loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specbench_ss import load_method
from specbench_ss.engine.decoder import DecodeState
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.engine.tree import DraftTree
from specbench_ss.methods.mtp.decode import MTP, MTPOptions
from specbench_ss.methods.mtp.train import MTPTrainer, MTPTraining
from specbench_ss.models.tiny import randomise
from specbench_ss.training.batch import Batch, base_states
from specbench_ss.training.distributed import DistributedContext
from specbench_ss.training.loop import Budget, DrafterLoop
from specbench_ss.training.masks import Documents
from tests.methods.batches import batch_of, text_of
from tests.methods.reference_mtp import Reference, model_of
from tests.tiny import few, tiny_model

STEPS = 3


@pytest.fixture
def target() -> Target:
    return Target(model_of("qwen3"))


def trainer_of(target: Target, random: bool = True, **options: object) -> MTPTrainer:
    torch.manual_seed(0)
    trainer = MTPTrainer(target, MTPTraining(num_speculative_tokens=STEPS, **options), 3e-3)  # type: ignore[arg-type]
    if random:
        randomise(trainer.module, 3, 0.15)
    return trainer


def batch_at(rows: int, length: int, at: list[int]) -> Batch:
    ids = torch.randint(3, 61, (rows, length), generator=torch.Generator().manual_seed(1))
    return batch_of(ids, torch.tensor([at] * rows), ahead=STEPS)


def published_loss(target: Target, reference: Reference, batch: Batch, states: Tensor, beta: float) -> Tensor:
    """FastMTP's loss: dense steps over rows 0 to T - K - 2, each reading the true tokens and the step before."""
    table, (rows, length) = target.model.get_input_embeddings().weight, batch.ids.shape
    valid, terms = length - STEPS - 1, []
    for k in range(1, STEPS + 1):
        inputs = batch.ids[:, k : k + valid]
        u = [reference.rows(table[inputs[b]], states[b][:valid]) for b in range(rows)]
        states = torch.stack([reference.normed(x) for x in u])
        logits, labels = target.logits(states), batch.ids[:, k + 1 : k + 1 + valid]
        terms.append(F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
    weights = torch.tensor([beta ** (k - 1) for k in range(1, STEPS + 1)])
    return (weights / weights.sum() * torch.stack(terms)).sum()


def test_the_loss_and_its_gradients_are_the_published_ones(target: Target) -> None:
    trainer, length = trainer_of(target), 14
    batch = batch_at(2, length, list(range(length - STEPS - 1)))
    states = base_states(target, batch.ids, (), None)
    loss, right = trainer.loss(states, batch)
    reference = Reference(dict(trainer.module.named_parameters()), "qwen3")
    wanted = published_loss(target, reference, batch, states.final, 0.6)
    torch.testing.assert_close(loss, wanted, atol=1e-5, rtol=1e-5)
    parameters = list(trainer.module.parameters())
    ours, theirs = (torch.autograd.grad(x, parameters, retain_graph=True) for x in (loss, wanted))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-3)
    assert right.shape == (STEPS,) and all(p.grad is None for p in target.model.parameters())


def test_steps_are_weighted_by_beta(target: Target) -> None:
    batch = batch_at(2, 14, [2, 5, 7])
    states = base_states(target, batch.ids, (), None)
    by_beta = {beta: trainer_of(target, beta=beta).loss(states, batch)[0].item() for beta in (1e-6, 0.5, 1.0)}
    with torch.no_grad():
        trainer = trainer_of(target)
        logits = [target.logits(out) for out in trainer.unrolled([states.final], batch, STEPS)]
        terms = [
            float(F.cross_entropy(out.flatten(0, 1), batch.anchors.labels[..., 1 + k].flatten()))
            for k, out in enumerate(logits)
        ]
    assert by_beta[1e-6] == pytest.approx(terms[0], rel=1e-4)
    assert by_beta[0.5] == pytest.approx((4 * terms[0] + 2 * terms[1] + terms[2]) / 7, rel=1e-5)
    assert by_beta[1.0] == pytest.approx(sum(terms) / 3, rel=1e-5)


@pytest.mark.parametrize("kind", ["qwen3", "phi3", "opt"])
@torch.inference_mode()
def test_the_first_step_is_decodings_first_draft(kind: str) -> None:
    """Later steps differ: in decoding they attend to rows of step 1, in training to those of their own step."""
    target = Target(tiny_model(kind))
    trainer, at = trainer_of(target), [2, 5, 9]
    batch = batch_at(1, 14, at)
    method = MTP(target, MTPOptions(num_speculative_tokens=1), trainer.module, {})
    propose, seen = method.propose, dict[int, Tensor]()

    def spy(state: DecodeState) -> DraftTree:
        seen.setdefault(state.position, method.slots.newest[0, 0].clone())
        return propose(state)

    method.propose = spy  # type: ignore[method-assign]
    for number, t in enumerate(at):
        ids = batch.ids[0, : t + 1].tolist()
        following = int(target.next_logits(ids).argmax())
        text = torch.tensor([[*ids, following, *batch.ids[0, t + 2 :].tolist()]])
        states = base_states(target, text, (), None)
        first = next(trainer.unrolled([states.final], batch_of(text, torch.tensor([at]), ahead=STEPS), STEPS))[0]
        seen.clear()
        generate(method, ids, StopParams(3), SamplingParams())
        torch.testing.assert_close(seen[t + 1], first[number], atol=3e-5, rtol=1e-4)


@torch.no_grad()
def test_texts_in_a_row_stand_alone(target: Target) -> None:
    one, two = torch.randint(3, 61, (2, 12), generator=torch.Generator().manual_seed(2))
    numbers, places = torch.tensor([[0] * 12 + [1] * 12]), torch.cat((torch.arange(12), torch.arange(12)))[None]
    trainer = trainer_of(target)
    packed = batch_of(torch.cat((one, two))[None], torch.tensor([[12 + 5, 3, 12 + 8]]), Documents(numbers, places))
    alone = batch_of(two[None], torch.tensor([[5, 8]]))
    found, wanted = (
        list(trainer.unrolled([base_states(target, b.ids, (), None, b.documents).final], b, STEPS))
        for b in (packed, alone)
    )
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours[:, [0, 2]], theirs, atol=3e-5, rtol=1e-4)


@few(1)
@pytest.mark.parametrize("kind", ["llama", "phi3", "opt"])
def test_the_loss_falls_and_what_is_saved_loads(kind: str, tmp_path: Path) -> None:
    target = Target(tiny_model(kind))
    trainer = trainer_of(target, random=False)
    budget, machine = Budget(30, 8, 16, STEPS, warmup=3), DistributedContext(target.device, exact=True)
    loop, losses = DrafterLoop(target, [trainer], text_of(target), budget, tmp_path / "run", machine), list[float]()
    for _ in range(budget.steps):
        loop.advance()
        losses.append(loop.outcomes["mtp"].loss)
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    trainer.save(tmp_path, {"trained": {"tokens": 7}})
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_model_type"] == "mtp" and config["num_nextn_predict_layers"] == 1
    method = load_method("mtp", target, weights=str(tmp_path))
    assert method.metadata()["num_speculative_tokens"] == STEPS and method.training_info == {"tokens": 7}
    for (name, ours), theirs in zip(
        method.drafter.state_dict().items(), trainer.module.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(ours, theirs.half().float(), msg=name)
    steps = generate(method, [7], StopParams(23), SamplingParams()).steps
    assert sum(step.tokens for step in steps) / len(steps) > 1.2
