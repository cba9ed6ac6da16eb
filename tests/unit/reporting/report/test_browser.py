"""The report in a browser: curves are drawn, filters and keys work, hostile texts stay texts.

Needs Chromium and Playwright; skipped with the name of what is missing.
"""

import shutil
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from mindspeed_rlxf.cli.watch import make_server
from mindspeed_rlxf.reporting.jsonl import JsonlWriter, metrics_record
from mindspeed_rlxf.reporting.report.page import RunFolder, make_report
from tests.report_run import HAN, damage, metrics_of, write_run

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
if CHROMIUM is None:
    pytest.skip("Chromium is not installed", allow_module_level=True)
sync_api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
pytestmark = pytest.mark.xdist_group("browser")


def split(ids: list[int]) -> list[str]:
    """Letters, of which every tenth belongs to the character of the next token."""
    return ["" if i % 10 == 5 else chr(0x4E00 + token) for i, token in enumerate(ids)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunFolder]:
    folder = tmp_path_factory.mktemp("runs")
    damage(first := write_run(folder / "first"))
    second = write_run(folder / "second", 30, rise=0.2, lr=0.25)
    return [RunFolder(first, "first", "running", split), RunFolder(second, "second", "finished")]


@pytest.fixture(scope="module")
def report(runs: list[RunFolder], tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_bytes(make_report(runs).encode("utf-8", "backslashreplace"))
    return file.as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu"]  # of root in a container
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


def open_page(browser: Any, url: str, said: list[str], **settings: Any) -> Any:
    """Open a page without network; what it says to the console goes to `said`."""
    page = browser.new_page(viewport={"width": 1280, "height": 900}, **settings)
    page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: said.append(f"error: {error}"))
    page.on("request", lambda request: said.append(request.url) if request.url != url else None)
    page.goto(url)
    page.wait_for_selector("body[data-ready]")
    return page


@pytest.fixture(scope="module")
def opened(browser: Any, report: str) -> Iterator[tuple[Any, list[str]]]:
    said: list[str] = []
    page = open_page(browser, report, said)
    yield page, said
    page.close()


@pytest.fixture
def page(opened: tuple[Any, list[str]]) -> Iterator[Any]:
    """The same page for each test, which says nothing and asks for nothing."""
    page, said = opened
    yield page
    assert said == []


def see(page: Any, place: str) -> Any:
    """Scroll to an element and return its locator."""
    found = page.locator(place).first
    found.scroll_into_view_if_needed()
    return found


def plotted(page: Any, chart: str) -> dict[str, list[float]]:
    """Return label -> values of the lines that a chart draws, once it is drawn."""
    page.wait_for_function("chart => document.querySelector(chart).plot", arg=f"{chart} .plot")
    script = """chart => { const plot = document.querySelector(chart).plot;
        return plot.series.map((each, i) => [each.label, Array.from(plot.data[i])]); }"""
    found = page.evaluate(script, f"{chart} .plot")
    return {label: values for label, values in found[1:] if label != "Value"}


def test_the_first_screen_answers_and_draws_curves_of_both_runs(page):
    assert page.locator(".answer .short").all_inner_texts()[0] == "yes"
    chart = see(page, "#key-charts .chart")
    assert plotted(page, "#key-charts .chart").keys() == {"first", "second"}
    assert "first: " in chart.locator(".plot").get_attribute("aria-label")
    assert page.locator(".answer h3").all_inner_texts()[3] == "Is anything unhealthy?"
    assert page.locator("#subject").inner_text() == "PPO, model tiny"
    assert "of 40 iterations, 1 min 21 s" in page.locator("#summary > div").nth(0).inner_text()
    kl = see(page, "#key-charts .chart:has-text('critic/kl')").inner_text()
    assert "healthy at most 1" in kl
    page.click("button:has(.swatch):has-text('second')")
    assert plotted(page, "#key-charts .chart").keys() == {"first"}
    page.click("button:has(.swatch):has-text('second')")


def test_a_curve_is_read_and_zoomed_by_keys(page):
    svg = see(page, "#key-charts .chart .plot")
    readout = page.locator("#key-charts .chart output").first
    svg.focus()
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    assert readout.inner_text().startswith("iteration 40: first 0.")
    page.keyboard.press("+")
    status = page.locator("#summary .controls [role=status]")
    assert status.inner_text() == "iterations 30 to 41"
    page.keyboard.press("0")
    assert page.locator("#reset-zoom").is_disabled()


