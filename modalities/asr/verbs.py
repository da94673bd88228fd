"""Verbs of the command line that speech recognition has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    app.command()(align)


def align(
    data: Annotated[str, typer.Argument(metavar="DATA", help="Manifest of recordings with transcripts.")],
    model: Annotated[str, typer.Option(help="Checkpoint of asr.ctc, or directory of a CTC model.")],
    output: Annotated[Path, typer.Option(help="JSONL file to write: audio, start, end, text, confidence.")],
    split: Annotated[str | None, typer.Option(help="Split of the data.")] = None,
    language: Annotated[str | None, typer.Option(help="Language of rows that name none.")] = None,
    channel: Annotated[str, typer.Option(help="Channel of files with several: first, mean, or a number.")] = "mean",
    max_seconds: Annotated[float, typer.Option(help="Longest segment, in seconds.", min=1)] = 20.0,
    min_confidence: Annotated[float, typer.Option(help="Leave out segments below it.", min=0, max=1)] = 0.0,
    window: Annotated[float, typer.Option(help="Audio that the model hears at once, in seconds.", min=1)] = 30.0,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and the libraries' own messages.")] = False,
) -> None:
    """Cut long recordings with transcripts into training segments, by CTC alignment. A killed run goes on."""
    from ...common.console import set_up
    from ...common.errors import LuthierError

    set_up(debug)
    if not (channel in ("first", "mean") or channel.isdecimal()):
        raise LuthierError("not a channel", where="--channel", given=channel, expected="first, mean, or a number")
    from . import align as alignment

    settings = alignment.Settings(
        data, model, output, split=split, language=language,
        channel=int(channel) if channel.isdecimal() else channel, max_seconds=max_seconds,
        min_confidence=min_confidence, window=window,
    )  # fmt: skip
    alignment.show(settings, alignment.align(settings))
