"""`ssbench train together`: each drafter learns what it would alone, and mistakes are one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from specbench_ss.cli.main import main
from specbench_ss.storage import locked
from specbench_ss.training.loop import Budget, DrafterLoop
from tests.methods.train.tokenizers_made import made_tokenizer
from tests.tiny import thorough, tiny_model

COMMON = ["--length", "96", "--batch-size", "2", "--anchors", "16", "--eval-fraction", "0.2", "--device", "cpu"]
DRAFTERS = "medusa[heads=2,own_unembed=off],ss[gamma=2,n_msa_layers=2,lr=0.02],medusa[heads=3]"
FOLDERS = ["medusa-heads-2-own-unembed-off", "ss-gamma-2-n-msa-layers-2-lr-0.02", "medusa-heads-3"]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSBENCH_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    """A tiny model and conversations, as options."""
    tokenizer = made_tokenizer("gpt", "chatml")
    tiny_model("llama", vocab=len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"What is {i} and {j}?", "completion": f"It is {i + j}."} for i in range(5) for j in range(5)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [*COMMON, "--model", str(tmp_path / "model"), "--data", str(tmp_path / "chats.jsonl")]


def together(out: Path, given: list[str], drafters: str = DRAFTERS, steps: int = 3) -> list[str]:
    return ["train", "together", "--drafters", drafters, "--out", str(out), "--steps", str(steps), *given]


@thorough
def test_each_learns_what_it_would_alone(tmp_path: Path, given: list[str]) -> None:
    assert main(together(tmp_path / "out", given)) == 0
    assert json.loads((tmp_path / "out" / "together.json").read_text()) == dict(
        zip(["medusa[heads=2,own_unembed=off]", "ss[gamma=2,n_msa_layers=2,lr=0.02]", "medusa[heads=3]"], FOLDERS,
            strict=True)
    )  # fmt: skip
    alone = ["train", "medusa", "--heads", "3", "--out", str(tmp_path / "alone"), "--steps", "3", *given]
    assert main(alone) == 0
    name = "medusa_lm_head.safetensors"
    both = [load_file(tmp_path / place / name) for place in (f"out/{FOLDERS[2]}", "alone")]
    assert all((both[0][key] == both[1][key]).all() for key in both[0]) and both[0].keys() == both[1].keys()
    for folder in FOLDERS:
        log = [json.loads(line) for line in (tmp_path / "out" / folder / "training.jsonl").read_text().splitlines()]
        assert [line["step"] for line in log] == [1, 2, 3] and log[-1]["estimated_tau"] >= 1
        card = (tmp_path / "out" / folder / "README.md").read_text()
        assert "validation" in card and ("| 0.02, 0 |" in card) == (folder == FOLDERS[1])  # the rate of each
    assert "unembed" not in load_file(tmp_path / "out" / FOLDERS[0] / name)


def test_what_was_trained_together_decodes(tmp_path: Path, given: list[str]) -> None:
    assert main(together(tmp_path / "out", given, steps=1)) == 0
    model, (_, streams, heads) = given[given.index("--model") + 1], (tmp_path / "out" / name for name in FOLDERS)
    asked = f"ss[weights={streams}],medusa[weights={heads}]"
    run = ["run", "--model", model, "--methods", asked, "--suite", f"jsonl:{given[-1]}", "--limit", "2"]
    assert main([*run, "--max-new-tokens", "8", "--warmup", "0", "--out", str(tmp_path / "run")]) == 0


@thorough
def test_it_goes_on_where_it_was_cut_off(tmp_path: Path, given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(together(tmp_path / "whole", given)) == 0
    step = DrafterLoop.advance

    def killed(self: DrafterLoop) -> str:
        if self.step == 2:
            raise MemoryError
        return step(self)

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(DrafterLoop, "advance", killed)
        main([*together(tmp_path / "cut", given), "--save-every", "1"])
    assert main([*together(tmp_path / "cut", given), "--save-every", "1"]) == 0
    for folder in FOLDERS:
        files = [tmp_path / place / folder / "training.jsonl" for place in ("whole", "cut")]
        assert files[0].read_text() == files[1].read_text()
    whole, cut = (next((tmp_path / place / FOLDERS[1]).glob("*.safetensors")) for place in ("whole", "cut"))
    assert whole.read_bytes() == cut.read_bytes()


def cooled(out: Path, given: list[str], steps: int, share: float = 0.5) -> list[str]:
    return [*together(out, given, steps=steps), "--cooldown", str(share), "--save-every", "1", "--warmup", "1"]


def learnt(out: Path) -> list[tuple[str, dict[str, list[float]]]]:
    """Logs and weights of all drafters."""
    return [
        ((out / folder / "training.jsonl").read_text(), {n: t.tolist() for n, t in load_file(weights).items()})
        for folder in FOLDERS
        for weights in (out / folder).glob("*.safetensors")
    ]


def test_the_rate_stays_at_its_peak_and_then_falls_in_a_line() -> None:
    budget = Budget(steps=10, warmup=2, cooldown=0.4)
    assert budget.falls_from == 6
    assert [budget.rate(step) for step in range(10)] == pytest.approx([0.5, *[1.0] * 6, 0.75, 0.5, 0.25])
    assert Budget(steps=10).falls_from is None


def test_without_a_cooldown_it_falls_along_a_cosine() -> None:
    rates = [Budget(steps=4, warmup=1).rate(step) for step in range(4)]
    assert rates == pytest.approx([1, 0.853553, 0.5, 0.146447], rel=1e-5)


@thorough
def test_a_finished_training_is_made_longer(tmp_path: Path, given: list[str]) -> None:
    assert main(cooled(tmp_path / "whole", given, 6)) == 0
    for steps in (3, 6):
        assert main(cooled(tmp_path / "longer", given, steps)) == 0
    assert learnt(tmp_path / "longer") == learnt(tmp_path / "whole")
    assert "to 0 in a line from step 3 on |" in (tmp_path / "longer" / FOLDERS[0] / "README.md").read_text()


@thorough
def test_one_that_is_cut_off_while_it_cools_is_made_longer_or_ended(
    tmp_path: Path, given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for steps in (4, 6):
        assert main(cooled(tmp_path / f"whole {steps}", given, steps)) == 0
    step = DrafterLoop.advance

    def killed(self: DrafterLoop) -> str:
        if self.step == 3:  # the first step of the cooldown is done
            raise MemoryError
        return step(self)

    for steps in (4, 6):
        with monkeypatch.context() as patch, pytest.raises(MemoryError):
            patch.setattr(DrafterLoop, "advance", killed)
            main(cooled(tmp_path / f"cut {steps}", given, 4))
        assert main(cooled(tmp_path / f"cut {steps}", given, steps)) == 0
        assert learnt(tmp_path / f"cut {steps}") == learnt(tmp_path / f"whole {steps}")


@thorough
def test_it_cannot_be_made_shorter_than_it_was_at_its_peak(
    tmp_path: Path, given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(cooled(tmp_path / "out", given, 4)) == 0
    for asked, words in (
        (
            cooled(tmp_path / "out", given, 2),
            "use more --steps or another --out\n",
        ),
        (together(tmp_path / "out", given, steps=4), "use another --out\n"),
    ):
        capsys.readouterr()
        assert main(asked) == 2
        stated = capsys.readouterr().err
        assert stated.endswith(words) and stated.count("\n") == 1


@thorough
def test_lengths_whose_cooldown_begins_at_the_same_step_are_reported_apart(
    tmp_path: Path, given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(cooled(tmp_path / "whole", given, 5)) == 0
    assert Budget(4, cooldown=0.5).falls_from == Budget(5, cooldown=0.5).falls_from == 2
    for steps in (4, 5):
        assert main(cooled(tmp_path / "longer", given, steps)) == 0
    assert learnt(tmp_path / "longer") == learnt(tmp_path / "whole")
    (tmp_path / "longer" / "checkpoint.pt.kept").unlink()
    capsys.readouterr()
    assert main(cooled(tmp_path / "longer", given, 6)) == 2
    assert capsys.readouterr().err.endswith("cannot be extended; use another --out\n")


def test_a_folder_is_trained_by_one_process_at_a_time(
    tmp_path: Path, given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "both"
    with locked(out):
        assert main(together(out, given)) == 2
    reported = capsys.readouterr().err
    assert f"{out} is in use by another process" in reported and not out.exists()
    assert main(together(out, given)) == 0