def test_metrics_are_found_by_name(page):
    see(page, "#curves")
    assert "Training by data source" in page.inner_text("#curves")
    page.fill("#metric-search", "grad")
    assert page.locator("#curves .chart h3").all_inner_texts() == ["actor/grad_norm"]
    assert "Same values: critic/grad_norm" in page.locator("#curves .chart").inner_text()
    page.fill("#metric-search", "slowest")
    assert plotted(page, "#curves .chart")["first"][:4] == [1, 0, 1, 0], "ranks have no mean"
    page.fill("#metric-search", "no such")
    assert "No metric" in page.locator("#curves").inner_text()
    page.fill("#metric-search", "")


def test_phases_are_drawn_and_read(page):
    phases = see(page, "#phases .plot")
    stacked = plotted(page, "#phases")
    assert len(stacked) == 7 and stacked["update_actor"][0] > stacked["gen"][0] > 0
    phases.focus()
    page.keyboard.press("Home")
    assert "iteration 1: gen 0.252" in page.inner_text("#phases output")
    assert "gen 0.2" in page.locator("#time-legend").inner_text()


def test_samples_are_filtered_searched_and_walked_by_keys(page):
    count = see(page, "#sample-count")
    assert count.inner_text() == "175 of 175 samples"
    page.select_option("[data-filter=kind]", "training")
    page.fill("[data-filter=from]", "40")
    assert count.inner_text() == "4 of 175 samples"
    page.fill("[data-filter=low]", "1")
    assert count.inner_text() == "2 of 175 samples"
    page.fill("[data-filter=low]", "")
    page.focus("#samples .list")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("j")
    selected = page.locator("#samples [aria-selected=true]").inner_text()
    assert "plain" in selected and "plain"[0] in page.locator("#sample").inner_text()
    page.click("#clear-filters")
    assert count.inner_text() == "175 of 175 samples"


def test_tokens_have_colours_and_their_numbers_by_keys(page):
    see(page, "#samples")
    page.select_option("[data-filter=kind]", "training")
    tokens = page.locator("#sample .text[role=group]")
    assert tokens.locator(".tok").count() == len(HAN) - 1, "the sixth belongs to the seventh"
    tokens.focus()
    page.keyboard.press("ArrowRight")
    said = page.locator("#sample output").inner_text()
    assert said.startswith(f"token 1 of {len(HAN)}") and "Advantage 0, KL 0.842" in said
    page.click("#sample button:has-text('KL')")
    assert "--above" in tokens.locator(".tok").nth(1).get_attribute("style")
    assert "full colour from 0.992" in page.inner_text("#sample"), "of the tokens of all samples"
    page.select_option("[data-filter=kind]", "")


def test_hostile_texts_stay_texts(page):
    see(page, "#samples")
    page.fill("[data-filter=text]", "onerror")
    shown = page.locator("#sample").inner_text()
    assert "prompt 1: </script><img src=x" in shown
    assert page.evaluate("window.hacked") is None and page.locator("img").count() == 0
    assert "\u202e" not in shown and "\x1b" not in shown
    page.fill("[data-filter=text]", "")


def test_configurations_show_their_differences(page):
    see(page, "#config")
    rows = page.locator("#config tbody tr").all_inner_texts()
    assert [row.split("\t") for row in rows if "lr" in row] == [["actor_rollout.lr", "0.5", "0.25"]]
    assert not any("best_metric" in row for row in rows)


def test_nothing_is_wider_than_a_narrow_screen_in_the_dark(browser, report):
    said: list[str] = []
    page = open_page(browser, report, said, color_scheme="dark")
    page.set_viewport_size({"width": 380, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") == 380
    dark = "getComputedStyle(document.body).backgroundColor"
    before = page.evaluate(dark)
    page.click("#theme")
    assert page.evaluate(dark) != before and said == []
    page.close()


def test_a_live_page_shows_what_the_run_writes(browser, tmp_path):
    run = write_run(tmp_path / "run", 6)
    server = make_server(run, 50, 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        said: list[str] = []
        url = f"http://127.0.0.1:{server.server_port}/"
        page = open_page(browser, url, said)
        assert "6 of 6 iterations" in page.locator("#summary").inner_text()
        JsonlWriter(run / "metrics.jsonl").write(metrics_record(7, metrics_of(7), 1.0))
        page.locator("#summary", has_text="7 of 6 iterations").wait_for()
        assert not [line for line in said if not line.startswith(url)]
        page.close()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
