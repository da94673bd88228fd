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

    Raises:
        LuthierError: it is not there, or the page's own folder in it is a link.
    """

    def __init__(self, folder: Path):
        self.folder = folder.expanduser().resolve()
        if not self.folder.is_dir():
            raise LuthierError("no such folder", where=folder, do="make it first")
        self.own = self.folder / OWN
        if self.own.is_symlink():
            raise LuthierError("a link, which may lead out of the folder", where=self.own, do="delete it")
        self.own.mkdir(exist_ok=True)

    def inside(self, name: str | Path) -> Path:
        """A path in the folder; see `inside`."""
        return inside(self.folder, name)

    def named(self, path: Path) -> str:
        """A path of the folder as it is called on the page."""
        return path.relative_to(self.folder).as_posix()

    def argument(self, path: Path) -> str:
        """A path of the folder as a command that runs there takes it; never one that looks like an option."""
        return f"./{self.named(path)}"

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
    try:
        found = (folder / Path(name).expanduser()).resolve()
    except (OSError, RuntimeError, ValueError):  # a circle of links, no such user, a zero byte
        found = folder
    if found == folder or not found.is_relative_to(folder):
        raise LuthierError("outside of the page's folder", where=repr(str(name)), expected=f"a path in {folder}")
    return found
