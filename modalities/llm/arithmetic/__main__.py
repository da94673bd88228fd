"""`python -m luthier.modalities.llm.arithmetic [FOLDER]`: make the dialogues and the model that the exercise needs."""

from __future__ import annotations

import sys
from pathlib import Path

from ....common import console
from ....common.errors import LuthierError
from .prepare import FOLDER, prepare


def main(folder: str = FOLDER) -> int:
    """Prepare, and say what to run next."""
    console.set_up()
    made = prepare(folder)
    root, changes = Path(folder), ""
    if root.resolve() != Path(FOLDER).resolve():
        places = {"model.path": "model", "output": "run"}
        places |= {f"data.{name}": f"sums/{name}.jsonl" for name in ("train", "validation", "test")}
        changes = "".join(f" {key}={root / place}" for key, place in places.items())
    console.console.print(f"{'made' if made else 'all is there already'}: {root}", highlight=False)
    console.console.print(f"next: luthier train llm/arithmetic-sft{changes}", highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except LuthierError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
