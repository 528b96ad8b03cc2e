"""`ssbench train hydra` and `medusa2`: what they write decodes; accuracies of heads that there are can be measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specbench_ss.cli.main import main
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.methods.hydra.decode import Hydra, HydraOptions
from specbench_ss.methods.medusa.decode import Medusa, Medusa2, Medusa2AROptions, Medusa2Autoregressive, MedusaOptions
from specbench_ss.models.load import load_target
from tests.methods.train import test_train
from tests.methods.train.test_train import answer, arguments, lines
from tests.tiny import few, thorough

_cache, chats, models = test_train._cache, test_train.chats, test_train.models  # its fixtures


@few(1)
@pytest.mark.parametrize("more", [[], ["--no-prefix", "--no-own-unembed", "--layers", "1"]])
@pytest.mark.parametrize("kind", ["llama", "opt"])
def test_trained_hydra_heads_decode_what_the_base_does(
    kind: str, more: list[str], models: dict[str, Path], chats: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert (
        main(arguments("hydra", models[kind], chats, out, "--heads", "3", "--steps", "8", "--lr", "0.02", *more)) == 0
    )
    found = lines(out)
    assert found[-1]["loss"] < found[0]["loss"]
    config = json.loads((out / "config.json").read_text())
    assert [len(row) for row in config["accuracies"]] == [10, 10, 10]
    assert config["hydra_head_arch"] == ("mlp" if "--no-prefix" in more else "prefix-mlp")
    target = load_target(str(models[kind]), device="cpu")
    Hydra.check(HydraOptions(weights=str(out)), target)
    decoder = Hydra.load(target, HydraOptions(weights=str(out)))
    assert (decoder.drafter.prefix is None) is ("--no-prefix" in more)
    assert answer(decoder) == answer(Autoregressive(target))


@few(1)
@pytest.mark.parametrize("more", [["--lora-rank", "4"], ["--lora-rank", "0", "--no-own-unembed"]])
def test_a_jointly_trained_model_decodes_as_itself(
    more: list[str], models: dict[str, Path], chats: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    more = ["--heads", "2", "--steps", "6", "--lr", "0.02", "--ramp", "3", *more]
    assert main(arguments("medusa2", models["llama"], chats, out, *more)) == 0
    target = load_target(str(models["llama"]), device="cpu")
    own = Medusa2Autoregressive.load(target, Medusa2AROptions(str(out)))
    assert answer(own) != answer(Autoregressive(target))
    Medusa2.check(MedusaOptions(weights=str(out)), target)
    decoder = Medusa2.load(target, MedusaOptions(weights=str(out)))
    assert len(decoder.config["accuracies"]) == 2
    assert answer(decoder) == answer(own)


@thorough
def test_heads_that_there_are_can_be_measured(
    models: dict[str, Path], chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Published heads come without accuracies; measured on the user's text they make a tree."""
    for name, more in (("medusa", []), ("hydra", ["--layers", "1"])):
        trained, out = tmp_path / name, tmp_path / f"{name}-measured"
        assert main(arguments(name, models["llama"], chats, trained, "--heads", "3", "--steps", "2", *more)) == 0
        capsys.readouterr()
        assert main(arguments(name, models["llama"], chats, out, "--measure", str(trained))) == 0
        measured = json.loads((out / "accuracies.json").read_text())["accuracies"]
        assert [len(row) for row in measured] == [10, 10, 10] and all(0 <= p <= 1 for row in measured for p in row)
        stated = capsys.readouterr().out
        assert f"--set {name}.weights={trained} --set {name}.tree={out / 'accuracies.json'}" in stated
        target = load_target(str(models["llama"]), device="cpu")
        method = Medusa if name == "medusa" else Hydra
        options = method.Options(weights=str(trained), tree=str(out / "accuracies.json"), nodes=7)
        assert len(method.load(target, options).tree.ranks) == 7
        assert sorted(p.name for p in out.iterdir()) == ["accuracies.json"]
