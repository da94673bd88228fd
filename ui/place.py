"""The folder that the page works in; nothing outside of it is read or written by its name."""

from __future__ import annotations

from pathlib import Path

from ..common.errors import LuthierError

OWN = ".luthier-ui"
"""The page's own files in the folder: edited recipes, logs, reports."""


class Place:
    """A folder.

    Args:
        folder: which is there.
    """

    def __init__(self, folder: Path):
        self.folder = folder.expanduser().resolve()
        if not self.folder.is_dir():
            raise LuthierError("no such folder", where=folder, do="make it first")
        self.own = self.folder / OWN
        self.own.mkdir(exist_ok=True)

    def inside(self, name: str | Path) -> Path:
        """A path in the folder; see `inside`."""
        return inside(self.folder, name)

    def named(self, path: Path) -> str:
        """A path of the folder as it is called on the page."""
        return path.relative_to(self.folder).as_posix()

    def recipes(self) -> list[str]:
        """The YAML files of the folder, without those that runs have left."""
        files = (file for depth in ("*.yaml", "*/*.yaml", "*/*/*.yaml") for file in self.folder.glob(depth))
        return sorted(self.named(file) for file in files if not self._is_left(file))

    def _is_left(self, file: Path) -> bool:
        return (file.parent / "run.json").is_file() or any(
            part.startswith(".") for part in file.relative_to(self.folder).parts
        )

    def runs(self) -> list[str]:
        """Folders of runs, the newest first."""
        found = [
            file.parent
            for depth in ("*", "*/*", "*/*/*")
            for file in self.folder.glob(f"{depth}/run.json")
            if "checkpoints" not in file.parts and OWN not in file.parts
        ]
        return [self.named(run) for run in sorted(found, key=lambda run: -(run / "run.json").stat().st_mtime)]


def inside(folder: Path, name: str | Path) -> Path:
    """A path in a resolved folder, whether or not it is there yet.

    Raises:
        LuthierError: it leads out of the folder, through `..`, a link or as an absolute path.
    """
    found = (folder / Path(name).expanduser()).resolve()
    if found == folder or not found.is_relative_to(folder):
        raise LuthierError("outside of the page's folder", where=str(name), expected=f"a path in {folder}")
    return found
