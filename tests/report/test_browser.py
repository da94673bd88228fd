"""Pages in a real browser: headless Chromium, a desk's and a phone's width, light and dark."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from luthier.report.page import write

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser without a window."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here (Debian: apt-get install chromium)")
    driver = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
    with driver.sync_playwright() as running:
        started = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Callable[..., Any]:
    """Opens the report of some runs; whatever the page asks for, or complains of, is collected in `asked`, `errors`."""

    def visit(*folders: Path, width: int = 1200, scheme: str = "light") -> Any:
        write(folders, tmp_path / "report.html")
        page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
        page.asked, page.errors = [], []
        page.on("request", lambda request: page.asked.append(request.url))
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.on("console", lambda message: page.errors.append(message.text))
        page.goto((tmp_path / "report.html").as_uri())
        return page

    return visit


LOSSES = [3.0 / (1 + at / 9) + 0.1 * (at % 3) for at in range(60)]
HOSTILE = "</script><script>document.title = 'taken'</script><img src=x onerror=\"document.title='taken'\">"


def line(page: Any, run: int) -> str:
    """The path of a run in the first chart: the one that is drawn strongly."""
    found: str = page.locator(
        f".charts figure >> nth=0 >> path[stroke='var(--c{run})'][stroke-width='1.8']"
    ).get_attribute("d")
    return found


def test_curves_are_drawn_smoothed_and_switched_off(opened, run_at) -> None:
    page = opened(run_at("a", losses=LOSSES), run_at("b", losses=[loss + 1 for loss in LOSSES]))
    assert page.errors == []
    assert [url for url in page.asked if not url.startswith(("file:", "data:"))] == []
    before = line(page, 0)
    assert before.count("L") == 59
    dashes = [page.locator(f"path[stroke='var(--c{run})'][stroke-width='1.8'] >> nth=0") for run in (0, 1)]
    assert dashes[0].get_attribute("stroke-dasharray") != dashes[1].get_attribute("stroke-dasharray"), "without colour"
    page.evaluate(
        "() => { const it = document.getElementById('smooth'); it.value = 0; it.dispatchEvent(new Event('input')); }"
    )
    assert line(page, 0) != before, "not smoothed any more"
    page.locator("[data-run='1']").uncheck()
    assert page.locator(".charts figure >> nth=0 >> path[stroke='var(--c1)']").count() == 0
    page.locator(".charts figure svg >> nth=0").hover(position={"x": 1, "y": 40})
    assert "3 at step 10" in page.locator(".charts output >> nth=0").inner_text()


def test_smoothing_is_the_average_that_trackers_draw(opened, run_at) -> None:
    """With the weight 0.5 of the losses 4, 2, ...: 4, then (4 x 0.25 + 2 x 0.5) / 0.75 = 8 / 3."""
    page = opened(run_at("a", losses=[4.0, 2.0] + [2.0] * 8))
    page.evaluate(
        "() => { const it = document.getElementById('smooth'); it.value = 0.5; it.dispatchEvent(new Event('input')); }"
    )
    box = page.locator(".charts figure svg >> nth=0").bounding_box()
    at = 52 + (440 - 52 - 18) / 9  # of the second of ten points, in the drawing's own units
    page.mouse.move(box["x"] + at / 440 * box["width"], box["y"] + 40)
    assert page.locator(".charts output >> nth=0").inner_text() == "2.667 at step 20"


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
def test_a_curve_that_is_level_but_for_rounding_is_drawn(opened, run_at, scale: float) -> None:
    """Steps between such numbers are smaller than what a number can be raised by."""
    page = opened(run_at("a", losses=[scale * (0.1 + 0.2), scale * 0.3] * 5))
    assert page.errors == []
    assert line(page, 0).count("L") == 9
    heights = {float(point.split(" ")[1]) for point in line(page, 0)[1:].split("L")}
    assert heights == {101.0}, "the middle of 10 to 192"
    numbers = page.locator(".charts figure >> nth=0 >> text[text-anchor='end']").all_text_contents()
    assert len(set(numbers)) == len(numbers) >= 3


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_without_moving_sideways(opened, run_at, utterances, scheme: str) -> None:
    long = "word " * 60 + "x" * 300
    samples = [{"where": "a:1", "reference": long, "hypothesis": long[5:]}]
    slices = {"speaker": {str(at): {f"metric_{n}": 0.5 for n in range(12)} for at in range(3)}}
    page = opened(
        run_at("a" * 60, losses=LOSSES, samples=samples, metrics={"wer": 0.5, "slices": slices}),
        run_at("b", losses=LOSSES, learning_rate=2e-4),
        width=390,
        scheme=scheme,
    )
    assert page.errors == []
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    back, text = page.evaluate(
        "() => { const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]; }"
    )
    light, dark = "rgb(255, 255, 255)", "rgb(20, 23, 26)"
    assert back == (light if scheme == "light" else dark)
    assert text != back
    assert page.locator("h2").all_inner_texts() == [
        "Runs", "Curves", "Metrics", "Samples", "Data", "Parity of artifacts", "Environment", "Recipe",
    ]  # fmt: skip


def test_a_phone_has_completions_and_passages_below_their_numbers(opened, run_at) -> None:
    samples = [{"query": "what", "found 1": "0.874 + " + "a passage of some length " * 4, "found 2": "0.5 - short"}]
    folder = run_at("a", samples=samples)
    (folder / "rollouts").mkdir()
    rows = [
        {"step": 0, "where": "a:1", "prompt": "2+2", "completion": "four, I think " * 8, "reward": at / 2,
         "reward/number": at / 2, "reward/length": 0.0, "advantage": at - 0.5, "finished": True}
        for at in range(2)
    ]  # fmt: skip
    parquet.write_table(pa.Table.from_pylist(rows), folder / "rollouts" / "rollout-00000000.parquet")
    phone, desk = opened(folder, width=390), opened(folder)
    for page in (phone, desk):
        texts = page.locator("table.stacked td.text")
        boxes = [texts.nth(at).bounding_box() for at in range(texts.count())]
        assert len(boxes) == 4
        assert all(box["x"] >= 0 for box in boxes)
        assert all(box["x"] + box["width"] <= page.viewport_size["width"] for box in boxes), "nothing is cut"
        assert all(box["width"] >= (250 if page is phone else 190) for box in boxes), "wide enough to be read"
    assert phone.locator("table.stacked .name >> nth=0").inner_text().strip() == "reward"
    assert not desk.locator("table.stacked .name >> nth=0").is_visible(), "a desk has a head for each column"


def test_a_table_of_data_has_no_row_of_one_word_a_line(opened, run_at) -> None:
    folder = run_at("a")
    known = json.loads((folder / "data.json").read_text())
    known["validation"]["noted"] = {"cut at the longest length that the model takes": 3}
    (folder / "data.json").write_text(json.dumps(known))
    cell = opened(folder, width=390).locator("td.said >> nth=1")
    assert cell.bounding_box()["height"] < 120


def test_hostile_text_does_nothing(opened, run_at) -> None:
    folder = run_at("a", samples=[{"where": HOSTILE, "reference": HOSTILE, "hypothesis": HOSTILE}])
    with (folder / "curves.csv").open("a") as stream:
        stream.write('10,"' + HOSTILE.replace('"', '""') + '",1.0\n')
    page = opened(folder)
    assert page.errors == []
    assert page.title().startswith("Luthier: ")
    assert page.locator("img").count() == 0
    assert page.locator("figcaption").get_by_text(HOSTILE, exact=True).count() == 1
