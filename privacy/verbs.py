"""The verbs `luthier scrub` and `luthier leak`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

leak = typer.Typer(help="What a model gives away of its training data.", no_args_is_help=True)

Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and the libraries' own messages.")]


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    app.command()(scrub)
    app.add_typer(leak, name="leak")


def scrub(
    data: Annotated[str, typer.Argument(metavar="DATA", help="JSONL, CSV, Parquet, a folder, or a hub data set.")],
    output: Annotated[Path, typer.Option(help="JSONL file to write; its report stands beside it.")],
    split: Annotated[str | None, typer.Option(help="Split of the data.")] = None,
    kind: Annotated[list[str] | None, typer.Option(help="Kinds to look for, such as EMAIL; default: all.")] = None,
    field: Annotated[list[str] | None, typer.Option(help="Fields to look through; default: all.")] = None,
    names: Annotated[
        list[str] | None, typer.Option(metavar="LANGUAGE", help="Look for names in this language too, by Presidio.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Replace personal data and secrets by typed placeholders. A killed run goes on."""
    from ..common.console import set_up
    from ..common.errors import LuthierError, missing_extra

    set_up(debug)
    try:
        from . import show
        from .find import ALL
        from .scrub import Settings
        from .scrub import scrub as run_scrub
    except ModuleNotFoundError as error:
        raise missing_extra(error.name or str(error), "scrub") from error
    kinds = tuple(one.upper() for one in kind or ALL)
    if unknown := set(kinds) - set(ALL):
        raise LuthierError("no such kind", where="--kind", given=", ".join(unknown), expected=", ".join(ALL))
    show.report(run_scrub(Settings(data, output, split, kinds, tuple(field or ()), tuple(names or ()))))


@leak.command("plant")
def plant(
    data: Annotated[str, typer.Argument(metavar="DATA", help="Conversations to plant canaries in.")],
    output: Annotated[Path, typer.Option(help="JSONL file to write, and OUTPUT.canaries.jsonl.")],
    split: Annotated[str | None, typer.Option(help="Split of the data.")] = None,
    number: Annotated[int, typer.Option(help="Canaries.", min=1)] = 10,
    planted: Annotated[int, typer.Option(help="How often each stands in the data.", min=1)] = 8,
    controls: Annotated[int, typer.Option(help="Canaries that are nowhere, to compare with.", min=0)] = 10,
    seed: Annotated[int, typer.Option(help="Of secrets and places.", min=0)] = 0,
    debug: Debug = False,
) -> None:
    """Plant canaries, made-up secrets, among the rows of a data set."""
    from ..common.console import set_up

    set_up(debug)
    from .leak.plant import plant as run_plant

    typer.echo(f"{run_plant(data, output, split, number, planted, controls, seed)} rows")


@leak.command("measure")
def measure(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, such as OUTPUT/checkpoints/best.")],
    canaries: Annotated[Path, typer.Option(help="OUTPUT.canaries.jsonl of `luthier leak plant`.")],
    alternatives: Annotated[int, typer.Option(help="Numbers that each secret is ranked among.", min=1)] = 100,
    seed: Annotated[int, typer.Option(help="Of the alternatives.", min=0)] = 0,
    output: Annotated[Path | None, typer.Option(help="Write what was found to this JSON file.")] = None,
    debug: Debug = False,
) -> None:
    """Try to draw the canaries out of a trained model: their exposure, and whether it says them."""
    from ..common.console import set_up

    set_up(debug)
    from . import show
    from .leak import measure as measuring

    show.leaks(measuring.measure(checkpoint, measuring.read(canaries), alternatives, seed), output)
