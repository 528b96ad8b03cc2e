"""The public API: light to import, what docs/api.md states of it, decoding by it, mistakes in one line."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import specbench_ss
from specbench_ss import Decoder, Target, UserError, check_decoder, generate, load_method, load_model
from specbench_ss.conformance import CHECKS, CheckFailed
from specbench_ss.engine.decoder import DecodeState
from specbench_ss.engine.tree import DraftTree
from tests.tiny import THOROUGH, tiny_model

FEW = ("draft", "greedy", "description")  # checks of the quick suite
DOCS = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def lab() -> Target:
    return load_model("lab", device="cpu")


@pytest.fixture(scope="module")
def prompt(lab: Target) -> list[int]:
    return lab.encode_chat([{"role": "user", "content": "Who wrote the letter, and when?"}])


@pytest.fixture(scope="module")
def tiny() -> Target:
    return Target(tiny_model("llama"))


# -- the package ------------------------------------------------------------------------------------------------


def python(code: str, *arguments: str) -> str:
    """Return what a new interpreter prints."""
    command = [sys.executable, *arguments, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.strip()


def test_importing_the_package_loads_nothing_heavy() -> None:
    heavy = "import sys, specbench_ss; dir(specbench_ss); specbench_ss.UserError; print({0} & set(sys.modules))"
    assert python(heavy.format({"torch", "transformers", "numpy", "pandas", "scipy", "typer", "rich"})) == "set()"


def test_every_name_is_there_and_has_its_place_in_the_page() -> None:
    for name in specbench_ss.__all__:
        assert getattr(specbench_ss, name) is not None and name in dir(specbench_ss)
    assert set(specbench_ss._MODULE_OF) == set(specbench_ss.__all__) - {"__version__"}
    headings = " ".join(re.findall(r"^#+ (.*)$", DOCS, re.M))
    assert not [name for name in specbench_ss._MODULE_OF if f"`{name}`" not in headings]
    assert not [name for name in specbench_ss._MODULE_OF if not re.search(rf"import .*\b{name}\b", DOCS)]
    with pytest.raises(AttributeError, match="no attribute 'Decodr'"):
        specbench_ss.Decodr  # noqa: B018


def test_every_hook_of_a_decoder_has_its_place_in_the_page() -> None:
    documented = set(re.findall(r"`(\w+)(?:\([^`]*\))?`", " ".join(re.findall(r"^\|(`.*?)\|", DOCS, re.M))))
    hooks = {name for name in vars(Decoder) if not name.startswith("_")} | {"name", "summary"}
    assert not hooks - documented


def test_the_examples_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not THOROUGH:
        monkeypatch.setitem(check_decoder.__kwdefaults__, "checks", [check for check in CHECKS if check.name in FEW])
    monkeypatch.chdir(tmp_path)
    module = ModuleType("examples_of_the_api")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    blocks = re.findall(r"^```python\n(.*?)^```$", DOCS, re.M | re.S)
    assert len(blocks) >= 8
    for block in blocks:
        above = "\n" * DOCS[: DOCS.index(block)].count("\n")  # so that a failure names the line of the page
        exec(compile(above + block, "docs/api.md", "exec"), module.__dict__)
    assert "did you mean pld?" in capsys.readouterr().out


# -- loading and decoding ---------------------------------------------------------------------------------------


def test_every_way_to_ask_for_a_method_gives_the_tokens_of_plain_decoding(lab: Target, prompt: list[int]) -> None:
    plain = generate(load_method("ar", lab), prompt)
    kind = type(load_method("pld", lab))
    assert len(plain.tokens) == 40 or plain.finish == "eos"
    asked = load_method("pld", lab, length=4, match="last", complete=False)
    ways = (asked, load_method("pld[length=4,match=last]", lab))
    assert ways[0].options == ways[1].options == load_method(kind, lab, length=4, match="last").options
    for decoder in (*ways, load_method("ss", lab, prune=False), load_method("medusa", lab)):
        answer = generate(decoder, prompt)
        assert answer.tokens == plain.tokens and answer.finish == plain.finish
    assert len(answer.steps) < len(plain.steps)  # medusa's


def test_a_prompt_may_come_in_several_forms(tiny: Target) -> None:
    decoder = load_method("ar", tiny)
    forms: list[Any] = [[5, 6, 7], (5, 6, 7), torch.tensor([5, 6, 7]), torch.tensor([[5, 6, 7]]), np.array([5, 6, 7])]
    answers = [generate(decoder, ids, max_new_tokens=5).tokens for ids in forms]
    assert answers == [answers[0]] * len(forms)


def test_where_an_answer_ends(lab: Target, prompt: list[int]) -> None:
    decoder = load_method("ar", lab)
    plain = generate(decoder, prompt, max_new_tokens=20)
    ended = generate(decoder, prompt, stop_ids=[plain.tokens[3]])
    assert ended.finish == "eos" and ended.tokens == plain.tokens[: plain.tokens.index(plain.tokens[3]) + 1]
    text = lab.decode_text(plain.tokens[4:6])
    assert generate(decoder, prompt, stop_strings=text).finish == "stop"
    model = Target(lab.model, lab.tokenizer)
    model.eos_ids = frozenset({plain.tokens[2]})
    own = load_method("ar", model)
    assert generate(own, prompt).finish == "eos"
    assert len(generate(own, prompt, stop_ids=(), max_new_tokens=9).tokens) == 9


def test_sampling_depends_on_the_seed_alone(tiny: Target) -> None:
    decoder = load_method("ar", tiny)
    drawn = [generate(decoder, [5, 6], temperature=1.5, top_k=30, top_p=0.99, seed=s).tokens for s in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


class Nameless(Decoder):
    def propose(self, state: DecodeState) -> DraftTree:
        return DraftTree.root_only(state.root)


@pytest.mark.parametrize(
    ("method", "options", "stated"),
    [
        ("pldd", {}, "no method 'pldd' (did you mean pld?)"),
        ("pld[", {}, "cannot read method 'pld['"),
        ("pld", {"lenght": 3}, "method 'pld' has no option 'lenght' (did you mean length?)"),
        ("pld", {"length": 2.5}, "option length='2.5' is not int"),
        ("pld", {"length": True}, "option length='on' is not int"),
        ("pld", {"length": None}, "method 'pld': option length=None is not int"),
        ("medusa", {"weights": None}, "method 'medusa': option weights=None is not text"),
        ("pld", {"length": [3]}, "option length='[3]' is not int"),
        ("pld", {"match": "middle"}, "option match='middle' is not first|last"),
        ("pld", {"length": 0}, "length must be 1 to"),
        ("pld[length=3]", {"length": 4}, "option 'length' is given twice"),
        ("medusa", {"weights": Path("/nowhere")}, "no such file or folder: /nowhere"),
        (Nameless, {}, "method Nameless: it has no name"),
        (int, {}, "a method is a name or a subclass of Decoder, not the class int"),
        (3, {}, "a method is a name or a subclass of Decoder, not an object of type int"),
    ],
)
def test_a_method_that_cannot_be_is_one_line(lab: Target, method: Any, options: dict[str, Any], stated: str) -> None:
    with pytest.raises(UserError, match=re.escape(stated)) as error:
        load_method(method, lab, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("ids", "options", "stated"),
    [
        ([], {}, "the prompt is empty"),
        ("hello", {}, "a prompt is token ids, not an object of type str"),
        ({"input_ids": [1]}, {}, "a prompt is token ids, not an object of type dict"),
        ([1.5], {}, "a prompt is token ids: whole numbers"),
        (torch.tensor([[1], [2]]), {}, "one prompt at a time: these are 2"),
        ([5, 61], {}, "token 61 is not in the model's vocabulary of 61"),
        ([-1], {}, "token -1 is not in"),
        ([5] * 128, {}, "the prompt has 128 tokens, the context"),
        ([5], {"max_new_tokens": 0}, "max_new_tokens must be at least 1, not 0"),
        ([5], {"temperature": -1}, "temperature must be a number of at least 0"),
        ([5], {"temperature": "warm"}, "temperature must be a number, not 'warm'"),
        ([5], {"top_p": 0}, "top_p must be above 0 and at most 1"),
        ([5], {"top_k": 1.5}, "top_k must be a whole number, at least 0, not 1.5"),
        ([5], {"stop_strings": ""}, "a stop string is text that is not empty"),
        ([5], {"stop_strings": "x"}, "stop strings need a tokenizer"),
        ([5], {"stop_ids": ["x"]}, "stop_ids must be a whole number"),
        (5, {}, "a prompt is token ids, not an object of type int"),
        (torch.tensor(5), {}, "a prompt is token ids: whole numbers"),
        ([5], {"stop_ids": 5}, "stop_ids must be a list, not 5"),
        ([5], {"stop_strings": None}, "stop_strings must be a list of texts, not None"),
        ([5], {"seed": 2**70}, "seed must be 0 to 9223372036854775807"),
    ],
)
def test_what_cannot_be_decoded_is_one_line(tiny: Target, ids: Any, options: dict[str, Any], stated: str) -> None:
    with pytest.raises(UserError, match=re.escape(stated)):
        generate(load_method("ar", tiny), ids, **options)


def test_things_in_each_others_place_are_one_line(tiny: Target) -> None:
    with pytest.raises(UserError, match="with a target, as load_model gives it, not with an object of type Llama"):
        load_method("ar", tiny.model)
    with pytest.raises(UserError, match="a decoder, as load_method gives it, not an object of type Target"):
        generate(tiny, [5])  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no model 'labb'"):
        load_model("labb")


# -- writing a method -------------------------------------------------------------------------------------------


def test_the_example_of_contributing_is_what_new_method_writes() -> None:
    root = Path(__file__).parents[2]
    block = re.search(
        r"^   ```python\n(.*?)^   ```$", (root / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.M | re.S
    )
    assert block is not None
    kind = textwrap.dedent(block[1]).partition("class MyWay")[2].replace("my-way", "copycat")
    assert kind and kind in (root / "tests/plugin_pkg/ssbench_copycat.py").read_text(encoding="utf-8")


class Uprooted(Decoder):
    name, summary = "uprooted", "drafts under another root than the decided token"

    def propose(self, state: DecodeState) -> DraftTree:
        return DraftTree.root_only((state.root + 1) % self.target.vocab_size)


def test_every_check_is_reported_of_instead_of_the_first_that_breaks() -> None:
    few: dict[str, Any] = {
        "architectures": ("llama",),
        "checks": [check for check in CHECKS if check.name in ("draft", "search_space", "description")],
    }
    results = check_decoder(Uprooted, all=True, **few)
    assert [(result.name, result.verdict) for result in results] == [
        ("draft", "failed"),
        ("search_space", "exempt"),
        ("description", "failed"),
    ]
    assert all("root" in str(results[i].failure) for i in (0, 2))
    with pytest.raises(CheckFailed, match="draft"):
        check_decoder(Uprooted, **few)
    check_decoder(type(load_method("ar", Target(tiny_model("llama")))), **few)  # None: nothing is broken
