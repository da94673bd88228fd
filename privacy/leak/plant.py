"""Planting canaries in a data set of conversations."""

from __future__ import annotations

import json
import logging
import random
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from ...common.data.sources import rows
from ...common.errors import BadExample, DataError
from .canary import canaries


def plant(
    data: str,
    output: Path,
    split: str | None = None,
    number: int = 10,
    planted: int = 8,
    controls: int = 10,
    seed: int = 0,
) -> int:
    """Write a data set with canaries among its rows, and beside it, as `OUTPUT.canaries.jsonl`, what they are.

    Args:
        data: the data set.
        output: JSONL file to write.
        split: of the data.
        number: canaries, each about another person.
        planted: how often each stands in the data.
        controls: canaries that are nowhere in the data, to compare with.
        seed: of secrets and places.

    Returns:
        rows written.

    Raises:
        DataError: an output that is there already, more canaries than people, or data that can't be read.
    """
    if output.exists():
        raise DataError("the file exists already and is not overwritten", where=output, do="give another name")
    try:
        made = canaries(number, planted, controls, seed)
    except ValueError as error:
        raise DataError(str(error), where="--number", given=number + controls) from error
    copies = [one.row() for one in made for _ in range(one.planted)]
    draw = random.Random(f"places {seed}")
    draw.shuffle(copies)
    readable = [not isinstance(item, BadExample) for item in rows(data, split=split)]
    total, lost = sum(readable), readable.count(False)
    if lost:
        logging.getLogger(__name__).warning("%s: %d rows can't be read and are left out", data, lost)
    places = sorted(draw.randrange(total + 1) for _ in copies)
    written = 0
    output.parent.mkdir(parents=True, exist_ok=True)
    part = output.with_name(f".{output.name}.part")
    with part.open("w", encoding="utf-8") as file:
        for at, item in enumerate(one for one in rows(data, split=split) if not isinstance(one, BadExample)):
            while places and places[0] == at:
                places.pop(0)
                written += _write(file, copies.pop())
            written += _write(file, dict(item.fields))
        for copy in copies:
            written += _write(file, copy)
    lines = "".join(json.dumps(asdict(one), ensure_ascii=False) + "\n" for one in made)
    output.with_name(f"{output.name}.canaries.jsonl").write_text(lines, encoding="utf-8")
    part.replace(output)
    return written


def _write(file: TextIO, row: dict[str, object]) -> int:
    file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
    return 1
