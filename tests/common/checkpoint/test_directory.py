"""A checkpoint is whole or it is not used: each way of breaking one is found, and nothing is lost on the way."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from luthier.common.checkpoint import directory
from luthier.common.errors import CheckpointError

FILES = {
    "model/model.safetensors": bytes(range(256)) * 20,
    "model/config.json": b"{}\n",
    "model/deep/er/vocab.txt": "perché\n".encode(),
    "state/trainer.pt": b"state" * 100,
    "recipe.yaml": b"task: 1\n",
    "run.json": b'{"position": {"step": 1}}',
    "metrics.json": b"{}",
}


def write(root: Path, step: int) -> Path:
    """A committed checkpoint whose contents differ from those of other steps, but not their sizes."""
    target = root / directory.name(step)
    folder = directory.partial(target)
    for name, content in FILES.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content + b"%08d" % step)
    directory.commit(folder, target)
    return target


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints"
    for step in (3, 6, 9):
        write(folder, step)
    return folder


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


# ------------------------------------------------------------------------------------------------ what is written


def test_a_committed_checkpoint_is_whole(root: Path) -> None:
    folder = root / "step-00000009"
    assert directory.fault(folder) is None
    directory.verify(folder)
    listing = json.loads((folder / "manifest.json").read_text())
    assert set(listing) == set(FILES)
    assert listing["run.json"]["size"] == len(FILES["run.json"]) + 8
    assert (folder / "COMMIT").read_text() == directory.sha256(folder / "manifest.json")
    assert names(root) == {"step-00000003", "step-00000006", "step-00000009"}


def test_names_sort_by_step(root: Path) -> None:
    write(root, 123456789)
    assert [directory.step_of(path) for path in directory.committed(root)] == [3, 6, 9, 123456789]


def test_the_newest_is_taken(root: Path) -> None:
    assert directory.newest_valid(root) == root / "step-00000009"


def test_without_any_there_is_none(tmp_path: Path) -> None:
    assert directory.newest_valid(tmp_path) is None


# ------------------------------------------------------------------------------------------------ what can break


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def delete(file: Path) -> None:
    file.unlink()


def grow(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


def become_a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def swap(file: Path) -> None:
    """The same file of another checkpoint: whole, of the same size, and of another step."""
    older = Path(str(file).replace("step-00000009", "step-00000006"))
    shutil.copy(older, file)


BREAKS: list[Callable[[Path], None]] = [cut, empty, flip, delete, grow, swap, become_a_folder]


@pytest.mark.parametrize("damage", BREAKS, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("file", [*FILES, "manifest.json", "COMMIT"])
def test_every_damage_to_every_file_is_found(root: Path, file: str, damage: Callable[[Path], None]) -> None:
    folder = root / "step-00000009"
    damage(folder / file)
    reason = directory.fault(folder)
    assert reason is not None
    assert file in reason or "manifest.json" in reason
    with pytest.raises(CheckpointError, match="not whole") as caught:
        directory.verify(folder)
    assert str(folder) in str(caught.value)
    assert reason in str(caught.value)
    # The one before is used instead, and the broken one is kept, under a name that tells, with the reason.
    assert directory.newest_valid(root) == root / "step-00000006"
    assert names(root) == {"step-00000003", "step-00000006", "step-00000009.broken"}
    assert (root / "step-00000009.broken" / "BROKEN").read_text().strip() == reason


@pytest.mark.parametrize("file", ["extra.pt", "state/trainer.pt.new", "model/deep/model.bin"])
def test_an_added_file_is_found(root: Path, file: str) -> None:
    folder = root / "step-00000009"
    (folder / file).write_bytes(b"")
    assert directory.fault(folder) == f"{file} does not belong to it"


def test_the_manifest_of_another_checkpoint_is_found(root: Path) -> None:
    """Even with its own COMMIT."""
    for file in ("manifest.json", "COMMIT"):
        shutil.copy(root / "step-00000006" / file, root / "step-00000009" / file)
    assert "other contents than were written" in str(directory.fault(root / "step-00000009"))


def test_a_newline_after_the_hash_is_no_damage_that_matters(root: Path) -> None:
    """COMMIT is altered, if only by an editor: refused, as everything else that was not written."""
    commit = root / "step-00000009" / "COMMIT"
    commit.write_text(commit.read_text() + "\n")
    assert directory.fault(root / "step-00000009") == "manifest.json is not the committed one"


def test_only_the_process_that_may_mend_renames(root: Path) -> None:
    cut(root / "step-00000009" / "run.json")
    assert directory.newest_valid(root, mend=False) == root / "step-00000006"
    assert names(root) == {"step-00000003", "step-00000006", "step-00000009"}


def test_several_broken_ones_are_passed_over(root: Path) -> None:
    cut(root / "step-00000009" / "run.json")
    flip(root / "step-00000006" / "COMMIT")
    assert directory.newest_valid(root) == root / "step-00000003"
    assert names(root) == {"step-00000003", "step-00000006.broken", "step-00000009.broken"}
    assert directory.newest_valid(root) == root / "step-00000003"


def test_when_all_are_broken_that_is_an_error_every_time(root: Path) -> None:
    for step in (3, 6, 9):
        empty(root / directory.name(step) / "state" / "trainer.pt")
    with pytest.raises(CheckpointError, match="there are checkpoints and none is whole") as caught:
        directory.newest_valid(root)
    for step in (3, 6, 9):
        assert f"step-{step:08d}" in str(caught.value)
        assert (root / f"step-{step:08d}.broken").is_dir()
    assert "state/trainer.pt has 0 bytes" in str(caught.value)
    assert "train.fresh=true" in str(caught.value)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="none is whole"):
            directory.newest_valid(root)


def test_a_second_break_of_the_same_step_is_kept_too(root: Path) -> None:
    for _ in range(3):
        cut(root / "step-00000009" / "run.json")
        directory.newest_valid(root)
        write(root, 9)
    aside = {f"step-00000009.broken{ending}" for ending in ("", "-2", "-3")}
    assert names(root) == {"step-00000003", "step-00000006", "step-00000009"} | aside
    assert directory.newest_valid(root) == root / "step-00000009"


def test_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        directory.verify(tmp_path / "nothing")


# ------------------------------------------------------------------------------------------------ half-done work


def test_what_is_not_committed_is_never_taken(root: Path) -> None:
    shutil.copytree(root / "step-00000009", root / "step-00000012.tmp")  # sealed, and not yet renamed
    shutil.copytree(root / "step-00000009", root / "step-00000015.del")  # on its way out
    shutil.copytree(root / "step-00000009", root / "step-00000018.broken")
    shutil.copytree(root / "step-00000009", root / "step-final")
    (root / "step-00000021").write_text("a file")
    assert directory.newest_valid(root) == root / "step-00000009"
    assert [path.name for path in directory.committed(root)] == ["step-00000003", "step-00000006", "step-00000009"]


def test_leftovers_are_cleared_and_nothing_else(root: Path) -> None:
    before = names(root)
    (root / "step-00000012.tmp" / "model").mkdir(parents=True)
    (root / "step-00000012.tmp" / "model" / "half").write_bytes(b"x")
    (root / "step-00000003.del").mkdir()
    (root / "step-00000006.broken").mkdir()
    directory.clear_partial(root)
    assert names(root) == before | {"step-00000006.broken"}


def test_only_leftovers_are_as_good_as_nothing(tmp_path: Path) -> None:
    directory.partial(tmp_path / "step-00000003")
    directory.clear_partial(tmp_path)
    assert directory.newest_valid(tmp_path) is None


def test_a_new_attempt_starts_with_an_empty_folder(root: Path) -> None:
    folder = directory.partial(root / "step-00000012")
    (folder / "old").write_bytes(b"from a killed save")
    assert list(directory.partial(root / "step-00000012").iterdir()) == []


@pytest.mark.parametrize(("at", "sealed"), [("sha256", False), ("_sync", True)])
def test_a_kill_before_the_rename_leaves_the_earlier_ones(
    root: Path, monkeypatch: pytest.MonkeyPatch, at: str, sealed: bool
) -> None:
    """And the new one too, if it was sealed already and lacks its renaming only."""
    folder = directory.partial(root / "step-00000012")
    (folder / "run.json").write_bytes(b"{}")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(directory, at, killed)
    with pytest.raises(KeyboardInterrupt):
        directory.commit(folder, root / "step-00000012")
    monkeypatch.undo()
    earlier = {"step-00000003", "step-00000006", "step-00000009"}
    assert names(root) == earlier | {"step-00000012.tmp"}
    assert directory.newest_valid(root) == root / "step-00000009"
    directory.clear_partial(root)
    assert names(root) == (earlier | {"step-00000012"} if sealed else earlier)
    assert directory.newest_valid(root) == root / ("step-00000012" if sealed else "step-00000009")


@pytest.mark.parametrize("damaged", [True, False])
def test_a_sealed_folder_never_replaces_what_is_in_its_place(root: Path, damaged: bool) -> None:
    """Nor does one that is damaged count, whatever its COMMIT says."""
    shutil.copytree(root / "step-00000006", root / "step-00000012.tmp")
    if damaged:
        flip(root / "step-00000012.tmp" / "state" / "trainer.pt")
    else:
        (root / "step-00000012.tmp").rename(root / "step-00000009.tmp")  # its hashes hold
    directory.clear_partial(root)
    assert names(root) == {"step-00000003", "step-00000006", "step-00000009"}
    assert (root / "step-00000009" / "run.json").read_bytes().endswith(b"00000009")


def test_a_kill_while_a_step_is_replaced_loses_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saving a step again renames the old one away first; killed right there, one of the two must still count."""
    write(tmp_path, 3)
    rename = Path.rename

    def killed_after_the_first(self: Path, target: Path) -> Path:
        if str(self).endswith(directory.PARTIAL):
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", killed_after_the_first)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, 3)
    monkeypatch.undo()
    directory.clear_partial(tmp_path)
    assert directory.newest_valid(tmp_path) == tmp_path / "step-00000003"
    assert names(tmp_path) == {"step-00000003"}


