"""Licenses: read where they are stated, compared by a table, shown by `luthier check`; unknown is told as such."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from luthier.common import licenses
from luthier.common.check.licenses import permitted
from luthier.common.errors import LuthierError


def test_licenses_are_read_and_compared(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: cc-by-nc-4.0\n---\n# x\n")
    assert licenses.stated_by(str(tmp_path)) == "cc-by-nc-4.0"
    (tmp_path / "rows.jsonl").write_text("")
    assert licenses.stated_by(str(tmp_path / "rows.jsonl")) == "cc-by-nc-4.0"
    assert licenses.stated_by("someone/on-the-hub") is None
    both = licenses.verdict({"base": "apache-2.0", "rows": "cc-by-nc-4.0"})
    assert both.usable is True
    assert "No commercial use, by the license of: rows." in both.lines
    assert licenses.verdict({"base": "mit", "rows": None}).usable is None
    assert "rows (unknown)" in licenses.verdict({"base": "mit", "rows": None}).lines[0]
    assert licenses.verdict({"base": "cc-by-nd-4.0", "rows": "mit"}).usable is False
    assert licenses.verdict({"base": "gpl-3.0", "rows": "cc-by-sa-4.0"}).usable is False, "each asks for itself"
    assert licenses.verdict({"base": "apache-2.0", "rows": "cc-by-sa-4.0"}).output == "cc-by-sa-4.0"
    assert licenses.verdict({"base": "mit", "rows": "mit"}).output == "mit"
    assert licenses.verdict({"base": "llama3", "rows": "cc-by-sa-4.0"}).output == "other", "of its own"


def test_what_has_to_stay_free_can_t_be_made_of_what_is_not() -> None:
    """CC BY-SA 4.0, 3(b): a changed work is under the same license, which forbids no commercial use."""
    both = licenses.verdict({"base": "cc-by-sa-4.0", "rows": "cc-by-nc-4.0"})
    assert (both.usable, both.output) == (False, "other")
    assert "What these licenses ask for contradicts one another." in both.lines
    both = licenses.verdict({"base": "cc-by-nc-sa-4.0", "rows": "cc-by-nc-4.0"})
    assert (both.usable, both.output) == (True, "cc-by-nc-sa-4.0")


def test_works_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """Of a model and two data sets that are all called `en` none is lost."""
    places = []
    for name, license in (("a", "mit"), ("b", "cc-by-nd-4.0"), ("c", "cc0-1.0")):
        (tmp_path / name).mkdir()
        places.append(stated(tmp_path / name, "en", license))
    found = licenses.of(recipe(*places))
    assert found.stated == {"en": "mit", "en (2)": "cc-by-nd-4.0", "en (3)": "cc0-1.0"}
    assert found.usable is False


def stated(folder: Path, name: str, license: str | None) -> str:
    """A folder whose README states a license, or none."""
    (folder / name).mkdir()
    if license is not None:
        (folder / name / "README.md").write_text(f"---\nlicense: {license}\n---\n")
    return str(folder / name)


def recipe(base: str, *data: str) -> Any:
    sources = [SimpleNamespace(path=one, label=Path(one).name) for one in data]
    return SimpleNamespace(model=SimpleNamespace(path=base), data=SimpleNamespace(train=sources))


def test_check_tells_what_follows(tmp_path: Path) -> None:
    base = stated(tmp_path, "base", "apache-2.0")
    _, told = permitted(recipe(base, stated(tmp_path, "rows", "cc-by-nc-4.0")))
    assert "base: apache-2.0; rows: cc-by-nc-4.0" in told
    assert "No commercial use, by the license of: rows." in told
    _, told = permitted(recipe(base, stated(tmp_path, "silent", None)))
    assert "silent: unknown" in told
    assert "it is not known what they permit: silent" in told
    with pytest.raises(LuthierError, match="may not be passed on") as forbidden:
        permitted(recipe(base, stated(tmp_path, "closed", "cc-by-nd-4.0")))
    assert "closed" in str(forbidden.value)


def test_a_hub_name_is_told_as_it_is_and_a_path_by_its_last_part(tmp_path: Path) -> None:
    found = licenses.of(recipe("someone/model", stated(tmp_path, "rows", "mit")))
    assert found.stated == {"someone/model": "unknown", "rows": "mit"}
    assert found.usable is None
