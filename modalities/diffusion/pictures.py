"""Captioned pictures: folders with caption files, `metadata.jsonl`, tables and data sets with an image column."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ...common.data.rows import Row
from ...common.data.sources import Media, rows
from ...common.errors import BadExample
from ...common.recipe import Source
from .buckets import Size, nearest, own
from .images import SUFFIXES, Colour, Stored, decoded, digest, stored_bytes
from .sections import ImageSection

IMAGE = ("image", "file_name", "image_path", "image_file", "path", "jpg", "png", "img")
CAPTION = ("text", "caption", "prompt", "captions", "txt", "description")
MASK = ("mask", "mask_file_name", "mask_path", "conditioning_image")
SIDECARS = (".txt", ".caption")
"""Endings of caption files beside pictures."""


@dataclass(frozen=True)
class Picture:
    """A picture and its caption.

    Args:
        image: where its bytes are.
        caption: what it shows; None: the row has none.
        where: file and row.
        source: name of the data set.
        mask: a picture that is white where the loss counts.
        fields: further fields of the row, for slices.
        size: width and height of the upright picture; known after the check.
        bucket: size it is trained at; known after the check.
        digest: of the bytes of image and mask; known after the check.
        notes: what the check found worth counting.
    """

    image: Stored
    caption: str | None
    where: str
    source: str = ""
    mask: Stored | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    size: Size = (0, 0)
    bucket: Size = (0, 0)
    digest: str = ""
    notes: Mapping[str, int] = field(default_factory=dict)


def pictures(source: Source) -> Iterator[Picture | BadExample]:
    """All pictures of a source: of a folder of picture files with caption files beside them, else of its rows."""
    folder = Path(source.path)
    if folder.is_dir() and _is_plain(folder):
        yield from _folder(folder if source.split is None else folder / source.split, source.label)
        return
    for row in rows(source.path, split=source.split, source=source.label):
        yield row if isinstance(row, BadExample) else _of_row(row)


def _is_plain(folder: Path) -> bool:
    """Whether a folder holds pictures and no table about them."""
    if any((folder / name).is_file() for name in ("dataset_dict.json", "state.json", "dataset_info.json")):
        return False
    files = [file for file in folder.rglob("*") if file.is_file()]
    named = any(file.suffix.lower() in (".jsonl", ".csv", ".parquet", ".arrow", ".json", ".tsv") for file in files)
    return not named and any(file.suffix.lower() in SUFFIXES for file in files)


def _folder(folder: Path, label: str) -> Iterator[Picture]:
    for file in sorted(folder.rglob("*")):
        if file.suffix.lower() not in SUFFIXES or file.stem.endswith(".mask"):
            continue
        mask = file.with_name(f"{file.stem}.mask.png")
        yield Picture(
            str(file), _sidecar(file), str(file.relative_to(folder)), label, str(mask) if mask.is_file() else None
        )


def _sidecar(file: Path) -> str | None:
    """The text of a caption file, its lines joined."""
    for ending in SIDECARS:
        beside = file.with_suffix(ending)
        if beside.is_file():
            return " ".join(beside.read_text(encoding="utf-8", errors="replace").split())
    return None


def _of_row(row: Row) -> Picture | BadExample:
    found = next((name for name in IMAGE if row.fields.get(name) not in (None, "")), None)
    if found is None:
        given = ", ".join(row.fields)
        return BadExample("no_image", "no image column", where=row.where, given=given, expected=" or ".join(IMAGE[:3]))
    caption = next((row.fields[name] for name in CAPTION if row.fields.get(name) is not None), None)
    if caption is not None and not isinstance(caption, str):
        return BadExample("no_caption", "the caption is no text", where=row.where, given=repr(caption)[:80])
    mask = next((row.fields[name] for name in MASK if row.fields.get(name) not in (None, "")), None)
    used = (*IMAGE, *CAPTION, *MASK)
    others = {name: value for name, value in row.fields.items() if name not in used and not isinstance(value, Media)}
    return Picture(
        _stored(row.fields[found], row.base),
        None if caption is None else " ".join(caption.split()),
        row.where,
        row.source,
        None if mask is None else _stored(mask, row.base),
        others,
    )


def _stored(value: Any, base: Path) -> Stored:
    if callable(value):
        stored: Stored = value
        return stored
    return str(base / str(value))


def examined(picture: Picture, section: ImageSection, sizes: tuple[Size, ...]) -> Picture:
    """The check: all pixels are decoded, and size, bucket and digest are known afterwards.

    Args:
        picture: as it was read.
        section: how pictures are read and sized.
        sizes: sizes to train at.

    Raises:
        BadExample: `missing_file`, `corrupt_image`, `too_small`, `wrong_mask`, ...
    """
    data = stored_bytes(picture.image, picture.where)
    image = decoded(data, picture.where, section.background)
    if min(image.size) < section.min_side:
        raise BadExample(
            "too_small",
            "the picture is too small",
            where=picture.where,
            given=f"{image.size[0]} x {image.size[1]}",
            expected=f"a shorter side of {section.min_side} pixels (data.image.min_side)",
        )
    bucket = nearest(image.size, sizes)
    if not section.upscale:
        bucket = own(image.size, bucket, section.step)
    enlarged = image.size[0] < bucket[0] or image.size[1] < bucket[1]
    content = digest(data)
    if picture.mask is not None:
        mask_data = stored_bytes(picture.mask, picture.where)
        mask = decoded(mask_data, picture.where)
        if mask.size != image.size:
            raise BadExample(
                "wrong_mask",
                "the mask has another size than the picture",
                where=picture.where,
                given=f"{mask.size[0]} x {mask.size[1]}",
                expected=f"{image.size[0]} x {image.size[1]}",
            )
        content += digest(mask_data)
    notes = {"pictures enlarged": 1} if enlarged else {}
    return replace(picture, size=image.size, bucket=bucket, digest=content, notes=notes)


def unchanged(picture: Picture, background: Colour) -> Any:
    """(picture, mask or None) as Pillow images; what was checked before must still be there.

    Raises:
        BadExample: `changed_file`, or what decoding finds.
    """
    data = stored_bytes(picture.image, picture.where)
    mask = None if picture.mask is None else stored_bytes(picture.mask, picture.where)
    if digest(data) + ("" if mask is None else digest(mask)) != picture.digest:
        raise BadExample("changed_file", "the picture is another one than at the start of the run", where=picture.where)
    image = decoded(data, picture.where, background)
    return image, None if mask is None else decoded(mask, picture.where).convert("L")
