"""A plugin that alters the target: every method would decode with it, and "identical" would prove nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specbench_ss import UserError, load_run, run
from specbench_ss.engine.checks import NotFinite, difference, own_logits
from specbench_ss.engine.decoder import Decoder, DecodeState
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.layers import cpu
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.engine.tree import DraftTree
from tests.tiny import few, thorough, tiny_model

PLUGIN = """
import torch
from specbench_ss import Decoder, DraftTree
class Zeroes(Decoder):
    name, summary = "zeroes", "changes the model"
    @classmethod
    def load(cls, target, options):
        if {while_loading}:
            target.model.lm_head.weight.data.zero_()
        return cls(target, options)
    def max_tokens_per_step(self):
        return 8
    def propose(self, state):
        self.target.model.lm_head.weight.data.zero_()
        return DraftTree.chain(state.root, torch.zeros(7, dtype=torch.long))
"""
SMALL = {"tasks": "qa", "limit": 1, "max_new_tokens": 8, "warmup": 0, "record_drafts": 0, "telemetry": 0}


def plugin(folder: Path, while_loading: bool) -> Path:
    file = folder / "zeroes.py"
    file.write_text(PLUGIN.format(while_loading=while_loading))
    return file


def test_a_method_that_changes_the_target_while_it_loads_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="method 'zeroes' changes the target"):
        run("zeroes", plugin=plugin(tmp_path, True), out=tmp_path / "run", **SMALL)  # type: ignore[arg-type]


@thorough
def test_a_target_that_changed_during_the_run_makes_all_of_it_invalid(tmp_path: Path) -> None:
    made = run("zeroes", plugin=plugin(tmp_path, False), out=tmp_path / "run", **SMALL)  # type: ignore[arg-type]
    for results in (made, load_run(tmp_path / "run")):
        table = results.summary(all=True).set_index(["task", "method"])
        row = table.loc[("overall", "zeroes")]
        assert row["comparison"] == "invalid" and "a method altered the model" in row["health"][0]


@few(3)
@pytest.mark.parametrize("prepack", [True, False])
@pytest.mark.parametrize("kind", ["llama", "opt", "gpt2"])
def test_any_weight_that_changes_is_noticed(kind: str, prepack: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where products use a copy of the weights, and where a module was given other weights in their place."""
    if not prepack:
        monkeypatch.setattr(cpu, "supports", lambda *_: False)
    target = Target(tiny_model(kind))
    before = own_logits(target)
    assert difference(target, before) == 0
    matrices = [m for m in target.model.modules() if isinstance(getattr(m, "weight", None), torch.nn.Parameter)]
    for module in matrices:
        kept, copy = module.weight.data, module.weight.data.clone()
        module.weight.data = kept * 1.5
        assert difference(target, before) > 0, f"other weights in {module}"
        module.weight.data = kept
        kept *= 1.5
        assert difference(target, before) > 0, f"changed weights in {module}"
        kept.copy_(copy)
        assert difference(target, before) == 0


class Improper(Decoder):
    """States that its candidate was drawn from something that is no distribution."""

    name, summary = "improper", "improper"
    row: tuple[float, float] = (0.5, 0.5)

    def max_tokens_per_step(self) -> int:
        return 2

    def propose(self, state: DecodeState) -> DraftTree:
        q = torch.zeros(2, self.target.vocab_size)
        q[:, 3], q[:, 4] = self.row
        return DraftTree.chain(state.root, torch.tensor([3]), q)


@pytest.mark.parametrize("row", [(10.0, -9.0), (10.0, 0.0), (0.3, 0.3)])
def test_probabilities_that_are_no_distribution_are_refused(row: tuple[float, float]) -> None:
    decoder = Improper(Target(tiny_model("llama")))
    assert generate(decoder, [3, 4, 5], StopParams(6), SamplingParams(1.0)).tokens
    decoder.row = row
    with pytest.raises(NotFinite, match="draft_probs are not a distribution"):
        generate(decoder, [3, 4, 5], StopParams(6), SamplingParams(1.0))


def test_nan_in_them_is_named_at_temperature_0_too() -> None:
    decoder = Improper(Target(tiny_model("llama")))
    decoder.row = (float("nan"), 0.5)
    with pytest.raises(NotFinite, match="not finite"):
        generate(decoder, [3, 4, 5], StopParams(6), SamplingParams())


@pytest.mark.parametrize("token", [10**9, -1])
def test_a_drafted_token_that_the_model_does_not_have_is_named(token: int) -> None:
    class Beyond(Improper):
        def propose(self, state: DecodeState) -> DraftTree:
            return DraftTree.chain(state.root, torch.tensor([token]))

    with pytest.raises(ValueError, match=f"propose drafted token {token}, the model has 61 tokens"):
        generate(Beyond(Target(tiny_model("llama"))), [3, 4, 5], StopParams(6), SamplingParams())
