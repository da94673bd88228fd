"""The tab on which runs are compared."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import gradio as gr

from . import watching
from .place import Place
from .runs_tab import LOSS


def compare_tab(place: Place, tab: gr.Tab) -> None:
    """Build what is in the tab."""
    with gr.Row(elem_classes="ends"):
        runs = gr.Dropdown([], multiselect=True, label="runs", interactive=True, elem_id="compared", scale=3)
        name = gr.Dropdown(
            [LOSS], value=LOSS, label="curve", elem_id="compared-curve", allow_custom_value=True, scale=2
        )
        refresh = gr.Button("look for runs", elem_id="compared-refresh", scale=1)
    plot = gr.LinePlot(x="step", y="value", color="run", elem_id="compared-plot", height=300)
    table = gr.Dataframe(label="metrics of the best checkpoints", elem_id="compared-metrics", interactive=False)
    gr.on([refresh.click, tab.select], lambda: gr.Dropdown(choices=place.runs()), None, [runs])
    gr.on([runs.change, name.change], partial(_compared, place), [runs, name], [plot, table, name])


def _compared(place: Place, runs: Sequence[str], name: str) -> Any:
    import pandas as pd

    found = {run: watching.metrics(place, run) for run in runs}
    names = list(dict.fromkeys(metric for one in found.values() for metric in one))
    rows = [[metric, *(_rounded(found[run].get(metric)) for run in runs)] for metric in names]
    table = pd.DataFrame(rows, columns=["metric", *runs])
    curves = {run: watching.curves(place, run) for run in runs}
    known = list(dict.fromkeys(curve for one in curves.values() for curve in one))
    drawn = watching.frame({run: one.get(name, []) for run, one in curves.items()})
    return drawn, table, gr.Dropdown(choices=known or [LOSS])


def _rounded(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
