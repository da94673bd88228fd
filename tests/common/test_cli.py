"""The command line: errors that users meet are told in a few lines, with exit code 2."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from luthier.common import cli, reading
from luthier.common.errors import LuthierError


def run(monkeypatch: pytest.MonkeyPatch, error: Exception, *arguments: str) -> Any:
    def load(*_: Any) -> None:
        raise error

    monkeypatch.setattr(reading, "load", load)
    return cli.main(["train", "recipe.yaml", *arguments])


@pytest.mark.parametrize(
    "error",
    [
        LuthierError("wrong", where="there", do="this"),
        OSError(errno.ENOSPC, "No space left on device", "curves.csv"),
        OSError(errno.EROFS, "Read-only file system"),
    ],
)
def test_errors_of_the_user_and_of_the_disk_exit_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(monkeypatch, error)
    assert stopped.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert "do:" in told


def test_other_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        run(monkeypatch, FileNotFoundError(errno.ENOENT, "No such file", str(tmp_path)))
    with pytest.raises(LuthierError):
        run(monkeypatch, LuthierError("wrong"), "--debug")
