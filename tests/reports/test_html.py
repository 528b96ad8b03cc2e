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
from typing import Any

import pytest

from specbench_ss import load_run
from specbench_ss.reports.html import health, ranking
from specbench_ss.reports.html.assets import joined, plotly_js, render
from specbench_ss.reports.html.health import chips as chips_of
from specbench_ss.reports.html.report import SCRIPTS, HtmlReport
from specbench_ss.reports.html.report import page as page_of
from specbench_ss.reports.palette import COLOURS, DARK, GREY, METHODS, PARTS, Style, short_labels, styles
from specbench_ss.results.analysis import analyse
from specbench_ss.runs.run_dir import read_run
from tests.conftest import MakeRun
from tests.fabricated import fabricate
from tests.tiny import thorough


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
    HtmlReport().write(analyse(read_run(run_dir)), path)
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(fabricate(tmp_path_factory.mktemp("report") / "run", questions=4))


@pytest.fixture(scope="module")
def page(source: str) -> Page:
    return Page(source)


def test_model_output_is_text_and_never_runs(source: str, page: Page) -> None:
    assert "</script><script>alert(1)" in data_of(page)["texts"][0]  # as it was written
    assert not any("alert(1)" in text for kind, text in page.scripts if kind != "application/json")
    assert "<script>alert" not in source


def test_hostile_names_are_text(make_run: MakeRun) -> None:
    evil = "</script><img src=x onerror=alert(1)>"
    page = Page(write(make_run(labels=("ar", "ss[<a href=x>hi</a>]"), categories=(evil, "qa"), questions=2)))
    assert evil in page.text and "ss[<a href=x>hi</a>]" in page.text
    assert "x" not in page.addresses
    assert [text for kind, text in page.scripts if not kind] == [plotly_js(), joined(SCRIPTS)]


def test_what_cannot_be_seen_stands_by_its_name(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=("ar", "ss"), categories=("qa",), questions=2))
    run.manifest["model"]["name"] = "evil\u202emodel\x1b[31m"
    run.rows[0].text = "a\ud800b \u200ffamily: 👩\u200d👧"
    page = Page(render("report.html.jinja", [], page=page_of(analyse(run))))
    assert "evil⟨RIGHT-TO-LEFT OVERRIDE⟩model⟨ESC⟩[31m" in page.text
    assert "a⟨U+D800⟩b ⟨RIGHT-TO-LEFT MARK⟩family: 👩\u200d👧" in data_of(page)["texts"]


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
    own = source.replace(plotly_js(), "").replace(
        "http://www.w3.org/2000/svg", ""
    )  # the name of SVG, which nothing loads
    assert not re.search(r"https?://|//cdn|@import|url\(", own)


def test_the_page_is_small(source: str) -> None:
    assert len(joined(SCRIPTS)) < 60_000 and len(source) < 2_500_000


def test_every_chart_has_marks_and_a_table(source: str, page: Page) -> None:
    for name in ("waterfall", "tokens-per-step", "acceptance", "time-per-token"):
        assert name in page.ids and f"{name}-table" in page.ids
    assert "pareto" in page.ids and "everything-table" in page.ids
    defined = set(re.findall(r'id="(sy-[a-z-]+)"', source))
    assert set(re.findall(r'href="#(sy-[a-z-]+)"', source)) <= defined


def test_ids_are_unique_and_navigation_leads_somewhere(page: Page) -> None:
    assert len(page.ids) == len(set(page.ids))
    assert {address[1:] for address in page.addresses} <= set(page.ids)


def test_record_and_numbers_are_there(page: Page) -> None:
    for expected in ("ssbench run --methods ss,medusa", "abcdef012345", "generated", "A processor", "greedy"):
        assert expected in page.text
    assert "identical" in page.text and "may be noise" not in page.text, "no method has this tag"
    assert "</li>" not in page.text
    assert "The run is complete: 48 samples." in page.text


