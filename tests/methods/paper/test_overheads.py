"""What needs no weights: printed parameter counts, FLOPs of the real code, equation 10."""

from __future__ import annotations

import pytest
import torch

from specbench_ss.engine.target import Target
from specbench_ss.engine.tree import DraftTree
from specbench_ss.methods.hydra.heads import HydraHeads
from specbench_ss.reports.paper import drafter_costs, meta_device, rival_costs
from specbench_ss.reports.paper.meta_device import Overhead
from specbench_ss.reports.paper.overheads import FLOP_NOTES, PRINTED, Figure9, as_printed, counted
from specbench_ss.reports.paper.paper_models import MODELS, meta_target
from specbench_ss.reports.paper.theory import parity, streaming_over_draft
from tests.tiny import tiny_model

PINNED = {
    ("OPT-1.3B", "SS-Shared"): "4.096E4",
    ("OpenLlama-7B", "SS-Shared"): "8.19E4",
    ("Llama-2-7B", "SS-Shared"): "8.2E4",
    ("Phi-3", "SS-Shared"): "6.1E4",
    ("OPT-1.3B", "Medusa"): "4.28E8",
    ("Phi-1.3B", "Medusa"): "4.36E8",
    ("OpenLlama-7B", "Medusa"): "5.91E8",
    ("Phi-3", "Medusa"): "4.3E8",
    ("Llama-2-7B", "Eagle"): "2.4E8",
    ("Phi-3", "Eagle"): "1.3E8",
}


@pytest.mark.parametrize("model,method", PINNED)
def test_extra_parameters_come_out_as_printed(model: str, method: str) -> None:
    assert as_printed(counted(model, method), PINNED[model, method])


def test_every_printed_count_is_met_but_one() -> None:
    differing = [(p.model, p.method) for p in PRINTED if not as_printed(counted(p.model, p.method), p.text)]
    assert differing == [("Mistral-7B", "Eagle")]  # printed with the count of the Llama shape


@pytest.mark.parametrize(
    "count,text,agrees",
    [(428_613_632, "4.28E8", "truncated"), (81_920, "8.2E4", "rounded"), (81_920, "8.19E4", "rounded"),
     (430_000_000, "4.28E8", ""), (4_286, "4.28E8", ""), (251_662_336, "2.4E8", "")],
)  # fmt: skip
def test_agreement_is_digit_by_digit(count: int, text: str, agrees: str) -> None:
    assert as_printed(count, text) == agrees


def test_lossless_adds_over_a_thousand_times_less_than_medusa() -> None:
    lossless = counted("Llama-2-7B", "SS-Lossless")
    assert lossless == 344_064
    assert counted("Llama-2-7B", "Medusa") > 1000 * lossless


def test_meta_models_hold_no_weights() -> None:
    target = meta_target("OPT-125M")
    assert target.device.type == "meta"
    assert target.hidden_size == MODELS["OPT-125M"].shape["hidden_size"]


def test_flops_of_one_token_are_two_for_each_weight_of_a_product() -> None:
    target = meta_target("Llama-68M")
    state = meta_device.meta_state(target)
    seen = meta_device.flops(lambda: target.forward_tree(DraftTree.root_only(state.root), state.cache))
    embedding = target.model.get_input_embeddings().weight.numel()
    norms = sum(p.numel() for p in target.model.parameters() if p.ndim == 1)
    weights = target.parameter_count - embedding - norms
    attention = 2 * 2 * target.hidden_size * (meta_device.CONTEXT + 1) * target.n_layers  # q k^T and the sum over v
    assert seen == 2 * weights + attention


def test_medusas_flops_are_its_matrices() -> None:
    target = meta_target("Llama-68M")
    h, v = target.hidden_size, target.vocab_size
    assert drafter_costs.medusa(target).flops == 2 * 4 * (h * h + h * v)


def test_flops_of_streaming_are_streams_exits_and_draft_logits() -> None:
    target = Target(tiny_model("llama").to("meta"))
    h, v, m = target.hidden_size, target.vocab_size, drafter_costs.KEPT
    rows, layers, kv = m * drafter_costs.GAMMA, 4, 16  # tiny: 2 key-value heads of 8
    projections = 2 * rows * (2 * h * h + 2 * h * kv)
    adapters = 2 * rows * 2 * 8 * h
    keys = meta_device.CONTEXT + m + rows
    attention = 2 * 2 * h * (rows * keys + m * rows)  # main rows are multiplied with stream keys too, then masked
    head = 2 * h * v
    expected = layers * (projections + adapters + attention) + drafter_costs.GAMMA * head + 40 * (head + 2 * 2 * 8 * h)
    assert drafter_costs.streaming(target).flops == expected


