"""A person at the page, in headless Chromium: from a recipe to an export. Pictures are left in `build/ui`."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TOKEN = "a-token-of-this-test"
PATIENCE = 600_000
"""Milliseconds to wait for what a run does; a machine may be busy."""

RECIPE = """
task: {kind: llm.sft}
model: {path: model}
data:
  train: train.jsonl
  validation: validation.jsonl
  max_length: 128
  workers: 0
  batch: {examples: 4}
optim: {learning_rate: 2e-3, schedule: constant, warmup: 0}
train: {steps: 150, log_every: 1, accelerator: cpu, threads: 1}
evaluate: {every: 75, limit: 8, generate: {max_new_tokens: 8}}
checkpoint: {every: 25}
output: runs/demo
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (Debian: apt-get install chromium)"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The demo: a toy model, rows, a recipe."""
    from luthier.modalities.llm.arithmetic.model import make_model

    rows = [
        {"messages": [{"role": "user", "content": f"What is {n} + 1?"}, {"role": "assistant", "content": f"{n + 1}."}]}
        for n in range(56)
    ]
    for name, part in (("train", rows[:48]), ("validation", rows[48:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    make_model(tmp_path / "model", [row["messages"][0]["content"] for row in rows])
    (tmp_path / "demo.yaml").write_text(RECIPE)
    return tmp_path


@pytest.fixture
def address(folder: Path) -> Iterator[str]:
    """The page, served as the verb serves it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "LUTHIER_UI_TOKEN": TOKEN, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "luthier", "ui", str(folder), "--port", str(port)]
    with (folder / "page.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env)
        try:
            _wait_for(port, server, folder / "page.log")
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(60)


def _wait_for(port: int, server: Any, log: Path) -> None:
    begun = time.monotonic()
    while time.monotonic() - begun < PATIENCE / 1000:
        assert server.poll() is None, log.read_text()
        try:
            with socket.create_connection(("127.0.0.1", port), 1):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(log.read_text())


def test_a_person_trains_with_the_page(address: str, folder: Path) -> None:
    from playwright.sync_api import sync_playwright

    pictures = ROOT / "build" / "ui"
    pictures.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1400, "height": 1000})
        page.set_default_timeout(PATIENCE)
        try:
            _session(page, address, folder, pictures)
        except BaseException:
            page.screenshot(path=pictures / "failed.png", full_page=True)
            raise
        finally:
            browser.close()


def _session(page: Any, address: str, folder: Path, pictures: Path) -> None:
    def picture(name: str) -> None:
        page.screenshot(path=pictures / f"{name}.png", full_page=True)

    def pick(where: str, value: str) -> None:
        box = page.locator(f"#{where} input").first
        box.click()
        box.fill(value)
        page.get_by_role("option", name=value, exact=True).first.click()

    def told(where: str, text: str) -> None:
        page.locator(f"#{where}").filter(has_text=text).wait_for()

    assert page.goto(address).status == 401  # without the token
    assert "luthier ui" in page.content()
    page.goto(f"{address}/?token={TOKEN}")
    assert "token" not in page.url

    # picks the demo recipe
    pick("recipe", "demo.yaml")
    told("problem", "valid")
    told("text", "llm.sft")
    picture("1-recipe")

    # changes a field wrongly, and sees why
    page.locator("#section").get_by_text("optim", exact=True).click()
    rate = page.locator("#field-optim-learning_rate").locator("textarea, input").first
    rate.fill("fast")
    rate.blur()
    told("problem", "not valid")
    told("problem", "optim.learning_rate")
    told("problem", "fast")
    picture("2-wrong")
    page.locator("#start").click()
    told("problem", "not started")
    assert not (folder / "runs").exists()

    # rightly
    rate = page.locator("#field-optim-learning_rate").locator("textarea, input").first
    rate.fill("0.003")
    rate.blur()
    page.locator("#problem").get_by_text("valid", exact=True).wait_for()
    told("text", "0.003")

    # has it checked, and starts meanwhile
    page.locator("#check").click()
    told("problem", "checking")
    page.locator("#start").click()
    told("problem", "started")
    run = folder / "runs" / "demo"
    page.get_by_role("tab", name="runs").click()
    told("state", "running")  # also before the run has written anything
    _until(lambda: (run / "run.json").exists() and (run / "curves.csv").exists(), folder)
    page.locator("#refresh").click()

    # watches the curve move
    page.wait_for_function("() => /step (\\d+)/.test(document.querySelector('#state').innerText)")
    first = _step(page)
    page.wait_for_function(
        f"() => +(/step (\\d+)/.exec(document.querySelector('#state').innerText) || [0, 0])[1] > {first + 10}"
    )
    assert page.locator("#plot").locator("svg, canvas").count() > 0
    picture("3-running")

    # stops, with the run resumable
    page.locator("#stop").click()
    told("state", "stopped, resumable")
    stopped = _step(page)
    assert stopped < 150
    kept = sorted(one.name for one in (run / "checkpoints").glob("step-*") if (one / "COMMIT").exists())
    assert kept, page.locator("#log textarea").input_value()
    picture("4-stopped")

    # opens the page anew, and resumes
    page.reload()
    page.get_by_role("tab", name="runs").click()
    told("state", "stopped, resumable")
    page.locator("#resume").click()
    told("told", "goes on")
    told("state", "done")
    assert _step(page) == 150
    assert json.loads((run / "metrics.json").read_text())["step"] in (75, 150)
    told("samples", "answer")
    picture("5-done")

    # opens the report
    page.locator("#report").click()
    link = page.locator("#told a")
    link.wait_for()
    with page.expect_popup() as opened:
        link.click()
    opened.value.wait_for_load_state()
    assert "demo" in opened.value.content()
    opened.value.screenshot(path=pictures / "6-report.png", full_page=True)

    # compares, exports
    page.locator("#target").locator("textarea, input").first.fill("../elsewhere")
    page.locator("#export").click()
    told("told", "outside")
    page.locator("#target").locator("textarea, input").first.fill("exported")
    page.locator("#export").click()
    told("told", "exporting")
    _until(lambda: (folder / "exported" / "parity.json").exists(), folder)
    page.wait_for_timeout(3000)
    picture("7-exported")
    page.get_by_role("tab", name="compare").click()
    page.locator("#compared-refresh").click()
    pick("compared", "runs/demo")
    told("compared-metrics", "loss")
    picture("8-compared")

    # has read what the check found; all of it fits a phone too
    page.get_by_role("tab", name="recipe").click()
    told("answers", "passed")
    assert "not passed" not in page.locator("#answers").inner_text()
    picture("9-checked")
    page.set_viewport_size({"width": 390, "height": 844})
    for tab in ("recipe", "runs", "compare"):
        page.get_by_role("tab", name=tab).click()
        page.wait_for_timeout(1500)
        picture(f"phone-{tab}")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, tab


def _step(page: Any) -> int:
    return int(page.locator("#state").inner_text().split("step ")[1].split(",")[0])


def _until(done: Any, folder: Path) -> None:
    begun = time.monotonic()
    while not done():
        logs = "".join(file.read_text()[-3000:] for file in (folder / ".luthier-ui").glob("*.log"))
        assert time.monotonic() - begun < PATIENCE / 1000, logs
        time.sleep(0.5)


def test_the_verb_listens_on_this_machine_only(address: str) -> None:
    """The address of another interface does not answer, and a name that points here is refused."""
    port = address.rpartition(":")[2]
    request = urllib.request.Request(f"{address}/?token={TOKEN}", headers={"Host": f"evil.example:{port}"})
    with pytest.raises(urllib.error.HTTPError, match="421"):
        urllib.request.urlopen(request)
    own = socket.gethostbyname(socket.gethostname())
    if own.startswith("127."):
        pytest.skip("this machine has no other address")
    with pytest.raises(OSError, match="refused"), socket.create_connection((own, int(port)), 2):
        pass
