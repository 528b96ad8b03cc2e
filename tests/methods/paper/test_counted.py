"""Experiments without weights: parameter counts, FLOPs of the real code, equation 10, memory of drafters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specbench_ss.engine.target import Target
from specbench_ss.engine.tree import DraftTree
from specbench_ss.methods.hydra.heads import HydraHeads
from specbench_ss.reports.paper import meta_drafters
from specbench_ss.reports.paper.cost_figures import (
    APP_METHODS,
    BASES,
    PRINTED,
    AppendixC,
    Figure9,
    as_printed,
    parity,
    streaming_over_draft,
)
from specbench_ss.reports.paper.meta_drafters import MODELS, Overhead, added_parameters, meta_target
from specbench_ss.results.report import Result
from tests.methods.paper.shared import bench
from tests.tiny import tiny_model


def test_every_printed_count_is_met_but_one() -> None:
    differing = [
        (model, method) for model, method, text, _ in PRINTED if not as_printed(added_parameters(model, method), text)
    ]
    assert differing == [("Mistral-7B", "Eagle")]  # printed with the count of the Llama shape


@pytest.mark.parametrize(
    "count,text,agrees",
    [(428_613_632, "4.28E8", "truncated"), (81_920, "8.2E4", "rounded"), (81_920, "8.19E4", "rounded"),
     (430_000_000, "4.28E8", ""), (4_286, "4.28E8", ""), (251_662_336, "2.4E8", "")],
)  # fmt: skip
def test_agreement_is_digit_by_digit(count: int, text: str, agrees: str) -> None:
    assert as_printed(count, text) == agrees


def test_flops_of_one_token_are_two_for_each_weight_of_a_product() -> None:
    target = meta_target("Llama-68M")
    state = meta_drafters.meta_state(target)
    seen = meta_drafters.flops(lambda: target.forward_tree(DraftTree.root_only(state.root), state.cache))
    embedding = target.model.get_input_embeddings().weight.numel()
    norms = sum(p.numel() for p in target.model.parameters() if p.ndim == 1)
    weights = target.parameter_count - embedding - norms
    attention = 2 * 2 * target.hidden_size * (meta_drafters.CONTEXT + 1) * target.n_layers  # q k^T and the sum over v
    assert seen == 2 * weights + attention


def test_medusas_flops_are_its_matrices() -> None:
    target = meta_target("Llama-68M")
    h, v = target.hidden_size, target.vocab_size
    assert meta_drafters.medusa(target).flops == 2 * 4 * (h * h + h * v)


def test_flops_of_streaming_are_streams_exits_and_draft_logits() -> None:
    target = Target(tiny_model("llama").to("meta"))
    h, v, m = target.hidden_size, target.vocab_size, meta_drafters.KEPT
    rows, layers, kv = m * meta_drafters.GAMMA, 4, 16  # tiny: 2 key-value heads of 8
    projections = 2 * rows * (2 * h * h + 2 * h * kv)
    adapters = 2 * rows * 2 * 8 * h
    keys = meta_drafters.CONTEXT + m + rows
    attention = 2 * 2 * h * (rows * keys + m * rows)  # main rows are multiplied with stream keys too, then masked
    head = 2 * h * v
    expected = layers * (projections + adapters + attention) + meta_drafters.GAMMA * head + 40 * (head + 2 * 2 * 8 * h)
    assert meta_drafters.streaming(target).flops == expected


def test_one_node_has_its_streams_and_no_early_exit() -> None:
    target = Target(tiny_model("llama").to("meta"))
    h, kv, rows, layers = target.hidden_size, 16, meta_drafters.GAMMA, 4
    linear = 2 * rows * (2 * h * h + 2 * h * kv + 2 * 8 * h)
    attention = 2 * 2 * h * (rows * (meta_drafters.CONTEXT + 1 + rows) + rows)  # and the main row next to the streams
    head = 2 * h * target.vocab_size
    assert meta_drafters.streaming(target).one_node == layers * (linear + attention) + meta_drafters.GAMMA * head


def test_a_chain_costs_what_its_rows_cost() -> None:
    target = meta_target("Vicuna-7B")
    h, v = target.hidden_size, target.vocab_size
    eagle, hydra = meta_drafters.eagle(target), meta_drafters.hydra(target, plus=False)
    ffn = MODELS["Vicuna-7B"].inner
    layer = 2 * (4 * h * h + 3 * h * ffn) + 2 * 2 * h * (meta_drafters.CONTEXT + 1)
    passes = layer + 2 * (2 * h * h + h * v)
    assert eagle.one_node == len(meta_drafters.EAGLE_ROWS) * passes
    assert eagle.flops > 4 * eagle.one_node and hydra.flops > 4 * hydra.one_node > 16 * 2 * h * v
    assert all(o.one_node == o.flops for o in (meta_drafters.medusa(target), meta_drafters.draft_model()))


def costs(ours: tuple[float, float], eagle: tuple[float, float]) -> dict[str, Overhead]:
    """Drafters that need so many GFLOPs per draft and for one node."""
    made = {"Medusa": (1.0, 1.0), "Eagle": eagle, "SS-Lossless": ours, "SS-Lossless, full attention": (0.1, 0.1)}
    return {name: Overhead(1, 1, int(1e9 * draft), int(1e9 * one)) for name, (draft, one) in made.items()}


def test_figure_9_states_by_which_count_the_streams_need_fewer() -> None:
    result = Figure9().show(costs((9, 3), eagle=(7, 2)))
    assert [claim.holds for claim in Figure9().claims(result)] == [False, False]
    assert result.notes[-3:] == (
        "Per draft: SS-Lossless needs 9 GFLOPs, more than Medusa, Eagle.",
        "Of one node each: SS-Lossless needs 3 GFLOPs, more than Medusa, Eagle.",
        "Of one node, next to the whole drafts of the others: SS-Lossless needs 3 GFLOPs, more than Medusa and fewer "
        "than Eagle.",
    )
    least = Figure9().show(costs((9, 0.5), eagle=(7, 2)))
    assert [claim.holds for claim in Figure9().claims(least)] == [False, True]
    assert least.notes[-2] == "Of one node each: SS-Lossless needs 0.5 GFLOPs, fewer than Medusa, Eagle."
    assert [trace["y"][0] for trace in result.plots[0].data] == [1.0, 1.0]


def test_eagle_and_hydra_counts_are_the_published_ones() -> None:
    assert as_printed(added_parameters("Vicuna-13B", "Eagle"), "3.7E8")  # 0.37B in EAGLE's README
    with torch.device("meta"):
        heads = HydraHeads(4, 1, 4096, 32000)
    assert meta_drafters.count(heads) / 1e9 == pytest.approx(0.99, abs=0.005)


def test_equation_10() -> None:
    assert parity(10, gamma=4) == pytest.approx(1.4)
    assert streaming_over_draft(parity(7), 7) == pytest.approx(1)
    assert streaming_over_draft(1, 10) > streaming_over_draft(1, 100) > 1 > streaming_over_draft(2, 10)


# -- appendix C: everything is counted, and ten drafters are ten times one ---------------------------------------------


def test_drafters_outgrow_the_base_where_it_is_stated(tmp_path: Path) -> None:
    made = AppendixC().run(bench(tmp_path))
    drafters, bases = made.grids
    sizes: list[Any] = [row[2] for row in bases.rows]
    assert sizes == pytest.approx([6.738, 6.738 * 34 / 32], abs=1e-3) and len(BASES) == 2
    assert [row[0] for row in drafters.rows] == list(APP_METHODS)
    for row in drafters.rows:
        parameters: Any = row[1]
        assert parameters == added_parameters("Llama-2-7B", str(row[0]))
        for at, size in zip(row[4:], sizes, strict=True):
            n: Any = at
            assert (n - 1) * 2 * parameters / 1e9 <= size < n * 2 * parameters / 1e9
    (plot,) = made.plots
    ten: Any = next(row for row in plot.grid.rows if row[0] == 10)
    assert list(ten[1 : 1 + len(APP_METHODS)]) == [row[3] for row in drafters.rows]
    assert [trace["name"] for trace in plot.data][: len(APP_METHODS)] == list(APP_METHODS)
    assert [claim.verdict for claim in AppendixC().claims(made)] == ["agrees"] * 6
    halved = replace(drafters, rows=tuple((*r[:2], r[2] / 2, r[3] / 2, *r[4:]) for r in drafters.rows))  # type: ignore[operator]
    claims = AppendixC().claims(Result((halved, replace(bases, rows=bases.rows[:1]))))
    assert [claim.holds for claim in claims] == [True, True, False, False, False, False]
