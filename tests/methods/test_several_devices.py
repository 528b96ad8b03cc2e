"""A model whose layers lie on two devices answers as the same model on one, with every method.

The second device is the tests' own (`tests/second_device.py`): its tensors hold numbers, and whatever mixes it with the
first raises. Torch's meta device, where torch itself looks for mixed devices but which holds no numbers, is the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from inspect import isfunction
from typing import Any

import pytest
import torch
from torch import Tensor

from specbench_ss import registry
from specbench_ss.engine.architectures import Block
from specbench_ss.engine.batching import BatchEngine, BatchRequest, RequestOutput
from specbench_ss.engine.decoder import Decoder
from specbench_ss.engine.device_map import DeviceBlock, PerDeviceInputs
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.engine.tree import DraftTree
from specbench_ss.methods._shared import fine_tuned
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.methods.pld import PromptLookup
from specbench_ss.models.tiny import ARCHITECTURES, WHOLE, tiny_model, tiny_tokenizer
from tests.second_device import SECOND, second_device, send_layers
from tests.tiny import METHODS, few, instances

WORDS = 61
PROMPT = [20, 4, 4, 4, 30, 12, 9, 8, 50, 41, 33, 22, 17, 60, 9]
PROMPTS = [PROMPT, PROMPT[4:9], PROMPT[2:13]]
HALF, EVERY = (2, 3), (0, 1, 2, 3)  # layers on the second device
FIRST = torch.device("cpu")
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.8, seed=3)


@pytest.fixture(autouse=True, scope="module")
def _all_imported() -> None:
    """So that all of them are given the second device's way of moving."""
    for name in registry.names(registry.METHODS):
        registry.method_class(name)


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with second_device(monkeypatch):
        yield


def divided(kind: str, there: Sequence[int] = HALF) -> Target:
    model = tiny_model(kind, vocab=WORDS)
    send_layers(model, there)
    target = Target(model, tiny_tokenizer(WORDS), "tiny")
    assert target.layer_devices == {FIRST: [i for i in EVERY if i not in there], SECOND: list(there)}
    return target


def in_turn(*cases: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return every method with one of the cases, in turn."""
    return [(name, *cases[turn % len(cases)]) for turn, name in enumerate(METHODS)]


def whole(kind: str) -> Target:
    return Target(tiny_model(kind, vocab=WORDS), tiny_tokenizer(WORDS), "tiny")


def answer(decoder: Decoder, sampling: SamplingParams = GREEDY) -> tuple[list[int], list[tuple[int, int]]]:
    made = generate(decoder, PROMPT, StopParams(16), sampling)
    return list(made.tokens), [(step.draft_nodes, step.verified_nodes) for step in made.steps]


@few(4)
@pytest.mark.usefixtures("second")
@pytest.mark.parametrize(("name", "there", "sampling"), in_turn((HALF, SAMPLED), (EVERY, GREEDY)))
def test_division_changes_no_token(name: str, there: Sequence[int], sampling: SamplingParams) -> None:
    """Every shape by one division and one way to accept, by turns of the methods; the first shape by both ways.

    Which layers lie there is the passes' business; how tokens are chosen comes after them, on one device.
    """
    targets = whole("llama"), divided("llama", there)
    one, two = (instances(name, target) for target in targets)
    for number, (label, make) in enumerate(one.items()):
        for how in [sampling] if number else [GREEDY, SAMPLED]:
            assert answer(make(), how) == answer(two[label](), how), (label, how)


@few(3)
@pytest.mark.usefixtures("second")
@pytest.mark.parametrize("kind", [*ARCHITECTURES, *WHOLE])
def test_division_changes_no_token_of_any_architecture(kind: str) -> None:
    one, two = whole(kind), divided(kind)
    assert one.kernel_summary == two.kernel_summary
    for method in (Autoregressive, PromptLookup):
        assert answer(method(one)) == answer(method(two))


@few(1)
@pytest.mark.usefixtures("second")
@pytest.mark.parametrize(("name", "kind"), [("ss", "mistral-window"), ("eagle", "llama"), ("pld", "qwen3")])
def test_division_changes_no_token_of_requests_side_by_side(name: str, kind: str) -> None:
    found = []
    for target in (whole(kind), divided(kind)):
        make = next(iter(registry.method_class(name).test_instances(target).values()))
        tokens: dict[int, list[int]] = {}
        asked = [BatchRequest(prompt, StopParams(12), GREEDY) for prompt in PROMPTS]

        def ended(place: int, answered: RequestOutput, into: dict[int, list[int]] = tokens) -> None:
            assert answered.generation is not None, answered.error
            into[place] = list(answered.generation.tokens)

        BatchEngine(make(), 3).answer(asked, ended)
        found.append(tokens)
    assert found[0] == found[1] and len(found[0]) == 3


def test_a_block_on_another_device_has_every_pass_of_a_block() -> None:
    """One that it does not define would run on its device with the mask of another."""
    passes = {name for name, member in vars(Block).items() if isfunction(member) and not name.startswith("__")}
    assert passes >= {"attend", "run_mlp"} and passes <= vars(DeviceBlock).keys()


class OwnPasses(Autoregressive):
    """A method that calls layers itself, as it would on one device."""

    def forward(self, state: Any, tree: DraftTree) -> Any:
        target, past = self.target, state.cache.get_seq_length()
        positions = torch.full((1, 1), past)
        x, rotary = target.embed(tree.tokens[None], positions), target.rotary(positions, past)
        for block in target.family.blocks:
            x = x + block.attend(x, state.cache, None, rotary)
            x = x + block.run_mlp(x)
        out = super().forward(state, tree)
        assert torch.equal(target.logits(target.family.norm(x)), out.logits)
        return out


@pytest.mark.usefixtures("second")
def test_a_method_that_calls_layers_itself_needs_to_have_nothing_of_devices() -> None:
    assert answer(OwnPasses(divided("llama"))) == answer(OwnPasses(whole("llama")))


@pytest.mark.usefixtures("second")
def test_a_mask_that_is_written_again_is_moved_again() -> None:
    given, mask = PerDeviceInputs(), torch.zeros(3)
    first, again = (given.on(SECOND, layer, mask)[0] for layer in (2, 3))
    assert first is again
    mask += 1
    assert bool((given.on(SECOND, 2, mask)[0] == 1).all())


def from_meta(tensor: Tensor, device: torch.device) -> Tensor:
    """As `placement.to_device`, with fixed numbers for what has none."""
    if not (tensor.is_meta and device.type == "cpu"):
        return tensor.to(device)
    return torch.arange(tensor.numel()).sin().to(tensor.dtype).view(tensor.shape)


@few(4)
@pytest.mark.parametrize(("name", "there"), in_turn((EVERY,), (HALF,)))
def test_torch_sees_no_mixed_devices(name: str, there: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first shape by both divisions, the others by one: the second device of these tests saw all by both."""
    monkeypatch.setattr(fine_tuned, "hash_weights", lambda model: "of no data")
    with second_device(monkeypatch, from_meta):
        model = tiny_model("llama", vocab=WORDS)
        for i in there:
            model.model.layers[i].to("meta")
        shapes = list(instances(name, Target(model, tiny_tokenizer(WORDS), "tiny")).values())
        for make in [*shapes[:1], *shapes[1 + (there == EVERY) :: 2]]:
            assert len(generate(make(), PROMPT, StopParams(6), GREEDY).tokens) > 0
