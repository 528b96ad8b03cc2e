"""The HTML report: complete, self-contained, and safe with whatever a model wrote."""

from __future__ import annotations

import base64
import csv
import hashlib
import json
import re
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import plotly.graph_objects as go
import pytest

from specbench_ss import load_run
from specbench_ss.reports.html import run_record
from specbench_ss.reports.html.assets import plotly_js, render
from specbench_ss.reports.html.page_parts import Fact
from specbench_ss.reports.html.palette import COLOURS, styles
from specbench_ss.reports.html.report import HtmlReport
from specbench_ss.reports.html.report import page as page_of
from specbench_ss.runs.run_directory import read_run
from tests.conftest import MakeRun, fabricate


class Page(HTMLParser):
    """Scripts as (type, text), ids, links and sources, and the visible text, as a browser would take the file apart."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[tuple[str, str]] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.policy = ""
        self.text = ""
        self.csv: dict[str, str] = {}
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids += [given["id"]] if "id" in given else []
        self.addresses += [given[name] for name in ("href", "src", "action") if name in given]
        if "data-csv" in given:
            self.csv[given["data-csv"]] = given["data-content"]
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
    return write(fabricate(tmp_path_factory.mktemp("report") / "run", questions=4))


@pytest.fixture(scope="module")
def page(source: str) -> Page:
    return Page(source)


def test_model_output_is_text_and_never_runs(source: str, page: Page) -> None:
    assert "</script><script>alert(1)" in page.text  # shown as it was written
    assert not any("alert(1)" in text for kind, text in page.scripts if kind != "application/json")
    assert "<script>alert" not in source.replace(plotly_js(), "")


def test_hostile_names_stay_inside_the_chart_data(make_run: MakeRun) -> None:
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


def test_failures_and_mismatches_stand_above_the_results(make_run: MakeRun) -> None:
    text = Page(write(make_run(failing=("medusa",), verdict="mismatch", questions=2))).text
    above = text[: text.index("By task")]
    assert "Samples failed" in above and "out of luck" in above
    assert "no near-tie explains" in above


@pytest.mark.parametrize("labels", [("ar",), ("ar", "ss")])
def test_small_runs_have_a_report_too(make_run: MakeRun, labels: tuple[str, ...]) -> None:
    assert "By task" in Page(write(make_run(labels=labels, categories=("qa",), questions=1))).text


def test_every_method_keeps_one_colour_and_the_reference_is_none_of_them() -> None:
    labels = ["ar", *(f"m{i}" for i in range(8))]
    made = styles(labels)
    assert [made[label].colour for label in labels[1:7]] == list(COLOURS)
    assert made["ar"].colour not in COLOURS
    assert len({(s.colour, s.pattern) for s in made.values()}) == len(labels)


def test_the_record_says_where_weights_come_from(make_run: MakeRun) -> None:
    """Where it is known: runs of before say nothing of it."""
    run = read_run(make_run())
    assert "Model's origin" not in {fact.name for fact in run_record.facts(run)}
    run.manifest["model"]["origin"] = {
        "package": "small-talk==1.2.3",
        "gguf": {"file": "Small.gguf", "types": {"Q4_1": 210, "F32": 61}},
        "licence": "Apache-2.0",
    }
    known = {fact.name: fact.value for fact in run_record.facts(run)}
    said = "dequantised from Small.gguf (tensors: 210 Q4_1, 61 F32); package small-talk==1.2.3; licence Apache-2.0"
    assert known["Model's origin"] == said


def test_the_record_says_what_computed_the_layers(make_run: MakeRun) -> None:
    run = read_run(make_run())
    assert "Layers" not in {fact.name for fact in run_record.facts(run)}
    run.manifest["model"] |= {"computed": "4 of 4 layers lean", "attention": "sdpa_grouped"}
    assert Fact("Layers", "4 of 4 layers lean; attention sdpa_grouped") in run_record.facts(run)


def test_the_record_shows_what_was_measured_and_in_which_sessions(make_run: MakeRun) -> None:
    run = read_run(make_run(questions=1))
    here = run.manifest["environment"]
    run.manifest["methods"][1]["resolved"] = {"k": 3, "tree": [1, 2], "weights_hash": "abc"}
    run.manifest["sessions"] = [
        {"started": "monday", "environment": here},
        {"started": "tuesday", "environment": {**here, "driver": "2"}},
    ]
    known = {fact.name: fact.value for fact in run_record.facts(run)}
    assert known["Method ss, as measured"] == "k=3, tree=[1, 2], weights_hash=abc"
    assert known["Sessions"] == "monday; tuesday (other driver: times do not compare)"
    run.manifest["sessions"] = run.manifest["sessions"][:1]
    assert "Sessions" not in {fact.name for fact in run_record.facts(run)}


@pytest.fixture
def shared(make_run: MakeRun) -> Path:
    return make_run(
        labels=("ar", "ss-shared", "ss-shared-ar"), references={"ss-shared": "ss-shared-ar"}, verdict="mismatch"
    )


def test_a_method_that_changes_the_model_is_shown_against_its_own_reference(shared: Path) -> None:
    made = page_of(read_run(shared))
    cards = {card.label: dict(card.facts) for card in made["cards"]}
    assert (
        "speedup over ss-shared-ar" in cards["ss-shared"] and "speedup over ss-shared-ar" not in cards["ss-shared-ar"]
    )
    assert cards["ss-shared"]["output"] == "24 mismatches of 24 against ss-shared-ar"
    assert cards["ss-shared-ar"]["output"] == "reference of ss-shared"
    matrix = made["matrix"]
    ss, own = ([column.title for column in matrix.columns].index(name) for name in ("ss-shared", "ss-shared-ar"))
    for row in matrix.rows:
        assert any(line.startswith("over ss-shared-ar ") for line in row[ss].small)
        assert not any("over" in line for line in row[own].small)
    everything = [row for row in made["everything"].rows if row[1].text == "ss-shared"]
    assert all(row[2].small[0].startswith("over ss-shared-ar ") for row in everything)
    assert "ss-shared over ss-shared-ar" in made["speedups"].note


def test_its_answers_and_verdicts_name_that_reference_too(shared: Path) -> None:
    made = page_of(read_run(shared))
    answers = {answer.label: answer.verdict for answer in made["examples"][0].turns[0].answers}
    assert answers == {
        "ar": None,
        "ss-shared": ("mismatch against ss-shared-ar", "bad"),
        "ss-shared-ar": ("reference of ss-shared", ""),
    }
    assert all(line.startswith("ss-shared against ss-shared-ar on ") for line in made["differences"][:-1])
    against = {row[0].text: row[1].text for row in made["sameness"].rows}
    assert against == {"ss-shared": "ss-shared-ar", "ss-shared-ar": "nothing: it is the reference of ss-shared"}
    assert [line for notice in made["alerts"] if notice.level == "error" for line in notice.lines] == [
        "ss-shared: 24 of 24 answers against the reference, ss-shared-ar"
    ]
    facts = {fact.name: fact.value for fact in made["facts"]}
    assert "compared with that of ss-shared-ar" in facts["Method ss-shared"]
    assert "compared with" not in facts["Method ss-shared-ar"]


def test_sampled_answers_promise_a_distribution_and_the_summary_says_so(make_run: MakeRun) -> None:
    run = make_run(labels=("ar", "ss"), categories=("qa",), questions=5, temperature=0.7)
    text = Page(write(run)).text
    assert "promises the same distribution, not the same text" in text[: text.index("By task")]
    made = page_of(read_run(run))
    assert {dict(card.facts)["output"] for card in made["cards"]} == {"reference", "sampled"}
    assert [answer.verdict for answer in made["examples"][0].turns[0].answers] == [None, ("sampled", "")]
    assert not page_of(read_run(make_run(labels=("ar", "ss"), categories=("qa",), questions=5)))["promised"]


def test_warnings_of_the_run_are_among_the_checks_as_text(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=("ar", "ss"), categories=("qa",), questions=1))
    titles = [notice.title for notice in page_of(run)["notices"]]
    assert "Warnings of the run." not in titles and all(titles)
    run.manifest["warnings"] = ["ss: times had not settled after warm-up", "<script>alert(2)</script>"]
    made = page_of(run)
    notice = next(notice for notice in made["notices"] if notice.title == "Warnings of the run.")
    assert (notice.level, list(notice.lines)) == ("warning", run.manifest["warnings"])
    source = render("report.html.jinja", page=made)
    assert "had not settled after warm-up" in source[source.index('id="health"') :]
    assert "<script>alert(2)" not in source


def csv_of(page: Page, name: str) -> list[dict[str, str]]:
    return list(csv.DictReader(StringIO(page.csv[name])))


def test_a_csv_file_has_both_ends_n_and_the_verdict(make_run: MakeRun) -> None:
    run = make_run(labels=("ar", "ss"), questions=5, categories=("qa", "writing"))
    summary = load_run(run).summary().set_index(["category", "method"])
    page = Page(write(run))
    for line in csv_of(page, "everything"):
        row = summary.loc[line["task"], line["method"]]
        assert float(line["speedup"]) == row["speedup"]
        assert int(line["n_prompts"]) == row["n_prompts"] and int(line["n_questions"]) == row["n_questions"]
        assert line["verdict"] == row["comparison"]
        ends = [line["speedup_low"], line["speedup_high"]]
        assert (
            ends == ["", ""]
            if line["method"] == "ar"
            else [float(e) for e in ends] == [row["speedup_low"], row["speedup_high"]]
        )
    matrix = {line["task"]: line for line in csv_of(page, "matrix")}
    assert matrix["qa"]["ss comparison"] == summary.loc[("qa", "ss"), "comparison"]
    assert float(matrix["qa"]["ss speedup_high"]) == summary.loc[("qa", "ss"), "speedup_high"]


def test_a_cell_without_an_interval_says_so_in_the_csv_file(make_run: MakeRun) -> None:
    page = Page(write(make_run(labels=("ar", "ss"), questions=1, categories=("qa", "writing"))))
    assert {line["ss comparison"] for line in csv_of(page, "matrix")} == {"too few"}
    assert {line["verdict"] for line in csv_of(page, "everything")} == {"reference", "too few questions"}


def test_how_long_a_request_takes_is_shown(make_run: MakeRun) -> None:
    run = make_run(labels=("ar", "ss"), questions=5, categories=("qa",))
    samples = load_run(run).samples
    waits = samples[samples["method"] == "ss"]["wall_s"].astype(float).quantile([0.5, 0.95, 0.99]) * 1000
    line = next(line for line in csv_of(Page(write(run)), "latency") if line["method"] == "ss")
    assert [float(line[f"request {p}"]) for p in ("p50", "p95", "p99")] == pytest.approx(list(waits))


def test_the_margin_of_quality_is_an_option_of_the_report(make_run: MakeRun) -> None:
    run = make_run(labels=("ar", "ss-shared", "ss-shared-ar"), references={"ss-shared": "ss-shared-ar"}, questions=5)
    report = HtmlReport()
    report.quality_margin = 0.9
    report.write(read_run(run), run / "report.html")
    assert "non-inferior to ar (margin 0.9)" in (run / "report.html").read_text(encoding="utf-8")
    assert "(margin 0.02)" in write(run)
    assert set(load_run(run).summary(quality_margin=0.9)["quality_margin"].dropna()) == {0.9}
