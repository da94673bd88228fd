"""The tab on which runs are watched, stopped, resumed, reported and exported."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from typing import Any

import gradio as gr

from ..common.errors import LuthierError
from . import watching
from .jobs import Jobs, slug
from .place import Place

LOSS = "train/loss"
FORMATS = ("merged", "adapter", "onnx", "ctranslate2", "gguf")
"""Formats that are offered; others can be written."""


def runs_tab(place: Place, jobs: Jobs) -> None:
    """Build the tab."""
    with gr.Row():
        run = gr.Dropdown([], label="run", interactive=True, elem_id="run", scale=3)
        name = gr.Dropdown(
            [LOSS], value=LOSS, label="curve", interactive=True, elem_id="curve", allow_custom_value=True, scale=2
        )
        refresh = gr.Button("look for runs", elem_id="refresh", scale=1)
    state = gr.Markdown("", elem_id="state")
    with gr.Row():
        stop = gr.Button("stop", variant="stop", elem_id="stop")
        resume = gr.Button("resume", elem_id="resume")
        report = gr.Button("report", elem_id="report")
    told = gr.Markdown("", elem_id="told")
    plot = gr.LinePlot(x="step", y="value", elem_id="plot", height=260)
    with gr.Row():
        log = gr.Textbox(label="log", lines=14, max_lines=14, elem_id="log", interactive=False, autoscroll=True)
        samples = gr.JSON(label="samples", elem_id="samples", max_height=330)
    with gr.Row():
        checkpoint = gr.Dropdown(
            [], label="checkpoint", interactive=True, elem_id="checkpoint", allow_custom_value=True
        )
        form = gr.Dropdown(
            list(FORMATS), value="merged", label="format", interactive=True, elem_id="format", allow_custom_value=True
        )
        target = gr.Textbox(label="new folder", placeholder="exported", elem_id="target")
        export = gr.Button("export", elem_id="export")
    exported = gr.Textbox(label="export", lines=6, elem_id="export-log", interactive=False)
    shown = [state, plot, log, samples, name, checkpoint, exported]
    look = partial(_look, place, jobs)
    refresh.click(partial(_found, place, jobs), [run], [run])
    run.change(look, [run, name], shown, show_progress="hidden")
    name.change(look, [run, name], shown, show_progress="hidden")
    stop.click(partial(_stop, place, jobs), [run], [told])
    resume.click(partial(_resume, place, jobs), [run], [told])
    report.click(partial(_report, place), [run], [told])
    export.click(partial(_export, place, jobs), [run, checkpoint, form, target], [told])
    gr.Timer(2).tick(look, [run, name], shown, show_progress="hidden")


def _found(place: Place, jobs: Jobs, current: str | None) -> Any:
    names = place.runs()
    return gr.Dropdown(choices=names, value=current if current in names else next(iter(names), None))


def _look(place: Place, jobs: Jobs, run: str | None, name: str) -> Any:
    """What is shown of a run; nothing changes where nothing was picked."""
    if not run:
        return [gr.skip()] * 7
    found = watching.curves(place, run)
    points = found.get(name, [])
    last = f"step {points[-1][0]}, {name} {points[-1][1]:.4g}, {len(points)} points" if points else f"no {name} yet"
    when, content = watching.samples(place, run)
    return (
        f"**{jobs.state(run)}** - {last}",
        watching.frame(place, [run], name),
        jobs.tail(run),
        {when: content},
        gr.Dropdown(choices=list(found) or [LOSS]),
        gr.Dropdown(choices=watching.checkpoints(place, run)),
        jobs.tail(f"export {run}"),
    )


def _stop(place: Place, jobs: Jobs, run: str) -> str:
    try:
        jobs.stop(run)
    except LuthierError as error:
        return f"```\n{error}\n```"
    return "asked to save and stop"


def _resume(place: Place, jobs: Jobs, run: str) -> str:
    try:
        jobs.start(run, ["train", place.named(place.inside(run) / "recipe.yaml")])
    except LuthierError as error:
        return f"```\n{error}\n```"
    return "goes on"


def _report(place: Place, run: str) -> str:
    """Write the page of the run, and link it."""
    file = place.own / f"{slug(run)}.html"
    command = [sys.executable, "-m", __package__.split(".")[0], "report", str(place.inside(run)), "--output", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        return f"```\n{done.stderr[-2000:]}\n```"
    return f'<a href="/files/{file.name}" target="_blank" rel="noopener">open the report</a>'


def _export(place: Place, jobs: Jobs, run: str, checkpoint: str | None, form: str, target: str) -> str:
    try:
        source = place.inside(f"{run}/checkpoints/{checkpoint or 'best'}")
        folder = place.inside(target or f"{run}-{form}")
        names = [f"{run}/checkpoints/{checkpoint or 'best'}", "--to", form, "--output", place.named(folder)]
        if not source.exists():
            raise LuthierError("no such checkpoint", where=names[0])
        jobs.start(f"export {run}", ["export", *names])
    except LuthierError as error:
        return f"```\n{error}\n```"
    return f"exporting into `{place.named(folder)}`; the log below ends with what was found"
