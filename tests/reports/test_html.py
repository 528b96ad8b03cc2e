"""The HTML report: complete, self-contained, and safe with whatever a model wrote."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import plotly.graph_objects as go
import pytest

from specbench_ss.reports import record
from specbench_ss.reports.assets import plotly_js
from specbench_ss.reports.html import HtmlReport
from specbench_ss.reports.palette import COLOURS, styles
from specbench_ss.rundir import read_run


class Page(HTMLParser):
    """Scripts as (type, text), ids, links and sources, and the visible text, as a browser would take the file apart."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[tuple[str, str]] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.policy = ""
        self.text = ""
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids += [given["id"]] if "id" in given else []
        self.addresses += [given[name] for name in ("href", "src", "action") if name in given]
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"]
        if tag in ("script", "style"):
            self._inside = tag
        if tag == "script":
            self.scripts.append((given.get("type", ""), ""))

    def handle_endtag(self, tag: str) -> None:
        self._inside = "" if tag == self._inside else self._inside

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            kind, before = self.scripts[-1]
            self.scripts[-1] = (kind, before + data)
        elif not self._inside:
            self.text += data


def write(run_dir: Path) -> str:
    path = run_dir / HtmlReport.filename
    HtmlReport().write(read_run(run_dir), path)
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests.conftest import fabricate

    return write(fabricate(tmp_path_factory.mktemp("report") / "run", questions=4))


@pytest.fixture(scope="module")
def page(source: str) -> Page:
    return Page(source)


def test_model_output_is_text_and_never_runs(source: str, page: Page) -> None:
    assert "</script><script>alert(1)" in page.text  # shown as it was written
    assert not any("alert(1)" in text for kind, text in page.scripts if kind != "application/json")
    assert "<script>alert" not in source.replace(plotly_js(), "")


def test_hostile_names_stay_inside_the_chart_data(make_run) -> None:  # type: ignore[no-untyped-def]
    evil = "</script><img src=x onerror=alert(1)>"
    page = Page(write(make_run(categories=(evil, "qa"), questions=2)))
    assert evil in page.text
    assert "x" not in page.addresses
    assert [kind for kind, _ in page.scripts] == ["application/json"] * 4 + ["", ""]


def test_policy_lets_only_the_pages_own_scripts_run(page: Page) -> None:
    assert page.policy.startswith("default-src 'none';")
    running = [text for kind, text in page.scripts if kind == ""]
    hashes = {base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in running}
    allowed = re.search(r"script-src ([^;]*);", page.policy)
    assert allowed is not None
    assert set(allowed[1].split()) == {f"'sha256-{one}'" for one in hashes}
    assert "unsafe-eval" not in page.policy and "http" not in page.policy


def test_nothing_is_loaded_from_anywhere(source: str, page: Page) -> None:
    assert all(address.startswith("#") for address in page.addresses)
    own = source.replace(plotly_js(), "")
    assert not re.search(r"https?://|//cdn|@import|url\(", own)


def test_plotly_is_embedded_once(source: str) -> None:
    assert source.count("Copyright 2012-") == 1
    assert source.count("plotly.js v") == 1


def test_charts_are_valid_figures_with_tables(page: Page) -> None:
    specs = [json.loads(text) for kind, text in page.scripts if kind == "application/json"]
    assert len(specs) == 4
    for spec in specs:
        text = json.dumps(spec).replace("var(--", "rgb(1,1,1)#").replace("#text)", "").replace("#raised)", "")
        figure = json.loads(re.sub(r"rgb\(1,1,1\)#?[a-z-]*\)?", "black", text))
        assert go.Figure(figure).data
        assert "template" not in spec["layout"]
    for name in ("speedup", "tokens-per-step", "acceptance", "time-per-token"):
        assert f"{name}-plot" in page.ids and f"{name}-table" in page.ids


def test_ids_are_unique_and_navigation_leads_somewhere(page: Page) -> None:
    assert len(page.ids) == len(set(page.ids))
    assert {address[1:] for address in page.addresses} <= set(page.ids)


def test_record_and_numbers_are_there(page: Page) -> None:
    for expected in ("ssbench run --methods ss,medusa", "abcdef012345", "generated", "A processor", "greedy"):
        assert expected in page.text
    assert "not distinguishable" in page.text
    assert "The run is complete: 48 samples." in page.text


def test_failures_and_mismatches_stand_above_the_results(make_run) -> None:  # type: ignore[no-untyped-def]
    text = Page(write(make_run(failing=("medusa",), verdict="mismatch", questions=2))).text
    above = text[: text.index("By task")]
    assert "Samples failed" in above and "out of luck" in above
    assert "no near-tie explains" in above


@pytest.mark.parametrize("labels", [("ar",), ("ar", "ss")])
def test_small_runs_have_a_report_too(make_run, labels: tuple[str, ...]) -> None:  # type: ignore[no-untyped-def]
    assert "By task" in Page(write(make_run(labels=labels, categories=("qa",), questions=1))).text


def test_every_method_keeps_one_colour_and_the_reference_is_none_of_them() -> None:
    labels = ["ar", *(f"m{i}" for i in range(8))]
    made = styles(labels)
    assert [made[label].colour for label in labels[1:7]] == list(COLOURS)
    assert made["ar"].colour not in COLOURS
    assert len({(s.colour, s.pattern) for s in made.values()}) == len(labels)


def test_the_record_shows_what_was_measured_and_in_which_sessions(make_run) -> None:  # type: ignore[no-untyped-def]
    run = read_run(make_run(questions=1))
    here = run.manifest["environment"]
    run.manifest["methods"][1]["resolved"] = {"k": 3, "tree": [1, 2], "weights_hash": "abc"}
    run.manifest["sessions"] = [
        {"started": "monday", "environment": here},
        {"started": "tuesday", "environment": {**here, "driver": "2"}},
    ]
    known = {fact.name: fact.value for fact in record.facts(run)}
    assert known["Method ss, as measured"] == "k=3, tree=[1, 2], weights_hash=abc"
    assert known["Sessions"] == "monday; tuesday (other driver: times do not compare)"
    run.manifest["sessions"] = run.manifest["sessions"][:1]
    assert "Sessions" not in {fact.name for fact in record.facts(run)}
