"""`python -m luthier.modalities.llm.arithmetic [FOLDER]`: make the dialogues and the model that the exercise needs, and
after the first training the pairs for the second."""

from __future__ import annotations

import sys
from pathlib import Path

from ....common import console
from ....common.errors import LuthierError
from .prepare import FINE_TUNED, FOLDER, fine_tuned, prepare

STEPS = (("llm/arithmetic-sft", "sums", "model", "run"), ("llm/arithmetic-dpo", "pairs", f"{FINE_TUNED}/model", "dpo"))
"""Of each training: the recipe, its data, the model that it starts from, and its output."""


def main(folder: str = FOLDER) -> int:
    """Prepare, and say what to run next."""
    console.set_up()
    made = prepare(folder)
    root, changes = Path(folder), ""
    recipe, data, model, output = STEPS[fine_tuned(root) is not None]
    if root.resolve() != Path(FOLDER).resolve():
        places = {"model.path": model, "output": output}
        places |= {f"data.{name}": f"{data}/{name}.jsonl" for name in ("train", "validation", "test")}
        changes = "".join(f" {key}={root / place}" for key, place in places.items())
    console.console.print(f"{'made' if made else 'all is there already'}: {root}", highlight=False)
    console.console.print(f"next: luthier train {recipe}{changes}", highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except LuthierError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
