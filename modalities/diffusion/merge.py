"""A pipeline with adapters merged into its weights.

python -m luthier.modalities.diffusion.merge BASE OUT RUN/checkpoints/best/model[=WEIGHT] ...
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ...common.errors import ExportError, LuthierError
from .adapters import FILE
from .model import facts, load


def merge(base: str, adapters: Sequence[tuple[Path, float]], directory: Path) -> None:
    """Write a pipeline that holds the sum of its own weights and weighted adapters.

    Args:
        base: the pipeline that the adapters belong to.
        adapters: (a checkpoint's `model/`, weight) of each.
        directory: where to; must be absent or empty.

    Raises:
        ExportError: an adapter is missing, or the directory is not empty.
    """
    if directory.exists() and any(directory.iterdir()):
        raise ExportError("the folder is not empty", where=directory)
    pipe, names = load(facts(base)), []
    for number, (folder, _) in enumerate(adapters):
        if not (folder / FILE).is_file():
            raise ExportError("no adapter that diffusers loads", where=folder, expected=FILE)
        names.append(f"adapter_{number}")
        pipe.load_lora_weights(str(folder), adapter_name=names[-1])
    pipe.set_adapters(names, adapter_weights=[weight for _, weight in adapters])
    pipe.fuse_lora(components=list(pipe._lora_loadable_modules), adapter_names=names)
    pipe.unload_lora_weights()
    pipe.save_pretrained(directory)


def _weighted(text: str) -> tuple[Path, float]:
    folder, _, weight = text.partition("=")
    return Path(folder), float(weight or 1.0)


if __name__ == "__main__":
    if len(sys.argv) < 4:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    try:
        merge(sys.argv[1], [_weighted(text) for text in sys.argv[3:]], Path(sys.argv[2]))
    except LuthierError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