def test_failures_and_mismatches_stand_above_the_results(make_run: MakeRun) -> None:
    text = Page(write(make_run(failing=("medusa",), verdict="mismatch", questions=2))).text
    above = text[: text.index("output match")]
    assert "Samples failed" in above and "out of luck" in above
    assert "without a numerical tie" in above


@pytest.mark.parametrize("labels", [("ar",), ("ar", "ss")])
def test_small_runs_have_a_report_too(make_run: MakeRun, labels: tuple[str, ...]) -> None:
    found = Page(write(make_run(labels=labels, categories=("qa",), questions=1)))
    assert {"ranking-table", "samples", "details"} <= set(found.ids) and "tasks" not in found.ids


def test_every_method_has_a_look_of_its_own_and_baselines_are_grey() -> None:
    labels = ["ar", *(f"m{i}" for i in range(12)), "m-ar"]
    made = styles(labels, plain=["m-ar"])
    assert {made["ar"].colour, made["m-ar"].colour} == {GREY}
    assert {made[label].colour for label in labels[1:7]} <= set(COLOURS)
    assert len({(s.colour, s.symbol) for s in made.values()}) == len(labels)
    assert len({s.colour for s in styles(["a", "b", "c", "d", "e", "f"]).values()}) == len(COLOURS)


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours as WCAG 2 defines it."""
    light = [
        sum(
            weight * (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4)
            for weight, c in zip((0.2126, 0.7152, 0.0722), (x / 255 for x in bytes.fromhex(colour[1:])), strict=True)
        )
        for colour in (one, other)
    ]
    return (max(light) + 0.05) / (min(light) + 0.05)


def test_variants_of_a_method_have_its_colour_in_shades_and_families_have_one_colour() -> None:
    made = styles(["ar", "medusa", "eagle", "ss", "eagle3", "ss[k=1]", "ss[k=2]"])
    assert (made["ss"].colour, made["ss"].symbol) == (METHODS["ss"])
    assert made["eagle"].colour == made["eagle3"].colour != made["medusa"].colour
    of_ss = [made[label] for label in ("ss", "ss[k=1]", "ss[k=2]")]
    assert len({one.colour for one in of_ss}) == 3 and len({one.symbol for one in of_ss}) == 1


def test_long_labels_are_abbreviated_and_no_two_alike() -> None:
    long = [f"ss[root=on,gamma=1,n_draft={i}]" for i in (1, 2)]
    names = short_labels(["ar", "ss", *long, "ss-2"])
    assert names["ss"] == "ss" and names["ss-2"] == "ss-2" and len(set(names.values())) == len(names)
    assert [names[label] for label in long] == ["ss root=on gamma=1 n_draft=1", "ss root=on gamma=1 n_draft=2"]
    folder = "ss[weights=/drafters/smollm2/ss-root-parent,nodes=16]"
    named = short_labels(["medusa[weights=/drafters/medusa,nodes=32]", folder, "ss[weights=/drafters/smollm2/ss]"])
    assert list(named.values()) == ["medusa", "ss ss-root-parent nodes=16", "ss ss"]
    assert short_labels(["a" * 60, f"{'a' * 60}[b={'c' * 60}]"])["a" * 60] == f"{'a' * 24} (2)"


def test_colours_can_be_seen_on_a_dark_page() -> None:
    shades = [Style("m", 0, colour, "circle").shade for colour in (*COLOURS, GREY)]
    dark = [re.findall("#[0-9A-F]{6}", shade)[1] for shade in shades] + [DARK[light] for light, _ in PARTS.values()]
    assert min(contrast(colour, "#1d222a") for colour in dark) > 3
    assert len(set(dark)) == len(dark), "one colour a method, on a dark page too"


def test_a_method_looks_the_same_in_whichever_order_it_was_asked_for() -> None:
    labels = ["ar", "ss", "medusa", "eagle", "pld", "rest", "sd", "hydra", "suffix"]
    ways = [styles(labels), styles(labels[::-1])]
    assert all(ways[0][name].colour == ways[1][name].colour for name in labels)
    assert all(ways[0][name].symbol == ways[1][name].symbol for name in labels)


def test_the_record_has_the_facts_of_the_manifest(make_run: MakeRun) -> None:
    run = read_run(make_run(questions=1))
    run.manifest["methods"][1]["resolved"] = {"k": 3, "tree": [1, 2], "weights_hash": "abc"}
    run.manifest["model"] |= {"origin": {"gguf": {"file": "Small.gguf", "types": {"Q4_1": 210}}}, "attention": "sdpa"}
    assert "Sessions" not in {fact.name for fact in health.facts(run)}
    run.manifest["sessions"] = [{"started": day, "environment": {}} for day in ("monday", "tuesday")]
    known = {fact.name: fact.value for fact in health.facts(run)}
    assert known["Method ss, as measured"] == "k=3, tree=[1, 2], weights_hash=abc"
    assert known["Sessions"] == "monday; tuesday"
    assert "attention sdpa" in known["Model"] and "gguf (file Small.gguf, types Q4_1 210)" in known["Model"]


@pytest.fixture
def shared(make_run: MakeRun) -> Path:
    return make_run(
        labels=("ar", "ss-shared", "ss-shared-ar"), references={"ss-shared": "ss-shared-ar"}, verdict="mismatch"
    )


def test_a_method_that_changes_the_model_is_shown_against_its_own_baseline(make_run: MakeRun) -> None:
    labels = ("ar", "ss-shared", "ss-shared-ar")
    run = make_run(labels=labels, references={"ss-shared": "ss-shared-ar"}, verdict="numerical tie")
    made = page_of(analyse(read_run(run)))
    ranked = {row.label: row for row in made["ranking"]}
    assert set(ranked) == {"ar", "ss-shared"}, "the control is folded"
    assert [control.label for control in ranked["ss-shared"].controls] == ["ss-shared-ar"]
    assert ranked["ss-shared"].own_model.endswith(" over ss-shared-ar, itself 1.00×")
    assert ("24 numerical ties of 24 †", "note") in ranked["ss-shared"].tags and ranked["ss-shared"].icon == "!"
    assert ranked["ss-shared"].rank == "–" and ranking.ANOTHER_MODEL in ranked["ss-shared"].tags
    assert "fastest" not in made["headline"] and "ss-shared decodes another model: " in made["headline"]
    assert ("baseline †", "flat") in ranked["ss-shared"].controls[0].tags
    assert {row[0].text for row in made["matrix"].rows} == {"ar", "ss-shared"}
    everything = [row for row in made["everything"].rows if row[1].text == "ss-shared"]
    assert all(row[2].small[0].startswith("over ss-shared-ar ") for row in everything)


def test_its_answers_and_verdicts_name_that_baseline_too(shared: Path) -> None:
    made = page_of(analyse(read_run(shared)))
    packed = made["samples"]
    verdicts = {method["label"]: packed["verdicts"][method["verdict"][0]] for method in packed["methods"]}
    assert verdicts == {
        "ar": ("baseline", ""),
        "ss-shared": ("mismatch against ss-shared-ar", "bad"),
        "ss-shared-ar": ("baseline of ss-shared", ""),
    }
    assert all(line.startswith("ss-shared against ss-shared-ar on ") for line in made["differences"])
    against = {row[0].text: row[1].text for row in made["output_match"].rows}
    assert against == {"ss-shared": "ss-shared-ar", "ss-shared-ar": "nothing: it is the baseline of ss-shared"}
    assert [line for check in made["alerts"] if check.state == "wrong" for line in check.lines] == [
        "ss-shared: 24 of 24 outputs compared with ss-shared-ar"
    ]
    facts = {fact.name: fact.value for fact in made["facts"]}
    assert "compared with that of ss-shared-ar" in facts["Method ss-shared"]
    assert "compared with" not in facts["Method ss-shared-ar"]


def test_sampled_answers_promise_a_distribution_and_the_page_states_it(make_run: MakeRun) -> None:
    run = make_run(labels=("ar", "ss"), categories=("qa",), questions=5, temperature=0.7)
    made = page_of(analyse(read_run(run)))
    assert any("same distribution" in line for line in made["how"])
    assert next(row for row in made["ranking"] if row.label == "ss").cells["output"] == "sampled"
    assert set(made["samples"]["verdicts"]) == {("baseline", ""), ("sampled", "")}
    greedy = page_of(analyse(read_run(make_run(labels=("ar", "ss"), categories=("qa",), questions=5))))
    assert not any("same distribution" in line for line in greedy["how"])


def test_warnings_of_the_run_are_among_the_checks_as_text(make_run: MakeRun) -> None:
    run = read_run(make_run(labels=("ar", "ss"), categories=("qa",), questions=1))
    titles = [check.sentence for check in page_of(analyse(run))["checks"]]
    assert not any(" of the run: " in title for title in titles) and all(titles)
    run.manifest["warnings"] = ["ss: a fan is loud", "<script>alert(2)</script>"]
    made = page_of(analyse(run))
    check = next(check for check in made["checks"] if check.sentence.startswith("2 warnings of the run: "))
    assert (check.state, list(check.lines)) == ("warning", run.manifest["warnings"])
    source = render("report.html.jinja", [], page=made)
    assert "a fan is loud" in source[source.index('id="health"') :]
    assert "<script>alert(2)" not in source


def data_of(page: Page) -> dict[str, Any]:
    found = (json.loads(text) for kind, text in page.scripts if kind == "application/json")
    return next(one for one in found if "texts" in one)


def csv_of(page: Page, name: str) -> list[dict[str, str]]:
    return list(csv.DictReader(StringIO(page.csv[name])))


def test_a_csv_file_has_both_ends_n_and_the_verdict(make_run: MakeRun) -> None:
    run = make_run(labels=("ar", "ss"), questions=5, categories=("qa", "writing"))
    summary = load_run(run).summary(all=True).set_index(["task", "method"])
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
    matrix = {line["method"]: line for line in csv_of(page, "matrix")}
    assert matrix["ss"]["qa comparison"] == summary.loc[("qa", "ss"), "comparison"]
    assert float(matrix["ss"]["qa speedup_high"]) == summary.loc[("qa", "ss"), "speedup_high"]


def test_how_long_a_request_takes_is_shown(make_run: MakeRun) -> None:
    run = make_run(labels=("ar", "ss"), questions=5, categories=("qa",))
    samples = load_run(run).samples
    waits = samples[samples["method"] == "ss"]["wall_s"].astype(float).quantile([0.5, 0.95, 0.99]) * 1000
    line = next(line for line in csv_of(Page(write(run)), "latency") if line["method"] == "ss")
    assert [float(line[f"latency {p}"]) for p in ("p50", "p95", "p99")] == pytest.approx(list(waits))


@thorough
def test_the_margin_of_quality_is_an_option_of_the_report(make_run: MakeRun) -> None:
    run = make_run(labels=("ar", "ss-shared", "ss-shared-ar"), references={"ss-shared": "ss-shared-ar"}, questions=5)
    HtmlReport().write(analyse(read_run(run), 0.9), run / "report.html")
    assert "non-inferior to ar (margin 0.9)" in (run / "report.html").read_text(encoding="utf-8")
    assert "(margin 0.02)" in write(run)
    assert set(load_run(run).summary(all=True, quality_margin=0.9)["quality_margin"].dropna()) == {0.9}


def test_the_limit_of_outputs_stands_on_the_first_screen(make_run: MakeRun) -> None:
    run = read_run(make_run())
    plain = [row for row in run.rows if row.method == run.baseline]
    for i, row in enumerate(plain):
        row.finish = "length" if i < len(plain) / 4 else "eos"
    decoding = dict(chips_of(run))["Dtype and decoding"]
    assert "outputs limited to 64 tokens (25% reached it)" in decoding and "concurrent" not in decoding
    run.manifest["config"]["concurrency"] = [2, 4]
    assert "1, 2, 4 concurrent requests" in dict(chips_of(run))["Dtype and decoding"]
    assert len(chips_of(run)) == 5
