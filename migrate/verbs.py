"""The verb `luthier import`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("import")(import_)


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML of Axolotl, LLaMA-Factory, ms-swift or TRL.")],
    tool: Annotated[
        str | None, typer.Option("--from", help="axolotl, llama-factory, ms-swift or trl; default: told by the keys.")
    ] = None,
    kind: Annotated[
        str | None, typer.Option(help="Task kind, such as llm.dpo, where only the tool's command line said it.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Recipe to write; never overwritten.")] = Path("recipe.yaml"),
    strict: Annotated[bool, typer.Option("--strict", help="Fail if anything could not be carried over.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and the libraries' own messages.")] = False,
) -> None:
    """Turn another tool's YAML into a recipe, and say what became of each of its keys."""
    from ..common.console import set_up
    from ..common.errors import RecipeError

    set_up(debug)
    from .engine import import_file
    from .show import show

    if output.exists():
        raise RecipeError("the file exists already and is not overwritten", where=output, do="give another --output")
    found = import_file(file, tool, kind)
    show(found)
    if found.problem is not None:
        raise found.problem
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(found.text(), encoding="utf-8")
    typer.echo(output)
    if strict and any(line.status == "unsupported" for line in found.lines):
        raise typer.Exit(2)
