"""The tab on which runs are watched, stopped, resumed, reported and exported."""

from __future__ import annotations

import json
import subprocess
from functools import partial
from typing import Any

import gradio as gr

from ..common.errors import LuthierError
from . import watching
from .jobs import Jobs, command, slug
from .place import Place

LOSS = "train/loss"
FORMATS = ("merged", "adapter", "onnx", "ctranslate2", "gguf")
"""Formats that are offered; others can be written."""


def runs_tab(place: Place, jobs: Jobs, tab: gr.Tab) -> None:
    """Build what is in the tab."""
    with gr.Row(elem_classes="ends"):
        run = gr.Dropdown([], label="run", interactive=True, elem_id="run", scale=3)
        name = gr.Dropdown(
            [LOSS], value=LOSS, label="curve", interactive=True, elem_id="curve", allow_custom_value=True, scale=2
        )
        refresh = gr.Button("look for runs", elem_id="refresh", scale=1)
    state = gr.Markdown("", elem_id="state")
    with gr.Row():
        stop = gr.Button("stop", variant="stop", elem_id="stop", min_width=90)
        resume = gr.Button("resume", elem_id="resume", min_width=90)
        report = gr.Button("report", elem_id="report", min_width=90)
    told = gr.Markdown("", elem_id="told")
    plot = gr.LinePlot(x="step", y="value", elem_id="plot", height=260)
    with gr.Row():
        log = gr.Textbox(label="log", lines=14, max_lines=14, elem_id="log", elem_classes="log", interactive=False)
        samples = gr.HTML("", label="samples", elem_id="samples", max_height=360)
    with gr.Row(elem_classes="ends"):
        checkpoint = gr.Dropdown(
            [], label="checkpoint (default: best)", interactive=True, elem_id="checkpoint", allow_custom_value=True
        )
        form = gr.Dropdown(
            list(FORMATS), value="merged", label="format", interactive=True, elem_id="format", allow_custom_value=True
        )
        target = gr.Textbox(label="new folder", placeholder="exported", elem_id="target")
        export = gr.Button("export", elem_id="export")
    exported = gr.Textbox(label="export", lines=6, elem_id="export-log", elem_classes="log", interactive=False)
    shown = [state, plot, log, samples, name, checkpoint, exported]
    look = partial(_look, place, jobs)
    gr.on([refresh.click, tab.select], partial(_found, place, jobs), [run], [run])
    run.change(look, [run, name], shown, show_progress="hidden")
    name.change(look, [run, name], shown, show_progress="hidden")
    stop.click(partial(_stop, place, jobs), [run], [told])
    resume.click(partial(_resume, place, jobs), [run], [told])
    report.click(partial(_report, place), [run], [told])
    export.click(partial(_export, place, jobs), [run, checkpoint, form, target], [told])
    gr.Timer(2).tick(look, [run, name], shown, show_progress="hidden")


def _found(place: Place, jobs: Jobs, current: str | None) -> Any:
    """The runs, those first that have only just been started."""
    begun = [name for name in reversed(jobs.names()) if not name.startswith("/")]
    names = [*(name for name in begun if jobs.is_running(name)), *place.runs(), *begun]
    names = list(dict.fromkeys(names))
    return gr.Dropdown(choices=names, value=current if current in names else next(iter(names), None))


def _look(place: Place, jobs: Jobs, run: str | None, name: str) -> Any:
    """What is shown of a run; nothing changes where nothing was picked."""
    if not run:
        return [gr.skip()] * 7
    found = watching.curves(place, run)
    points = found.get(name, [])
    last = f"step {points[-1][0]}, {name} {points[-1][1]:.4g}, {len(points)} points" if points else f"no {name} yet"
    state = jobs.state(run)
    return (
        f"**{watching.left(place, run) if state == 'not running' else state}** - {last}",
        watching.frame({run: points}),
        jobs.tail(run),
        watching.samples_shown(place, run),
        gr.Dropdown(choices=list(found) or [LOSS]),
        gr.Dropdown(choices=watching.checkpoints(place, run)),
        jobs.tail(f"/export/{run}"),
    )


def _stop(place: Place, jobs: Jobs, run: str) -> str:
    try:
        jobs.stop(run)
    except LuthierError as error:
        return f"```\n{error}\n```"
    return "asked to save and stop"


def _resume(place: Place, jobs: Jobs, run: str) -> str:
    """Go on in the run's own folder, also where the folder has been moved since and its recipe names another."""
    try:
        folder = place.inside(run or "")
        jobs.start(run, ["train", place.argument(folder / "recipe.yaml"), f"output={json.dumps(place.named(folder))}"])
    except LuthierError as error:
        return f"```\n{error}\n```"
    return "goes on"


def _report(place: Place, run: str) -> str:
    """Write the page of the run, and link it."""
    try:
        folder, file = place.inside(run or ""), place.own / f"{slug(run)}.html"
        wanted = command(["report", str(folder), "--output", str(file)])
        done = subprocess.run(wanted, capture_output=True, text=True, check=False, timeout=300)
    except (LuthierError, subprocess.TimeoutExpired) as error:
        return f"```\n{error}\n```"
    if done.returncode:
        return f"```\n{done.stderr[-2000:]}\n```"
    return f'<a href="/files/{file.name}" target="_blank" rel="noopener">open the report</a>'


def _export(place: Place, jobs: Jobs, run: str, checkpoint: str | None, form: str, target: str) -> str:
    try:
        source = place.inside(f"{run}/checkpoints/{checkpoint or 'best'}")
        folder = place.inside(target or f"{run}-{form}")
        if not source.exists():
            raise LuthierError("no such checkpoint", where=place.named(source))
        jobs.start(
            f"/export/{run}", ["export", place.argument(source), "--to", form, "--output", place.argument(folder)]
        )
    except LuthierError as error:
        return f"```\n{error}\n```"
    return f"exporting into `{place.named(folder)}`; the log below ends with what was found"
