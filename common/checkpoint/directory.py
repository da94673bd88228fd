"""A checkpoint on disk: written beside its place, sealed by hashes, renamed into place; read only when it is whole.

step-00001200/
  model/ state/ recipe.yaml run.json metrics.json
  manifest.json   every file with its size and SHA-256
  COMMIT          SHA-256 of manifest.json; written last
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from ..errors import CheckpointError

log = logging.getLogger(__name__)

MANIFEST, COMMIT = "manifest.json", "COMMIT"
PARTIAL, DELETED, BROKEN = ".tmp", ".del", ".broken"
UNSEALED = {MANIFEST, COMMIT}


def name(step: int) -> str:
    """Folder name of the checkpoint after `step` optimizer steps."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Optimizer steps done at a checkpoint, from its name."""
    return int(path.name.removeprefix("step-"))


def sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Force a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def partial(target: Path) -> Path:
    """An empty folder beside `target`, on the same file system, for its files to be written into."""
    folder = target.with_name(target.name + PARTIAL)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def commit(folder: Path, target: Path) -> None:
    """Seal a written folder and rename it into place; from then on it counts."""
    files = _files(folder)
    listing = {str(path.relative_to(folder)): {"size": path.stat().st_size, "sha256": sha256(path)} for path in files}
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps(listing, indent=1))
    (folder / COMMIT).write_text(sha256(manifest))
    for path in [*files, manifest, folder / COMMIT]:
        _sync(path)
    for path in sorted({path.parent for path in files} | {folder}):
        _sync(path)
    replaced = target.with_name(target.name + DELETED)
    if target.exists():  # the same step saved again, such as after an evaluation that a stopped run had left undone
        target.rename(replaced)
    folder.rename(target)
    _sync(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def discard(folder: Path) -> None:
    """Remove a checkpoint: renamed first, so that no half of it is ever taken for a whole."""
    doomed = folder.with_name(folder.name + DELETED)
    if doomed.exists():
        shutil.rmtree(doomed)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def fault(folder: Path) -> str | None:
    """Why a checkpoint is not whole, or None if every file is as it was committed."""
    if not (folder / COMMIT).is_file():
        return "no COMMIT"
    if not (folder / MANIFEST).is_file():
        return "no manifest.json"
    if (folder / COMMIT).read_bytes().decode("ascii", "replace") != sha256(folder / MANIFEST):
        return "manifest.json is not the committed one"
    listing = json.loads((folder / MANIFEST).read_text())
    present = {str(path.relative_to(folder)) for path in _files(folder)} - UNSEALED
    for file, entry in listing.items():
        if file not in present:
            return f"{file} is missing"
        size = (folder / file).stat().st_size
        if size != entry["size"]:
            return f"{file} has {size} bytes instead of {entry['size']}"
        if sha256(folder / file) != entry["sha256"]:
            return f"{file} has other contents than were written"
    if extra := present - set(listing):
        return f"{sorted(extra)[0]} does not belong to it"
    return None


def verify(folder: Path) -> None:
    """Raise CheckpointError unless the checkpoint is whole."""
    if not folder.is_dir():
        raise CheckpointError("no such checkpoint", where=folder, expected="a folder such as OUTPUT/checkpoints/best")
    if reason := fault(folder):
        raise CheckpointError("the checkpoint is not whole", where=folder, given=reason, do="use another checkpoint")


def committed(root: Path) -> list[Path]:
    """Checkpoints under `root` that have been renamed into place, oldest first."""
    return sorted(path for path in root.glob("step-*") if path.is_dir() and path.name.removeprefix("step-").isdigit())


def newest_valid(root: Path, mend: bool = True) -> Path | None:
    """The newest whole checkpoint; broken ones are renamed with the reason beside them and named in a warning.

    Args:
        root: the folder of the checkpoints.
        mend: rename the broken ones; of several processes only one may.

    Raises:
        CheckpointError: there are checkpoints and none is whole: starting over would hide the loss.
    """
    broken = []
    for folder in reversed(committed(root)):
        reason = fault(folder)
        if reason is None:
            return folder
        broken.append(f"{folder}: {reason}")
        if mend:
            aside = _set_aside(folder)
            (aside / "BROKEN").write_text(reason + "\n")
            log.warning("broken checkpoint, renamed to %s: %s", aside.name, reason)
    if broken or any(root.glob(f"step-*{BROKEN}*")):
        raise CheckpointError(
            "there are checkpoints and none is whole",
            where=root,
            given="; ".join(broken) or "all were set aside",
            do="mend one from a copy, or start over with train.fresh=true",
        )
    return None


def _set_aside(folder: Path) -> Path:
    aside, number = folder.with_name(folder.name + BROKEN), 2
    while aside.exists():
        aside, number = folder.with_name(f"{folder.name}{BROKEN}-{number}"), number + 1
    return folder.rename(aside)


def clear_partial(root: Path) -> None:
    """Remove what a killed save or a killed removal left; a sealed folder that only lacked its renaming is kept."""
    for folder in root.glob(f"step-*{PARTIAL}"):
        target = folder.with_name(folder.name.removesuffix(PARTIAL))
        if not target.exists() and fault(folder) is None:
            folder.rename(target)
    for ending in (PARTIAL, DELETED):
        for folder in root.glob(f"step-*{ending}"):
            shutil.rmtree(folder)


def point(link: Path, target: Path) -> None:
    """Make `link` point to `target`, replacing it in one step. Links are hints; what counts is COMMIT."""
    temporary = link.with_name(f".{link.name}.new")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target.name)
    temporary.replace(link)


def prune(root: Path, best: Path, keep_last: int) -> None:
    """Remove all but the best and the newest `keep_last`; at least 2 stay in all."""
    checkpoints = committed(root)
    kept = {best, *checkpoints[-keep_last:]} & set(checkpoints)
    for folder in reversed(checkpoints):
        if len(kept) >= 2:
            break
        kept.add(folder)
    for folder in checkpoints:
        if folder not in kept:
            discard(folder)


def need(root: Path, size: int, say: Callable[[str], None] = log.warning) -> None:
    """Raise CheckpointError if the disk under `root` has no room for a checkpoint of `size` bytes."""
    free = shutil.disk_usage(root).free
    if free < size:
        raise CheckpointError(
            "no room for a checkpoint",
            where=root,
            given=f"{free / 1e9:.2f} GB free",
            expected=f"{size / 1e9:.2f} GB",
            do="free some space; the last good checkpoint is untouched",
        )
    if free < 2 * size:
        say(f"{root}: room for only one more checkpoint ({free / 1e9:.2f} GB free, {size / 1e9:.2f} GB each)")
