"""A file of segments that a killed run goes on writing."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...common.errors import BadExample, DataError
from .utterance import Utterance


class SegmentsFile:
    """The segments' file, and beside it what is finished: a recording is there as a whole or not at all.

    Args:
        file: JSONL.
        settings: by which the segments are made; a file of others is not continued.
    """

    def __init__(self, file: Path, settings: Mapping[str, Any]):
        self.file, self.log = file, file.with_name(file.name + ".progress")
        self.settings = json.loads(json.dumps(settings, default=str))
        self._finished: dict[str, dict[str, Any]] = {}

    def __enter__(self) -> SegmentsFile:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        lines = _whole_lines(self.log)
        if lines and lines[0].get("settings") != self.settings:
            raise DataError(
                "the output is there already, with other settings",
                where=self.file,
                given=lines[0].get("settings"),
                do=f"give another --output, or delete {self.file} and {self.log}",
            )
        if not lines and self.file.exists():
            problem, do = "the file exists already and is not overwritten", "give another --output"
            raise DataError(problem, where=self.file, do=do)
        self._finished = {line["where"]: line for line in lines[1:]}
        size = max([line["bytes"] for line in lines[1:]], default=0)
        self._segments, self._progress = self.file.open("ab"), self.log.open("ab")
        self._segments.truncate(size)  # what a kill has left without a line in the progress
        self._progress.truncate(sum(len(_line(line)) for line in lines))
        if not lines:
            self._add(self._progress, _line({"settings": self.settings}))
        return self

    def __exit__(self, *_: object) -> None:
        self._segments.close()
        self._progress.close()

    def done(self, item: Utterance | BadExample) -> dict[str, Any] | None:
        """What was written for a recording before, if it was finished."""
        return self._finished.get(str(item.where))

    def write(self, item: Utterance | BadExample, rows: Sequence[dict[str, Any]], unsure: int) -> dict[str, Any]:
        """Write the rows of a recording; what is then known of it."""
        self._add(self._segments, b"".join(_line(row) for row in rows))
        seconds = sum(row["end"] - row["start"] for row in rows)
        known = {"where": str(item.where), "segments": len(rows), "seconds": seconds, "unsure": unsure}
        known["bytes"] = self._segments.tell()
        self._add(self._progress, _line(known))
        return known

    @staticmethod
    def _add(file: Any, data: bytes) -> None:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row, ensure_ascii=False, default=str).encode() + b"\n"


def _whole_lines(file: Path) -> list[dict[str, Any]]:
    """The lines of a JSONL file up to the first that is cut off."""
    found: list[dict[str, Any]] = []
    for line in file.read_bytes().splitlines(keepends=True) if file.exists() else []:
        if not line.endswith(b"\n"):
            break
        found.append(json.loads(line))
    return found
