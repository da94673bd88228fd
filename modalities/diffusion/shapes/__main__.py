"""`python -m luthier.modalities.diffusion.shapes [FOLDER]`: a small pipeline learns to draw, and an adapter pastel."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from ....common import console
from ....common.errors import LuthierError
from ....common.reading import load
from .prepare import FOLDER, prepare

RECIPE = "diffusion/shapes"


def main(folder: str = FOLDER) -> int:
    """Prepare, train the adapter by the shipped recipe, and print how many pictures show what was asked for, before
    and after."""
    console.set_up()
    from ....common.training.run import train
    from ....common.training.signals import exit_code

    root = Path(folder)
    console.console.print("drawing shapes, and training a small pipeline on them (some minutes the first time)")
    prepare(root)
    pictures = root / "pictures"
    places = {
        "model.path": root / "model", "output": root / "run", "data.train": pictures / "pastel",
        "data.validation": pictures / "pastel-validation", "data.cache.folder": root / "cache",
    }  # fmt: skip
    outcome = train(load(RECIPE, [f"{key}={value}" for key, value in places.items()]))
    if outcome.stopped_by:
        return exit_code(outcome.stopped_by)
    found = compare(root, outcome.folder / "checkpoints" / "best" / "model")
    console.console.print("\nshare of pictures that a classifier sees as they were asked for, in pastel:")
    for name, shares in found.items():
        console.console.print(f"  {name:<30} {json.dumps(shares)}", highlight=False)
    console.console.print(f"pictures: {root / 'before-after.png'}\nrun: {outcome.folder}", highlight=False)
    return 0


def compare(root: Path, adapter: Path, seed: int = 0, steps: int = 20, guidance: float = 3.0) -> dict[str, Any]:
    """Ask the pipeline without and with the adapter for combinations that were not in the adapter's training; write
    `before-after.png` (before above, after below) and `result.json`.

    Returns:
        shares by question, the style asked for being pastel, `before` and `after`.
    """
    from ....common.console import progress
    from ..model import facts, load
    from ..sampling import grid, sampled
    from .drawn import SIDE, drawings
    from .judge import judged, train

    rows = (root / "pictures" / "pastel-validation" / "metadata.jsonl").read_text(encoding="utf-8").splitlines()
    captions = {json.loads(row)["text"] for row in rows}
    asked = [drawing for drawing in drawings("pastel") if drawing.caption in captions]
    judge = train(seed)
    known = facts(str(root / "model"))
    pipe = load(known)
    found, shown = {}, []
    for moment in ("before", "after"):
        if moment == "after":
            pipe.load_lora_weights(str(adapter))
        images = []
        with progress(f"drawing {moment}", "pictures") as show:
            for number, drawing in enumerate(asked):
                images += sampled(
                    pipe, known.family, [drawing.caption], [seed + number], steps=steps, guidance=guidance,
                    width=SIDE, height=SIDE,
                )  # fmt: skip
                show(number + 1, len(asked))
        found[moment] = judged(judge, images, asked)
        shown += images[:: len(images) // 12][:12]
    small = grid(shown, 12)
    small.resize((small.width * 2, small.height * 2), 0).save(root / "before-after.png")
    (root / "result.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return found


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except LuthierError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