def test_one_node_has_its_streams_and_no_early_exit() -> None:
    target = Target(tiny_model("llama").to("meta"))
    h, kv, rows, layers = target.hidden_size, 16, drafter_costs.GAMMA, 4
    linear = 2 * rows * (2 * h * h + 2 * h * kv + 2 * 8 * h)
    attention = 2 * 2 * h * (rows * (meta_device.CONTEXT + 1 + rows) + rows)  # and the main row beside the streams
    head = 2 * h * target.vocab_size
    assert drafter_costs.streaming(target).one_node == layers * (linear + attention) + drafter_costs.GAMMA * head


def test_a_chain_costs_what_its_rows_cost() -> None:
    target = meta_target("Vicuna-7B")
    h, v = target.hidden_size, target.vocab_size
    eagle, hydra = rival_costs.eagle(target, "Vicuna-7B"), rival_costs.hydra(target, "Vicuna-7B", plus=False)
    passes = rival_costs.layer_flops(target, 1) + 2 * (2 * h * h + h * v)
    assert eagle.one_node == len(rival_costs.EAGLE_ROWS) * passes
    assert eagle.flops > 4 * eagle.one_node and hydra.flops > 4 * hydra.one_node > 16 * 2 * h * v
    assert all(o.one_node == o.flops for o in (drafter_costs.medusa(target), drafter_costs.draft_model()))


def costs(ours: tuple[float, float], eagle: tuple[float, float]) -> dict[str, Overhead]:
    """Drafters that need so many GFLOPs per draft and for one node."""
    made = {"Medusa": (1.0, 1.0), "Eagle": eagle, "SS-Lossless": ours, "SS-Lossless, full attention": (0.1, 0.1)}
    return {name: Overhead(1, 1, int(1e9 * draft), int(1e9 * one)) for name, (draft, one) in made.items()}


def test_figure_9_says_by_which_count_the_streams_need_fewer() -> None:
    result = Figure9().show(costs((9, 3), eagle=(7, 2)))
    assert [claim.holds for claim in Figure9().claims(result)] == [False, False]
    assert result.notes[-3:] == (
        "Per draft: SS-Lossless needs 9 GFLOPs, more than Medusa, Eagle.",
        "Of one node each: SS-Lossless needs 3 GFLOPs, more than Medusa, Eagle.",
        "Of one node, beside the whole drafts of the others: SS-Lossless needs 3 GFLOPs, more than Medusa and fewer "
        "than Eagle.",
    )
    least = Figure9().show(costs((9, 0.5), eagle=(7, 2)))
    assert [claim.holds for claim in Figure9().claims(least)] == [False, True]
    assert least.notes[-2] == "Of one node each: SS-Lossless needs 0.5 GFLOPs, fewer than Medusa, Eagle."
    assert [trace["y"][0] for trace in result.plots[0].data] == [1.0, 1.0]


def test_overheads_rank_as_the_paper_says() -> None:
    found = drafter_costs.all_overheads("Vicuna-7B")
    by_parameters = sorted(found, key=lambda name: found[name].parameters)
    assert by_parameters[0] == "SS-Lossless"
    assert found["Hydra++"].parameters > found["Hydra"].parameters > found["Medusa"].parameters
    assert found["Hydra++"].flops > found["Hydra"].flops > found["Medusa"].flops


def test_eagle_and_hydra_counts_are_the_published_ones() -> None:
    assert as_printed(meta_device.count(rival_costs.Eagle("Vicuna-13B")), "3.7E8")  # 0.37B in EAGLE's README
    with torch.device("meta"):
        heads = HydraHeads(4, 1, 4096, 32000)
    assert meta_device.count(heads) / 1e9 == pytest.approx(0.99, abs=0.005)


def test_equation_10() -> None:
    assert parity(10, gamma=4) == pytest.approx(1.4)
    assert streaming_over_draft(parity(7), 7) == pytest.approx(1)
    assert streaming_over_draft(1, 10) > streaming_over_draft(1, 100) > 1 > streaming_over_draft(2, 10)


def test_notes_say_what_was_counted() -> None:
    assert f"{meta_device.CONTEXT} tokens in the cache" in FLOP_NOTES[0]
    assert f"gamma = {drafter_costs.GAMMA}, k = {drafter_costs.K}" in FLOP_NOTES[0]
