"""Steps over buffers that stay give what steps give that are run eagerly."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from specbench_ss import load_model, registry, run
from specbench_ss.bench.timed_sample import Request, RequestRunner
from specbench_ss.engine import cuda_graphs, engines
from specbench_ss.engine.checks import NotFinite
from specbench_ss.engine.cuda_graphs import (
    BLOCK,
    NO_ROOM,
    SOMETHING_ELSE,
    CudaGraphRunner,
    Pass,
    Replay,
    StaticPass,
    run_eagerly,
)
from specbench_ss.engine.decoder import Decoder, DecodeState, Generation, _members
from specbench_ss.engine.engines import enable_cuda_graphs, enable_draft_cuda_graphs, use_engine
from specbench_ss.engine.forward import ForwardPass
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.kv_cache import Cache
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Output, Target
from specbench_ss.engine.tree import DraftTree
from specbench_ss.errors import UserError
from specbench_ss.models.tiny import CONTEXT, tiny_target
from specbench_ss.results.checks import checks
from specbench_ss.results.summary import summarise
from specbench_ss.runs.run_dir import read_run
from tests.cli import failing
from tests.frozen import called, frozen
from tests.tiny import METHODS, THOROUGH, few, instances, thorough

pytestmark = pytest.mark.usefixtures("torch_kernels_in_module")  # the stand-in for a graph records torch's operators

PROMPTS = ([5, 9, 5, 9, 5, 9, 7, 8], list(range(5, 45)))
WIDTHS = (1, 3, 7, 16, 64, 128)


CACHING = ("eagle", "eagle2", "eagle3", "hydra", "mtp", "peagle", "sd", "dflash")
DRAFTERS = {
    "dflash", "dspark", "eagle", "eagle2", "eagle3", "hydra", "medusa", "medusa2", "mtp", "peagle", "ss", "ss-shared",
    "uno", "lookahead", "space",
}  # fmt: skip
DECLINED = {  # all that methods run eagerly where their steps are replayed
    ("ss", "top-p"): {"stream_attention_top_p"},
    ("ss", "threshold"): {"prune_threshold"},
}


def of_a_drafter(key: Any) -> bool:
    """Return True if a recording is of a method's own pass; names of a model's recordings begin with a number."""
    return not (isinstance(key[0], tuple) and isinstance(key[0][0], int))


class Seen:
    """Drafts of a decoder and its computations of its drafts, step by step, while it answers the prompts."""

    def __init__(self, decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drafted: list[list[int]] = []
        self.outputs: list[torch.Tensor] = []
        forward = decoder.forward

        def watched(state: DecodeState, tree: DraftTree) -> Output:
            output = forward(state, tree)
            self.drafted.append(tree.tokens.tolist())
            parts = (output.logits, *output.hidden_states.values(), *([] if output.extra is None else [output.extra]))
            self.outputs += [part.clone().float() for part in parts]
            return output

        with monkeypatch.context() as patch:
            patch.setattr(decoder, "forward", watched)
            self.answers = [generate(decoder, prompt, StopParams(30), SamplingParams()).tokens for prompt in PROMPTS]
            self.answers.append(generate(decoder, PROMPTS[0], StopParams(12), SamplingParams(temperature=0.8)).tokens)


@few(6)
@pytest.mark.parametrize(("replay", "block"), [(run_eagerly, BLOCK), (frozen, 64)], ids=["called", "frozen"])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_drafts_and_answers_as_before(
    name: str, replay: Replay, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every second shape where what the host decided is frozen, as in a graph; the first over a real run's blocks."""
    monkeypatch.setattr(cuda_graphs, "BLOCK", block)
    target = tiny_target("llama", words=61)
    shapes = list(instances(name, target).items())
    for label, make in shapes[::2] if replay is frozen else shapes[:1]:
        decoder = make()
        decoder.target.graphs = None
        eager = Seen(decoder, monkeypatch)
        decoder.reset_history()
        decoder.target.graphs = CudaGraphRunner(replay, WIDTHS)
        decoder.target.drop_cache()
        static = Seen(decoder, monkeypatch)
        assert static.answers == eager.answers and static.drafted == eager.drafted, label
        for one, other in zip(static.outputs, eager.outputs, strict=True):
            torch.testing.assert_close(one, other, atol=2e-4, rtol=2e-4)
        passes = decoder.target.graphs
        assert set(passes.fallbacks) == DECLINED.get((name, label), set()), label
        own = name in DRAFTERS and ((name, label) not in DECLINED or name == "ss")  # its own passes are in graphs
        assert any(map(of_a_drafter, passes.graphs)) == own or label in ("eq-3", "same-model"), label
        if name == "sd":
            assert decoder.draft.model.graphs.graphs, label  # type: ignore[attr-defined]


