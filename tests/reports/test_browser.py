"""The report in real headless Chromium, as people use it: by keyboard, by address, printed, with hostile texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from specbench_ss import load_run
from specbench_ss.reports.html.report import HtmlReport
from specbench_ss.results.analysis import analyse
from specbench_ss.runs.records import Run
from specbench_ss.runs.run_dir import read_run
from tests.fabricated import fabricate
from tests.reports.bad_runs import half_done, nothing_works, only_the_reference
from tests.reports.chromium import EXTRA, Watched, browser, needs_chromium
from tests.reports.drafts_made import record
from tests.tiny import THOROUGH, thorough

pytestmark = [needs_chromium, pytest.mark.xdist_group("chromium")]
EVIL = '</script><img src=x onerror=alert(1)> "quoted" \u202etxt.exe \x1b[31m שלום 👩\u200d👧'
LABEL = "ss[<a href=//x>\u202eevil</a>]"
LABELS = ("ar", "medusa", LABEL, "ss-shared", "ss-shared-ar")
LONG = "word " * 10_000
HARMS = (half_done, nothing_works, only_the_reference)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of five methods, one of them with a hostile name, and hostile answers."""
    folder = tmp_path_factory.mktemp("browser") / "run"
    path = fabricate(folder, labels=LABELS, questions=10, references={"ss-shared": "ss-shared-ar"})
    run = read_run(path)
    for row in run.rows:
        row.text = LONG if row.question_id == "qa-1" else f"{EVIL} {row.question_id}"
        if row.method == "medusa" and row.question_id == "qa-2":
            row.text = f"{EVIL} another end"
    run.manifest["model"]["name"] = f"model {EVIL}"
    for question in ("qa-1", "qa-2"):
        record(path, question, f" {EVIL}")
    shape = {"weight_bytes": 2e7, "matrix_parameters": 5e6, "attention_flops": 9.0, "kv_bytes": 64, "windows": [None]}
    drafter = {"weight_bytes": 1e6, "matrix_parameters": 2e5}
    run.manifest["machine"] = {
        "limits": {"read_bytes_per_s": 1e10, "flops_per_s": {"float32": 1e11}},
        "shapes": {label: shape | {"drafter": None if label.endswith("ar") else drafter} for label in LABELS},
    }
    HtmlReport().write(analyse(run), path / "report.html")
    return path


@pytest.fixture(scope="module")
def running() -> Iterator[Any]:
    with browser() as one:
        yield one


@pytest.fixture(scope="module")
def seen(running: Any, made: Path) -> Watched:
    return Watched(running, made / "report.html")


def rows_of(page: Any) -> list[str]:
    return page.eval_on_selector_all("#matrix-table tbody th", "found => found.map(th => th.textContent)")


def test_it_opens_from_a_file_without_an_error_or_a_request(seen: Watched) -> None:
    assert seen.errors == []
    assert [url for url in seen.requests if not url.startswith("file:")] == [] and len(seen.requests) == 1


def test_every_chart_is_drawn_when_it_comes_near(running: Any, made: Path) -> None:
    page = Watched(running, made / "report.html")
    page.evaluate("document.getElementById('scatter-of').open = true")
    for name in ("pareto", "tokens-per-step", "acceptance", "time-per-token", "waterfall", "scatter"):
        page.locator(f"#{name}").scroll_into_view_if_needed()
        page.locator(f"#{name} .point").first.wait_for(state="attached")
    assert page.locator("#scatter .scatterlayer .trace:first-child .point").count() == 40
    assert page.locator("#ranking-table .strip use[href^='#sy-']").count() == len(LABELS)
    assert page.locator("#matrix-table td").count() == 4 * 5
    assert page.errors == [] and len(page.requests) == 1


