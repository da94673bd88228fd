"""The command line. Heavy libraries are imported inside the verb that needs them."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from . import kinds

app = typer.Typer(
    name="luthier",
    help="Tune models of every modality on one training core.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
recipes = typer.Typer(help="The recipes that ship.", no_args_is_help=True)
app.add_typer(recipes, name="recipes")

RecipeName = Annotated[str, typer.Argument(metavar="RECIPE", help="A file, or the name of a recipe that ships.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes, such as train.epochs=2.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and the libraries' own messages.")]


@app.command()
def train(recipe: RecipeName, overrides: Overrides = None, debug: Debug = False) -> None:
    """Train, evaluating on the way; goes on by itself where an earlier run of the same output stopped."""
    from .reading import load

    loaded = load(recipe, overrides or [])
    _set_up(debug)
    from .evaluation.table import show_outcome
    from .training import run
    from .training.signals import exit_code

    outcome = run.train(loaded)
    if outcome.stopped_by:
        raise typer.Exit(exit_code(outcome.stopped_by))
    show_outcome(outcome.folder)


@app.command()
def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, such as OUTPUT/checkpoints/best.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SUITE] [KEY=VALUE]...",
            help="`validation` (default), `regression` or `test`; changes such as data=C.jsonl, evaluate.num_beams=5.",
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write metrics and samples to this JSON file.")] = None,
    debug: Debug = False,
) -> None:
    """Metrics by slice, from a checkpoint alone."""
    _set_up(debug)
    from .evaluation.saved import evaluate_checkpoint
    from .evaluation.table import show
    from .record import write_json

    suite, overrides = _suite(arguments or [])
    found = evaluate_checkpoint(checkpoint, suite, overrides)
    show({suite: found.metrics}, found.samples)
    if output is not None:
        write_json(output, {**found.metrics, "samples": found.samples})


@app.command()
def check(
    recipe: RecipeName,
    overrides: Overrides = None,
    fast: Annotated[
        bool, typer.Option("--fast", help="Leave out what trains or loads again: resuming, two devices, merging.")
    ] = False,
    file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the answers here, for machines.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Everything that can be known before paying for a run: ten questions, exit code 2 if an answer is a failure."""
    from .reading import load

    loaded = load(recipe, overrides or [])
    _set_up(debug)
    from .check import check as run_check

    if not run_check(loaded, fast, file):
        raise typer.Exit(2)


@app.command()
def estimate(
    recipe: RecipeName,
    overrides: Overrides = None,
    devices: Annotated[int, typer.Option(help="Number of devices.", min=1)] = 1,
    device: Annotated[str | None, typer.Option(help="Device, such as h100 or cpu; default: this machine's.")] = None,
    memory: Annotated[float | None, typer.Option(help="Memory of a device in GB; default: as it is known.")] = None,
    price: Annotated[float | None, typer.Option(help="Price of a device for an hour.")] = None,
    tries: Annotated[float, typer.Option(help="Runs that are paid for until one is kept.", min=1)] = 3.0,
    measure: Annotated[bool, typer.Option("--measure", help="Run a step here instead of assuming a speed.")] = False,
    file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures here, for machines.")
    ] = None,
    debug: Debug = False,
) -> None:
    """What a run will need: operations, memory by part, checkpoints, time, money. The weights are not read."""
    from .reading import load

    loaded = load(recipe, overrides or [])
    _set_up(debug)
    from .estimate import estimate as run_estimate

    run_estimate(loaded, devices, device, memory, price, tries, measure, file)


@app.command("verify-resume")
def verify_resume(
    recipe: RecipeName,
    overrides: Overrides = None,
    kills: Annotated[int, typer.Option(help="Number of interruptions.", min=1)] = 10,
    steps: Annotated[int, typer.Option(help="Optimizer steps of each short run.", min=4)] = 12,
    debug: Debug = False,
) -> None:
    """Prove that resuming is exact: kill short runs of a recipe, let them go on, and compare with one left alone."""
    _set_up(debug)
    from .verify.run import verify

    if not verify(recipe, overrides or [], kills, steps):
        raise typer.Exit(2)


@app.command()
def inspect(
    recipe: RecipeName,
    overrides: Overrides = None,
    batches: Annotated[int, typer.Option(help="Training batches to show.", min=1)] = 1,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page instead.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Sizes, padding, and what is in the data twice.")] = False,
    debug: Debug = False,
) -> None:
    """Show batches as the model sees them: tokens coloured by what carries loss, audio, padding."""
    from .reading import load

    loaded = load(recipe, overrides or [])
    _set_up(debug)
    from .inspect.run import inspect as run_inspect

    run_inspect(loaded, batches, html, stats)


@app.command()
def doctor() -> None:
    """Versions, devices, and what each extra can do here."""
    from .doctor import doctor as run_doctor

    run_doctor()


@recipes.command("list")
def list_recipes() -> None:
    """Names and first lines of the recipes that ship."""
    from .reading import shipped

    for name, file in shipped().items():
        first = file.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        typer.echo(f"{name:24} {first}")


@recipes.command("show")
def show_recipe(recipe: RecipeName) -> None:
    """Print a recipe."""
    from .reading import find

    typer.echo(find(recipe).read_text(encoding="utf-8"), nl=False)


@recipes.command("copy")
def copy_recipe(recipe: RecipeName, to: Annotated[Path, typer.Argument(help="New file or existing folder.")]) -> None:
    """Copy a recipe, to be changed."""
    from .errors import RecipeError
    from .reading import find

    file = find(recipe)
    target = to / file.name if to.is_dir() else to
    if target.exists():
        raise RecipeError("the file exists already and is not overwritten", where=target, do="give another name")
    target.write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    typer.echo(target)


@recipes.command("schema")
def schema(kind: Annotated[str, typer.Argument(help="A task kind.")] = "asr.whisper") -> None:
    """The JSON Schema of a kind's recipes, for editors."""
    import json

    from .reading import config_of

    typer.echo(json.dumps(config_of(kind).model_json_schema(), indent=2))


def _suite(arguments: list[str]) -> tuple[str, list[str]]:
    """(suite, overrides); `data=X` means the data of the suite."""
    from .errors import RecipeError

    names = [text for text in arguments if "=" not in text]
    if len(names) > 1 or not set(names) <= {"validation", "regression", "test"}:
        raise RecipeError("no such suite", given=" ".join(names), expected="validation, regression or test")
    suite = names[0] if names else "validation"
    overrides = [f"data.{suite}={text[5:]}" if text.startswith("data=") else text for text in arguments if "=" in text]
    return suite, overrides


def _set_up(debug: bool) -> None:
    from .console import set_up

    set_up(debug)


for verbs in kinds.verbs():
    verbs.register(app)


def main(arguments: list[str] | None = None) -> Any:
    """Run the command line; user errors end with exit code 2 and no traceback (with `--debug`: with one)."""
    from .errors import LuthierError

    try:
        return app(arguments)
    except LuthierError as error:
        if "--debug" in (arguments or sys.argv):
            raise
        typer.secho(f"error: {error}", fg="red", err=True)
        sys.exit(2)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS) or "--debug" in (arguments or sys.argv):
            raise
        typer.secho(f"error: {error.filename or 'the disk'}: {error.strerror}", fg="red", err=True)
        typer.secho("  do:       free some space; the same command goes on", fg="red", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