@torch.inference_mode()
def test_a_pass_over_its_own_outputs_is_run_eagerly() -> None:
    """A capture or a check would overwrite its inputs."""
    target, cache = tiny_target("llama", words=61), Cache(1, 600)
    rows = torch.ones(1, 1, 8, 1)
    cache.update(rows, rows, 0)
    cache.commit(8)
    target.graphs = CudaGraphRunner(warmed_up, (1,))
    x = torch.ones(1, 1, 4)
    for step in range(1, 6):
        (x,) = target.run_pass(("again",), lambda _, x: (x + 1,), cache, (x,), rows=1)
        assert x.flatten().tolist() == [step + 1.0] * 4
        cache.commit(1)
    assert [text for text in target.graphs.fallbacks if "inputs that are outputs" in text]


def warmed_up(one: Pass) -> Pass:
    """A replay of a pass that was run before, over the buffers as they are, as a capture is preceded by a warm-up."""
    one()
    return one


def test_a_chain_of_sampled_tokens_reads_no_output_that_the_next_pass_overwrites(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_graphs, "BLOCK", 8)  # captures and checks within chains
    drafted = []
    for replay in (None, run_eagerly, warmed_up):
        target = tiny_target("llama", words=61)
        decoder = registry.method_class("mtp").test_instances(target)["state before the norm"]()
        target.graphs = replay and CudaGraphRunner(replay, WIDTHS)
        target.drop_cache()
        seen, forward = list[list[int]](), decoder.forward

        def watched(state: DecodeState, tree: DraftTree, seen: Any = seen, forward: Any = forward) -> Output:
            seen.append(tree.tokens.tolist())
            found: Output = forward(state, tree)
            return found

        monkeypatch.setattr(decoder, "forward", watched)
        generate(decoder, PROMPTS[0], StopParams(30), SamplingParams(temperature=0.7))
        drafted.append(seen)
    assert drafted[0] == drafted[1] == drafted[2]


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "phi3", "opt", "gpt_neox"])
@torch.inference_mode()
def test_a_padded_pass_gives_the_same_logits_and_the_same_cache(kind: str) -> None:
    target = tiny_target(kind, words=61)
    tree = DraftTree.from_parents(torch.tensor([4, 5, 6, 7, 8]), [-1, 0, 0, 1, 1])
    results = []
    for passes in (None, CudaGraphRunner(run_eagerly, WIDTHS)):
        target.graphs = passes
        target.drop_cache()
        cache = target.request_cache(40)
        target.prefill(torch.tensor([PROMPTS[0]]), cache)
        output = target.forward_tree(tree, cache, (1, 2))
        end = len(PROMPTS[0]) + len(tree)
        rows = [torch.stack(cache.memory_of(layer))[..., :end, :] for layer in range(target.n_layers)]
        results.append((output.logits, *output.hidden_states.values(), *rows))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)


@torch.inference_mode()
def test_a_pass_that_keeps_the_number_of_rows_before_it_is_found_out() -> None:
    """It gives what it should where it is recorded, and what it gave there everywhere else."""
    passes, cache = CudaGraphRunner(frozen, (4,)), prompted(tiny_target("llama", words=61), 600)
    x = torch.ones(1, 2, 16)
    for past in range(8, 12):
        made = passes.run_pass("layers", baked(past), cache, (x,), ((1,),), 2)
        assert (made is None) == (past > 8)
        given = (made or baked(past)(None, x))[0]
        assert torch.equal(given, x + past)
        cache.commit(1)
    assert passes.fallbacks == {SOMETHING_ELSE: 3} and not passes.graphs


