"""The verbs `luthier export` and `luthier registry`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

registry = typer.Typer(help="Versions of artifacts and their stages, in MLflow's registry.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="Name of the model.")]
Number = Annotated[int, typer.Argument(help="Number of the version.")]
Uri = Annotated[
    str,
    typer.Option(
        "--registry", envvar="MLFLOW_REGISTRY_URI", help="sqlite:///FILE, another database or a server, https://HOST."
    ),
]
FILE = "sqlite:///mlflow.db"


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    app.command()(export)
    app.add_typer(registry, name="registry")


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, such as OUTPUT/checkpoints/best.")],
    to: Annotated[str, typer.Option(help="Format, such as merged, adapter or onnx; the README lists them.")],
    output: Annotated[Path, typer.Option(help="Folder to be made.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Changes of the evaluation, such as data.validation=B.jsonl."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Numbers: float32, bfloat16, float16, int8, q8_0, q4_0.")] = None,
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


@registry.command()
def add(
    artifact: Annotated[Path, typer.Argument(help="A folder that `luthier export` has made.")],
    name: Name,
    uri: Uri = FILE,
) -> None:
    """Register an artifact as a candidate."""
    from .registry import Registry

    made = Registry(uri).add(artifact, name)
    typer.echo(f"{made.name} {made.number}: {made.stage}")


@registry.command("list")
def list_versions(name: Annotated[str | None, typer.Argument(help="One model only.")] = None, uri: Uri = FILE) -> None:
    """All versions."""
    from .registry import Registry
    from .registry_show import listed

    listed(Registry(uri).versions(name))


@registry.command()
def show(name: Name, version: Number, uri: Uri = FILE) -> None:
    """What is known of a version."""
    from .registry import Registry
    from .registry_show import shown

    shown(Registry(uri).version(name, version))


@registry.command()
def promote(
    name: Name,
    version: Number,
    to: Annotated[str, typer.Option(help="canary, production or archived.")],
    uri: Uri = FILE,
) -> None:
    """Move a version to its next stage, once it has been evaluated and compared."""
    from .registry import Registry

    moved = Registry(uri).promote(name, version, to)
    typer.echo(f"{moved.name} {moved.number}: {moved.stage}")


@registry.command()
def compare(
    name: Name, version: Number, other: Annotated[int, typer.Argument(help="Another version.")], uri: Uri = FILE
) -> None:
    """Two versions side by side."""
    from .registry import Registry
    from .registry_show import compared

    known = Registry(uri)
    compared(known.version(name, version), known.version(name, other))
