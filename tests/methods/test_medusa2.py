"""Medusa-2: its output is its own backbone's, whichever way that comes, and the base stays what it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specbench_ss.engine.decoder import Decoder
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.methods.medusa.decode import (
    Medusa,
    Medusa2,
    Medusa2AROptions,
    Medusa2Autoregressive,
    MedusaOptions,
)
from specbench_ss.methods.medusa.train import JointTraining, Medusa2Trainer
from specbench_ss.models.tiny import randomise
from specbench_ss.training.batch import BaseStates
from tests.methods.batches import answers_of
from tests.methods.test_medusa import layout
from tests.tiny import SOME, few, tiny_model

PROMPT = [5, 6, 7, 8, 9, 10, 11]
NOTHING = BaseStates(torch.empty(0), {}, {})


def answer(decoder: Decoder, n: int = 16) -> list[int]:
    return generate(decoder, PROMPT, StopParams(n), SamplingParams()).tokens


def trained(kind: str, **options: Any) -> tuple[Target, Medusa2Trainer]:
    """Random LoRA (or weights) and heads on a tiny base."""
    target = Target(tiny_model(kind))
    torch.manual_seed(2)
    trainee = Medusa2Trainer(target, JointTraining(3, **{"lora_rank": 4, **options}))
    with torch.no_grad():
        for p in trainee.backbone:
            p.add_(torch.randn_like(p) * 0.05)
    randomise(trainee.heads, 2)
    return target, trainee


@few(1)
@pytest.mark.parametrize("kind", SOME)
def test_output_is_its_own_backbones(kind: str, tmp_path: Path) -> None:
    target, trainee = trained(kind)
    trainee.save(tmp_path, {})
    before = answer(Autoregressive(target))
    Medusa2.check(MedusaOptions(weights=str(tmp_path)), target)
    own = Medusa2Autoregressive.load(target, Medusa2AROptions(str(tmp_path)))
    drafted = Medusa2.load(target, MedusaOptions(weights=str(tmp_path)))
    assert drafted.target is own.target  # merged once
    assert answer(drafted) == answer(own) != before
    with pytest.raises(UserError, match="has its own backbone"):  # for which the heads are
        Medusa.check(MedusaOptions(weights=str(tmp_path)), target)
    assert answer(Autoregressive(target)) == before
    assert drafted.metadata()["model_hash"] == own.metadata()["model_hash"] != target.weights_hash
    with torch.inference_mode():
        tokens = answer(own, 4)
        assert [int(drafted.next_logits(PROMPT, tokens[:i]).argmax()) for i in range(4)] == tokens


@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_all_weights_may_have_learnt(kind: str, tmp_path: Path) -> None:
    target, trainee = trained(kind, lora_rank=0)
    trainee.save(tmp_path, {"accuracies": [[0.5, 0.2], [0.4, 0.1], [0.3, 0.1]], "nodes": 3})
    options = MedusaOptions(weights=str(tmp_path))
    Medusa2.check(options, target)
    drafted = Medusa2.load(target, options)
    assert len(drafted.tree.ranks) == 3
    assert answer(drafted) == answer(Medusa2Autoregressive.load(target, Medusa2AROptions(str(tmp_path))))
    assert answer(drafted) != answer(Autoregressive(target))


def whole_model(folder: Path, shard: str = "4KB") -> tuple[Target, dict[str, Tensor]]:
    """As published: an ordinary model in shards, and among its tensors those of the heads."""
    model = tiny_model("llama", seed=5)
    model.save_pretrained(folder, max_shard_size=shard)
    heads = layout(prefix="medusa_head.")
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    last = sorted(set(content["weight_map"].values()))[-1]
    save_file({**load_file(folder / last), **heads}, folder / last, {"format": "pt"})
    content["weight_map"] |= dict.fromkeys(heads, last)
    index.write_text(json.dumps(content))
    return Target(model, name="own", folder=folder), heads


def test_a_published_model_decodes_as_itself(tmp_path: Path) -> None:
    own, heads = whole_model(tmp_path)
    target = Target(tiny_model("llama"))
    options = MedusaOptions(weights=str(tmp_path))
    Medusa2.check(options, target)
    drafted = Medusa2.load(target, options)
    assert (drafted.drafter.count, drafted.drafter.weight.shape[1]) == (3, 2)
    torch.testing.assert_close(drafted.drafter.weight[1, 0], heads["medusa_head.1.0.linear.weight"])
    torch.testing.assert_close(drafted.drafter.unembed[2], heads["medusa_head.2.2.weight"])
    assert answer(drafted) == answer(Autoregressive(own)) != answer(Autoregressive(target))
    assert answer(Medusa2Autoregressive.load(target, Medusa2AROptions(str(tmp_path)))) == answer(drafted)
    # as the model itself, its heads are Medusa-1's; for another model they are not
    assert answer(Medusa.load(own, options)) == answer(drafted)
    for ask in (Medusa.check, lambda options, base: Medusa.load(base, options)):
        with pytest.raises(UserError, match="has its own backbone; use medusa2"):
            ask(options, target)


def test_no_code_of_a_backbone_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is the user asked whether it may, in the midst of a command."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    whole_model(tmp_path)
    ran, config = tmp_path / "ran", json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "evil.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Evil: pass\n")
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="cannot load model"):
        Medusa2.check(MedusaOptions(weights=str(tmp_path)), Target(tiny_model("llama")))
    assert not ran.exists()


def test_what_is_wrong_with_a_model_is_named(tmp_path: Path) -> None:
    target = Target(tiny_model("llama"))
    options = MedusaOptions(weights=str(tmp_path))
    for ask in (Medusa2.check, lambda options, base: Medusa2.load(base, options)):
        with pytest.raises(UserError, match="has no backbone"):
            ask(options, target)
    with pytest.raises(UserError, match="has no backbone"):
        Medusa2Autoregressive.check(Medusa2AROptions(str(tmp_path)), target)
    whole_model(tmp_path)
    with pytest.raises(UserError, match="has 61 words, .* has 64"):
        Medusa2.check(options, Target(tiny_model("llama", vocab=64)))
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name = content["weight_map"]["medusa_head.0.0.linear.bias"]
    tensors = load_file(tmp_path / name)
    tensors["medusa_head.0.0.strange"] = tensors.pop("medusa_head.0.0.linear.bias")
    save_file(tensors, tmp_path / name, {"format": "pt"})
    with pytest.raises(UserError, match=r"unknown tensor 'medusa_head\.0\.0\.strange'"):
        Medusa2.check(options, target)
    assert Medusa2.drafted_model_info(target, tmp_path).n_layers == 4


# -- training -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["llama", "mistral-window"])
def test_the_loss_is_the_papers(kind: str) -> None:
    """L_LM + lambda sum 0.8^i L_i, from logits of the backbone as it decodes; lambda rises as a sine."""
    target, trainee = trained(kind, ramp=4, coefficient=0.3)
    ids = torch.randint(3, 61, (1, 24), generator=torch.Generator().manual_seed(0))
    one = answers_of(ids, 5)
    with torch.no_grad():
        cache = trainee.tuned.new_cache(32)
        final = trainee.tuned.prefill(ids, cache, every=True).hidden_states[-1]
        language = -trainee.tuned.logits(final[0, 4:-1]).log_softmax(-1).gather(-1, ids[0, 5:, None]).mean()
        made = trainee.heads(final[0], trainee.tuned.logits).log_softmax(-1)  # [n, T, V]
        heads = sum(0.8**i * -made[i, 4 : 22 - i].gather(-1, ids[0, 6 + i :, None]).mean() for i in range(3))
    for t in range(6):
        loss, right = trainee.loss(NOTHING, one)
        share = float(torch.sin(torch.tensor(min(1, t / 4) * torch.pi / 2)))
        torch.testing.assert_close(loss.detach(), language + 0.3 * share * heads, atol=1e-4, rtol=1e-4)
    assert right.shape == (3,)
    with torch.no_grad():
        trainee.loss(NOTHING, one)
    assert int(trainee.ramp.updates) == 6  # looking is no update
    assert int(trainee.module.state_dict()["2.updates"]) == 6


def test_gradients_reach_backbone_and_heads_at_their_own_rates() -> None:
    for rank in (2, 0):
        _, trainee = trained("llama", lora_rank=rank, head_lr=4.0)
        trainee.lr = 1e-3
        backbone, heads = trainee.parameter_groups()
        assert (backbone["lr"], heads["lr"]) == (1e-3, 4e-3)
        trainee.loss(NOTHING, answers_of(torch.randint(3, 61, (2, 20)), 5))  # at first the heads count nothing
        loss, _ = trainee.loss(NOTHING, answers_of(torch.randint(3, 61, (2, 20)), 5))
        loss.backward()
        assert all(p.grad is not None for group in (backbone, heads) for p in group["params"])