def baked(past: int) -> Callable[..., tuple[torch.Tensor]]:
    """A pass that adds a number which the host has."""
    return lambda _, x: (x + past,)


@thorough
@torch.inference_mode()
def test_what_was_recorded_of_a_drafter_that_is_gone_goes_with_it() -> None:
    target = tiny_target("llama", words=61)
    passes = target.graphs = CudaGraphRunner(frozen, WIDTHS)
    for name, shape in (("medusa", "tree"), ("eagle", "auto"), ("ss", "default"), ("dflash", "default")):
        test_instances = registry.method_class(name).test_instances(target)
        decoder = test_instances.get(shape, next(iter(test_instances.values())))()
        generate(decoder, PROMPTS[0], StopParams(12), SamplingParams())
        assert any(map(of_a_drafter, passes.graphs)), name
        caches = [weakref.ref(one) for one in _members(decoder) if isinstance(one, Cache)]
        gone = weakref.ref(decoder)
        del decoder, test_instances
        gc.collect()
        assert gone() is None and all(cache() is None for cache in caches), name
        target.request_cache(40)
        assert not any(map(of_a_drafter, passes.graphs)), name


@torch.inference_mode()
def test_recordings_over_memory_that_a_cache_has_no_longer_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "BLOCK", 8)
    target = tiny_target("llama", words=61)
    passes = target.graphs = CudaGraphRunner(run_eagerly, (1, 4))
    cache = target.request_cache(20, grows=True)
    target.prefill(torch.tensor([PROMPTS[0]]), cache)
    first, capacity = cache.keys[0], cache.capacity
    for token in range(capacity + 40):
        target.forward_tree(DraftTree.root_only(torch.tensor([token % 60])), cache)
        cache.commit(1)
    assert cache.capacity > capacity and not passes.fallbacks, "there is room for padded rows in what grew, too"
    target.request_cache(20)
    assert first is not None and all(kept.memory and kept.memory[0][0] is not first for kept in passes.graphs.values())
    assert passes.graphs


def passes_of(target: Target) -> CudaGraphRunner:
    assert target.graphs is not None
    return target.graphs


@torch.inference_mode()
def test_a_pass_is_made_once_for_all_steps_of_a_width_and_a_block_of_keys() -> None:
    target = tiny_target("llama", words=61)
    target.graphs = CudaGraphRunner(run_eagerly, WIDTHS)
    decoder = registry.method_class("ar").test_instances(target)["default"]()
    for made, tried in ((1, 2), (1, 2), (1, 2)):  # it is proven twice
        generate(decoder, PROMPTS[0], StopParams(30), SamplingParams())
        assert (passes_of(target).n_captures, passes_of(target).n_capture_attempts) == (made, tried)


