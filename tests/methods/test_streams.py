"""Speculative Streaming's own checks: the main stream untouched, training equal to decoding, pruning harmless."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from specbench_ss.engine.architectures import family_of
from specbench_ss.engine.batching import BatchEngine, BatchRequest, RequestOutput
from specbench_ss.engine.decoder import DecodeState
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.kv_cache import PrefixCache
from specbench_ss.engine.layers import attention, cpu
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.engine.tree import DraftTree
from specbench_ss.engine.verify import VerifyResult
from specbench_ss.errors import UserError
from specbench_ss.methods.ss import tree as drafting
from specbench_ss.methods.ss.config import SSOptions, StreamConfig, StreamPosition, resolve
from specbench_ss.methods.ss.decode import ROTATED, SAME_POSITION, SpeculativeStreaming
from specbench_ss.methods.ss.layers import (
    Layout,
    RotatedValues,
    Streams,
    stream_positions,
    stream_visibility,
    top_p,
    top_p_attention,
)
from specbench_ss.methods.ss.train import StreamsOptions, StreamsTrainer, start_embedding
from specbench_ss.methods.ss.tree import conditioned_tree, draft_tree, full_tree, nodes_to_score, prune
from specbench_ss.training.batch import Anchors, Batch, base_states
from tests.methods.decoders import (
    PARENT_CONDITIONED,
    ROOT_CONDITIONED,
    TWO_LAYERS,
    WITH_MLP,
    random_streams,
    randomise,
    streaming,
)
from tests.tiny import SOME, WITHOUT_WINDOW, few, paths, thorough, tiny_model

LEARNT = {
    "adapter": TWO_LAYERS,
    "adapter beside MLP": WITH_MLP,
    "at the main row's position": SAME_POSITION,
    "rotation": ROTATED,
    "rotation, at the main row's position": replace(ROTATED, stream_position="same"),
}


def prefilled(decoder: SpeculativeStreaming, ids: list[int]) -> DecodeState:
    target = decoder.target
    state = DecodeState(ids, len(ids), torch.tensor([0]), target.new_cache(200), SamplingParams())
    decoder.prefill(state, torch.tensor([ids]))
    return state


# sliding windows: as the model has it, narrower than the text; in one layer narrower than the streams of a position
@few(6)
@pytest.mark.parametrize("config", LEARNT.values(), ids=LEARNT)
@pytest.mark.parametrize(("kind", "window"), [*((kind, None) for kind in SOME), ("mistral-window", 2)])
def test_training_sees_the_streams_that_decoding_uses(kind: str, window: int | None, config: StreamConfig) -> None:
    """After a prompt, and after a step beyond it over a chain of two tokens, whose second one's streams draft."""
    target = Target(tiny_model(kind))
    if window:
        target.family.blocks[-1].window = window
    trainee = StreamsTrainer(target, config)
    randomise(trainee.module, 2)
    decoder = SpeculativeStreaming(target, SSOptions(), trainee.module, {})
    ids = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    states = base_states(target, torch.tensor([ids]), trainee.aux_hidden_state_layers, trainee.kv_from)
    with torch.no_grad():
        trained = trainee.stream_logits(states, torch.tensor([[3, 9, 6]]))
    for column, at in enumerate((3, 9, 6)):
        with torch.inference_mode():
            prefilled(decoder, ids[: at + 1])
            decoded = target.logits(target.family.norm(decoder._last_streams))
            state = prefilled(decoder, ids[: at - 1])
            out = decoder.forward(state, DraftTree.chain(*torch.tensor(ids[at - 1 : at + 1]).split(1)))
            assert out.extra is not None
            stepped = target.logits(target.family.norm(out.extra[1]))
        torch.testing.assert_close(trained[0, column], decoded, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(trained[0, column], stepped, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(
    "next_to", [TWO_LAYERS, PARENT_CONDITIONED, ROTATED], ids=["plain", "root and parent", "rotation"]
)
@pytest.mark.parametrize("kind", [*(kind for kind in SOME if kind != "opt"), "opt"])
@torch.inference_mode()
def test_where_streams_stand_changes_what_they_state(kind: str, next_to: StreamConfig) -> None:
    """By rotary positions; learned ones were added below the streams, so nothing is left to choose."""
    target = Target(tiny_model(kind))
    found = []
    for position in ("ahead", "same"):
        decoder = streaming(target, replace(next_to, stream_position=position), SSOptions())
        prefilled(decoder, [5, 6, 7, 8, 9, 10])
        found.append(target.family.norm(decoder._last_streams))
    assert torch.equal(*found) is (kind == "opt")
    apart = torch.cdist(found[1], found[1]) + torch.eye(3)
    assert apart.min() > 1e-3, "streams at one position are told apart by embeddings, or by their values' angles"


def test_streams_stand_ahead_unless_they_were_trained_otherwise() -> None:
    target, at = Target(tiny_model("llama")), torch.tensor([[3, 126]])
    assert stream_positions(target, at, 3).tolist() == [[4, 5, 6, 127, 127, 127]]  # of 128 positions
    assert stream_positions(target, at, 3, "same").tolist() == [[3, 3, 3, 126, 126, 126]]
    assert StreamConfig().stream_position == "ahead"
    asked = StreamsOptions(stream_position="same").shape()
    assert asked == StreamConfig(stream_position="same") and StreamConfig(**asked.as_dict()) == asked


@pytest.mark.parametrize("kind", ["llama", "mistral-window"])
def test_streams_of_several_requests_stand_next_to_their_own_rows(kind: str) -> None:
    decoder = streaming(Target(tiny_model(kind)), SAME_POSITION, SSOptions(k=2, n_keep=6))
    prompts = [[5, 6, 7, 8, 9, 10, 11], [20, 4, 4, 30, 12, 9, 8, 50, 41, 33]]
    alone = [generate(decoder, prompt, StopParams(20), SamplingParams()) for prompt in prompts]
    together: dict[int, RequestOutput] = {}
    asked = [BatchRequest(prompt, StopParams(20), SamplingParams()) for prompt in prompts]
    engine = BatchEngine(decoder, 2)
    engine.answer(asked, together.__setitem__)
    assert not any(keys.any() for cache in engine.caches for keys in cache.keys if keys is not None)
    for number, one in enumerate(alone):
        made = together[number].generation
        assert made is not None and made.tokens == one.tokens
        assert [s.accepted_tokens for s in made.steps] == [s.accepted_tokens for s in one.steps]


def test_an_adapter_that_adds_nothing_leaves_the_mlp_alone() -> None:
    target = Target(tiny_model("llama"))
    next_to, without = (Streams(replace(WITH_MLP, adapter_rank=r, keep_mlp=bool(r)), 32) for r in (4, 0))
    x, attended = torch.randn(1, 7, 32), torch.randn(1, 7, 32)
    block = target.family.blocks[-1]
    for mains in (0, 3):
        alone = without.pass_layer(1, block, x, mains, attended)
        torch.testing.assert_close(next_to.pass_layer(1, block, x, mains, attended), alone)
    with torch.no_grad():
        next_to.up += 0.1
    changed = (next_to.pass_layer(1, block, x, 3, attended) - alone).abs().amax(-1)[0]
    assert (changed > 1e-4).tolist() == [False] * 3 + [True] * 4


def test_keeping_the_mlp_wants_an_adapter() -> None:
    with pytest.raises(UserError, match="keep_mlp requires an adapter_rank"):
        replace(WITH_MLP, adapter_rank=0)


@pytest.mark.parametrize("kind", SOME)
def test_training_and_decoding_report_streams_their_root(kind: str) -> None:
    """The same root gives the same guesses in both, and another root others."""
    target = Target(tiny_model(kind))
    trainee = StreamsTrainer(target, ROOT_CONDITIONED)
    randomise(trainee.module, 2)
    decoder = SpeculativeStreaming(target, SSOptions(mode="chain"), trainee.module, {})
    ids, at = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14], 6
    states = base_states(target, torch.tensor([ids]), trainee.aux_hidden_state_layers, trainee.kv_from)
    guesses = set()
    for root in range(3, 40):
        with torch.no_grad():
            trained = trainee.stream_logits(states, torch.tensor([[at]]), torch.tensor([[[root]]]))[0, 0]
        with torch.inference_mode():
            state = replace(prefilled(decoder, ids[: at + 1]), root=torch.tensor([root]))
            drafted = decoder.propose(state).tokens[1:].tolist()
        assert drafted == trained.argmax(-1).tolist()
        guesses.add(tuple(drafted))
    assert len(guesses) > 1


@pytest.mark.parametrize("kind", SOME)
def test_training_and_decoding_report_a_nodes_children_the_node(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token of a chain is the best guess after those before it, as training sees them; and a tree has several."""
    target = Target(tiny_model(kind))
    monkeypatch.setattr(drafting, "SHORTLIST", target.vocab_size)  # random maps change more than trained ones
    trainee = StreamsTrainer(target, PARENT_CONDITIONED)
    randomise(trainee.module, 2)
    ids, at = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14], 6
    states = base_states(target, torch.tensor([ids]), trainee.aux_hidden_state_layers, trainee.kv_from)
    chain = SpeculativeStreaming(target, SSOptions(mode="chain"), trainee.module, {})
    tree = chain.with_options(SSOptions(k=3, n_draft=12))
    differ = 0
    for root in range(3, 30):
        with torch.inference_mode():
            state = replace(prefilled(chain, ids[: at + 1]), root=torch.tensor([root]))
            reported = chain.propose(state).tokens
            tree._last_streams, tree._next_logits = chain._last_streams, chain._next_logits
            grown = tree.propose(state)
        with torch.no_grad():
            known = trainee.stream_logits(states, torch.tensor([[at]]), reported[None, None, :-1])[0, 0]
        assert reported[1:].tolist() == known.argmax(-1).tolist()
        children: dict[int, set[int]] = {}
        for node, parent in enumerate(grown.parents().tolist()):
            children.setdefault(parent, set()).add(int(grown.tokens[node]))
        levels = grown.visibility()[1].tolist()
        second = [frozenset(children[node]) for node in children if node >= 0 and levels[node] == 1]
        differ += len(set(second)) > 1
    assert differ


def test_while_learning_half_of_the_parents_are_kept_back() -> None:
    """The root never; the others without a pattern by place, so that each token is a parent for some stream."""
    streams = random_streams(Target(tiny_model("llama")), PARENT_CONDITIONED)
    tokens, at = torch.arange(3, 6 * 400 * 3 + 3).view(6, 400, 3), torch.arange(400).expand(6, -1)
    received = streams.mask_parents(tokens, at)
    assert (received[..., 0] == tokens[..., 0]).all() and set((received - tokens)[received >= 0].tolist()) == {0}
    reported = received[0, :, 1:] >= 0
    assert 0.4 < reported.float().mean() < 0.6
    assert min(reported[place::2, j].float().mean() for place in (0, 1) for j in (0, 1)) > 0.4
    with torch.no_grad():  # as where validation text is judged
        assert streams.mask_parents(tokens, at) is tokens


def changed(change: torch.Tensor) -> drafting.Corrections:
    """Changes of logits by parents, from a table [parent, child] of all tokens."""
    return lambda above, below: change[above[..., None], below[..., None, :]]


@pytest.mark.parametrize(("k", "n_draft"), [(3, 0), (3, 60), (2, 20), (3, 8), (1, 0)])
def test_a_conditioned_tree_is_the_best_part_of_the_whole(k: int, n_draft: int) -> None:
    """Against every path, by a softmax over all words where the shortlist holds them, and nearly so where it does not.

    Without changes it is the tree of the papers.
    """
    rng = torch.Generator().manual_seed(k + n_draft)
    root, logits = torch.tensor([5]), 3 * torch.randn(4, 30, generator=rng)
    change = torch.randn(30, 30, generator=rng)
    tree = conditioned_tree(root, logits, changed(change), k, n_draft)
    log_p = [logits[0].log_softmax(-1)[None].expand(30, -1)]
    log_p += [(logits[g] + change).log_softmax(-1) for g in (1, 2, 3)]  # [parent, child]
    every: dict[tuple[int, ...], float] = {}
    level: dict[tuple[int, ...], float] = {(): 0.0}
    for g in range(4):
        following = {}
        for path, score in level.items():
            row = log_p[g][path[-1] if path else 0]
            following |= {(*path, int(c)): score + float(row[c]) for c in row.topk(k).indices}
        every |= following
        level = following
    size = n_draft or len(every)
    best = sorted(every, key=lambda path: -every[path])[:size]
    assert {tuple(tree.tokens[p[1:]].tolist()) for p in paths(tree.parents().tolist())[1:]} == set(best)
    same = conditioned_tree(root, logits, lambda above, below: torch.zeros(*above.shape, below.shape[-1]), k, n_draft)
    plain = draft_tree(root, logits, k, n_draft)
    stated = [sorted(tuple(t.tokens[p].tolist()) for p in paths(t.parents().tolist())) for t in (same, plain)]
    assert stated[0] == stated[1]


def test_what_a_shortlist_leaves_out_keeps_its_mass() -> None:
    """With more words than a shortlist has, probabilities are those of all words where parents change none beyond."""
    rng = torch.Generator().manual_seed(0)
    root, logits = torch.tensor([5]), torch.randn(2, 300, generator=rng)
    listed = logits[1].topk(drafting.SHORTLIST).indices
    change = torch.zeros(300, 300).index_copy_(1, listed, 2 * torch.randn(300, drafting.SHORTLIST, generator=rng))
    found = conditioned_tree(root, logits, changed(change), 4, 12)
    joint = logits[0].log_softmax(-1)[:, None] + (logits[1] + change).log_softmax(-1)
    firsts = logits[0].topk(4).indices
    best = joint[firsts].topk(4, dim=-1)
    scores = {(int(a),): float(logits[0].log_softmax(-1)[a]) for a in firsts}
    for first, children, values in zip(firsts.tolist(), best.indices.tolist(), best.values.tolist(), strict=True):
        scores |= {(first, child): value for child, value in zip(children, values, strict=True)}
    wanted = sorted(scores, key=lambda path: -scores[path])[:12]
    assert {tuple(found.tokens[p[1:]].tolist()) for p in paths(found.parents().tolist())[1:]} == set(wanted)


def test_streams_that_learn_their_root_are_reported_it() -> None:
    target = Target(tiny_model("llama"))
    trainee = StreamsTrainer(target, ROOT_CONDITIONED)
    states = base_states(target, torch.tensor([[5, 6, 7, 8]]), trainee.aux_hidden_state_layers, trainee.kv_from)
    with pytest.raises(ValueError, match="conditioned on tokens"):
        trainee.stream_logits(states, torch.tensor([[2]]))


@pytest.mark.parametrize(("config", "root"), [(TWO_LAYERS, "on"), (ROOT_CONDITIONED, "off")])
def test_streams_are_used_as_they_were_trained(config: StreamConfig, root: str) -> None:
    with pytest.raises(UserError, match=f"root={root} does not fit these streams"):
        streaming(Target(tiny_model("llama")), config, SSOptions(root=root))  # type: ignore[arg-type]


def test_streams_start_at_the_scale_of_ordinary_positions() -> None:
    """Real models hold a state a hundred times larger at their first token."""
    low = torch.randn(2, 30, 32) * 3
    low[:, 0] *= 100
    module = Streams(TWO_LAYERS, 32)
    start_embedding(module, low)
    torch.testing.assert_close(module.embedding.pow(2).mean(-1).sqrt(), torch.full((3,), 1.5), atol=0.3, rtol=0)


@pytest.mark.parametrize("position", ["ahead", "same"])
def test_segments_change_neither_loss_nor_gradients(position: StreamPosition) -> None:
    target = Target(tiny_model("llama"))
    torch.manual_seed(0)
    ids = torch.randint(3, 61, (2, 30))
    at = torch.stack([torch.randperm(26)[:12] for _ in range(2)])
    labels = torch.stack([ids.gather(1, at + 1 + j) for j in range(4)], -1)
    found = []
    for segment in (0, 12, 5, 1):
        trainee = StreamsTrainer(target, replace(TWO_LAYERS, root_rank=2, stream_position=position), segment=segment)
        randomise(trainee.module, 3)
        batch = Batch(ids, labels, Anchors(at, labels))
        loss, _ = trainee.loss(base_states(target, ids, trainee.aux_hidden_state_layers, trainee.kv_from), batch)
        loss.backward()
        found.append((loss.detach(), trainee.module.down.grad, trainee.module.embedding.grad))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@thorough
def test_training_learns_and_leaves_the_base_alone() -> None:
    target = Target(tiny_model("llama"))
    before = {k: v.clone() for k, v in target.model.state_dict().items()}
    trainee = StreamsTrainer(target, StreamConfig(gamma=2, n_msa_layers=2, adapter_rank=16))
    ids = torch.arange(40)[None] % 20 + 5
    at = torch.arange(5, 30)[None]
    labels = torch.stack([ids.gather(1, at + 1 + j) for j in range(3)], -1)
    batch = Batch(ids, labels, Anchors(at, labels))
    states = base_states(target, ids, trainee.aux_hidden_state_layers, trainee.kv_from)
    optimizer = torch.optim.AdamW(trainee.module.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss, _ = trainee.loss(states, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    assert all(torch.equal(v, target.model.state_dict()[k]) for k, v in before.items())


@pytest.mark.usefixtures("torch_kernels")
@pytest.mark.parametrize("kind", WITHOUT_WINDOW)
@torch.inference_mode()
def test_top_p_attention_over_all_keys_is_attention(kind: str) -> None:
    """And over few keys it changes what streams state, but no main logit (EMNLP H.1)."""
    target = Target(tiny_model(kind))
    ids, tree = [5, 6, 7, 8, 9, 10, 11, 12], DraftTree.from_parents(torch.tensor([3, 4, 5, 6]), [-1, 0, 0, 1])
    found = []
    for p in (0, 99, 2):
        decoder = streaming(target, TWO_LAYERS, SSOptions(prune="off", stream_attention_top_p=p))
        out = decoder.forward(prefilled(decoder, ids), tree)
        found.append((out.logits, out.extra))
    for logits, _ in found[1:]:
        assert torch.equal(logits, found[0][0])
    torch.testing.assert_close(found[1][1], found[0][1], atol=2e-5, rtol=1e-4)
    assert not torch.allclose(found[2][1], found[0][1], atol=1e-3)
    assert target.config._attn_implementation == attention.NAME


@pytest.mark.usefixtures("torch_kernels")
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 40])
@pytest.mark.parametrize("kind", ["llama", "opt"])  # two heads a key, and one
@torch.inference_mode()
def test_top_p_attention_leaves_the_main_rows_bit_for_bit(kind: str, rows: int) -> None:
    target = Target(tiny_model(kind))
    ids, tree = list(range(5, 35)), DraftTree.from_parents(torch.arange(rows) + 3, [-1, *range(0, rows - 1)])
    found = []
    for p in (0, 4):
        decoder = streaming(target, TWO_LAYERS, SSOptions(prune="off", stream_attention_top_p=p))
        found.append(decoder.forward(prefilled(decoder, ids), tree).logits)
    assert torch.equal(*found)


def test_top_p_attention_takes_the_keys_that_each_head_attends_to_most() -> None:
    """Against the definition, head by head: two heads a key, one main row of a tree hidden from the other."""
    heads, kv_heads, past, m, g, d, p = 4, 2, 9, 2, 3, 8, 3
    torch.manual_seed(0)
    rows, keys = m + m * g, past + m + m * g
    q, k, v = torch.randn(1, heads, rows, d), torch.randn(1, kv_heads, keys, d), torch.randn(1, kv_heads, keys, d)
    see = stream_visibility(torch.eye(m, dtype=torch.bool), g)
    visible = torch.cat((torch.ones(rows, past, dtype=torch.bool), see), 1)
    mask = torch.zeros(1, 1, rows, keys).masked_fill(~visible, torch.finfo(torch.float32).min)
    module = torch.nn.Module()
    module.num_key_value_groups = heads // kv_heads  # type: ignore[assignment]
    target = Target(tiny_model("llama"))
    with top_p(target, Layout(m, g, p)):
        found, _ = top_p_attention(module, q, k, v, mask)
    for head, row in product(range(heads), range(rows)):
        of_kv = head // (heads // kv_heads)
        main = row if row < m else (row - m) // g
        allowed = visible[row].clone()
        if row >= m:
            mains = (q[0, head, main] @ k[0, of_kv].T).masked_fill(~visible[main], -torch.inf)[: past + m]
            allowed[: past + m] = False
            allowed[mains.topk(p).indices] = True
        weights = (q[0, head, row] @ k[0, of_kv].T * d**-0.5).masked_fill(~allowed, -torch.inf).softmax(-1)
        torch.testing.assert_close(found[0, row, head], weights @ v[0, of_kv], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("angle", [0.3, 0.0004])
def test_values_are_turned_in_single_precision(angle: float) -> None:
    v = torch.randn(1, 2, 8, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    _, turned = RotatedValues(PrefixCache({0: None}), 0, 4, angle).update(v, v, 0)
    n = torch.tensor([1, 2, 3, 4, 1, 2, 3, 4])[:, None]
    exact = torch.complex(v[..., :32].double(), v[..., 32:].double()) * torch.exp(1j * angle * n.double())
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, torch.cat((exact.real, exact.imag), -1).float().bfloat16())


@torch.inference_mode()
def test_value_rotation_reports_streams_apart() -> None:
    """Eq. 8: a step of zero degrees leaves equal values; a larger step moves later streams further."""
    v = torch.randn(1, 2, 7, 8)  # one main row, two positions of three streams
    target = PrefixCache({0: None})
    _, turned = RotatedValues(target, 1, 3, 0.3).update(v, v, 0)
    as_complex = [torch.complex(x[..., :4], x[..., 4:]) for x in (v, turned)]
    n = torch.tensor([0, 1, 2, 3, 1, 2, 3])
    expected = as_complex[0] * torch.exp(1j * 0.3 * n)[:, None]
    torch.testing.assert_close(as_complex[1], expected)


@pytest.mark.parametrize("config", [TWO_LAYERS, PARENT_CONDITIONED], ids=["plain", "parent"])
def test_a_tree_has_no_more_streams_than_nodes(config: StreamConfig) -> None:
    """Further streams would draft nothing."""
    target, runs = Target(tiny_model("llama")), []
    for gamma in (0, 3):
        decoder = streaming(target, config, SSOptions(nodes=2, prune="off"))
        if gamma:
            decoder.settings, decoder.gamma = replace(decoder.settings, gamma=gamma), gamma
        else:
            assert decoder.gamma == 2
        run = generate(decoder, [5, 6, 7, 8], StopParams(30), SamplingParams())
        runs.append((run.tokens, [(step.draft_nodes, step.draft_depth, step.accepted_tokens) for step in run.steps]))
    assert runs[0] == runs[1]
    eq3 = replace(config, main_attends_streams=True, mode="shared", lora_rank=2, adapter_rank=0)
    assert resolve(SSOptions(nodes=2), eq3, target, "ss-shared").gamma == 3, "each of them changes the main rows"


def test_keeping_all_nodes_equals_no_pruning() -> None:
    target = Target(tiny_model("llama"))
    runs = [
        generate(streaming(target, TWO_LAYERS, options), [5, 6, 7], StopParams(30), SamplingParams(0.8, seed=5))
        for options in (SSOptions(k=2, prune="off"), SSOptions(k=2, n_keep=15), SSOptions(k=2, n_keep=99))
    ]
    assert runs[0].tokens == runs[1].tokens == runs[2].tokens
    assert [s.accepted_tokens for s in runs[0].steps] == [s.accepted_tokens for s in runs[1].steps]


def test_tree_sizes_are_the_papers() -> None:
    cpu = torch.device("cpu")
    assert len(full_tree(4, 3, cpu).topology.parents) == 121
    assert len(full_tree(3, 4, cpu).topology.parents) == 1 + 4 + 16 + 64
    assert full_tree(4, 1, cpu).topology.parents == (-1, 0, 1, 2, 3)


def test_best_nodes_are_the_most_probable_and_ancestor_closed() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 50)
    logits[1, 7] = 60.0  # a transition of probability one: child and parent tie
    root = torch.tensor([9])
    full, best = draft_tree(root, logits, 3, 0), draft_tree(root, logits, 3, 6)
    log_p = logits.log_softmax(-1)

    def joints(tree: DraftTree) -> list[float]:
        return [
            sum(float(log_p[tree.topology.depths[i] - 1, tree.tokens[i]]) for i in path[1:])
            for path in paths(tree.topology.parents)[1:]
        ]

    assert sorted(joints(best)) == pytest.approx(sorted(joints(full))[-6:], abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_nodes_are_ranked_in_single_precision_whatever_the_logits_are_in(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for _ in range(20):
        logits = (3 * torch.randn(4, 500)).to(dtype)
        root = torch.tensor([9])
        half, single = draft_tree(root, logits, 3, 20), draft_tree(root, logits.float(), 3, 20)
        assert half.topology.parents == single.topology.parents
        # among equal logits, which of their tokens come first depends on the dtype
        at = [d - 1 for d in half.topology.depths[1:]]
        assert torch.equal(logits[at, half.tokens[1:]], logits[at, single.tokens[1:]])


def test_pruning_keeps_the_best_by_path_probability() -> None:
    tree = DraftTree.from_parents(torch.tensor([0, 1, 2, 3, 1]), [-1, 0, 0, 1, 2])
    p = torch.tensor([[0.05, 0.7, 0.2, 0.05], [0.1, 0.2, 0.2, 0.5], [0.01, 0.97, 0.01, 0.01], [0.25] * 4, [0.25] * 4])
    # path probabilities: node 1 0.7, node 2 0.2, node 3 0.35, node 4 0.194
    assert pruned(tree, p, 5, 0.0) == [0, 1, 2, 3, 4]
    assert pruned(tree, p, 4, 0.0) == [0, 1, 2, 3]
    assert pruned(tree, p, 3, 0.0) == [0, 1, 3]
    assert pruned(tree, p, 1, 0.0) == [0]
    assert pruned(tree, p, 5, 0.3) == [0, 1, 3]  # node 2 goes with its whole subtree


def pruned(tree: DraftTree, p: torch.Tensor, n_keep: int, threshold: float) -> list[int]:
    """By early exits p [n, V], asked of nodes with children alone, and of all nodes: the same."""
    inner, parents = nodes_to_score(tree)
    kept = prune(tree, parents, p.log()[inner], n_keep, threshold).tolist()
    assert kept == prune(tree, tree.parents()[1:], p.log(), n_keep, threshold).tolist()
    return list(kept)


@pytest.mark.parametrize("depth", [1, 4, 12])
@pytest.mark.parametrize(("p", "threshold", "deepest"), [
    (2e-6, 1e-6, None),  # every transition is above the threshold, however unlikely the path
    (2e-6, 3e-6, 0),
    (2e-6, 0.0, None),
    (0.0, 1e-60, 0),
    (1.0, 0.9, None),
])  # fmt: skip
def test_a_threshold_is_of_transitions_and_not_of_paths(
    depth: int, p: float, threshold: float, deepest: int | None
) -> None:
    tree = DraftTree.chain(torch.tensor([0]), torch.ones(depth, dtype=torch.int64))
    kept = pruned(tree, torch.tensor([1 - p, p]).expand(depth + 1, 2), depth + 1, threshold)
    assert kept == list(range(1 + (depth if deepest is None else deepest)))


def test_below_a_refused_transition_nothing_stays_however_probable() -> None:
    tree = DraftTree.from_parents(torch.tensor([0, 1, 1, 1, 0]), [-1, 0, 1, 2, 0])
    p = torch.tensor([[0.6, 0.4], [1.0, 0.0], [0.0, 1.0], [0.5, 0.5], [0.5, 0.5]])
    assert pruned(tree, p, 5, 1e-30) == [0, 1, 4]
    assert pruned(tree, p, 5, 0.0) == [0, 1, 2, 3, 4]


def test_visibility_of_streams() -> None:
    see = stream_visibility(torch.tensor([[True, False], [True, True]]), 2)
    assert see.int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 0, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 1, 1],
    ]


def test_extra_parameters_are_the_papers() -> None:
    """gamma*h + 2*R_s*h*N_s + 2*theta*h: 344,064 for Llama-7B."""
    streams = Streams(StreamConfig(gamma=4, n_msa_layers=4, adapter_rank=8, prune_rank=8), 4096)
    assert sum(p.numel() for p in streams.parameters()) == 344_064


@pytest.mark.parametrize(
    ("config", "options", "stated"),
    [
        ({"gamma": 0}, {}, "gamma"),
        ({"n_msa_layers": 9}, {}, "9 MSA layers"),
        ({}, {"gamma": 5}, "as trained"),
        ({"n_msa_layers": 3, "prune_layer": 2}, {}, "pruning layer"),
    ],
)
def test_bad_shapes_are_one_clear_line(config: dict[str, int], options: dict[str, int], stated: str) -> None:
    with pytest.raises(UserError, match=stated):
        streaming(Target(tiny_model("llama")), StreamConfig(**config), SSOptions(**options))  # type: ignore[arg-type]


CHAIN_OF_ONE = SSOptions(mode="chain", gamma=1, prune="off")


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (replace(TWO_LAYERS, gamma=1), CHAIN_OF_ONE),
        (replace(ROOT_CONDITIONED, gamma=2), CHAIN_OF_ONE),
        (PARENT_CONDITIONED, SSOptions(k=2, n_draft=1, prune="off")),
    ],
    ids=["plain", "root", "parent"],
)
@torch.inference_mode()
def test_logits_made_with_the_verified_rows_are_those_made_alone(config: StreamConfig, options: SSOptions) -> None:
    target = Target(tiny_model("llama"))
    decoder = streaming(target, config, options)
    state, few = prefilled(decoder, [5, 6, 7, 8, 9]), DraftTree.from_parents(torch.tensor([3, 4]), [-1, 0])
    root, verdict = torch.tensor(17), VerifyResult([0, 1], [4, 17], torch.tensor([17]))
    decoder.update(state, verdict, decoder.forward(state, few))
    assert decoder._next_logits is not None
    together = decoder._stream_logits(True, root[None], decoder._next_logits)
    alone = decoder._stream_logits(False, root[None], decoder._last_streams)
    torch.testing.assert_close(together, alone, atol=2e-5, rtol=1e-4)
    many = DraftTree.from_parents(torch.arange(9), [-1, *range(8)])
    decoder.update(state, verdict, decoder.forward(state, many))
    assert decoder._next_logits is None, "a product of so many rows would cost more than the LM head read twice"
    decoder.update(state, verdict, decoder.forward(state, few))
    decoder.on_prefill(prefilled(decoder, [5, 6, 7]))
    assert decoder._next_logits is None, "what was made for the last prompt is of another one"
    assert not streaming(target, config, SSOptions(k=9, prune="off")).fuses


@pytest.mark.parametrize("keep_mlp", [False, True])
@pytest.mark.parametrize("mains", [0, 4])
def test_packed_adapters_follow_their_weights(mains: int, keep_mlp: bool) -> None:
    """As in an evaluation during training: in two models' layers by native kernels, and in one by torch's operators."""
    model = tiny_model("llama")
    model.config.intermediate_size = 64  # whole panels, which the native MLP needs
    target, other = (Target(type(model)(model.config)) for _ in range(2))
    config = StreamConfig(gamma=2, n_msa_layers=1, adapter_rank=4, init_rank=4, keep_mlp=keep_mlp)
    streams = random_streams(target, config)
    x, attended = torch.randn(2, 1, 6, target.hidden_size)
    for _ in range(2):
        with torch.inference_mode():
            for block in (t.family.blocks[-1] for t in (target, other)):
                packed = streams.packed(torch.float32)
                made, right = (streams.pass_layer(0, block, x, mains, attended, pairs) for pairs in (packed, {}))
                torch.testing.assert_close(made, right, atol=1e-5, rtol=1e-5)
                assert (streams._native(0, block, x, packed) is None) == (cpu.kernels() is None)
            by_torch = family_of(target.model).blocks[-1]
            made, right = (streams.pass_layer(0, by_torch, x, mains, attended, pairs) for pairs in (packed, {}))
            torch.testing.assert_close(made, right, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(streams.insert(x, 2, packed), streams.insert(x, 2), atol=1e-5, rtol=1e-5)
        with torch.no_grad():
            for weight in (streams.up, streams.init_up):
                weight.mul_(3)
