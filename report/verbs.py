"""The verbs `luthier report` and `luthier compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    app.command()(report)
    app.command()(compare)


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Output folders of runs.")],
    output: Annotated[Path, typer.Option(help="HTML file to write.")] = Path("report.html"),
    artifact: Annotated[
        list[Path] | None, typer.Option(help="Folder of an exported artifact that lies elsewhere; may be repeated.")
    ] = None,
) -> None:
    """Write one page that needs nothing but itself: curves, metrics, samples, data, versions of one run or several."""
    from .page import write

    write(runs, output, artifact or [])
    typer.echo(output)


def compare(
    one: Annotated[Path, typer.Argument(metavar="A", help="Output folder of a run.")],
    other: Annotated[Path, typer.Argument(metavar="B", help="Output folder of another run.")],
    tolerance: Annotated[
        float, typer.Option(help="Relative difference that is never more than noise.", min=0.0)
    ] = 0.01,
) -> None:
    """Compare two runs, such as one recipe in two environments; exit code 1 if they differ beyond noise."""
    from .compare import compare as run_compare
    from .compare import show
    from .runs import read_all

    first, second = read_all([one, other])
    found = run_compare(first, second, tolerance)
    show(found)
    if found.differ:
        raise typer.Exit(1)