def test_the_table_of_rotary_embeddings_stays_up_to_the_end_of_the_context() -> None:
    """Graphs read it; streams look ahead of the context."""
    target = tiny_target("llama", words=61)
    target.graphs, table = CudaGraphRunner(run_eagerly), target._rotary
    decoder = next(iter(registry.method_class("ss").test_instances(target).values()))()
    found = generate(decoder, [5, 9, 7] * (CONTEXT // 3 - 3), StopParams(40), SamplingParams())
    assert found.finish == "context" and target._rotary is table


@torch.inference_mode()
def test_prompts_are_not_replayed_and_not_counted() -> None:
    passes = CudaGraphRunner(lambda one: pytest.fail("it was recorded"))
    cache = tiny_target("llama", words=61).new_cache(CONTEXT)
    assert passes.run_pass("name", lambda *_: (), cache, (torch.randn(1, 40, 16),), ((1,),), 40) is None
    assert not passes.fallbacks and not passes.n_capture_attempts


@torch.inference_mode()
def test_a_function_of_tensors_is_recorded_once_for_each_form_of_them() -> None:
    passes, asked = CudaGraphRunner(frozen), []

    def added(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor]:
        asked.append(len(a))
        return (a + b,)

    for n in (2, 3, 2, 3):
        found = called(passes, "sum", added, torch.full((n,), float(n)), torch.arange(float(n)))
        assert found.tolist() == [n + i for i in range(n)]
    assert asked == [2, 2, 3, 3] and passes.n_captures == 2, "each form is recorded and proven once"


@torch.inference_mode()
def test_the_stand_in_for_a_graph_freezes_what_the_host_decides_and_forbids_looks() -> None:
    passes, host = CudaGraphRunner(frozen), [1.0]
    for n in (1.0, 2.0):
        host[0] = n
        assert called(passes, "baked", lambda x: (x + host[0],), torch.zeros(1)).item() == 1.0
    looks: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor]]] = {
        "item": lambda x: (x + x.sum().item(),),
        "where": lambda x: (x[x > 0],),
        "nonzero": lambda x: (x.nonzero(),),
    }
    for name, look in looks.items():
        assert torch.equal(called(passes, name, look, torch.ones(1)), look(torch.ones(1))[0])
    reported = "passes that cannot be captured (RuntimeError: operation not permitted when stream is capturing: a look"
    assert passes.fallbacks.total() == len(looks) and all(why.startswith(reported) for why in passes.fallbacks)


@torch.inference_mode()
def test_what_cannot_be_recorded_is_run_eagerly_and_not_tried_again() -> None:
    target, tried = tiny_target("llama", words=61), []
    decoder = registry.method_class("eagle").test_instances(target)["auto"]()
    eager = generate(decoder, PROMPTS[0], StopParams(12), SamplingParams()).tokens

    def of_the_model_alone(one: Pass) -> Pass:
        tried.append(one)
        if len(one()[0].shape) == 3 and len(one()) == 1:
            raise RuntimeError("operation not supported\nmore")
        return one

    target.graphs = CudaGraphRunner(of_the_model_alone, WIDTHS)
    for _ in range(2):
        again = generate(decoder, PROMPTS[0], StopParams(12), SamplingParams())
        assert again.tokens == eager
    assert set(target.graphs.fallbacks) == {"passes that cannot be captured (RuntimeError: operation not supported)"}
    assert len(tried) == len(target.graphs.failed_captures) + target.graphs.n_captures


@thorough
@torch.inference_mode()
def test_a_drafts_passes_are_replayed_and_counted_with_those_of_its_target() -> None:
    target = tiny_target("llama", words=61)
    passes = target.graphs = CudaGraphRunner(frozen, WIDTHS)
    for shape in ("chain", "tree"):
        decoder: Any = registry.method_class("sd").test_instances(target)[shape]()
        before = passes.n_captures
        generate(decoder, PROMPTS[0], StopParams(12), SamplingParams())
        draft = decoder.draft.model
        assert draft.graphs is not passes and draft.graphs.counts is passes.counts
        assert passes.n_captures - before > len(passes.graphs), "its own are counted beside the target's"
    windows = tiny_target("mistral-window", words=61)
    enable_draft_cuda_graphs(windows, target)
    assert windows.graphs is None


@torch.inference_mode()
def test_a_pass_is_made_again_when_the_cache_takes_other_memory() -> None:
    target = tiny_target("llama", words=61)
    decoder = registry.method_class("ar").test_instances(target)["default"]()
    eager = generate(decoder, PROMPTS[0], StopParams(8), SamplingParams()).tokens
    target.graphs = CudaGraphRunner(run_eagerly, WIDTHS)
    for most, made in ((8, 1), (8, 1), (CONTEXT, 2), (8, 2)):  # a longer request takes a larger cache
        assert generate(decoder, PROMPTS[0], StopParams(most), SamplingParams()).tokens[:8] == eager
        assert passes_of(target).n_captures == made
    target.drop_cache()
    for made, tried in ((3, 6), (3, 6)):
        assert generate(decoder, PROMPTS[0], StopParams(8), SamplingParams()).tokens == eager
        assert (passes_of(target).n_captures, passes_of(target).n_capture_attempts) == (made, tried)


