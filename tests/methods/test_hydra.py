"""Hydra: published layouts against numbers made by hand, training as decoding."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from specbench_ss.engine.decoder import DecodeState
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import FINAL, Target
from specbench_ss.engine.tree import DraftTree
from specbench_ss.errors import UserError
from specbench_ss.methods._shared.small_llama import llama_layer
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.methods.hydra.decode import Hydra, HydraOptions
from specbench_ss.methods.hydra.heads import Prefix
from specbench_ss.methods.hydra.train import HydraTrainer, HydraTraining
from specbench_ss.models.tiny import randomise
from specbench_ss.training.batch import Anchors, Batch, base_states
from specbench_ss.training.masks import Documents
from tests.methods.exactness import PROMPTS
from tests.tiny import paths, tiny_model

H, V, HEAD, KV = 32, 61, 8, 2
TREE = [[0], [1], [0, 0], [0, 2], [1, 1], [0, 0, 0], [0, 2, 1]]


def test_a_lossy_rule_states_so_and_is_greedy_without_a_temperature() -> None:
    target = Target(tiny_model("llama"))
    made = Hydra.test_instances(target)
    assert {name for name, make in made.items() if not make().lossless} == {"typical"}
    assert made["typical"]().metadata()["accept"] == "typical"
    with pytest.raises(UserError, match="hydra: epsilon must be above 0, not 0"):
        Hydra.check(HydraOptions(epsilon=0.0), target)


# -- the published layouts ------------------------------------------------------------------------------------------


def published(heads: int = 3, plain: int = 3, plus: bool = True, ffn: int = 20) -> dict[str, Tensor]:
    """Names and nesting of `hydra_lm_head.pt`; the plain blocks of a head are one tensor under several names."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    tensors: dict[str, Tensor] = {}
    place: Callable[[int], int] = (lambda j: 2 * j + 1) if plus else (lambda j: j)
    for i in range(heads):
        block = {"weight": random(H, H), "bias": random(H)}
        wide = (
            {"weight": random(H, (i + 2) * H), "bias": random(H)},
            {"weight": random(H, (i + 2) * H), "bias": random(H)},
        )
        for part in ("weight", "bias"):
            tensors[f"hydra_mlp.{i}.{place(0)}.linear.{part}"] = wide[0][part]
            tensors[f"hydra_mlp.{i}.{place(0)}.res_connection.{part}"] = wide[1][part]
            for j in range(1, plain + 1):
                tensors[f"hydra_mlp.{i}.{place(j)}.linear.{part}"] = block[part]
        head = f"hydra_lm_head.{i}.1" if plus else f"hydra_lm_head.{i}"
        tensors |= {f"{head}.weight": random(V, H), f"{head}.bias": random(V)}
    if plus:
        layer, rows = "prefix_embeding_layer.layers.0", {"q": H, "k": KV * HEAD, "v": KV * HEAD, "o": H}
        tensors |= {f"{layer}.self_attn.{n}_proj.weight": random(r, H) for n, r in rows.items()}
        tensors |= {f"{layer}.mlp.{n}_proj.weight": random(ffn, H) for n in ("gate", "up")}
        tensors[f"{layer}.mlp.down_proj.weight"] = random(H, ffn)
        for name in (f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm", "prefix_embeding_layer.norm"):
            tensors[f"{name}.weight"] = 1 + random(H)
        tensors["prefix_embeding_layer.embed_tokens.weight"] = random(V, H)
        tensors[f"{layer}.self_attn.rotary_emb.inv_freq"] = random(HEAD // 2)
    return tensors


def saved(folder: Path, target: Target, tensors: dict[str, Tensor], **config: Any) -> HydraOptions:
    """As published: the embedding of the base is inside, and the config lies about the numbers."""
    embedding = target.model.get_input_embeddings().weight.detach().half()
    torch.save({"input_embed_fn.weight": embedding, **tensors}, folder / "hydra_lm_head.pt")
    about = {"hydra_num_heads": 9, "hydra_num_layers": 9, "grounded_heads": True, "hidden_state_offset": 0, **config}
    (folder / "config.json").write_text(json.dumps(about))
    (folder / "tree.json").write_text(json.dumps(TREE))
    return HydraOptions(weights=str(folder), tree=str(folder / "tree.json"))


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


def turned(x: Tensor, place: int) -> Tensor:
    """Rotary embedding of a vector [.., HEAD]."""
    angles = place / 10000 ** (torch.arange(0, HEAD, 2) / HEAD)
    a, b = x[..., : HEAD // 2], x[..., HEAD // 2 :]
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def prefix_by_hand(t: dict[str, Tensor], states: Tensor) -> Tensor:
    """The published prefix layer over states [S, H]: the last position's output."""
    w = {k.removeprefix("prefix_embeding_layer.layers.0."): v for k, v in t.items()}
    n = rms(states, w["input_layernorm.weight"])
    q = (n[-1] @ w["self_attn.q_proj.weight"].T).view(H // HEAD, HEAD)
    k, v = ((n @ w[f"self_attn.{p}_proj.weight"].T).view(-1, KV, HEAD) for p in "kv")
    q = turned(q, len(states) - 1)
    k = torch.stack([turned(row, place) for place, row in enumerate(k)])
    heads = []
    for i in range(H // HEAD):
        own = i // (H // HEAD // KV)
        attention = (k[:, own] @ q[i] / HEAD**0.5).softmax(0)
        heads.append(attention @ v[:, own])
    x = states[-1] + torch.cat(heads) @ w["self_attn.o_proj.weight"].T
    n = rms(x, w["post_attention_layernorm.weight"])
    up = F.silu(n @ w["mlp.gate_proj.weight"].T) * (n @ w["mlp.up_proj.weight"].T)
    return rms(x + up @ w["mlp.down_proj.weight"].T, t["prefix_embeding_layer.norm.weight"])


def head_by_hand(t: dict[str, Tensor], i: int, x: Tensor, tokens: list[Tensor], plus: bool, plain: int = 3) -> Tensor:
    """Logits of head i from the prefix state and the embeddings of root and drafted tokens."""
    first, head = (1, f"hydra_lm_head.{i}.1") if plus else (0, f"hydra_lm_head.{i}")

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ t[f"{name}.weight"].T + t[f"{name}.bias"]

    x = torch.cat((x, *tokens))
    y = linear(f"hydra_mlp.{i}.{first}.res_connection", x) + F.silu(linear(f"hydra_mlp.{i}.{first}.linear", x))
    for j in range(1, plain + 1):
        y = y + F.silu(linear(f"hydra_mlp.{i}.{first + 2 * j if plus else j}.linear", y))
    return linear(head, y)


@pytest.mark.parametrize(("plus", "offset"), [(True, 0), (False, 0), (True, 1)])
def test_published_heads_draft_what_their_definition_states(plus: bool, offset: int, tmp_path: Path) -> None:
    """Every tree of an answer, against states of the whole model and a prefix layer that keeps nothing."""
    target, tensors = Target(tiny_model("llama")), published(plus=plus)
    arch = "prefix-mlp" if plus else "mlp"
    options = saved(tmp_path, target, tensors, hydra_head_arch=arch, hidden_state_offset=offset)
    Hydra.check(options, target)
    decoder = Hydra.load(target, options)
    assert (decoder.drafter.count, len(decoder.drafter.hydra_mlp[0])) == (3, 4)
    assert decoder.drafter.hydra_mlp[0][1] is decoder.drafter.hydra_mlp[0][3]  # in memory once
    embedding = target.model.get_input_embeddings().weight
    ranks = {tuple(c): c[-1] for c in TREE}
    seen = []

    def checked(state: DecodeState) -> DraftTree:
        tree = Hydra.propose(decoder, state)
        hidden = target.model(torch.tensor([state.ids[:-1]]), output_hidden_states=True).hidden_states
        states = hidden[-(offset + 1)][0]
        prefix = prefix_by_hand(tensors, states) if plus else states[-1]
        tokens = tree.tokens.tolist()
        choices: dict[int, tuple[int, ...]] = {0: ()}
        for node, path in enumerate(paths(tree.topology.parents)[1:], start=1):
            *before, _ = path
            logits = head_by_hand(tensors, len(path) - 2, prefix, [embedding[tokens[n]] for n in before], plus)
            rank = int((logits > logits[tokens[node]]).sum())
            choices[node] = (*choices[path[-2]], rank)
        assert sorted(list(c) for c in choices.values() if c) == sorted(TREE) and len(ranks) == len(TREE)
        seen.append(len(state.ids))
        return tree

    decoder.propose = checked  # type: ignore[method-assign]
    answer = generate(decoder, PROMPTS[0], StopParams(12), SamplingParams())
    of_answer = len(
        answer.steps
    )  # one without success is begun again, to see whether its drafts are chosen from numbers
    assert seen[of_answer:] in ([], seen[: len(seen) - of_answer]) and len(seen) >= of_answer


def test_the_prefix_layer_reads_all_that_was_accepted() -> None:
    """Heads that are always right: every step accepts a path, and the layer's cache holds all positions in order."""
    target = Target(tiny_model("llama"))
    decoder = Hydra.test_instances(target)["hydra++"]()
    expected = generate(Autoregressive(target), PROMPTS[0], StopParams(30), SamplingParams()).tokens
    fed: list[Tensor] = []
    extend = decoder._extend  # type: ignore[attr-defined]

    def reported(state: DecodeState) -> DraftTree:
        assert decoder.cache.get_seq_length() == state.position  # type: ignore[attr-defined]
        answered = len(state.ids) - len(PROMPTS[0])
        right = expected[answered : answered + 3]
        wrong = [(x + 1) % V for x in right[:1]]  # in the first place, so that what is accepted lies further back
        tokens = torch.tensor([int(state.root), *wrong, *right])
        return DraftTree.from_parents(tokens, (-1, *([0, 0] if right else []), *range(2, 1 + len(right))))

    decoder.propose = reported  # type: ignore[method-assign]
    decoder._extend = lambda states: (fed.append(states), extend(states))  # type: ignore[attr-defined]
    answer = generate(decoder, PROMPTS[0], StopParams(30), SamplingParams())
    assert answer.tokens == expected and max(s.accepted_tokens for s in answer.steps) == 3
    ids = torch.tensor([[*PROMPTS[0], *expected]])
    states = torch.cat(fed, 1)
    with torch.inference_mode():
        whole = target.prefill(ids, target.new_cache(64), every=True).hidden_states[FINAL][:, : states.shape[1]]
        layer, places = decoder.drafter.prefix, torch.arange(states.shape[1])[None]  # type: ignore[attr-defined]
        alone = layer(whole, None, None, layer.rotary(places, states.shape[1], whole.dtype))[0, -1:]
    torch.testing.assert_close(states, whole, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(decoder.prefix_state, alone, atol=1e-4, rtol=1e-4)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("change", "config", "stated"),
    [
        ({"hydra_mlp.1.3.linear.bias": None}, {}, "lacks tensors: hydra_mlp.1.3.linear.bias"),
        ({"hydra_lm_head.2.1.bias": None}, {}, "lacks tensors: hydra_lm_head.2.1.bias"),
        ({"prefix_embeding_layer.norm.weight": None}, {}, "lacks tensors: prefix_embeding_layer.norm.weight"),
        ({"prefix_embeding_layer.layers.0.self_attn.k_proj.weight": None}, {}, "lacks tensors: prefix_embeding_layer"),
        ({"hydra_mlp.0.1.gate.weight": torch.zeros(1)}, {}, "has unknown tensors: hydra_mlp.0.1.gate.weight"),
        ({"hydra_mlp.0.1.linear.weight": torch.zeros(H, H)}, {}, "hydra_mlp.0.1.linear.weight has shape"),
        ({"input_embed_fn.weight": torch.zeros(V + 3, H)}, {}, "is for embeddings of shape"),
        ({"input_embed_fn.weight": torch.ones(V, H)}, {}, "trained for another base"),
        (
            {"hydra_mlp.1000000.1.linear.weight": torch.zeros(1)},
            {},
            "lacks tensors of heads up to hydra_mlp.1000000",
        ),
        ({"prefix_embeding_layer.layers.0.self_attn.k_proj.weight": torch.tensor(1.0)}, {}, r"has shape \(\)"),
        ({"prefix_embeding_layer.layers.0.mlp.gate_proj.weight": torch.tensor(1.0)}, {}, r"has shape \(\)"),
        ({}, {"hydra_head_arch": "eagle-attn"}, "architecture 'eagle-attn' are not supported"),
        ({}, {"hydra_head_arch": "cross-attn"}, "architecture 'cross-attn' are not supported"),
        ({}, {"grounded_heads": False}, "grounded_heads"),
        ({}, {"hidden_state_offset": 7}, "'hidden_state_offset' in config.json must be 0 to 4, not 7"),
    ],
)
def test_what_is_wrong_is_named(
    change: dict[str, Tensor | None], config: dict[str, Any], stated: str, tmp_path: Path
) -> None:
    target, tensors = Target(tiny_model("llama")), published()
    changed = {k: v for k, v in {**tensors, **change}.items() if v is not None}
    options = saved(tmp_path, target, changed, **{"hydra_head_arch": "prefix-mlp", **config})
    if "another base" not in stated:  # which only the numbers show
        with pytest.raises(UserError, match=stated):
            Hydra.check(options, target)
    with pytest.raises(UserError, match=stated):
        Hydra.load(target, options)


def test_a_file_without_heads_is_refused(tmp_path: Path) -> None:
    torch.save({"other": torch.zeros(2)}, tmp_path / "hydra_lm_head.pt")
    with pytest.raises(UserError, match="has no Hydra heads"):
        Hydra.load(Target(tiny_model("llama")), HydraOptions(weights=str(tmp_path / "hydra_lm_head.pt")))
    with pytest.raises(UserError, match=r"looked for hydra_lm_head\.safetensors, hydra_lm_head\.pt"):
        Hydra.load(Target(tiny_model("llama")), HydraOptions(weights=str(tmp_path.parent)))


# -- training -------------------------------------------------------------------------------------------------------


def trainee_of(target: Target, prefix: bool = True) -> HydraTrainer:
    trainee = HydraTrainer(target, HydraTraining(3, layers=2, prefix=prefix))
    randomise(trainee.module, 3)
    return trainee


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("kind", ["llama", "opt", "gpt_neox"])
def test_training_sees_what_decoding_sees(kind: str, prefix: bool) -> None:
    """Logits of all heads at an anchor, teacher-forced, equal those of a decoder that was reported the same tokens."""
    target = Target(tiny_model(kind))
    trainee = trainee_of(target, prefix)
    ids, at = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13, 14]]), 4
    anchors = Anchors(torch.tensor([[at]]), ids[:, at + 1 :][:, None, :4])
    chain = Hydra.test_instances(target)["hydra"]().tree.__class__(*CHAIN)
    decoder = Hydra(target, HydraOptions(), trainee.module, tree=chain)
    with torch.inference_mode():
        logits = trainee._logits(base_states(target, ids, (), target.n_layers), anchors)
        cache = target.new_cache(64)
        state = DecodeState(ids[0, : at + 2].tolist(), at + 1, ids[0, at + 1 : at + 2], cache, SamplingParams())
        output = decoder.prefill(state, ids[:, : at + 1])
        state.hidden_states = {layer: tap[:, -1:] for layer, tap in output.hidden_states.items()}
        decoder.on_prefill(state)
        for i in range(3):
            path = F.embedding(ids[:, at + 1 : at + 2 + i], decoder.embedding)
            decoded = decoder.drafter.logits(i, decoder.prefix_state, path, target.logits)
            torch.testing.assert_close(logits[i], decoded, atol=1e-4, rtol=1e-4)


CHAIN = (DraftTree.chain(torch.zeros(1), torch.zeros(3)).topology, (0, 1, 2), (0, 0, 0))


def test_documents_in_a_row_do_not_see_each_other() -> None:
    target = Target(tiny_model("llama"))
    trainee = trainee_of(target)
    one, two = torch.tensor([[5, 6, 7, 8, 9, 10]]), torch.tensor([[21, 22, 23, 24, 25, 26]])
    numbers, places = torch.tensor([[0] * 6 + [1] * 6]), torch.arange(6).repeat(2)[None]
    with torch.no_grad():
        row = base_states(target, torch.cat((one, two), 1), (), 4, Documents(numbers, places))
        packed = trainee._prefixed(row)[:, 6:]
        alone = trainee._prefixed(base_states(target, two, (), 4))
    torch.testing.assert_close(packed, alone, atol=1e-4, rtol=1e-4)


def test_the_loss_is_the_cross_entropy_from_the_bases_distribution() -> None:
    """Against what the base states at each place, in plain arithmetic; what lies past an answer's end counts
    nothing."""
    target = Target(tiny_model("llama"))
    trainee = trainee_of(target)
    ids, at = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12, 13, 14]]), torch.tensor([[2, 5]])
    labels = torch.tensor([[[8, 9, 10, -100], [11, 12, -100, -100]]])
    states = base_states(target, ids, (), 4)
    anchors = Anchors(at, labels)
    with torch.no_grad():
        loss, right = trainee.loss(states, Batch(ids, labels, anchors))
        teacher = target.logits(states.final[0]).softmax(-1)
        made = [x.log_softmax(-1) for x in trainee._logits(states, anchors)]
    expected = torch.zeros(())
    for i, known in enumerate(([0, 1], [0], [])):
        each = [-(teacher[int(at[0, a]) + 1 + i] * made[i][a]).sum() for a in known]
        expected = expected + (torch.stack(each).mean() if each else 0)
    torch.testing.assert_close(loss, expected)
    assert right.shape == (3,) and float(right[2]) == 0