@thorough
@pytest.mark.parametrize("at_load", [True, False])
def test_charts_are_as_wide_as_a_phone_at_load_and_when_the_window_narrows(
    running: Any, made: Path, at_load: bool
) -> None:
    page = Watched(running, made / "report.html")
    for width in [390] if at_load else [390, 1280, 390]:
        page.set_viewport_size({"width": width, "height": 900})
        if at_load:
            page.reload()
        for name in ("pareto", "tokens-per-step", "acceptance", "time-per-token", "waterfall"):
            page.locator(f"#{name}").scroll_into_view_if_needed()
            page.locator(f"#{name} .point").first.wait_for(state="attached")
        page.evaluate("new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
        beyond = "all => all.map(one => one.querySelector('.main-svg').getBoundingClientRect().width - one.clientWidth)"
        differences = page.eval_on_selector_all(".chart.js-plotly-plot", beyond)
        assert len(differences) >= 5 and max(map(abs, differences)) <= 1
    assert page.errors == []


@thorough
def test_all_columns_of_the_ranking_fit_on_a_desktop_and_stand_under_their_titles(running: Any, made: Path) -> None:
    page = Watched(running, made / "report.html")
    assert page.locator(".ranking").evaluate("one => one.scrollWidth - one.clientWidth") <= 1
    for width in (1280, 900):
        page.set_viewport_size({"width": width, "height": 900})
        shown = "all => all.filter(one => one.offsetParent).map(one => one.cellIndex)"
        assert page.eval_on_selector_all("#ranking-table thead tr > *", shown) == page.eval_on_selector_all(
            "#ranking-table tbody tr:first-child > *", shown
        )


@thorough
def test_the_page_is_not_wider_than_the_screen(running: Any, made: Path) -> None:
    for width in (1280, 768, 390):
        page = Watched(running, made / "report.html")
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width


@thorough
def test_what_was_measured_of_a_prompt_fits_and_names_stay_on_a_phone(running: Any, made: Path) -> None:
    page = Watched(running, made / "report.html", "#sample=qa-3.0")
    box = page.locator("#detail .table")
    assert box.evaluate("one => one.scrollWidth - one.clientWidth") <= 1
    page.set_viewport_size({"width": 390, "height": 900})
    box.evaluate("one => { one.scrollLeft = 1000; }")
    name, edge = (page.locator(where).first.bounding_box()["x"] for where in ("#detail tbody th", "#detail .table"))
    assert box.evaluate("one => one.scrollLeft") > 0 and abs(name - edge) <= 2


@thorough
def test_the_first_speedup_is_on_the_first_screen_of_a_phone(running: Any, made: Path) -> None:
    page = Watched(running, made / "report.html")
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.locator("#ranking-table tbody strong").first.bounding_box()["y"] < 844


@thorough
def test_the_task_map_switches_between_speedup_tau_and_tokens(running: Any, made: Path) -> None:
    page = Watched(running, made / "report.html")
    cell = page.locator("#matrix-table tbody tr:first-child td").first
    shown = []
    for i in range(3):
        page.locator(f"#measure input[value='{i}']").check()
        shown.append(cell.text_content())
    row = load_run(made).summary().set_index(["task", "method"]).loc["overall"].sort_values("speedup").iloc[-1]
    assert shown == [f"{row.speedup:.2f}×", f"{row.mean_acceptance_length:.2f}", f"{row.tokens_per_s:.1f}"]


@thorough
def test_a_phone_shows_one_task_at_a_time(running: Any, made: Path) -> None:
    page = Watched(running, made / "report.html")
    page.set_viewport_size({"width": 390, "height": 900})
    assert page.locator("#matrix-table tbody tr:first-child td:visible").count() == 1
    page.select_option("#task-of-matrix", label="qa")
    note = page.locator("#matrix-table tbody tr:first-child td:visible").get_attribute("data-note")
    assert ", qa: " in note


def test_the_matrix_is_sorted_and_read_by_keyboard(running: Any, made: Path) -> None:
    page, frame = Watched(running, made / "report.html"), load_run(made).summary(all=True)
    button = page.locator("#matrix-table thead button", has_text="qa")
    button.focus()
    page.keyboard.press("Enter")
    names = {"ss-shared", "ar", "medusa", LABEL}
    qa = frame[(frame.task == "qa") & frame.method.isin(names)].sort_values("speedup", ascending=False)
    assert rows_of(page) == ["ss" if name == LABEL else name for name in qa.method]
    assert button.locator("xpath=..").get_attribute("aria-sort") == "descending"
    page.locator("#matrix-table td[tabindex='0']").focus()
    first = page.locator("#matrix-note").text_content()
    page.keyboard.press("ArrowRight")
    second = page.locator("#matrix-note").text_content()
    assert "overall" in first + second and "95% CI" in first + second and first != second


@thorough
def test_the_order_of_the_matrix_is_in_the_address(running: Any, made: Path) -> None:
    page = Watched(running, made / "report.html")
    button = page.locator("#matrix-table thead button", has_text="qa")
    for way in ("", "&order=up"):
        button.click()
        address = page.evaluate("location.hash")
        assert address == f"#by=qa{way}"
        again = Watched(running, made / "report.html", address)
        assert rows_of(again) == rows_of(page) and again.errors == []
    odd, plain = (Watched(running, made / "report.html", address) for address in ("#by=no+such", ""))
    assert rows_of(odd) == rows_of(plain)


@thorough
def test_controls_are_folded_and_unfold_by_keyboard(running: Any, made: Path) -> None:
    page = Watched(running, made / "report.html")
    control = page.locator("#ranking-table tr.control")
    assert control.count() == 1 and not control.is_visible()
    page.locator("#ranking-table .fold").focus()
    page.keyboard.press("Enter")
    assert control.is_visible() and "ss-shared-ar" in control.text_content()


@thorough
def test_the_theme_is_switched_and_kept(running: Any, made: Path) -> None:
    page = Watched(running, made / "report.html", color_scheme="light")

    def colour() -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    light = colour()
    page.locator("#theme").focus()
    for _ in range(2):
        page.keyboard.press("Enter")
    assert page.locator("#theme").get_attribute("aria-label") == "Theme: dark" and colour() != light
    page.reload()
    assert page.locator("#theme").get_attribute("aria-label") == "Theme: dark" and colour() != light


def test_samples_are_filtered_sorted_and_opened_by_keyboard(running: Any, made: Path) -> None:
    page = Watched(running, made / "report.html")
    assert page.locator("#shown").text_content() == "40 of 40 prompts"
    page.locator("#filters select[name=task]").select_option("qa")
    assert page.locator("#shown").text_content() == "10 of 40 prompts"
    page.locator("#filters select[name=sort]").select_option("slowest")
    speeds = [float(text.split("×")[0]) for text in page.locator(".row .end > :last-child").all_text_contents()]
    assert speeds == sorted(speeds) and len(speeds) == 10
    page.locator("#list").focus()
    page.keyboard.press("End")
    shown = page.locator("#detail h3").text_content()
    assert shown == page.locator(".row[aria-selected=true] b").text_content()
    page.fill("#filters [name=search]", "another END qa-")
    assert page.locator("#shown").text_content() == "0 of 40 prompts"
    page.fill("#filters [name=search]", "another END")
    assert page.locator("#shown").text_content() == "1 of 40 prompts", "one output has this text"
    assert "search=another" in page.evaluate("location.hash")
    assert page.errors == []


@thorough
def test_prompts_on_which_methods_differ_most_come_first(running: Any, made: Path) -> None:
    page = Watched(running, made / "report.html", "#sort=differ")
    run = read_run(made)
    ms: dict[str, list[float]] = {}
    for row in run.rows:
        if row.method != "ar" and row.wall_s and row.tokens:
            ms.setdefault(f"{row.question_id}, turn {row.turn + 1}", []).append(row.wall_s / row.tokens)
    assert page.locator(".row b").first.text_content() == max(ms, key=lambda name: max(ms[name]) / min(ms[name]))


def test_the_list_draws_only_what_is_seen(seen: Watched) -> None:
    assert 5 < seen.locator("#rows .row").count() < 30


@thorough
def test_an_address_shows_what_it_showed_when_it_was_sent(running: Any, made: Path) -> None:
    page = Watched(running, made / "report.html")
    page.locator("#filters select[name=method]").select_option(label="medusa")
    page.locator("#filters select[name=task]").select_option("qa")
    page.locator("#list").focus()
    page.keyboard.press("End")
    page.keyboard.press("ArrowUp")
    address, shown = page.evaluate("location.hash"), page.locator("#detail h3").text_content()
    assert "sample=" in address and "method=medusa" in address
    again = Watched(running, made / "report.html", address)
    assert again.locator("#detail h3").text_content() == shown
    assert again.locator("#filters select[name=task]").input_value() == "qa"
    assert again.locator("#detail tr.now th").text_content() == "medusa"
    odd = Watched(running, made / "report.html", "#sample=no-such.7&method=none&sort=odd&task=%22%3E%3Cb%3E")
    assert odd.errors == [] and odd.locator("#shown").text_content() == "40 of 40 prompts", (
        "what is not there is left out"
    )


@thorough
def test_a_dot_opens_its_sample_by_keyboard(running: Any, made: Path) -> None:
    page = Watched(running, made / "report.html")
    page.evaluate("document.getElementById('scatter-of').open = true")
    page.locator("#scatter").scroll_into_view_if_needed()
    page.locator("#scatter .point").first.wait_for(state="attached")
    page.locator("#scatter").focus()
    page.keyboard.press("End")
    name = page.locator("#scatter-note").text_content().split(":")[0]
    page.keyboard.press("Enter")
    assert page.locator("#detail h3").text_content() == name


def test_hostile_texts_are_text(running: Any, made: Path) -> None:
    page = Watched(running, made / "report.html", "#sample=qa-2.0&method=medusa")
    text = page.locator("#detail").text_content()
    assert "</script><img src=x onerror=alert(1)>" in text and "⟨RIGHT-TO-LEFT OVERRIDE⟩txt.exe ⟨ESC⟩[31m" in text
    assert "שלום 👩\u200d👧" in text
    assert page.locator("#detail mark").text_content() == "another end", "from the first difference on"
    assert page.locator("a[href*='//x'], img, iframe").count() == 0
    legend = page.locator("#overview .abbreviations").text_content()
    assert "ss = ss[<a href=//x>⟨RIGHT-TO-LEFT OVERRIDE⟩evil</a>]" in legend
    page.goto((made / "report.html").as_uri() + "#sample=qa-1.0")
    page.reload()
    assert LONG.strip() in page.locator("#detail").text_content()
    assert page.errors == []


@pytest.mark.parametrize("harm", HARMS if THOROUGH else HARMS[:1], ids=lambda harm: harm.__name__)
def test_a_run_that_lacks_something_opens_too(running: Any, tmp_path: Path, harm: Callable[[Run], None]) -> None:
    run = read_run(fabricate(tmp_path / "run", questions=2))
    harm(run)
    HtmlReport().write(analyse(run), tmp_path / "report.html")
    page = Watched(running, tmp_path / "report.html")
    assert page.errors == [] and page.locator(".headline").text_content()
    page.locator("#filters select[name=method]").select_option(label="ss")
    page.locator("#filters select[name=sort]").select_option("differ")
    assert page.errors == [] and page.locator("#detail").text_content()


@thorough
def test_a_download_equals_the_frame_of_the_run(running: Any, made: Path, tmp_path: Path) -> None:
    page = Watched(running, made / "report.html")
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    with page.expect_download() as started:
        page.locator("button[data-csv=everything]").click()
    started.value.save_as(tmp_path / "everything.csv")
    got = pd.read_csv(tmp_path / "everything.csv").set_index(["task", "method"])
    frame = load_run(made).summary(all=True).set_index(["task", "method"])
    assert len(got) == len(frame)
    for column in ("speedup", "speedup_low", "speedup_high", "n_prompts"):
        for task, method in got.index:
            want = frame.loc[(task, method), column]
            assert got.loc[(task, method), column] == pytest.approx(want, nan_ok=True) if pd.notna(want) else True


@thorough
def test_it_prints_the_ranking_the_task_map_the_bar_and_the_record(running: Any, made: Path) -> None:
    pypdf = pytest.importorskip("pypdf", reason=f"the package pypdf is not installed: {EXTRA}")
    import io

    page = Watched(running, made / "report.html")
    pages = [one.extract_text() for one in pypdf.PdfReader(io.BytesIO(page.pdf(format="A4"))).pages]
    winner = page.locator("#ranking-table tbody tr:first-child th bdi").text_content()
    assert winner in pages[0] and "identical" in pages[0] and "Fingerprint" not in pages[0]
    text = " ".join(" ".join(pages).split())
    assert all(
        word in text for word in ("milliseconds per output token", "translation", "draft position", "Fingerprint")
    )
    assert "Search prompts" not in text and len(pages) <= 6
    assert page.locator("#record").get_attribute("open") is None, "folded again on the screen"


@thorough
def test_nothing_printed_is_wider_than_the_paper(running: Any, made: Path) -> None:
    page = Watched(running, made / "report.html")
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 700, "height": 900})  # A4 at 96 dots an inch, without its margins
    right = "all => Math.max(...all.map(one => one.getBoundingClientRect().right))"
    assert page.eval_on_selector_all("table, .pill, dd, p", right) <= 700


