"""`python -m luthier.modalities.asr.demo [FOLDER]`: make speech, train a small Whisper on it, show what it learned."""

from __future__ import annotations

import sys
from pathlib import Path

from ....common import console
from ....common.errors import LuthierError
from ....common.reading import load
from .prepare import FOLDER, prepare

RECIPE = "asr/demo"


def main(folder: str = FOLDER) -> int:
    """Prepare, train by the shipped recipe, and print the test metrics before and after."""
    console.set_up()
    from ....common.evaluation.saved import evaluate_checkpoint, evaluate_recipe
    from ....common.evaluation.table import show
    from ....common.training.run import train
    from ....common.training.signals import exit_code

    root = Path(folder)
    console.console.print("making speech and an untrained model (a few seconds the first time)")
    prepare(root)
    places = {"model.path": "model", "output": "run"}
    places |= {f"data.{name}": f"speech/{name}.jsonl" for name in ("train", "validation", "test")}
    recipe = load(RECIPE, [f"{key}={root / place}" for key, place in places.items()])
    before = evaluate_recipe(recipe, "test")
    outcome = train(recipe)
    if outcome.stopped_by:
        return exit_code(outcome.stopped_by)
    best = outcome.folder / "checkpoints" / "best"
    after = evaluate_checkpoint(best, "test")
    console.console.print("\nsentences that were not in the training, half of them in a voice that was not either:")
    show({"before": before.metrics, "after": after.metrics}, after.samples)
    console.console.print(f"run: {outcome.folder}", highlight=False)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except LuthierError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
