"""What the page is made of, without a browser: who may speak to it, where it reads and writes, fields, processes."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from luthier.common.errors import LuthierError
from luthier.common.fields import field_at, fields
from luthier.common.reading import config_of
from luthier.ui import checking, editing, jobs, watching
from luthier.ui.guard import Guard
from luthier.ui.place import Place

TOKEN = "a-token-of-this-test"
HERE = "127.0.0.1:7878"


def client(app: Any, cookie: bool = False) -> TestClient:
    found = TestClient(app, base_url=f"http://{HERE}", follow_redirects=False)
    if cookie:
        found.cookies.set("luthier_7878", TOKEN)
    return found


@pytest.fixture
def guarded() -> Guard:
    app = Starlette(
        routes=[Route("/{path:path}", lambda request: PlainTextResponse("inside"), methods=["GET", "POST"])]
    )
    return Guard(app, TOKEN, [HERE, "localhost:7878"])


def test_without_a_token_nothing_is_seen(guarded: Guard) -> None:
    for path in ("/", "/?token=", "/?token=wrong", "/files/a.html", f"/files/a.html?token={TOKEN}", "/gradio_api/info"):
        answer = client(guarded).get(path)
        assert answer.status_code == 401, path
        assert "inside" not in answer.text
    assert client(guarded).post(f"/?token={TOKEN}").status_code == 401
    wrong = client(guarded)
    wrong.cookies.set("luthier_7878", TOKEN + "x")
    assert wrong.get("/").status_code == 401


def test_the_token_becomes_a_cookie_that_scripts_and_other_sites_can_not_use(guarded: Guard) -> None:
    answer = client(guarded).get(f"/?token={TOKEN}")
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    assert set(answer.headers["set-cookie"].split("; ")[1:]) == {"Path=/", "HttpOnly", "SameSite=Strict"}
    assert client(guarded, cookie=True).get("/").text == "inside"
    beside = {"cookie": f'other={{"a": 1}}; luthier_7878={TOKEN}'}  # of another server of this machine
    assert client(guarded).get("/", headers=beside).text == "inside"


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:7878", "127.0.0.1", "127.0.0.1:80", "localhost.evil:7878", ""]
)
def test_other_hosts_are_refused_even_with_the_token(guarded: Guard, host: str) -> None:
    answer = client(guarded, cookie=True).get("/", headers={"host": host})
    assert answer.status_code == 421
    assert "inside" not in answer.text


def test_pages_of_other_origins_are_refused(guarded: Guard) -> None:
    page = client(guarded, cookie=True)
    assert page.post("/x", headers={"origin": "http://evil.example"}).status_code == 403
    for other in ("null", "", "http://[", f"http://{HERE}.evil.example", f"http://evil.example@{HERE}"):
        assert page.post("/x", headers={"origin": other}).status_code == 403, other
    assert page.post("/x", headers={"origin": f"http://{HERE}"}).status_code == 200


def test_pictures_and_frames_of_other_pages_are_refused_too(guarded: Guard) -> None:
    """They say no `Origin`, and servers of one machine share its cookies whatever their port."""
    page = client(guarded, cookie=True)
    for site in ("cross-site", "same-site"):
        assert page.get("/x", headers={"sec-fetch-site": site, "sec-fetch-mode": "no-cors"}).status_code == 403
        opened = page.get("/x", headers={"sec-fetch-site": site, "sec-fetch-mode": "navigate"})
        assert opened.status_code == 200
        assert opened.headers["x-frame-options"] == "DENY"
    assert page.get("/x", headers={"sec-fetch-site": "same-origin", "sec-fetch-mode": "cors"}).status_code == 200


# ------------------------------------------------------------------------------------------------ places


OUTSIDE = ["..", "../x", "/etc/passwd", "a/../../x", "~/x", ".", "", "link/passwd", "link"]


@pytest.mark.parametrize("name", [*OUTSIDE, "circle/x", "~nobody-here/x", "a\0b"])
def test_paths_outside_are_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "link").symlink_to("/etc")
    (folder / "circle").symlink_to(folder / "circle")
    with pytest.raises(LuthierError, match="outside"):
        Place(folder).inside(name)


def test_the_page_does_not_write_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / ".luthier-ui").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LuthierError, match="link"):
        Place(tmp_path / "work")


def test_recipes_and_runs_of_a_folder(tmp_path: Path) -> None:
    for name in ("a.yaml", "sub/b.yaml", "run/recipe.yaml", ".hidden/c.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("task: {kind: llm.sft}\n")
    (tmp_path / "run" / "run.json").write_text("{}")
    place = Place(tmp_path)
    assert place.recipes() == ["a.yaml", "sub/b.yaml"]
    assert place.runs() == ["run"]


# ------------------------------------------------------------------------------------------------ fields

TREE = {"task": {"kind": "llm.sft"}, "model": {"path": "m"}, "data": {"train": "t.jsonl"}, "output": "runs/a"}


def test_every_field_of_a_kind_has_an_entry_with_its_description() -> None:
    config = config_of("llm.sft")
    there = [entry for section in editing.sections(TREE) for entry in editing.entries(TREE, section)]
    assert [entry.place for entry in there] == [place for place, _ in fields(config)]
    described = [entry for entry in there if entry.place != "task.kind"]
    assert all(entry.description for entry in described)
    assert field_at(config, "model.lora.rank") is not None
    assert field_at(config, "model.lora.nothing") is None


def test_entries_show_values_defaults_and_choices() -> None:
    shown = {entry.place: entry for entry in editing.entries({**TREE, "optim": {"learning_rate": 0.5}}, "optim")}
    assert (shown["optim.learning_rate"].text, shown["optim.learning_rate"].is_set) == ("0.5", True)
    assert (shown["optim.weight_decay"].text, shown["optim.weight_decay"].is_set) == ("0.01", False)
    assert "cosine" in shown["optim.schedule"].choices
    assert shown["optim.betas"].text == "[0.9, 0.999]"


def test_a_wrong_value_is_explained_and_a_right_one_taken(tmp_path: Path) -> None:
    place = Place(tmp_path)
    wrong = editing.changed(TREE, "optim.learning_rate", "-1")
    told = editing.problem(place, wrong)
    assert told is not None
    assert "optim.learning_rate" in told
    assert "greater than 0" in told
    right = editing.changed(wrong, "optim.learning_rate", "2e-4")
    assert float(right["optim"]["learning_rate"]) == 2e-4  # as text, which recipes take too
    assert editing.problem(place, right) is None
    assert editing.changed(right, "optim.learning_rate", "")["optim"] == {}
    assert "optim" not in TREE  # the tree that was given stays


def test_an_output_outside_of_the_folder_is_a_problem(tmp_path: Path) -> None:
    told = editing.problem(Place(tmp_path), {**TREE, "output": "../elsewhere"})
    assert told is not None
    assert "outside" in told


def test_recipes_that_ship_can_be_opened_and_files_elsewhere_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "secret.yaml").write_text("task: {kind: llm.sft}\n")
    place = Place(tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")  # as `serve` does
    assert editing.opened(place, "llm/sft")["task"]["kind"] == "llm.sft"
    for name in ("../secret.yaml", str(tmp_path / "secret.yaml"), ".hidden/a.yaml"):
        with pytest.raises(LuthierError, match="no such recipe"):
            editing.opened(place, name)


# ------------------------------------------------------------------------------------------------ processes


def test_a_job_runs_is_stopped_and_found_by_another_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(143))\n"
    script += "print('begun', flush=True)\ntime.sleep(60)\n"
    monkeypatch.setattr(jobs.sys, "executable", _wrapped(tmp_path, script))
    (tmp_path / "work").mkdir()
    place = Place(tmp_path / "work")
    page = jobs.Jobs(place)
    assert page.state("runs/a") == "not running"
    page.start("runs/a", ["train", "x"])
    _until(lambda: "begun" in page.tail("runs/a"))
    assert page.tail("runs/a").startswith("$ luthier train x")
    with pytest.raises(LuthierError, match="already"):
        page.start("runs/a", ["train", "x"])
    other = jobs.Jobs(place)  # the page opened anew
    assert other.state("runs/a") == "running"
    other.stop("runs/a")
    _until(lambda: not page.is_running("runs/a"))
    assert page.state("runs/a") == "stopped, resumable"
    assert other.state("runs/a") == "not running"
    other.start("runs/a", ["train", "x"])  # the first page has to know
    assert page.state("runs/a") == "running"
    with pytest.raises(LuthierError, match="already"):
        page.start("runs/a", ["train", "x"])
    _until(lambda: "begun" in page.tail("runs/a"))
    page.stop("runs/a")
    _until(lambda: not other.is_running("runs/a"))
    with pytest.raises(LuthierError, match="does not run"):
        page.stop("runs/a")


def _wrapped(folder: Path, script: str) -> str:
    """A program that takes the place of Python, and runs a script whatever it is asked."""
    (folder / "script.py").write_text(script)
    file = folder / "python"
    file.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{folder / "script.py"}" "$@"\n')
    file.chmod(0o755)
    return str(file)


def _until(done: Any, seconds: float = 30) -> None:
    begun = time.monotonic()
    while not done():
        assert time.monotonic() - begun < seconds
        time.sleep(0.05)


def test_names_of_jobs_give_different_files() -> None:
    names = ["runs/a", "runs-a", "/export/runs/a", "check", checking.CHECK, "实验一", "实验二", "../a"]
    files = {jobs.slug(name) for name in names}
    assert len(files) == len(names)
    assert not any("/" in file or file.startswith((".", "-")) for file in files)


def test_a_training_is_not_told_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs.sys, "executable", _wrapped(tmp_path, "import os\nprint(sorted(os.environ), 'end')\n"))
    monkeypatch.setenv(jobs.TOKEN, TOKEN)
    (tmp_path / "work").mkdir()
    page = jobs.Jobs(Place(tmp_path / "work"))
    page.start("runs/a", ["train", "x"])
    _until(lambda: "] end" in page.tail("runs/a"))
    assert "PATH" in page.tail("runs/a")
    assert jobs.TOKEN not in page.tail("runs/a")
    assert page.names() == ["runs/a"]


def test_what_a_check_has_found_is_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {"name": "data.train", "state": "fail", "found": "<b> & 3 rows", "do": "look"}
    questions = [{"question": "data", "asks": "Is it whole?", "state": "fail", "answers": [answer]}]
    written = json.dumps({"passed": False, "questions": questions})
    script = f"import sys\nopen(sys.argv[sys.argv.index('--json') + 1], 'w').write({written!r})\n"
    monkeypatch.setattr(jobs.sys, "executable", _wrapped(tmp_path, script))
    (tmp_path / "work").mkdir()
    place = Place(tmp_path / "work")
    page = jobs.Jobs(place)
    assert checking.shown(place, page) == ""
    checking.start(place, page, "a.yaml")
    _until(lambda: "checking" not in checking.shown(place, page))
    found = checking.shown(place, page)
    assert "not passed" in found
    assert "✗ fail" in found
    assert "&lt;b&gt; &amp; 3 rows" in found
    assert "do: look" in found
    assert page.state(checking.CHECK) == "done"
    (place.own / "check.json").unlink()  # as of a check that failed before it could answer
    assert "$ luthier check" in checking.shown(place, page)


def test_a_process_with_the_number_of_an_ended_one_is_not_taken_for_it(tmp_path: Path) -> None:
    place = Place(tmp_path)
    (place.own / "jobs.json").write_text(f'{{"a": {{"pid": {os.getpid()}, "begun": 1.0}}}}')
    assert not jobs.Jobs(place).is_running("a")


# ------------------------------------------------------------------------------------------------ runs


def test_curves_metrics_and_samples_are_read(tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "samples").mkdir(parents=True)
    rows = "".join(f"{step},train/loss,{1 / step:.8g}\n" for step in range(1, 1500))
    (run / "curves.csv").write_text(f"step,name,value\n{rows}5,train/speed,nan\n1500,train/loss")
    (run / "metrics.json").write_text('{"loss": 0.5, "slices": {}}')
    (run / "samples" / "step-00000002.json").write_text('[{"answer": "a"}]')
    place = Place(tmp_path)
    found = watching.curves(place, "run")
    assert found["train/loss"][:2] == [(1, 1.0), (2, 0.5)]
    assert "train/speed" not in found
    drawn = watching.thinned(found["train/loss"])
    assert len(drawn) <= watching.POINTS + 1
    assert drawn[-1] == found["train/loss"][-1]
    assert watching.metrics(place, "run") == {"loss": 0.5}
    assert watching.samples(place, "run") == ("step-00000002", [{"answer": "a"}])
    shown = watching.samples_shown(place, "run")
    assert "<b>step-00000002</b>" in shown
    assert "<dt>answer</dt><dd>a</dd>" in shown
    frame = watching.frame({"run": found["train/loss"]})
    assert list(frame.columns) == ["step", "value", "run"]


def test_how_a_run_was_left_is_read_from_its_folder(tmp_path: Path) -> None:
    """For a page that is opened anew, which was not there when the process ended."""
    place, run = Place(tmp_path), tmp_path / "run"
    (run / "checkpoints" / "step-00000002").mkdir(parents=True)
    (run / "run.json").write_text("{}")
    assert watching.left(place, "run") == "not running"
    (run / "checkpoints" / "step-00000002" / "COMMIT").write_text("")
    assert watching.left(place, "run") == "stopped, resumable"
    (run / "run.json").write_text('{"position": {}}')
    assert watching.left(place, "run") == "done"
    assert watching.samples_shown(place, "run") == "<p>no samples yet</p>"


@pytest.mark.slow  # Gradio takes long to import
def test_only_reports_are_served_and_only_behind_the_guard(tmp_path: Path) -> None:
    pytest.importorskip("gradio")
    from luthier.ui.server import application

    place = Place(tmp_path)
    (place.own / "a.html").write_text("<p>report</p>")
    (place.own / "a.log").write_text("log")
    (tmp_path / "b.html").write_text("other")
    app = application(place, TOKEN, [HERE])
    assert client(app).get("/files/a.html").status_code == 401
    page = client(app, cookie=True)
    answer = page.get("/files/a.html")
    assert answer.text == "<p>report</p>"
    assert answer.headers["content-security-policy"].startswith("sandbox")
    for name in ("a.log", "../b.html", "%2e%2e/b.html", "%2e%2e%2fb.html", "/etc/passwd", "nothing.html"):
        assert page.get(f"/files/{name}").status_code in (403, 404), name
    assert page.get("/").status_code == 200
    assert "Luthier" in page.get("/").text
    for name in ("/etc/passwd", str(tmp_path / "b.html"), str(place.own / "jobs.json")):
        assert page.get(f"/gradio_api/file={name}").status_code in (403, 404), name
