"""What a tracker is told: numbers, what the run is made of, samples, where its checkpoints are."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ..errors import LuthierError
from ..record import write_json
from ..secrets import distinct, without_secrets

log = logging.getLogger(__name__)

IDS = "trackers.json"
"""In the run's folder: the name of its record at each tracker, so that a resumed run goes on with it."""
TEXT = 20_000
"""Characters of a text that a tracker gets."""

Samples = Sequence[Mapping[str, Any]]


@runtime_checkable
class Tracker(Protocol):
    """A Lightning logger that takes more than numbers."""

    def begin(self, facts: Mapping[str, str]) -> None:
        """Open the record, or the one that an earlier start of the run has left, and say what the run is made of."""

    def log_samples(self, samples: Samples, step: int) -> None:
        """Samples of an evaluation; a value of bytes is a PNG file."""

    def log_checkpoint(self, path: Path, step: int) -> None:
        """Where the newest checkpoint is; it is not uploaded."""


def begin(loggers: Iterable[Any], record: Mapping[str, Any]) -> None:
    """Open the trackers among some loggers, on the first rank.

    Raises:
        LuthierError: one can't be opened: now nothing is lost yet.
    """
    for tracker in loggers:
        if not isinstance(tracker, Tracker):
            continue
        try:
            tracker.begin(facts(record))
        except Exception as error:
            raise LuthierError(
                f"the tracker can't be opened: {str(error).strip() or type(error).__name__}",
                where="track.loggers",
                given=type(tracker).__name__,
                do="log in to it or set its offline mode (WANDB_MODE=offline, SWANLAB_MODE=offline), or leave it out",
            ) from error


def tell(loggers: Iterable[Any], what: Callable[[Any], object], only: Any = object) -> None:
    """Tell each logger something. One that fails is named in a warning: a training doesn't end for its tracker.

    Args:
        loggers: of the run.
        what: is called with each.
        only: those of this kind.
    """
    for logger in loggers:
        if not isinstance(logger, only):
            continue
        if not isinstance(logger, Tracker):
            what(logger)
            continue
        try:
            what(logger)
        except Exception as error:
            log.warning("%s could not be told: %s", type(logger).__name__, str(error).strip() or type(error).__name__)


def facts(record: Mapping[str, Any]) -> dict[str, str]:
    """What a run is made of, as texts by name: resolved recipe, hashes of data and model, versions, git; no secrets."""
    known = without_secrets(record)
    found = {f"recipe/{path}": str(value) for path, value in _leaves(known.get("recipe") or {})}
    for name, report in (known.get("data") or {}).items():
        digests = (report.get("sha256") or {}).items()
        found |= distinct((f"data/{name}/{Path(path).name}/sha256", str(digest)) for path, digest in digests)
        found |= {f"data/{name}/{key}": str(report[key]) for key in ("rows", "examples") if key in report}
    for name in ("model", "versions", "git"):
        found |= {f"{name}/{path}": str(value) for path, value in _leaves(known.get(name) or {})}
    return found


def _leaves(tree: Any, path: str = "") -> Iterable[tuple[str, Any]]:
    if isinstance(tree, Mapping) and tree:
        for name, value in tree.items():
            yield from _leaves(value, f"{path}.{name}".lstrip("."))
    elif path:
        yield path, tree


def record_id(output: Path, tracker: str) -> tuple[str | None, bool]:
    """(name of the run's record at a tracker, whether it is there already); kept in the run's folder."""
    known = _known(output)
    if tracker in known:
        return known[tracker], True
    return uuid.uuid4().hex[:21], False


def keep_id(output: Path, tracker: str, name: str) -> None:
    """Keep the name of the run's record."""
    write_json(output / IDS, {**_known(output), tracker: name})


def _known(output: Path) -> dict[str, str]:
    file = output / IDS
    found: dict[str, str] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return found


def text(value: Any) -> str:
    """A value of a sample as a text, of bounded length."""
    return str(value)[:TEXT]
