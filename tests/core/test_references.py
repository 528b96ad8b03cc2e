"""References are autoregressive methods: what names another one is refused, and what only states so fails in the
loop."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from specbench_ss.bench.preflight import with_references
from specbench_ss.conformance import tiny_target
from specbench_ss.engine.decoder import Decoder, DecodeState, check_references, reference_spec
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.tree import DraftTree
from specbench_ss.errors import UserError
from specbench_ss.options import MethodSpec
from specbench_ss.runs.config import RunConfig
from specbench_ss.runs.output_match import judge_alone
from tests.core.test_stats import make, step


class Plain(Decoder):
    name, summary = "plain", "drafts nothing"
    autoregressive = True

    def propose(self, state: DecodeState) -> DraftTree:
        return DraftTree.root_only(state.root)


class Reference(Plain):
    name = "ar"


class Own(Plain):
    """Autoregressive decoding of a model of its own."""

    name = "own-ar"
    lossless = False


class Speculative(Plain):
    name = "speculative"
    autoregressive = False
    named: ClassVar[str] = "own-ar"

    @classmethod
    def baseline_for(cls, options: Any) -> MethodSpec:
        return MethodSpec(cls.named)


class OfItself(Speculative):
    name = named = "of-itself"


class PlainOfItself(Speculative):
    name = named = "plain-of-itself"
    autoregressive = True


class OfSpeculative(Speculative):
    name, named = "of-speculative", "speculative"


def of(*kinds: type[Decoder]) -> dict[str, Decoder]:
    target = tiny_target("llama")
    return {"ar": Reference(target)} | {kind.name: kind(target) for kind in kinds}


def references(decoders: dict[str, Decoder]) -> dict[str, str]:
    named = {label: reference_spec(decoder, decoder.options).label for label, decoder in decoders.items()}
    check_references(decoders, named)
    return named


def test_a_method_is_compared_with_plain_decoding_of_its_own_model() -> None:
    assert references(of(Own, Speculative)) == {"ar": "ar", "own-ar": "ar", "speculative": "own-ar"}


class OfSecond(Plain):
    name = "of-second"

    @classmethod
    def baseline_for(cls, options: Any) -> MethodSpec:
        return MethodSpec("ar", copy=2)


def test_a_second_copy_of_the_reference_is_a_reference_before_and_after_loading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before loading, methods go by name; afterwards, decoders go by label."""
    kinds = {kind.name: kind for kind in (Reference, OfSecond)}
    monkeypatch.setattr("specbench_ss.registry.method_class", kinds.__getitem__)
    config = with_references(RunConfig((MethodSpec("ar"), MethodSpec("of-second"))))
    labels = [spec.label for spec in config.methods]
    assert labels == ["ar", "of-second", "ar#2"]
    target = tiny_target("llama")
    decoders = {spec.label: kinds[spec.name](target) for spec in config.methods}
    assert references(decoders) == {"ar": "ar", "of-second": "ar#2", "ar#2": "ar"}


@pytest.mark.parametrize(
    ("kinds", "keyword"),
    [
        ((OfItself,), "is not autoregressive"),
        ((Own, Speculative, OfSpeculative), "is not autoregressive"),
        ((PlainOfItself,), "leave baseline_for out"),
        ((Speculative,), "must be among the methods"),
    ],
)
def test_any_other_reference_is_refused(kinds: tuple[type[Decoder], ...], keyword: str) -> None:
    with pytest.raises(UserError, match=keyword):
        references(of(*kinds))


def test_an_answer_of_an_own_model_is_kept_to_its_own_logits() -> None:
    decoder = Own(tiny_target("llama"))
    row = make([("a", "m", [step(0.01)] * 8, 0.1, None, 0)]).rows[0]
    row.token_ids = generate(decoder, [3, 4], StopParams(8), SamplingParams()).tokens
    assert judge_alone(decoder, [3, 4], row, "why").reason == "why"
    row.token_ids = [(token + 1) % decoder.target.vocab_size for token in row.token_ids]
    assert judge_alone(decoder, [3, 4], row, "why").verdict == "mismatch"
