"""The tab on which a recipe is picked, edited, checked and started."""

from __future__ import annotations

from functools import partial
from typing import Any

import gradio as gr

from ..common.errors import LuthierError
from ..common.reading import parse, shipped
from . import checking, editing
from .jobs import Jobs, slug
from .place import Place

IN_TURN: dict[str, Any] = {"concurrency_id": "recipe", "concurrency_limit": 1}
"""What reads or changes the recipe happens in the order it was asked for, so that a start sees the last edit."""


def recipe_tab(place: Place, jobs: Jobs) -> None:
    """Build the tab."""
    tree = gr.State({})
    with gr.Row():
        name = gr.Dropdown(_names(place), label="recipe", value=None, elem_id="recipe", scale=3, min_width=300)
        section = gr.Radio([], label="section", elem_id="section", scale=4, min_width=300)
    problem = gr.Markdown("Pick a recipe.", elem_id="problem")
    with gr.Row():
        with gr.Column(scale=3):

            @gr.render(inputs=[tree, section], triggers=[section.change, name.change])  # type: ignore[untyped-decorator]
            def fields(current: dict[str, Any], wanted: str | None) -> None:
                for entry in editing.entries(current, wanted) if current and wanted else ():
                    box = _box(entry)
                    change = partial(_set, place, entry.place)
                    events = [box.change] if isinstance(box, gr.Dropdown) else [box.blur, box.submit]
                    gr.on(events, change, [box, tree], [tree, problem, text], show_progress="hidden", **IN_TURN)

        with gr.Column(scale=2):
            text = gr.Code(label="the recipe", language="yaml", elem_id="text", interactive=True)
            keep = gr.Button("take the text over", elem_id="take-over")
            with gr.Row():
                check = gr.Button("check", elem_id="check")
                start = gr.Button("start", variant="primary", elem_id="start")
            answers = gr.HTML("", elem_id="answers")
    name.change(partial(_open, place), [name], [tree, text, section, problem], **IN_TURN)
    keep.click(partial(_take_over, place), [text, tree], [tree, problem, section], **IN_TURN)
    check.click(partial(_check, place, jobs), [tree], [problem], **IN_TURN)
    start.click(partial(_start, place, jobs), [tree], [problem], **IN_TURN)
    gr.Timer(2).tick(partial(_answers, place, jobs), [answers], [answers], show_progress="hidden")


def _names(place: Place) -> list[str]:
    return [*place.recipes(), *shipped()]


def _box(entry: editing.Entry) -> Any:
    """What a field is edited in; a field that the recipe says stands out by its mark."""
    label, where = f"{entry.place}{' *' if entry.is_set else ''}", f"field-{entry.place.replace('.', '-')}"
    common: dict[str, Any] = {"label": label, "info": entry.description, "elem_id": where, "interactive": True}
    if entry.choices:
        return gr.Dropdown(list(entry.choices), value=entry.text, **common)
    return gr.Textbox(entry.text, max_lines=4, **common)


def _told(place: Place, tree: dict[str, Any]) -> str:
    found = editing.problem(place, tree)
    return f"**not valid**\n```\n{found}\n```" if found else "valid"


def _open(place: Place, name: str | None) -> Any:
    if not name:
        return {}, "", gr.Radio(choices=[]), "Pick a recipe."
    try:
        tree = editing.opened(place, name)
        names = editing.sections(tree)
    except LuthierError as error:
        return {}, "", gr.Radio(choices=[]), f"**not readable**\n```\n{error}\n```"
    return tree, editing.text_of(tree), gr.Radio(choices=names, value=names[0]), _told(place, tree)


def _set(place: Place, field: str, value: str | None, tree: dict[str, Any]) -> Any:
    try:
        known = {entry.place: entry for entry in editing.entries(tree, field.split(".")[0])}
        if value == known[field].text:
            return gr.skip(), gr.skip(), gr.skip()
        made = editing.changed(tree, field, value or "")
    except LuthierError as error:
        return gr.skip(), f"**not valid**\n```\n{error}\n```", gr.skip()
    return made, _told(place, made), editing.text_of(made)


def _take_over(place: Place, text: str, tree: dict[str, Any]) -> Any:
    try:
        made = parse(text, "the text")
        names = editing.sections(made if isinstance(made, dict) else {})
    except LuthierError as error:
        return tree, f"**not valid**\n```\n{error}\n```", gr.skip()
    return made, _told(place, made), gr.Radio(choices=names, value=names[0])


def saved(place: Place, tree: dict[str, Any]) -> tuple[str, str]:
    """Write an edited recipe into the page's own folder: its name there, and its output.

    Raises:
        LuthierError: it is not valid, or its output is not in the folder.
    """
    found = editing.problem(place, tree)
    if found:
        raise LuthierError(found)
    output = place.named(place.inside(str(tree["output"])))
    file = place.own / f"{slug(output)}.yaml"
    file.write_text(editing.text_of({**tree, "output": output}), encoding="utf-8")
    return place.named(file), output


def _check(place: Place, jobs: Jobs, tree: dict[str, Any]) -> str:
    try:
        checking.start(place, jobs, saved(place, tree)[0])
    except LuthierError as error:
        return f"**not checked**\n```\n{error}\n```"
    return "checking: what is found comes below the buttons"


def _answers(place: Place, jobs: Jobs, before: str | None) -> Any:
    """What the check has found; nothing changes where nothing has, so that it can be read and marked."""
    found = checking.shown(place, jobs)
    return gr.skip() if found == before else found


def _start(place: Place, jobs: Jobs, tree: dict[str, Any]) -> str:
    try:
        file, output = saved(place, tree)
        jobs.start(output, ["train", f"./{file}"])
    except LuthierError as error:
        return f"**not started**\n```\n{error}\n```"
    return f"started: see `{output}` among the runs"
