"""The verb `luthier ui`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command()(ui)


def ui(
    folder: Annotated[Path, typer.Argument(help="Folder of recipes, data and runs; the page sees no other.")] = Path(),
    host: Annotated[
        str, typer.Option(help="Address to listen on; others than this machine's own are seen.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port.", min=1, max=65535)] = 7878,
    name: Annotated[list[str] | None, typer.Option(help="Further name by which browsers may call it.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and the libraries' own messages.")] = False,
) -> None:
    """A local page: edit and check recipes, start and stop runs, watch, compare and export them."""
    from ..common.console import set_up

    set_up(debug)
    from .server import serve

    serve(folder, host, port, name or ())
