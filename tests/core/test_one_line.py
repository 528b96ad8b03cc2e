"""Unusual input and output: pipes, streams that fail, interruptions, nested trees, and projected embeddings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from specbench_ss import load_model, prompt_files, registry
from specbench_ss.cli import commands
from specbench_ss.cli.shared import print_json
from specbench_ss.conformance import tiny_tokenizer
from specbench_ss.engine.sampling import SamplingParams
from specbench_ss.engine.target import Target
from specbench_ss.errors import UserError
from specbench_ss.models.resolve import LAB
from tests.cli import failing
from tests.conftest import MakeRun
from tests.tiny import few


def test_prompts_may_come_through_a_pipe(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, b'{"prompt": "Hi"}\n')
    os.close(writer)
    assert [row for _, row in prompt_files.read_rows(Path(f"/dev/fd/{reader}"))] == [{"prompt": "Hi"}]
    os.close(reader)


@few(1)
@pytest.mark.parametrize("method", ["medusa", "hydra", "eagle"])
def test_trees_that_are_nested_or_deep(method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nested, deep = tmp_path / "nested.json", tmp_path / "deep.json"
    nested.write_text("[" * 5000 + "]" * 5000)
    lengths = range(5000) if method == "eagle" else (5000,)
    deep.write_text("[" + ",".join("[" + "0," * n + "0]" for n in lengths) + "]")
    for file in (nested, deep):
        reported = failing(["run", "--methods", method, "--set", f"{method}.tree={file}"], capsys)
        assert str(file) in reported


@pytest.mark.parametrize(
    "method", ["dflash", "eagle", "eagle2", "eagle3", "hydra", "medusa", "medusa2", "mtp", "peagle"]
)
def test_an_opt_that_projects_its_embeddings_is_refused(method: str) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "word_embed_proj_dim": 16, "ffn_dim": 48, "num_hidden_layers": 2}
    config = transformers.OPTConfig(vocab_size=61, num_attention_heads=4, max_position_embeddings=64, **sizes)
    auto: Any = transformers.AutoModelForCausalLM
    target = Target(auto.from_config(config), tiny_tokenizer(61), "projecting")
    kind = registry.method_class(method)
    for act in (kind.check, lambda options, base: kind.load(base, options)):
        with pytest.raises(UserError, match="'projecting' has 16 and 32"):
            act(kind.Options(weights=str(LAB / "medusa")), target)


def test_in_python() -> None:
    for wrong in (None, "lab"):
        with pytest.raises(UserError, match="Target takes a Hugging Face causal LM"):
            Target(wrong)
    with pytest.raises(UserError, match="at least 1e-05"):
        SamplingParams(1e-38)
    with pytest.raises(UserError, match="not available"):
        load_model("lab", device="cpu:9")


PRINTING = """
import sys
from specbench_ss.cli import commands, main
def written(args):
    print("\\u03c4 \\xd7 \\ud800 " * 20_000)
    print("done", file=sys.stderr)
    return 7
commands.main = written
main.console()
"""


@few(7)
@pytest.mark.parametrize(
    "output", ["", ">&-", ">&- 2>&-", "<&- >&- 2>&-", "| head -1", ">/dev/full", ">/dev/full 2>&1"]
)
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_printing_cannot_fail(output: str, encoding: str) -> None:
    line = f'"{sys.executable}" -c "$PRINTING" {output}; exit ${{PIPESTATUS[0]}}'
    environment = {**os.environ, "PRINTING": PRINTING, "PYTHONIOENCODING": encoding}
    ended = subprocess.run(["bash", "-c", line], env=environment, capture_output=True)
    assert ended.returncode == 7 and b"Traceback" not in ended.stderr
    if not output:
        assert "?" in ended.stdout.decode(encoding) and len(ended.stdout) > 100_000
    if "2>" not in output:
        assert ended.stderr.splitlines()[0] == b"done"
        assert (b"incomplete: no space left" in ended.stderr) == ("/dev/full" in output)


def test_json_is_printed_in_ascii(capsys: pytest.CaptureFixture[str]) -> None:
    print_json(content := {"\u03c4": "\ud800"})
    output = capsys.readouterr().out
    assert output.isascii() and json.loads(output) == content


INTERRUPTED = """
import os, signal, sys
from specbench_ss.cli import main
class Interrupts:
    def find_spec(self, name, *_):
        if name == "specbench_ss.cli.commands":
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupts())
main.console()
"""


def test_ctrl_c_while_starting_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "_imported", interrupt)
    assert commands.main(["suites"]) == 130 and capsys.readouterr().err == "ssbench: interrupted\n"
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (130, "ssbench: interrupted\n")


def test_open_without_a_browser_is_stated(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("webbrowser.open", lambda _: False)
    assert commands.main(["report", str(make_run()), "--open"]) == 0
    assert "browser" in capsys.readouterr().err
