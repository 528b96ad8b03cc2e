"""Both editions of Spec-Bench, files of one's own, and fetching the official one from a loopback server."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import pytest

from specbench_ss.errors import UserError
from specbench_ss.suite import SuiteData, SuiteRequest
from specbench_ss.suites.base import LAB_SIZES, SPECBENCH_CATEGORIES
from specbench_ss.suites.chat_suites import SpecBench
from tests.loopback import Quiet, listening

FULL_SIZE = {name: LAB_SIZES[name] for name in SPECBENCH_CATEGORIES}

SHARED = Path(os.environ.get("SSBENCH_SHARED", Path(__file__).resolve().parents[3] / "shared"))
OFFICIAL = SHARED / "data" / "specbench" / "question.jsonl"
needs_official = pytest.mark.skipif(not OFFICIAL.is_file(), reason="the official questions are not here")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("SSBENCH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SSBENCH_SPECBENCH_URL", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    class Handler(Quiet, SimpleHTTPRequestHandler):
        pass

    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with listening(partial(Handler, directory=str(OFFICIAL.parent))) as site:
        yield f"{site}/{OFFICIAL.name}"


def counts(data: SuiteData) -> dict[str, int]:
    return dict(Counter(question.category for question in data.questions))


def write(path: Path, *rows: object) -> Path:
    path.write_text(
        "\n".join(row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows),
        encoding="utf-8",
    )
    return path


def test_the_generated_edition_has_the_shape_of_the_official_one() -> None:
    data = SpecBench().load(SuiteRequest(lab=True, limit=0))
    assert data.edition == "generated"
    assert counts(data) == FULL_SIZE and len(data.questions) == 480
    assert list(counts(data)) == list(SpecBench.categories)
    assert len({question.id for question in data.questions}) == 480


def test_a_limit_is_a_prefix() -> None:
    suite = SpecBench()
    whole = suite.load(SuiteRequest(lab=True, limit=7, categories=("rag", "math"))).questions
    some = suite.load(SuiteRequest(lab=True, limit=3, categories=("math", "rag")))
    assert [q for q in whole if int(q.id[-4:]) < 3] == list(some.questions)
    default = suite.load(SuiteRequest(lab=True))
    assert set(counts(default).values()) == {4} and len(default.questions) == 52
    assert default.content_hash == suite.load(SuiteRequest(lab=True, limit=4)).content_hash
    assert len(suite.load(SuiteRequest(lab=True, limit=999, categories=("math",))).questions) == 10


@needs_official
def test_the_official_file() -> None:
    data = SpecBench().load(SuiteRequest(data=OFFICIAL))
    assert (data.edition, data.notes, data.max_new_tokens) == ("official", (), 1024)
    assert counts(data) == FULL_SIZE
    by_id = {question.id: question for question in data.questions}
    assert by_id["81"].references == () and by_id["81"].metric is None and len(by_id["81"].turns) == 2
    assert by_id["111"].references == (("Area is 3",), ("5pi",)) and by_id["111"].metric is None
    assert by_id["131"].references[1] == ()  # the file has an empty text there
    assert by_id["161"].metric == "bleu" and by_id["241"].metric == "rouge_l"
    assert by_id["321"].metric is None  # the file has no references for qa
    assert by_id["482"].references == (("James Ray", "George Harrison"),) and by_id["482"].metric == "token_f1"
    suite = SpecBench()
    assert suite.score(by_id["401"], 0, "400 + 600 is 1000. The answer is $1,000.") == 1.0
    assert suite.score(by_id["401"], 0, "The answer is 999.") == 0.0
    assert suite.score(by_id["482"], 0, "It was George Harrison") == pytest.approx(2 * 2 / (4 + 2))
    assert suite.score(by_id["111"], 0, "Area is 3") is None


@needs_official
def test_fetch_then_load(url: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = SpecBench()
    with pytest.raises(UserError, match="ssbench suites fetch specbench.*--data FILE") as caught:
        suite.load(SuiteRequest())
    assert "\n" not in str(caught.value)
    path = suite.fetch(url)
    assert path == cache / "specbench" / "question.jsonl" and path.read_bytes() == OFFICIAL.read_bytes()
    assert suite.load(SuiteRequest()).edition == "official"
    monkeypatch.setenv("SSBENCH_SPECBENCH_URL", "http://127.0.0.1:1/unused")
    assert suite.fetch() == path  # there already: nothing is asked of the network
    path.write_text("spoilt")
    with pytest.raises(UserError, match="damaged"):
        suite.load(SuiteRequest())
    monkeypatch.setenv("SSBENCH_SPECBENCH_URL", url)
    assert suite.fetch().read_bytes() == OFFICIAL.read_bytes()


@needs_official
def test_a_changed_file_is_custom(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    shutil.copyfile(OFFICIAL, path)
    with path.open("a") as file:
        file.write("\n")
    data = SpecBench().load(SuiteRequest(data=path))
    assert data.edition == "custom" and data.notes == ("mine.jsonl differs from the official Spec-Bench file",)
    assert len(data.questions) == 480