@thorough
@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_axe_finds_nothing(running: Any, made: Path, scheme: str, width: int) -> None:
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason=f"the package axe-playwright-python is not installed: {EXTRA}"
    )
    page = Watched(running, made / "report.html", color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 900})
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    found = axe.Axe().run(page.page).response["violations"]
    message = [(one["id"], one["impact"], [node["html"][:200] for node in one["nodes"][:3]]) for one in found]
    assert message == []


def lanes(page: Any) -> list[str]:
    return page.eval_on_selector_all(
        "#replay-stage .lane .readout:first-of-type", "all => all.map(one => one.textContent)"
    )


def test_the_replay_goes_from_step_to_step_by_keyboard_and_its_address_survives(running: Any, made: Path) -> None:
    page = Watched(running, made / "report.html")
    page.select_option("#replay-form [name=prompt]", index=1)
    page.select_option("#replay-form [name=first]", label="medusa")
    assert "after 0 of" not in lanes(page)[0] and page.locator("#replay-stage .word").count() > 10, (
        "it starts at the end"
    )
    page.focus("#replay-stage")
    page.keyboard.press("Home")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert "after 3 of" in lanes(page)[0]
    page.keyboard.press("ArrowLeft")
    address = page.evaluate("location.hash")
    assert "replay=" in address and "of=medusa" in address and "step=2" in address
    again = Watched(running, made / "report.html", address)
    assert lanes(again) == lanes(page) and "after 2 of" in lanes(again)[0]
    assert page.errors == again.errors == []
    page.keyboard.press("End")
    assert len(page.query_selector_all("#replay-stage .lane:first-child .word")) > 10
    assert page.locator("#replay-stage .node.rejected").count() > 0