@torch.inference_mode()
def test_more_rows_than_a_method_states_are_an_error_there_too() -> None:
    target = tiny_target("llama", words=61)
    target.graphs = CudaGraphRunner(run_eagerly, WIDTHS)
    cache = target.request_cache(12)
    target.prefill(torch.tensor([PROMPTS[0]]), cache)
    cache.set_limit(10)
    with pytest.raises(RuntimeError, match="max_tokens_per_step"):
        target.forward_tree(DraftTree.chain(torch.tensor([4]), torch.tensor([5, 6, 7])), cache)


def prompted(target: Target, capacity: int) -> Cache:
    """A cache of the target's that holds the first prompt."""
    cache = target.new_cache(capacity)
    target.prefill(torch.tensor([PROMPTS[0]]), cache)
    return cache


@torch.inference_mode()
def test_a_pass_that_cannot_be_replayed_is_counted_by_its_reason_and_gives_the_same() -> None:
    target = tiny_target("llama", words=61)
    wide, narrow = [DraftTree.from_parents(torch.tensor([4, 5, 6, 7, 8])[:n], [-1, 0, 0, 1, 1][:n]) for n in (5, 3)]
    expected = [target.forward_tree(tree, prompted(target, 600)).logits for tree in (wide, narrow)]
    target.graphs = CudaGraphRunner(run_eagerly, (1, 4))
    roomy, tight = prompted(target, 600), prompted(target, 20)
    assert not passes_of(target).fallbacks  # prompts are not steps
    given = [target.forward_tree(wide, roomy).logits, target.forward_tree(narrow, tight).logits]
    torch.testing.assert_close(given, expected)
    assert passes_of(target).fallbacks == {"more than 4 rows": 1, NO_ROOM: 1}
    target.forward_tree(narrow, roomy)
    assert passes_of(target).n_captures == 1 and passes_of(target).fallbacks.total() == 2


@torch.inference_mode()
def test_passes_that_take_no_rows_in_addition_may_have_more_than_the_widest_of_the_others() -> None:
    passes, cache = CudaGraphRunner(run_eagerly, (1, 4)), prompted(tiny_target("llama", words=61), 600)
    x = torch.ones(1, 9, 16)
    made = passes.run_pass("streams", lambda _, x: (x + 1,), cache, (x,), (), 9, rows=9)
    assert made is not None and torch.equal(made[0], x + 1)
    assert passes.run_pass("layers", lambda _, x: (x + 1,), cache, (x,), ((1,),), 9) is None
    assert passes.fallbacks == {"more than 4 rows": 1}


