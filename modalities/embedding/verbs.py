"""Verbs of the command line that embedding models and rerankers have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def register(app: typer.Typer) -> None:
    """Add the verbs to the command line."""
    app.command()(mine)


def mine(
    data: Annotated[str, typer.Argument(metavar="DATA", help="Rows with a query and its positives, or a BEIR folder.")],
    output: Annotated[Path, typer.Option(help="JSONL file to write: anchor, positive, negatives.")],
    model: Annotated[str | None, typer.Option(help="Directory of the embedding model, or a checkpoint.")] = None,
    corpus: Annotated[
        str | None, typer.Option(help="Further documents: rows with a `text` (and `title`), or a BEIR folder.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Split of the data.")] = None,
    role: Annotated[
        list[str] | None, typer.Option(metavar="ROLE=COLUMN", help="Which column is what, as anchor=title.")
    ] = None,
    method: Annotated[
        Literal["dense", "bm25", "both"],
        typer.Option(help="What ranks documents; both: the two rankings, joined by reciprocal rank fusion."),
    ] = "dense",
    negatives: Annotated[int, typer.Option(help="Negatives for each query.", min=1)] = 5,
    first: Annotated[int, typer.Option(help="First rank to take; known positives have none.", min=1)] = 1,
    last: Annotated[int, typer.Option(help="Last rank to take.", min=1)] = 100,
    margin: Annotated[float | None, typer.Option(help="Leave out what scores above the positive less this.")] = None,
    relative_margin: Annotated[
        float | None,
        typer.Option(
            help="Leave out what has at least this share of the positive's score; 0: off.",
            show_default="0.95; off for --method bm25 without --rescore",
        ),
    ] = None,
    max_similarity: Annotated[float | None, typer.Option(help="Leave out what scores above this.")] = None,
    sample: Annotated[
        Literal["top", "random"], typer.Option(help="The hardest of the candidates that are left, or any of them.")
    ] = "top",
    seed: Annotated[int, typer.Option(help="Of --sample random.", min=0)] = 0,
    rescore: Annotated[
        str | None,
        typer.Option(help="Directory of a cross-encoder: margins are applied to its logits, which are written too."),
    ] = None,
    scores: Annotated[
        bool, typer.Option("--scores", help="Also write the model's similarities, for a reranker that adds to them.")
    ] = False,
    query_prompt: Annotated[
        str | None, typer.Option(help="Before each query.", show_default="the model's saved prompt")
    ] = None,
    document_prompt: Annotated[
        str | None, typer.Option(help="Before each document.", show_default="the model's saved prompt")
    ] = None,
    batch: Annotated[int, typer.Option(help="Texts that run through a model at once.", min=1)] = 64,
    shard: Annotated[int, typer.Option(help="Documents in memory at once.", min=1)] = 50_000,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and the libraries' own messages.")] = False,
) -> None:
    """Find hard negatives: documents close to a query that are not relevant to it. A killed run goes on."""
    from ...common.console import set_up

    set_up(debug)
    from .mine import run
    from .mine.settings import Settings

    settings = Settings(
        data, output, model=model, split=split, roles=_roles(role or []), corpus=corpus, method=method,
        negatives=negatives, first=first, last=last, margin=margin, relative_margin=relative_margin,
        max_similarity=max_similarity, sample=sample, seed=seed, rescore=rescore, scores=scores,
        query_prompt=query_prompt, document_prompt=document_prompt, batch=batch, shard=shard,
    )  # fmt: skip
    run.show(settings, run.mine(settings))


def _roles(given: list[str]) -> dict[str, str]:
    """`anchor=title` as {anchor: title}."""
    from ...common.errors import LuthierError

    for text in given:
        if not all(text.partition("=")):
            raise LuthierError("not a role", where="--role", given=text, expected="ROLE=COLUMN, as anchor=title")
    return {name: column for name, _, column in (text.partition("=") for text in given)}