@thorough
def test_the_replay_plays_and_the_slider_moves_it(running: Any, made: Path) -> None:
    page = Watched(running, made / "report.html")
    page.select_option("#replay-form [name=pace]", "1")
    page.click("#replay-form [name=play]")
    page.locator("#replay-form [name=play]", has_text="Play").wait_for(timeout=60_000)
    ended = lanes(page)
    page.fill("#replay-form [name=time]", "0")
    assert lanes(page) != ended and "1 token after 0 of" in lanes(page)[0]
    assert page.errors == []


@thorough
def test_the_samples_and_the_replay_share_the_address(running: Any, made: Path) -> None:
    page = Watched(running, made / "report.html", "#replay=qa-2.0&of=medusa&against=ar&step=1")
    page.focus("#list")
    page.keyboard.press("ArrowDown")
    address = page.evaluate("location.hash")
    assert "sample=" in address and "replay=qa-2.0" in address


def predicted(own: dict[str, float], plain: dict[str, float], **changes: float) -> float:
    """The speedup by docs/metrics.md, of the parts of a step and factors on them."""
    c = dict.fromkeys(("size", "bandwidth", "products", "launch", "acceptance", "nodes"), 1.0) | changes

    def step(one: dict[str, float]) -> float:
        wider, products = (1 + c["nodes"] * one["nodes"]) / (1 + one["nodes"]), c["size"] / c["products"]
        computed = (one["fixed_s"] + (one["product_s"] - one["fixed_s"]) * wider) * products
        launched = (one["overhead_s"] - one["rows_s"]) * c["launch"] + one["rows_s"] * c["nodes"] * products
        return max(one["read_s"] * c["size"] / c["bandwidth"], computed) + launched

    kept = min((own["tau"] - 1) * c["acceptance"], max(own["depth"], own["tau"] - 1))
    return (1 + kept) * step(plain) / step(own)


def test_the_page_predicts_by_the_formula(running: Any, made: Path) -> None:
    page = Watched(running, made / "report.html")
    found = page.evaluate("JSON.parse(document.getElementById('what-if-data').textContent)")
    medusa = next(one for one in found if one["method"] == "medusa")
    for change in ({}, {"size": 8.0, "launch": 0.25}, {"acceptance": 0.5, "nodes": 4.0, "products": 2.0}):
        expected = predicted(medusa, medusa["baseline"], **change)
        assert page.evaluate("change => WhatIf.speedup('medusa', change)", change) == pytest.approx(expected)
    page.evaluate("document.getElementById('what-if').open = true")
    page.fill("#what-if-form [name=size]", "3")
    page.dispatch_event("#what-if-form [name=size]", "change")
    assert "×8.00" in page.inner_text("#what-if-form") and "if-size=3" in page.evaluate("location.hash")
    again = Watched(running, made / "report.html", page.evaluate("location.hash"))
    assert again.inner_text("#what-if-table") == page.inner_text("#what-if-table")
    assert page.errors == again.errors == []
