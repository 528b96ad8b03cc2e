"""`ssbench train`: what it writes decodes, it goes on where it was cut off, and mistakes are one line."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from specbench_ss.cli.main import main
from specbench_ss.engine.decoder import Decoder
from specbench_ss.engine.generate import StopParams, generate
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.methods.ar import Autoregressive
from specbench_ss.methods.block_drafters.decode import DFlash, DFlashOptions, PEagle, PEagleOptions
from specbench_ss.methods.eagle.decode import DynamicOptions, Eagle, Eagle2, Eagle3, Eagle3Options, EagleOptions
from specbench_ss.methods.medusa.decode import Medusa, MedusaOptions
from specbench_ss.methods.sd.decode import TwoModel, TwoModelOptions
from specbench_ss.methods.ss.config import SharedAROptions, SSOptions
from specbench_ss.methods.ss.decode import SpeculativeStreaming
from specbench_ss.methods.ss.shared import SharedAutoregressive, SharedStreaming
from specbench_ss.models import checkpoint as drafter_folder
from specbench_ss.models.load import load_target
from specbench_ss.training.data import Counts, load_rows
from specbench_ss.training.loop import DrafterLoop, estimated_tau
from specbench_ss.training.model_card import _results
from tests.cli import failing
from tests.methods.train.tokenizers_made import made_tokenizer
from tests.tiny import SOME, THOROUGH, WITHOUT_WINDOW, few, thorough, tiny_model

QUESTIONS = [f"What is the sum of {i} and {j}?" for i in range(3) for j in range(9)]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSBENCH_CACHE", str(tmp_path / "cache"))


class Models(dict[str, Path]):
    """Tiny models of any architecture on disk, with a tokenizer, made when asked for; "another" is another Llama."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.tokenizer = folder, made_tokenizer("gpt", "chatml")

    def __missing__(self, kind: str) -> Path:
        architecture, seed = ("llama", 1) if kind == "another" else (kind, 0)
        tiny_model(architecture, seed, len(self.tokenizer)).save_pretrained(self.folder / kind)
        self.tokenizer.save_pretrained(self.folder / kind)
        self[kind] = self.folder / kind
        return self[kind]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Conversations in all three forms."""
    rows: list[dict[str, Any]] = []
    for i, q in enumerate(QUESTIONS):
        answer = f"The answer is {i}."
        rows.append(
            [
                {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": answer}]},
                {"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": answer}]},
                {"prompt": q, "completion": answer},
            ][i % 3]
        )
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


COMMON = ["--length", "96", "--batch-size", "2", "--anchors", "16", "--eval-fraction", "0.2", "--device", "cpu"]
STREAMS = ["--gamma", "3", "--n-msa-layers", "2"]


def arguments(trainer: str, model: Path, chats: Path, out: Path, *more: str) -> list[str]:
    return ["train", trainer, "--model", str(model), "--data", str(chats), "--out", str(out), *COMMON, *more]


def answer(decoder: Decoder) -> list[int]:
    return generate(decoder, [5, 6, 7, 8, 9, 10, 11], StopParams(24), SamplingParams()).tokens


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "training.jsonl").read_text().splitlines()]


@thorough
@pytest.mark.parametrize("mode", ["lossless", "shared"])
def test_where_streams_stand_is_kept_with_them(mode: str, models: dict[str, Path], chats: Path, tmp_path: Path) -> None:
    """In the folder's config.json."""
    named = {}
    for position in ("ahead", "same"):
        out, how = tmp_path / position, [*STREAMS, "--mode", mode, "--stream-position", position]
        assert main(arguments("ss", models["llama"], chats, out, *how, "--steps", "2", "--lr", "0.05")) == 0
        named[position] = json.loads((out / "config.json").read_text())["streams"].get("stream_position")
    assert named == {"ahead": "ahead", "same": "same"}
    target, options = load_target(str(models["llama"]), device="cpu"), SSOptions(weights=str(out), k=2)
    decoder = SpeculativeStreaming if mode == "lossless" else SharedStreaming
    loaded = decoder.load(target, options)
    assert loaded.drafter.config.stream_position == "same"
    own = (
        Autoregressive(loaded.target)
        if mode == "lossless"
        else SharedAutoregressive.load(target, SharedAROptions(weights=str(out)))
    )
    assert answer(loaded) == answer(own)


