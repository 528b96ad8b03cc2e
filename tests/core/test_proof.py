"""A model that is not driven as it runs itself is refused, with the layer and the reason; one that is, is not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from transformers.models.olmo2.modeling_olmo2 import Olmo2DecoderLayer
from transformers.models.starcoder2.modeling_starcoder2 import Starcoder2DecoderLayer

from specbench_ss.engine.architectures import ModelInfo
from specbench_ss.engine.layers.attention import NAME
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from tests.architectures import AT_LOAD, BY_CONFIGURATION, DRIVEN, random_model


class AddsPlaces(Olmo2DecoderLayer):
    """Adds what depends on a row's number in the pass, which is its position only where nothing is cached."""

    def forward(self, hidden_states: Any, **kwargs: Any) -> Any:
        rows = torch.arange(hidden_states.shape[1], device=hidden_states.device)
        return super().forward(hidden_states, **kwargs) + 0.1 * rows[:, None]


class IgnoresMask(Olmo2DecoderLayer):
    """Sees every row of the pass."""

    def forward(self, hidden_states: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        return super().forward(hidden_states, attention_mask=None, **kwargs)


class Odd(transformers.Olmo2ForCausalLM):
    """An Olmo2 with another class in place of its second layer."""

    second: type[Any]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.layers[1] = self.second(config, 1)


@pytest.mark.parametrize("second", [AddsPlaces, IgnoresMask])
def test_a_model_that_does_not_prove_itself_is_refused_with_its_layer(second: type[Any]) -> None:
    odd = type("Odd", (Odd,), {"second": second})
    torch.manual_seed(0)
    refusal = rf"'olmo2' cannot be used: layer 1 \({second.__name__}\) differs from the model's own forward pass by \d"
    with pytest.raises(UserError, match=refusal):
        Target(odd(DRIVEN["olmo2"]).eval())


class NeedsMask(Starcoder2DecoderLayer):
    """Hides nothing where it is given no mask, as its model with eager attention never does."""

    def forward(self, hidden_states: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        rows = hidden_states.shape[1]
        mask = hidden_states.new_zeros(1, 1, rows, rows) if attention_mask is None and rows > 1 else attention_mask
        return super().forward(hidden_states, attention_mask=mask, **kwargs)


class NeedsMasks(transformers.Starcoder2ForCausalLM):
    """A Starcoder2 of such layers."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for i in range(len(self.model.layers)):
            self.model.layers[i] = NeedsMask(config, i)


def test_the_proof_looks_within_windows_too() -> None:
    """Beyond them there always is a mask; the quick attention goes without one within, which is wrong here."""
    torch.manual_seed(0)
    target = Target(NeedsMasks(DRIVEN["starcoder2"]).eval())
    assert target.attention == target.model.config._attn_implementation == "eager"


def test_a_window_that_masks_do_not_have_is_refused() -> None:
    """The configuration states it, so that the model's own cache drops what lies beyond it."""
    config = copy.deepcopy(DRIVEN["olmo2"])
    config.sliding_window = 5
    with pytest.raises(UserError, match="layer 0 .* differs from the model's own forward pass by"):
        Target(random_model(config))


@pytest.mark.parametrize("kind", ["olmo2", "gemma2"])
def test_weights_that_cannot_be_copied_are_random_in_the_proof(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of 4 bits, which have other shapes and types."""
    model, odd = random_model(DRIVEN[kind]), type("Odd", (Odd,), {"second": AddsPlaces})(DRIVEN["olmo2"]).eval()
    for one in (model, odd):
        packed = {name: t.flatten().to(torch.uint8) for name, t in one.state_dict().items()}
        monkeypatch.setattr(one, "state_dict", lambda packed=packed: packed)
    assert Target(model).attention == ("eager" if kind == "gemma2" else NAME)
    with pytest.raises(UserError, match=r"layer 1 \(AddsPlaces\) differs"):
        Target(odd)


class AsksTwice(transformers.Olmo2ForCausalLM):
    """Its logits depend on the token that it is asked after, not on states alone."""

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        out = super().forward(input_ids=input_ids, **kwargs)
        out.logits = out.logits + input_ids[..., None]
        return out


def test_a_head_that_needs_more_than_states_is_refused() -> None:
    with pytest.raises(UserError, match="its logits depend on more"):
        Target(AsksTwice(DRIVEN["olmo2"]).eval())


@pytest.mark.parametrize("kind", BY_CONFIGURATION)
def test_what_cannot_be_driven_is_reported_before_weights_are_read(kind: str) -> None:
    config, why = BY_CONFIGURATION[kind]
    with pytest.raises(UserError, match=f"model type '{kind}' cannot be used: .*{why}"):
        ModelInfo(config, None, kind)


@pytest.mark.parametrize("kind", AT_LOAD)
def test_what_cannot_be_driven_is_reported_when_it_is_loaded(kind: str) -> None:
    config, why = AT_LOAD[kind]
    with pytest.raises(UserError, match=f"model type '{kind}' cannot be used: {why}"):
        Target(random_model(config))