@pytest.mark.parametrize(
    ("kind", "rope"),
    [
        ("llama", {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0}),
        ("qwen2", {"rope_type": "default", "rope_theta": 1e6}),
        ("mistral", {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}),
    ],
)
def test_the_prefix_layer_turns_positions_as_its_base_does(kind: str, rope: dict[str, Any]) -> None:
    """Also where a table for more positions than the base has would be another one."""
    config = tiny_model(kind).config
    config.rope_parameters, config.rms_norm_eps = rope, 3e-5
    target = Target(AutoModelForCausalLM.from_config(config))
    prefix = Prefix(llama_layer(target))
    assert prefix.norm.variance_epsilon == 3e-5
    positions = torch.arange(100)
    for ours, bases in zip(prefix._tables(100, target.device), target.rotary(positions[None]) or (), strict=True):
        assert torch.equal(ours[:100], bases[0])


def test_an_untrained_prefix_layer_gives_back_the_bases_state() -> None:
    """At its scale; and LM heads begin as the base's."""
    target = Target(tiny_model("llama"))
    states = base_states(target, torch.tensor([[5, 6, 7, 8, 9, 10]]), (), 4)
    anchors = Anchors(torch.tensor([[3]]), torch.tensor([[[9, 10, 11, 12]]]))
    trainee = HydraTrainer(target, HydraTraining(2))
    trainee.prepare(states, Batch(torch.zeros(1, 6), anchors.labels, anchors))
    with torch.no_grad():
        made = trainee._prefixed(states)
    assert F.cosine_similarity(made, states.final, dim=-1).min() > 0.999
    torch.testing.assert_close(made.pow(2).mean(), states.final.pow(2).mean(), rtol=0.02, atol=0)
    for head in trainee.module.hydra_lm_head or ():
        torch.testing.assert_close(head.weight, target.unembed)