@few(1)
@pytest.mark.parametrize("kind", SOME)
def test_trained_streams_decode_what_the_base_does(
    kind: str, models: dict[str, Path], chats: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert main(arguments("ss", models[kind], chats, out, *STREAMS, "--steps", "3", "--lr", "0.05")) == 0
    target = load_target(str(models[kind]), device="cpu")
    reference = answer(Autoregressive(target))
    for options in ({"k": 2, "n_keep": 5}, {"mode": "chain"}):
        decoder = SpeculativeStreaming.load(target, SSOptions(weights=str(out), **options))
        assert decoder.drafter.up.abs().max() > 0
        assert answer(decoder) == reference


@few(1)
@pytest.mark.parametrize("kind", WITHOUT_WINDOW)
def test_a_trained_shared_model_decodes_as_itself(
    kind: str, models: dict[str, Path], chats: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shared = ["--mode", "shared", "--lora-rank", "4", "--lr", "0.02", "--steps", "3", "--segment", "40"]
    assert main(arguments("ss", models[kind], chats, out, *STREAMS, *shared)) == 0
    target = load_target(str(models[kind]), device="cpu")
    own = SharedAutoregressive.load(target, SharedAROptions(weights=str(out)))
    assert answer(own) != answer(Autoregressive(target))
    assert answer(SharedStreaming.load(target, SSOptions(weights=str(out), k=2))) == answer(own)


@few(1)
@pytest.mark.parametrize("kind", WITHOUT_WINDOW)
def test_bfloat16_and_recomputation(kind: str, models: dict[str, Path], chats: Path, tmp_path: Path) -> None:
    for mode in ("lossless", "shared"):
        out = tmp_path / mode
        more = ["--mode", mode, "--dtype", "bfloat16", "--gradient-checkpointing", "--steps", "2"]
        assert main(arguments("ss", models[kind], chats, out, *STREAMS, *more)) == 0
        assert all(line["loss"] == line["loss"] for line in lines(out))
        config = json.loads((out / "config.json").read_text())
        assert config["base_dtype"] == "torch.bfloat16"


@thorough
def test_recomputation_changes_no_weight(models: dict[str, Path], chats: Path, tmp_path: Path) -> None:
    for mode in ("lossless", "shared"):
        made = []
        for name, more in (("plain", []), ("twice", ["--gradient-checkpointing"])):
            out = tmp_path / mode / name
            steps = ["--mode", mode, "--steps", "3", "--dtype", "float32"]
            assert main(arguments("ss", models["llama"], chats, out, *STREAMS, *steps, *more)) == 0
            made.append(torch.load(out / "checkpoint.pt", weights_only=True)["modules"][0])
        for name, tensor in made[0].items():
            torch.testing.assert_close(tensor, made[1][name], atol=1e-5, rtol=1e-3, msg=name)


def test_heads_have_a_tree_of_their_own_and_decode(models: dict[str, Path], chats: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(arguments("medusa", models["qwen2"], chats, out, "--heads", "3", "--steps", "4")) == 0
    config = json.loads((out / "config.json").read_text())
    assert [len(row) for row in config["accuracies"]] == [10, 10, 10]
    assert config["accuracies_of"] == "validation text"
    target = load_target(str(models["qwen2"]), device="cpu")
    reference = answer(Autoregressive(target))
    assert answer(Medusa.load(target, MedusaOptions(weights=str(out)))) == reference
    part = Medusa.load(target, MedusaOptions(weights=str(out), nodes=4, draft_vocab="20"))
    assert answer(part) == reference and part.vocabulary.ids is not None
    counts = load_rows(chats, target.tokenizer, 96, eval_fraction=0.2).train.completion_counts(target.vocab_size)
    listed = load_file(out / "draft_vocab.safetensors")["token_ids"].tolist()
    assert part.vocabulary.ids.tolist()[: len(listed)] == listed[:20]
    assert (np.diff(counts[listed]) <= 0).all() and sum(counts[listed]) == sum(counts) > 0 == min(counts)


@pytest.mark.parametrize("layout", ["eagle3", "speculators"])
def test_a_drafter_of_all_depths_decodes(layout: str, models: dict[str, Path], chats: Path, tmp_path: Path) -> None:
    out, form = tmp_path / "out", ["--format", layout, "--depths", "4", "--steps", "2"]
    assert main(arguments("peagle", models["opt"], chats, out, *form)) == 0
    target = load_target(str(models["opt"]), device="cpu")
    decoder = PEagle.load(target, PEagleOptions(weights=str(out)))
    assert decoder.size == 4 and answer(decoder) == answer(Autoregressive(target))
    assert ("speculators_model_type" in json.loads((out / "config.json").read_text())) == (layout == "speculators")


@few(1)
@pytest.mark.parametrize("trainer", ["dflash", "eagle", "eagle3"])
def test_a_drafter_over_features_decodes(trainer: str, models: dict[str, Path], chats: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(arguments(trainer, models["opt"], chats, out, "--steps", "2")) == 0
    target = load_target(str(models["opt"]), device="cpu")
    reference = answer(Autoregressive(target))
    if trainer == "dflash":
        assert answer(DFlash.load(target, DFlashOptions(weights=str(out)))) == reference
        return
    if trainer == "eagle3":
        assert answer(Eagle3.load(target, Eagle3Options(weights=str(out)))) == reference
        return
    eagle = Eagle.load(target, EagleOptions(weights=str(out)))
    assert [len(row) for row in eagle.config["accuracies"]] == [10] * 5
    assert answer(eagle) == answer(Eagle2.load(target, DynamicOptions(weights=str(out)))) == reference


@thorough
@pytest.mark.parametrize("way", ["--from-scratch", "--distill"])
def test_a_draft_is_a_model_of_the_same_tokens(way: str, models: dict[str, Path], chats: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    size = ["--layers", "1", "--hidden", "32", "--n-heads", "2", "--gradient-checkpointing"]
    assert main(arguments("draft", models["opt"], chats, out, *size, way, "--steps", "3")) == 0
    base, draft = load_target(str(models["opt"]), device="cpu"), load_target(str(out), device="cpu")
    assert draft.tokenizer.get_vocab() == base.tokenizer.get_vocab()
    assert (draft.vocab_size, draft.n_layers, draft.hidden_size) == (base.vocab_size, 1, 32)
    assert len(answer(Autoregressive(draft))) == 24
    decoder = TwoModel.load(base, TwoModelOptions(weights=str(out), draft_vocab="20"))
    assert decoder.draft.vocabulary.size == 20 and answer(decoder) == answer(Autoregressive(base))


def test_regenerated_responses_are_what_the_base_states(models: dict[str, Path], chats: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    more = ["--regenerate-responses", "--answer-limit", "12", "--steps", "1"]
    assert main(arguments("ss", models["llama"], chats, out, *STREAMS, *more)) == 0
    assert "the base's own answers" in (out / "README.md").read_text()


@few(3)
@pytest.mark.parametrize("trainer", ["ss", "medusa", "draft", "dflash", "eagle", "eagle3", "peagle"])
def test_the_loss_falls_and_is_written_down(trainer: str, models: dict[str, Path], chats: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    own = {"ss": STREAMS, "draft": ["--hidden", "32"], "dflash": ["--layers", "2", "--loss", "ce"]}
    own["peagle"] = ["--loss", "ce"]
    more = [*own.get(trainer, []), "--steps", "30", "--lr", "0.02", "--eval-every", "10"]
    assert main(arguments(trainer, models["llama"], chats, out, *more)) == 0
    found = lines(out)
    assert [line["step"] for line in found] == list(range(1, 31))
    counts = [line["tokens"] for line in found]
    assert counts == sorted(set(counts)) and counts[-1] < 30 * 192  # rows have padding
    assert found[-1]["loss"] < 0.9 * found[0]["loss"]
    looks = [line for line in found if "validation_loss" in line]
    assert [line["step"] for line in looks] == [10, 20, 30]
    assert looks[-1]["validation_loss"] < looks[0]["validation_loss"]
    assert looks[-1]["estimated_tau"] == estimated_tau(looks[-1]["validation_accuracy"])
    assert f"{looks[-1]['validation_loss']:.4f}" in (out / "README.md").read_text()


def test_a_log_with_the_former_name_of_the_accuracies_has_a_card() -> None:
    logs = [{"loss": 2.0, name: [0.5, 0.25]} for name in ("right", "top1_accuracy")]
    former, current = map(_results, logs)
    assert former == current and "0.500, 0.250" in current


def test_the_estimate_is_the_sum_of_products() -> None:
    assert estimated_tau([0.5, 0.5, 0.0, 1.0]) == 1 + 0.5 + 0.25
    assert estimated_tau([1.0, 1.0]) == 3


class Killed(BaseException):
    """Nothing in the code under test may catch it."""


KINDS = {
    "ss": STREAMS,
    "ss-shared": [*STREAMS, "--mode", "shared", "--lora-rank", "2", "--alpha-ramp", "4"],
    "medusa": ["--heads", "2"],
    "medusa2": ["--heads", "2", "--lora-rank", "2", "--ramp", "4"],
    "hydra": ["--heads", "2", "--layers", "1"],
    "draft": ["--hidden", "32", "--layers", "1", "--distill"],
    "dflash": ["--layers", "2", "--block-size", "4", "--draft-vocab", "50"],
    "dspark": ["--layers", "1", "--block-size", "3", "--markov-rank", "4"],
    "uno": ["--rank", "2", "--block", "3"],
    "eagle": [],
    "eagle3": ["--levels", "3", "--draft-vocab", "50"],
    "mtp": ["--num-speculative-tokens", "2"],
    "peagle": ["--depths", "3", "--draft-vocab", "50"],
}


POSITIONS: dict[str, Callable[[Counts], int]] = {  # of a text whose positions are all anchors
    "medusa": lambda text: text.completion_tokens - text.documents,  # a head drafts the token after the next one
    "ss-shared": lambda text: text.completion_tokens,
    "draft": lambda text: text.tokens - text.documents,  # prompts have a loss too
}


@pytest.mark.parametrize("kind", POSITIONS)
def test_padding_is_no_trained_token(kind: str, models: dict[str, Path], tmp_path: Path) -> None:
    """Two short conversations in one long row, read in three steps of two rows: each six times."""
    chats, out = tmp_path / "chats.jsonl", tmp_path / "out"
    chats.write_text("".join(json.dumps({"prompt": q, "completion": "yes"}) + "\n" for q in ("no", "hi")))
    more = ["--length", "128", "--anchors", "128", "--eval-fraction", "0", "--steps", "3", *KINDS[kind]]
    assert main(arguments(kind.partition("-")[0], models["llama"], chats, out, *more)) == 0
    text = load_rows(chats, made_tokenizer("gpt", "chatml"), 128, eval_fraction=0.0).train
    assert (len(text), text.counts.documents) == (1, 2) and text.counts.tokens < 64
    config = json.loads((out / "config.json").read_text())
    trained, expected = config.get("ssbench", config)["trained"], 6 * POSITIONS[kind](text.counts)
    assert (trained["tokens"], trained["draft_positions"]) == (6 * text.counts.tokens, expected)
    assert [line["tokens"] for line in lines(out)] == [2 * step * text.counts.tokens for step in (1, 2, 3)]
    assert f"{trained['tokens']:,} tokens and {expected:,} draft positions" in (out / "README.md").read_text()


@few(2)
@pytest.mark.parametrize("kind", KINDS if THOROUGH else [*KINDS][::3])
def test_cut_off_it_ends_as_if_it_had_not_been(
    kind: str, models: dict[str, Path], chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(out: str) -> int:
        more = ["--steps", "6", "--save-every", "2", "--eval-every", "3", *KINDS[kind]]
        return main(arguments(kind.partition("-")[0], models["llama"], chats, tmp_path / out, *more))

    assert run("whole") == 0
    step = DrafterLoop.advance
    for last in (1, 5):  # before any checkpoint, and a step after one

        def killed(self: DrafterLoop, last: int = last) -> str:
            stated = step(self)
            if self.step == last:
                raise Killed
            return stated

        with monkeypatch.context() as patch:
            patch.setattr(DrafterLoop, "advance", killed)
            with pytest.raises(Killed):
                run("cut")
    assert run("cut") == 0
    names = sorted(p.name for p in (tmp_path / "whole").iterdir())
    assert sorted(p.name for p in (tmp_path / "cut").iterdir()) == names
    for name in names:
        if name != "checkpoint.pt":
            assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert run("cut") == 0  # all is done: written again, the same


def test_ctrl_c_states_where_it_is_and_how_to_go_on(
    models: dict[str, Path], chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out, step = tmp_path / "out", DrafterLoop.advance
    command = arguments("medusa", models["llama"], chats, out, "--steps", "4")

    def interrupted(self: DrafterLoop) -> str:
        if self.step == 1:
            signal.raise_signal(signal.SIGINT)
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(DrafterLoop, "advance", interrupted)
        assert main(command) == 130
    saved = f"step 2 of 4 is saved in {out / 'checkpoint.pt'}"
    assert capsys.readouterr().err == f"\nssbench: interrupted: {saved}; the same command goes on from it\n"
    assert main(command) == 0
    assert [line["step"] for line in lines(out)] == [1, 2, 3, 4]


def test_text_of_no_use_is_one_line(
    models: dict[str, Path], chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, out, llama = tmp_path / "asked.jsonl", tmp_path / "out", models["llama"]
    asked.write_text(json.dumps({"messages": [{"role": "user", "content": "Hello there"}]}) + "\n")
    assert "no completion in any conversation" in failing(arguments("ss", llama, asked, out, *STREAMS), capsys)
    asked.write_text(json.dumps({"prompt": "Hello there", "completion": "Hi."}) + "\n")
    one = arguments("ss", llama, asked, out, *STREAMS, "--eval-fraction", "0.9999")
    assert "all of the data (1 conversation" in failing(one, capsys)
    window = ["--mode", "shared", *STREAMS]
    assert "sliding window" in failing(arguments("ss", models["mistral-window"], chats, out, *window), capsys)


@thorough
def test_another_training_in_the_folder_is_kept(
    models: dict[str, Path], chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(arguments("ss", models["llama"], chats, out, *STREAMS, "--steps", "2")) == 0
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    for more, differs in (
        (["--steps", "3"], "steps 2, not 3"),
        (["--steps", "2", "--lr", "0.1"], "lr none, not 0.1"),
        (["--steps", "2", "--prune-rank", "4", "--seed", "1"], "seed 0, not 1 and prune_rank 8, not 4"),
    ):
        stated = _stated(arguments("ss", models["llama"], chats, out, *STREAMS, *more), capsys)
        assert stated.endswith(f"checkpoint.pt was made with {differs}; use another --out\n")
    stated = _stated(arguments("medusa", models["llama"], chats, out, "--steps", "2"), capsys)
    assert "was made with trainer ss, not medusa;" in stated
    stated = _stated(arguments("ss", models["another"], chats, out, *STREAMS, "--steps", "2"), capsys)
    assert "made with base" in stated
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before


def _stated(command: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(command) == 2
    return capsys.readouterr().err


def test_streams_of_another_base_are_refused(models: dict[str, Path], chats: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(arguments("ss", models["llama"], chats, out, *STREAMS, "--steps", "1")) == 0
    with pytest.raises(UserError, match="trained for another base"):
        SpeculativeStreaming.load(load_target(str(models["another"]), device="cpu"), SSOptions(weights=str(out)))


def test_weights_by_hub_id(
    models: dict[str, Path], chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    import huggingface_hub

    kept: dict[str, Path] = {}

    class Hub:
        def create_repo(self, repo: str, exist_ok: bool) -> str:
            return f"https://hub/{repo}"

        def upload_folder(self, repo_id: str, folder_path: Path, ignore_patterns: list[str]) -> None:
            assert "checkpoint.pt*" in ignore_patterns
            kept[repo_id] = folder_path

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(drafter_folder, "snapshot_download", lambda name, **_: str(kept[name]))
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    monkeypatch.setattr("specbench_ss.models.checkpoint.check_reachable", lambda repo: None)
    push = ["--steps", "1", "--push-to-hub", "someone/streams"]
    command = arguments("ss", models["llama"], chats, tmp_path / "out", *STREAMS, *push)
    assert "needs a write token" in failing(command, capsys)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "hf_x")
    assert main(command) == 0
    target: Target = load_target(str(models["llama"]), device="cpu")
    decoder = SpeculativeStreaming.load(target, SSOptions(weights="someone/streams"))
    assert answer(decoder) == answer(Autoregressive(target))

    def offline(name: str, **_: Any) -> str:
        raise ConnectionError("no route to the hub\nsecond line")

    monkeypatch.setattr(drafter_folder, "snapshot_download", offline)
    with pytest.raises(Exception, match=r"^ss: no file or folder 'someone/streams', and the hub .*no route[^\n]*$"):
        SpeculativeStreaming.load(target, SSOptions(weights="someone/streams"))