def test_files_are_staged_beside_their_place_and_not_in_tmpdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    monkeypatch.setenv("TMPDIR", str(elsewhere))  # it does not even exist
    target = write(tmp_path / "checkpoints", 3)
    assert directory.fault(target) is None
    assert not elsewhere.exists()
    assert directory.partial(target).parent == target.parent


def test_everything_is_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    rename, sync = Path.rename, directory._sync

    def noted_sync(path: Path) -> None:
        events.append(f"sync {path.relative_to(tmp_path)}")
        sync(path)

    def noted_rename(self: Path, target: Path) -> Path:
        events.append(f"rename {self.name}")
        return rename(self, target)

    monkeypatch.setattr(directory, "_sync", noted_sync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    write(tmp_path, 3)
    at = events.index("rename step-00000003.tmp")
    written = {f"sync step-00000003.tmp/{name}" for name in [*FILES, "manifest.json", "COMMIT"]}
    folders = {f"sync step-00000003.tmp/{name}".rstrip("/") for name in ("", "model", "model/deep/er", "state")}
    assert written | folders <= set(events[:at])
    assert events[at + 1 :] == ["sync ."]


# ------------------------------------------------------------------------------------------------ saving again


def test_the_same_step_committed_twice_is_the_second(root: Path) -> None:
    target = root / "step-00000009"
    folder = directory.partial(target)
    (folder / "run.json").write_bytes(b"second")
    directory.commit(folder, target)
    assert directory.fault(target) is None
    assert (target / "run.json").read_bytes() == b"second"
    assert names(root) == {"step-00000003", "step-00000006", "step-00000009"}


# ------------------------------------------------------------------------------------------------ pruning


def kept(root: Path) -> list[int]:
    assert not any(name.endswith((".del", ".tmp")) for name in names(root))
    return [directory.step_of(path) for path in directory.committed(root)]


@pytest.mark.parametrize(
    ("best", "keep_last", "left"),
    [
        (1, 2, [1, 4, 5]),
        (5, 2, [4, 5]),
        (4, 2, [4, 5]),
        (2, 3, [2, 3, 4, 5]),
        (3, 1, [3, 5]),
        (5, 1, [4, 5]),  # never fewer than 2
        (1, 9, [1, 2, 3, 4, 5]),
    ],
)
def test_the_best_and_the_last_stay(tmp_path: Path, best: int, keep_last: int, left: list[int]) -> None:
    for step in range(1, 6):
        write(tmp_path, step)
    directory.prune(tmp_path, tmp_path / directory.name(best), keep_last)
    assert kept(tmp_path) == left
    assert all(directory.fault(path) is None for path in directory.committed(tmp_path))


def test_a_single_one_stays(tmp_path: Path) -> None:
    write(tmp_path, 1)
    directory.prune(tmp_path, tmp_path / directory.name(1), 1)
    assert kept(tmp_path) == [1]


def test_a_best_that_is_gone_does_not_count_as_kept(root: Path) -> None:
    directory.prune(root, root / directory.name(1), 1)
    assert kept(root) == [6, 9]


def test_pruning_leaves_everything_else_alone(root: Path) -> None:
    (root / "step-00000001.broken").mkdir()
    (root / "notes").mkdir()
    directory.prune(root, root / directory.name(9), 2)
    assert names(root) == {"step-00000001.broken", "notes", "step-00000006", "step-00000009"}


def test_a_checkpoint_is_renamed_before_it_is_removed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill in the middle of a removal leaves no half of a checkpoint under its name."""

    def killed(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        directory.discard(root / "step-00000003")
    monkeypatch.undo()
    assert names(root) == {"step-00000003.del", "step-00000006", "step-00000009"}
    directory.clear_partial(root)
    assert names(root) == {"step-00000006", "step-00000009"}


# ------------------------------------------------------------------------------------------------ pointers


def test_pointers_are_relative_and_replaced(root: Path) -> None:
    link = root / "best"
    directory.point(link, root / "step-00000003")
    directory.point(link, root / "step-00000009")
    assert os.readlink(link) == "step-00000009"
    moved = root.rename(root.with_name("moved"))
    assert (moved / "best" / "recipe.yaml").read_bytes() == b"task: 1\n00000009"


def test_a_pointer_is_never_away(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed at any moment, `best` is the old one or the new one."""
    link = root / "best"
    directory.point(link, root / "step-00000003")
    replace = Path.replace
    seen: list[bool] = []

    def watched(self: Path, target: Path) -> Path:
        seen.append(link.is_symlink() and link.exists())
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", watched)
    unlink = Path.unlink

    def guarded(self: Path, missing_ok: bool = False) -> None:
        assert self != link
        unlink(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", guarded)
    directory.point(link, root / "step-00000006")
    assert seen == [True]
    assert os.readlink(link) == "step-00000006"


def test_a_pointer_left_half_made_is_replaced(root: Path) -> None:
    (root / ".best.new").symlink_to("nowhere")
    directory.point(root / "best", root / "step-00000006")
    assert os.readlink(root / "best") == "step-00000006"
    assert ".best.new" not in names(root)


def test_pointers_are_hints_only(root: Path) -> None:
    directory.point(root / "last", root / "step-00000003")
    directory.point(root / "best", root / "step-00000099")
    assert directory.newest_valid(root) == root / "step-00000009"


# ------------------------------------------------------------------------------------------------ room


def test_room_on_the_disk(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 50, 50))  # type: ignore[attr-defined]
    told: list[str] = []
    directory.need(root, 25, told.append)
    assert not told
    directory.need(root, 26, told.append)
    assert "room for only one more" in told[0]
    with pytest.raises(CheckpointError, match="no room for a checkpoint"):
        directory.need(root, 51)
