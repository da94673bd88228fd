"""`python -m luthier.modalities.embedding.pydocs [FOLDER]`: tune all-MiniLM-L6-v2 on Python's documentation, mine
negatives with it, train a reranker on them, and show what both learned."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ....common import console
from ....common.errors import LuthierError
from ....common.reading import load
from .prepare import FOLDER, prepare

RECIPE, RERANKER = "embedding/pydocs", "embedding/pydocs-reranker"


def main(folder: str = FOLDER) -> int:
    """Prepare, train by the two shipped recipes, and print the test metrics before and after each."""
    console.set_up()
    from ....common.evaluation.saved import evaluate_checkpoint, evaluate_recipe
    from ....common.evaluation.table import show
    from ..mine import run as mining
    from ..mine.settings import Settings
    from .lists import make_lists

    root = Path(folder)
    prepare(root)
    recipe = load(RECIPE, _places(root, "pairs", {"model.path": "model", "output": "run"}))
    before = evaluate_recipe(recipe, "test")
    best = _trained(recipe)
    after = evaluate_checkpoint(best, "test")
    console.console.print("\ndocumentation that was not in the training, found by the functions' names and signatures:")
    show({"before": before.metrics, "after": after.metrics}, after.samples)

    mined = Settings(
        str(root / "pairs/train.jsonl"), root / "mined.jsonl", model=str(best / "model"), negatives=3, last=30
    )
    mining.show(mined, mining.mine(mined))
    for name in ("validation", "test"):
        make_lists(best / "model", root / f"pairs/{name}.jsonl", root / f"lists/{name}.jsonl")
    changes = {"model.path": "run/checkpoints/best/model", "data.train": "mined.jsonl", "output": "reranker"}
    reranker = load(RERANKER, _places(root, "lists", changes))
    data = [f"data.test={root / 'lists/test.jsonl'}", "evaluate.metrics=[reranking]"]
    order = evaluate_checkpoint(best, "test", data)
    reads = _trained(reranker)
    alone = evaluate_checkpoint(reads, "test", ["evaluate.first_stage=0"])
    both = evaluate_checkpoint(reads, "test")
    console.console.print(
        "\nthe ten that the embedding model finds first, in its order, the reranker's and that of both:"
    )
    show({"embedding": order.metrics, "reranker": alone.metrics, "both": both.metrics}, both.samples)
    console.console.print(f"runs: {root / 'run'}, {root / 'reranker'}", highlight=False)
    return 0


def _places(root: Path, data: str, more: dict[str, str]) -> list[str]:
    """The recipes' places, under `root`."""
    names = ("train", "validation", "test")
    places = {**{f"data.{name}": f"{data}/{name}.jsonl" for name in names}, **more}
    return [f"{key}={root / place}" for key, place in places.items()]


def _trained(recipe: Any) -> Path:
    """The best checkpoint of a training. Exits if a signal stops it."""
    from ....common.training.run import train
    from ....common.training.signals import exit_code

    outcome = train(recipe)
    if outcome.stopped_by:
        raise SystemExit(exit_code(outcome.stopped_by))
    return outcome.folder / "checkpoints" / "best"


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except LuthierError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
