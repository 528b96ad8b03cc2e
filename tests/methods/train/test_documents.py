"""Conversations packed into one row learn as if each stood alone: base, streams, shared mode and draft."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specbench_ss.engine.target import Target
from specbench_ss.methods.sd.train import DraftOptions, DraftTrainer
from specbench_ss.methods.ss.config import StreamConfig, StreamPosition
from specbench_ss.methods.ss.train import SharedTrainer, StreamsTrainer, carriers_of
from specbench_ss.training.batch import BaseStates, Batch, base_states
from specbench_ss.training.data import TrainingRows
from specbench_ss.training.loop import Budget, PackedText
from specbench_ss.training.masks import Documents, draft_visibility
from tests.methods.decoders import randomise
from tests.tiny import SOME, WITHOUT_WINDOW, tiny_model

LENGTHS, T = (9, 13, 6), 32
NONE = BaseStates(torch.empty(0), {}, {})


def rows() -> TrainingRows:
    """One row of three conversations and padding."""
    ids = np.random.default_rng(0).integers(3, 61, (1, T)).astype(np.int32)
    documents, mask = np.full((1, T), -1, np.int32), np.zeros((1, T), bool)
    start = 0
    for number, n in enumerate(LENGTHS):
        documents[0, start : start + n], mask[0, start + 3 : start + n] = number, True
        start += n
    return TrainingRows(ids, mask, documents)


def alone(whole: TrainingRows) -> list[tuple[slice, TrainingRows]]:
    ends = np.cumsum(LENGTHS).tolist()
    places = [slice(end - n, end) for end, n in zip(ends, LENGTHS, strict=True)]
    return [(p, TrainingRows(whole.ids[:, p], whole.mask[:, p], whole.documents[:, p] * 0)) for p in places]


def batch(packed: TrainingRows, ahead: int = 3) -> Batch:
    budget = Budget(1, 1, packed.ids.shape[1], ahead)
    return PackedText(packed).chosen(np.zeros(1, np.int64), budget, np.random.default_rng(0))


@pytest.mark.parametrize("position", ["ahead", "same"])
@pytest.mark.parametrize("kind", SOME)
def test_the_base_and_its_streams(kind: str, position: StreamPosition) -> None:
    target = Target(tiny_model(kind))
    trainee = StreamsTrainer(target, StreamConfig(gamma=3, n_msa_layers=2, stream_position=position))
    randomise(trainee.module, 1)
    whole = rows()
    with torch.no_grad():
        packed = batch(whole)
        states = base_states(target, packed.ids, trainee.aux_hidden_state_layers, trainee.kv_from, packed.documents)
        for place, one in alone(whole):
            single = batch(one)
            plain = base_states(target, single.ids, trainee.aux_hidden_state_layers, trainee.kv_from)  # no mask at all
            torch.testing.assert_close(states.final[:, place], plain.final, atol=1e-4, rtol=1e-4)
            at = torch.arange(place.start, place.stop)[None]
            found = trainee.stream_logits(states, at)
            torch.testing.assert_close(found, trainee.stream_logits(plain, at - place.start), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("attends", "position"), [(True, "ahead"), (False, "ahead"), (True, "same")])
@pytest.mark.parametrize("kind", WITHOUT_WINDOW)
def test_shared_mode(kind: str, attends: bool, position: StreamPosition) -> None:
    more = {"main_attends_streams": attends, "stream_position": position}
    shape = StreamConfig(3, 2, adapter_rank=0, mode="shared", lora_rank=4, **more)  # type: ignore[arg-type]
    trainee = SharedTrainer(Target(tiny_model(kind)), shape)
    randomise(trainee.module, 2, std=0.2)
    whole = rows()

    def logits(one: Batch) -> torch.Tensor:
        carriers, real = carriers_of(one.labels[..., 0] != -100)
        low, _ = trainee._lower(one.ids, one.documents)
        return trainee.upper(low, 0, carriers, real, [], 3, one.documents)[0]

    with torch.no_grad():
        packed = logits(batch(whole))
        apart = []
        for _, one in alone(whole):
            single = batch(one)
            single.documents = None
            apart.append(logits(single))
        torch.testing.assert_close(packed, torch.cat(apart, 1), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("window", [None, 3])
def test_a_drafted_row_attends_to_its_text_up_to_its_anchor_and_to_earlier_rows_of_it(window: int | None) -> None:
    of = [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, -1, -1]
    at, steps, widest = [5, 8, 7], [1, 2, 3, 4], window or len(of) + 4
    documents = Documents(torch.tensor([of]), torch.zeros(1, len(of)))
    rows = [(a, s) for a in at for s in steps]
    wanted = [
        [k <= a and of[k] == of[a] and a + s - k < widest for k in range(len(of))]
        + [a == b and 0 <= s - r < widest for b, r in rows]
        for a, s in rows
    ]
    found = draft_visibility(torch.tensor([at]), torch.tensor(steps), len(of), documents, window)
    assert found.tolist() == [wanted]


def test_segments_of_packed_rows() -> None:
    shape = StreamConfig(3, 2, adapter_rank=0, mode="shared", lora_rank=4, main_attends_streams=True)
    losses = []
    for segment in (0, 7):
        trainee = SharedTrainer(Target(tiny_model("llama")), shape, segment=segment)
        randomise(trainee.module, 2, std=0.2)
        losses.append(trainee.loss(NONE, batch(rows()))[0].detach())
    torch.testing.assert_close(losses[0], losses[1])


def test_the_draft() -> None:
    target = Target(tiny_model("llama"))
    trainee = DraftTrainer(target, DraftOptions(1, 32, 2, gamma=3))
    whole = rows()
    with torch.no_grad():
        packed = trainee._logits(batch(whole))
        for place, one in alone(whole):
            single = batch(one)
            single.documents = None
            torch.testing.assert_close(packed[:, place], trainee._logits(single), atol=1e-4, rtol=1e-4)
        one_row, parts = batch(whole), [batch(one) for _, one in alone(whole)]
        weights = trainee._weights(one_row)
        assert weights.sum() == pytest.approx(sum(float(trainee._weights(p).sum()) for p in parts))


def test_every_row_is_learnt_from_once_a_pass() -> None:
    many = TrainingRows(np.arange(10)[:, None].repeat(4, 1), np.ones((10, 4), bool), np.zeros((10, 4), np.int32))
    text, budget = PackedText(many), Budget(5, 4, 2, 1)
    seen = [int(i) for step in range(5) for i in text.batch(step, budget, torch.device("cpu")).ids[:, 0]]
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10))
    assert seen[:10] != seen[10:]
    shares = [text.batch(0, budget, torch.device("cpu")).rows(slice(i, None, 2)).ids[:, 0].tolist() for i in (0, 1)]
    assert sorted(shares[0] + shares[1]) == sorted(seen[:4])
