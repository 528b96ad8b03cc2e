"""The layer driver equals the model's own forward pass, and refuses or mends what it cannot drive."""

from __future__ import annotations

import pytest
import torch
import transformers

from specbench_ss.engine.forward import EagerPass
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.layers import attention as grouped_attention
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.engine.tree import DraftTree
from specbench_ss.methods.ar import Autoregressive
from tests.tiny import ARCHITECTURES, paths, tiny_model


@pytest.mark.parametrize("kind", ARCHITECTURES)
@torch.inference_mode()
def test_logits_are_those_of_the_models_own_forward(kind: str) -> None:
    target = Target(tiny_model(kind))
    ids = [5, 9, 11, 6, 30, 22, 41, 8, 17, 60, 3, 4]
    theirs = target.model(torch.tensor([ids])).logits[0, -1]
    torch.testing.assert_close(target.next_logits(ids), theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ARCHITECTURES)
@torch.inference_mode()
def test_a_tree_is_decoded_as_its_paths_one_by_one(kind: str) -> None:
    target = Target(tiny_model(kind))
    prompt = [5, 9, 11, 6, 30, 22, 41, 8, 17, 60]
    tree = DraftTree.from_parents(torch.tensor([3, 4, 5, 6, 7, 8]), [-1, 0, 0, 1, 2, 4])
    cache = target.new_cache(40)
    target.prefill(torch.tensor([prompt]), cache)
    logits = target.forward_tree(tree, cache).logits[0]
    for node, path in enumerate(paths(tree.topology.parents)):
        alone = target.next_logits(prompt + tree.tokens[path].tolist())
        torch.testing.assert_close(logits[node], alone, atol=2e-5, rtol=1e-4)


@torch.inference_mode()
def test_new_tokens_see_the_cached_ones_and_those_before_them() -> None:
    target = Target(tiny_model("llama"))
    cache = target.new_cache(9)
    assert EagerPass(target, cache, 2).causal_mask(3) is None  # layers mask a prompt themselves
    target.prefill(torch.tensor([[5, 9]]), cache)
    mask = EagerPass(target, cache, 4).causal_mask(3)
    assert mask is not None and torch.equal(mask[0, 0] == 0, torch.ones(3, 5, dtype=torch.bool).tril(2))


def test_longrope_ends_where_its_factors_would_change() -> None:
    half = [1.0, 1.5, 2.0, 3.0]
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": half, "long_factor": [4 * f for f in half],
        "original_max_position_embeddings": 24,
    }  # fmt: skip
    torch.manual_seed(0)
    config = transformers.Phi3Config(
        vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, max_position_embeddings=96, pad_token_id=0, rope_parameters=rope,
        original_max_position_embeddings=24,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config)
    target = Target(model)
    assert target.context_length == 24
    prompt = [5, 6, 7, 8]
    ours = generate(Autoregressive(target), prompt, StopParams(80), SamplingParams())
    assert (ours.finish, len(ours.tokens)) == ("context", 20)
    theirs = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None)
    assert ours.tokens == theirs[0, 4:].tolist()


@pytest.mark.parametrize("rows", [2, 5, 40])
@torch.inference_mode()
def test_heads_of_a_group_attend_as_they_do_one_by_one(rows: int) -> None:
    """Grouped attention against transformers' own, which repeats keys and values; four heads over two."""
    target = Target(tiny_model("llama"))
    tree = DraftTree.from_parents(torch.arange(rows) + 3, [-1, *range(rows - 1)])
    found = []
    for name in (grouped_attention.NAME, "sdpa"):
        target.model.set_attn_implementation(name)
        cache = target.new_cache(120)
        target.prefill(torch.tensor([list(range(5, 50))]), cache)
        found.append(target.forward_tree(tree, cache).logits)
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)
    assert target.config.num_attention_heads > target.config.num_key_value_heads