@torch.inference_mode()
def test_rows_of_a_pass_that_are_not_finite_stay_in_no_later_one() -> None:
    target = tiny_target("llama", words=61)
    target.graphs = CudaGraphRunner(run_eagerly, (4,))
    cache = prompted(target, 600)
    rows = torch.randn(1, 3, target.config.hidden_size)

    def chain(current: ForwardPass, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        places = torch.arange(x.shape[1])
        mask, rotary = current.mask(places[:, None] >= places), current.rotary(current.positions(places))
        return current.run(x, 0, target.n_layers, mask, rotary)

    def result(x: torch.Tensor) -> torch.Tensor:
        return target.run_pass(("chain",), chain, cache, (x,), ((1,),), x.shape[1], 11)[0].clone()

    expected = result(rows[:, :2])
    for x in (rows, torch.full_like(rows, torch.nan)):
        result(x)
    assert (
        torch.equal(result(rows[:, :2]), expected) and passes_of(target).n_captures and not passes_of(target).fallbacks
    )
    assert all(kept_here[:, :, 8:].isfinite().all() for kept_here in cache.memory_of(0))


@torch.inference_mode()
def test_streams_that_see_few_tokens_are_counted_step_by_step() -> None:
    """The pass of such a step runs eagerly; the draft is replayed."""
    target = tiny_target("llama", words=61)
    target.graphs = CudaGraphRunner(run_eagerly)
    decoder = registry.method_class("ss").test_instances(target)["top-p"]()
    steps = len(generate(decoder, PROMPTS[0], StopParams(12), SamplingParams()).steps)
    why = "stream_attention_top_p"
    assert passes_of(target).fallbacks == {why: steps} and passes_of(target).n_captures


def test_passes_of_a_training_are_not_counted() -> None:
    passes, cache = CudaGraphRunner(run_eagerly, WIDTHS), prompted(tiny_target("llama", words=61), 600)
    for kept_here in (cache, None):
        assert passes.run_pass("name", lambda *_: (), kept_here, (torch.zeros(1, 300, 16),), ((1,),), 300) is None
    assert not passes.fallbacks


@thorough
def test_a_run_states_which_passes_were_run_eagerly(tmp_path: Path) -> None:
    target = load_model("lab", dtype="float32")
    target.graphs = CudaGraphRunner(run_eagerly, (1, 4))
    found = run(
        "medusa[nodes=6]", model=target, warmup=0, limit=1, tasks="qa", max_new_tokens=8, telemetry=0,
        record_drafts="0", out=tmp_path / "run",
    )  # fmt: skip
    rows = {row.method: row for row in read_run(tmp_path / "run").rows}
    drafted, plain = rows["medusa[nodes=6]"], rows["ar"]
    assert (drafted.n_eager_fallbacks, drafted.eager_fallback_reason) == (drafted.steps, "more than 4 rows")
    assert (plain.n_eager_fallbacks, plain.eager_fallback_reason) == (0, "")
    made = read_run(tmp_path / "run")
    check = next(check for check in checks(made, summarise(made)) if check.name == "cuda-graphs")
    assert check.state == "warning"
    assert f"{drafted.steps} of medusa[nodes=6] (more than 4 rows)." in check.sentence
    assert " of ar" not in check.sentence
    assert len(found.samples) == 2


# -- the engine ------------------------------------------------------------------------------------------------------


def test_an_engine_that_gives_the_same_is_used_and_reported() -> None:
    target = tiny_target("llama", words=61)
    before = target.kernel_summary
    enable_cuda_graphs(target, run_eagerly, "calls")
    assert passes_of(target).n_captures
    assert target.kernel_summary == f"{before}; steps replayed by calls"
    assert target.with_model(target.model, "").graphs is not target.graphs


def test_a_model_in_place_of_the_target_is_replayed_only_if_its_layers_can_be() -> None:
    """Sliding windows are folded into the mask by what the host has, which a replay does not receive of."""
    target, windows = tiny_target("llama", words=61), tiny_target("mistral-window", words=61)
    decoder = registry.method_class("ar").test_instances(windows)["default"]()
    expected = generate(decoder, PROMPTS[1], StopParams(30), SamplingParams()).tokens
    enable_cuda_graphs(target, run_eagerly, "calls")
    with pytest.warns(UserWarning, match="run eagerly: its layers have sliding windows"):
        other = target.with_model(windows.model, "")
    assert other.engine == "eager" and "replayed" not in other.kernel_summary
    assert (
        generate(type(decoder)(other, decoder.options), PROMPTS[1], StopParams(30), SamplingParams()).tokens == expected
    )


def stale(one: Pass) -> Pass:
    """A replay that gives its first results again."""
    outs = one()
    return lambda: outs


def not_finite(one: Pass) -> Pass:
    """A replay that gives NaN."""
    return lambda: tuple(out * torch.nan for out in one())


def fails(one: Pass) -> Pass:
    """A replay that fails when it is made for the third time."""
    left = [2]

    def replayed() -> tuple[torch.Tensor, ...]:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("an illegal memory access\nmore")
        return one()

    return replayed


def full(one: Pass) -> Pass:
    raise torch.OutOfMemoryError("tried to allocate 2 GiB")


def broken(one: Pass) -> Pass:
    raise RuntimeError("operation not permitted when stream is capturing\nmore")


@pytest.mark.parametrize(
    ("replay", "stated"),
    [
        (stale, "passes that give something else when they are replayed"),
        (not_finite, "passes that give something else when they are replayed"),
        (fails, r"passes that cannot be replayed \(RuntimeError: an illegal memory access\)"),
        (full, "not enough memory to capture a pass"),
        (broken, r"passes that cannot be captured \(RuntimeError: operation not permitted when stream"),
    ],
)
def test_an_engine_that_does_not_prove_itself_is_refused(replay: Replay, stated: str) -> None:
    target = tiny_target("llama", words=61)
    before = target.kernel_summary
    with pytest.raises(UserError, match=stated):
        enable_cuda_graphs(target, replay, "calls")
    assert target.graphs is None
    assert target.kernel_summary == before


def test_padding_that_changes_the_logits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The replay gives what the call gives: both see a key that was added."""
    mask = StaticPass.mask

    def wrong(self: StaticPass, *given: Any) -> torch.Tensor:
        padded = mask(self, *given)
        padded[..., -1] = 0
        return padded

    monkeypatch.setattr(StaticPass, "mask", wrong)
    with pytest.raises(UserError, match="other logits when passes are padded"):
        enable_cuda_graphs(tiny_target("llama", words=61), run_eagerly, "calls")


@pytest.mark.parametrize(
    ("kind", "stated"), [("mistral-window", "sliding windows"), ("gemma3_text", "are called whole")]
)
def test_layers_that_cannot_be_replayed_are_refused(kind: str, stated: str) -> None:
    with pytest.raises(UserError, match=stated):
        enable_cuda_graphs(tiny_target(kind, words=61), run_eagerly, "calls")


def on_cuda(monkeypatch: pytest.MonkeyPatch, kind: str = "llama", replay: Replay = run_eagerly) -> Target:
    """A target that calls itself one on CUDA, whose recordings are made otherwise."""
    target = tiny_target(kind, words=61)
    monkeypatch.setattr(target, "device", Anywhere("cuda"))
    monkeypatch.setattr(engines.torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(engines, "Graphs", lambda device: replay)

    def replayed(target: Target, replay: Replay, by: str, own: Any = enable_cuda_graphs) -> None:
        monkeypatch.setattr(target, "device", torch.device("cpu"))  # where it really is
        own(target, replay, by)

    monkeypatch.setattr(engines, "enable_cuda_graphs", replayed)
    return target


class Anywhere:
    """A device of this type that is not there."""

    def __init__(self, type: str) -> None:  # noqa: A002 - as torch calls it
        self.type = type


@pytest.mark.parametrize(
    ("replay", "kind", "why"),
    [
        (run_eagerly, "llama", ""),
        (stale, "llama", "give something else"),
        (full, "llama", "not enough memory"),
        (run_eagerly, "mistral-window", "have sliding windows"),
    ],
)
def test_on_cuda_steps_are_replayed_unless_something_keeps_them_from_it(
    replay: Replay, kind: str, why: str, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    target = on_cuda(monkeypatch, kind, replay)
    use_engine(target, "auto")
    stated = [str(warning.message) for warning in recwarn if "eagerly" in str(warning.message)]
    assert target.engine == ("eager" if why else "graph")
    assert len(stated) == bool(why) and all(why in text for text in stated)
    assert f"; steps run eagerly: {stated[0].partition(': ')[2]}" in target.kernel_summary if why else not stated
    if why:
        with pytest.raises(UserError, match=why):
            use_engine(on_cuda(monkeypatch, kind, replay), "graph")
    eager = on_cuda(monkeypatch, kind, replay)
    use_engine(eager, "eager")
    assert eager.engine == "eager"


def test_on_a_cpu_there_is_one_engine() -> None:
    target = tiny_target("llama", words=61)
    before = target.kernel_summary
    use_engine(target, "auto")
    assert (target.engine, target.kernel_summary) == ("eager", before)


def test_without_a_gpu_the_command_refuses_graphs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    reported = failing(
        ["run", "--methods", "pld", "--engine", "graph", "--device", "cpu", "--out", str(tmp_path / "run")], capsys
    )
    assert "engine graph needs a CUDA device" in reported
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("layers", [1, 3])
def test_rows_that_are_kept_by_numbers_on_the_device_are_those_of_the_list(layers: int) -> None:
    kept_here = []
    for rows in ([0, 2, 3, 6], torch.tensor([0, 2, 3, 6])):
        cache = Cache(layers, 12)
        for layer in range(layers):
            k = torch.arange(9.0).view(1, 1, 9, 1) + 100 * layer
            cache.update(k, k + 0.5, layer)
        cache.commit(2)
        cache.compact(2, rows)
        assert cache.lengths == [6] * layers
        kept_here.append(torch.stack([torch.stack(cache.memory_of(layer))[..., :6, :] for layer in range(layers)]))
    assert torch.equal(kept_here[0], kept_here[1])
    assert kept_here[0][0, 0].flatten().tolist() == [0, 1, 2, 4, 5, 8]


@torch.inference_mode()
def test_numbers_that_are_not_finite_stay_in_no_later_request() -> None:
    target = tiny_target("llama", words=61)
    target.graphs = CudaGraphRunner(run_eagerly, WIDTHS)
    decoder = registry.method_class("ar").test_instances(target)["default"]()
    expected = generate(decoder, PROMPTS[0], StopParams(8), SamplingParams()).tokens
    assert target._cache is not None
    for layer in range(target.n_layers):
        for rows in target._cache.memory_of(layer):
            rows.fill_(torch.nan)
    with pytest.raises(NotFinite):
        generate(decoder, PROMPTS[0], StopParams(8), SamplingParams())
    assert generate(decoder, PROMPTS[0], StopParams(8), SamplingParams()).tokens == expected


@thorough
@pytest.mark.parametrize("broken_off", [False, True])
@torch.inference_mode()
@pytest.mark.parametrize("name", CACHING if THOROUGH else CACHING[::3])
def test_a_drafters_numbers_that_are_not_finite_stay_in_no_later_request(
    name: str, broken_off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft of NaN ends no answer, so that the memory is zeroed for the next; one that ends in an error drops it.

    Which shape drafts does not matter to what is dropped: of those the first is enough.
    """
    target, cached = tiny_target("llama", words=61), 0
    target.graphs = CudaGraphRunner(run_eagerly, WIDTHS)
    shapes = list(registry.method_class(name).test_instances(target).items())
    for label, make in shapes if THOROUGH and not broken_off else shapes[:1]:
        decoder = make()
        expected = Seen(decoder, monkeypatch).drafted
        caches = [one for one in _members(decoder) if isinstance(one, Cache)]
        cached += len(caches)
        for rows in (rows for cache in caches for rows in (*cache.keys, *cache.values) if rows is not None):
            rows.fill_(torch.nan)
        if broken_off:
            with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
                patch.setattr(decoder, "on_prefill", lambda state: 1 // 0)
                generate(decoder, PROMPTS[0], StopParams(8), SamplingParams())
            assert not any(cache.has(0) for cache in caches)
        decoder.reset_history()
        assert Seen(decoder, monkeypatch).drafted == expected, label
    assert cached


@thorough
def test_an_answer_during_which_a_pass_was_recorded_is_given_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing warms up here. A method that remembers prompts would answer from memory: it is marked instead."""
    target = load_model("lab", dtype="float32")
    target.graphs = CudaGraphRunner(run_eagerly, WIDTHS)
    made: list[str] = []
    own = RequestRunner.answer

    def counted(self: RequestRunner, asked: Request, *rest: Any) -> Generation:
        made.append(asked.label)
        return own(self, asked, *rest)

    monkeypatch.setattr(RequestRunner, "answer", counted)
    found = run(
        "pld,suffix[past=on]", model=target, warmup=0, limit=1, tasks="qa", max_new_tokens=8,
        record_drafts="0", telemetry=0, out=tmp_path / "run",
    )  # fmt: skip
    again = Counter(made)
    rows = found.samples.set_index("method")
    assert again["ar"] > 1 or again["pld"] > 1
    noted = rows["noise_reason"].fillna("")
    assert again["suffix[past=on]"] == 1 and "captured" in noted["suffix[past=on]"]
    assert noted["ar"] == noted["pld"] == ""
