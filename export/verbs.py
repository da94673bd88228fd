"""The verb `luthier export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command()(export)


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, such as OUTPUT/checkpoints/best.")],
    to: Annotated[str, typer.Option(help="Format: merged, adapter, onnx, ctranslate2, gguf, openvino, kohya.")],
    output: Annotated[Path, typer.Option(help="Folder to be made.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Changes of the evaluation, such as data.validation=B.jsonl."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Numbers: float32, bfloat16, float16, int8, q8_0.")] = None,
    inputs: Annotated[int, typer.Option(help="Examples whose outputs are compared.", min=1)] = 16,
    push: Annotated[str | None, typer.Option(metavar="REPO", help="Upload to this hub repository, private.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and the libraries' own messages.")] = False,
) -> None:
    """Write what serves a model, compare it with the model, and say how it is served."""
    from ..common.console import set_up

    set_up(debug)
    from .run import export as run_export

    place = run_export(checkpoint, to, output, overrides or [], dtype, inputs)
    if push is not None:
        from .hub import push as run_push

        typer.echo(run_push(place, push))
