"""Requests answered at the same time get the answers that they get alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from specbench_ss import registry
from specbench_ss.engine.batch_runner import next_step, run_concurrently, wait_for
from specbench_ss.engine.batching import BatchEngine, BatchRequest, RequestOutput
from specbench_ss.engine.decoder import Decoder
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.errors import UserError
from specbench_ss.models.tiny import tiny_target
from tests.tiny import few


def together(decoder: Decoder, asked: list[BatchRequest], most: int) -> list[RequestOutput]:
    found: dict[int, RequestOutput] = {}
    BatchEngine(decoder, most).answer(asked, found.__setitem__)
    return [found[i] for i in range(len(asked))]


def made(kind: str, name: str, shape: str) -> Callable[[], Decoder]:
    return registry.method_class(name).test_instances(tiny_target(kind))[shape]


def test_a_request_that_fails_leaves_the_others_alone() -> None:
    make = made("llama", "ss", "tree")
    asked = [BatchRequest(p, StopParams(12), SamplingParams()) for p in ([5, 6, 7], [], [3, 4], [2] * 10_000, [8, 9])]
    found = together(make(), asked, 2)
    assert [type(one.error) for one in found] == [type(None), UserError, type(None), UserError, type(None)]
    for i in (0, 2, 4):
        assert found[i].generation.tokens == generate(make(), asked[i].prompt, asked[i].limits, SamplingParams()).tokens


def test_streams_of_a_model_without_rotary_embeddings_are_shared() -> None:
    make = made("opt", "ss", "tree")
    asked = [BatchRequest(p, StopParams(12), SamplingParams()) for p in ([5, 6, 7], [3, 4, 9])]
    for one in together(make(), asked, 2):
        assert one.error is None
    answers = [one.generation.tokens for one in together(make(), asked, 2)]  # type: ignore[union-attr]
    assert answers == [generate(make(), one.prompt, one.limits, SamplingParams()).tokens for one in asked]


@few(3)
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("eagle", "auto"), ("eagle3", "small"), ("peagle", "tree"), ("dflash", "chain"), ("hydra", "hydra++"),
        ("mtp", "in turn"),
    ],
)  # fmt: skip
def test_drafters_layers_take_the_rows_of_all_requests(name: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three requests of the same prompt make as many passes of the drafter as one, with three times the rows."""
    seen = list[int]()

    def counted(decoder: Decoder) -> Decoder:
        drafter = decoder.drafter.prefix if name == "hydra" else decoder.drafter  # type: ignore[attr-defined]
        forward = drafter.forward

        def watched(x: torch.Tensor, *rest: object) -> object:
            seen.append(x.shape[1])
            return forward(x, *rest)

        monkeypatch.setattr(drafter, "forward", watched)
        return decoder

    asked = BatchRequest([5, 6, 7, 8], StopParams(8), SamplingParams())
    together(counted(made("llama", name, shape)()), [asked], 1)
    alone, seen[:] = list(seen), []
    together(counted(made("llama", name, shape)()), [asked] * 3, 3)
    assert seen == [3 * rows for rows in alone]


def test_what_most_wait_for_is_served_first_and_a_step_last() -> None:
    order: list[tuple[str, int]] = []

    def serve(what: str) -> Callable[[object], object]:
        def served(given: list[int]) -> list[int]:
            order.append((what, len(given)))
            return given

        return served

    def job(ahead: str) -> Callable[[], str]:
        def run() -> str:
            wait_for(ahead, 0, serve(ahead))
            next_step()
            wait_for("all", 0, serve("all"))
            return ahead

        return run

    jobs = [job("one"), job("many"), job("many")]
    assert sorted(run_concurrently(jobs, 3)) == [(0, "one"), (1, "many"), (2, "many")]
    assert order == [("many", 2), ("one", 1), ("all", 3)]
    with pytest.raises(ZeroDivisionError):
        list(run_concurrently([lambda: 1 // 0], 2))
    assert wait_for("outside", 3, list) == 3


def test_what_fails_within_a_shared_pass_fails_for_those_in_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three requests are in a pass that breaks; the third, and one that comes later, are answered."""
    decoder = made("llama", "ar", "default")()
    target, layers = decoder.target, decoder.target.run

    def broken(x: torch.Tensor, *rest: Any) -> object:
        if x.shape[1] == 7:  # the prompts of the first two
            raise RuntimeError("out of memory")
        return layers(x, *rest)

    monkeypatch.setattr(target, "run", broken)
    found = together(
        decoder, [BatchRequest(p, StopParams(4), SamplingParams()) for p in ([5, 6, 7], [5, 6, 7, 8], [5, 9])], 2
    )
    assert [str(one.error) for one in found] == ["out of memory", "out of memory", "None"]
    assert found[2].generation is not None and len(found[2].generation.tokens) == 4
