"""Scrubbing: what is found in a made set, and what becomes of a data set, also one whose run was killed."""

from __future__ import annotations

import csv
import importlib.util
import json
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from luthier.common import cli
from luthier.common.errors import DataError, LuthierError
from luthier.privacy import names as naming
from luthier.privacy import scrub as scrubbing
from luthier.privacy.find import ALL, Found, find
from luthier.privacy.names import names
from luthier.privacy.scrub import Settings, form, scrub
from luthier.privacy.secrets import entropy


@pytest.fixture(scope="module")
def made() -> ModuleType:
    spec = importlib.util.spec_from_file_location("marked", Path(__file__).parent / "marked.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["marked"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_made_set_is_large_and_in_five_languages(made: ModuleType) -> None:
    whole = list(made.marked())
    assert sum(bool(one.values) for one in whole) >= 500
    assert {one.language for one in whole} == {"en", "zh", "it", "fr", "de"}
    assert sum(not one.values for one in whole) >= 50
    assert list(made.marked()) == whole  # the same each time


def test_recall_and_precision_of_every_kind(made: ModuleType) -> None:
    """The table in the README is what `python tests/privacy/marked.py` prints."""
    table = made.measured(made.marked())
    assert set(table) <= set(ALL)
    for kind, (there, right, called) in table.items():
        assert right / there >= 0.95, kind
        assert right / called >= 0.95, kind


def test_rarer_forms_are_found_for_the_most_part(made: ModuleType) -> None:
    """What the README says of them is measured; what is not found is told there."""
    table = made.measured(made.unusual())
    there, right = (sum(row[at] for row in table.values()) for at in (0, 1))
    assert right / there >= 0.9


@pytest.mark.parametrize("kind", ["CARD", "IBAN", "IT_FISCAL_CODE", "FR_NIR", "DE_TAX_ID", "CN_ID"])
def test_one_digit_changed_is_no_number(made: ModuleType, kind: str) -> None:
    """A check digit finds every single wrong digit (Luhn, mod 97, ISO 7064)."""
    for one in made.marked():
        if not one.values or one.values[0][0] != kind:
            continue
        value = one.values[0][1]
        at = max(index for index, letter in enumerate(value) if letter.isdigit())
        wrong = value[:at] + str((int(value[at]) + 1) % 10) + value[at + 1 :]
        assert (kind, wrong) not in [(span.kind, wrong[span.begin : span.end]) for span in find(wrong)]


@pytest.mark.parametrize(
    "text",
    [
        "## v2.10.1 (2024-11-21)", "pytz.NonExistentTimeError: 2002-04-07 02:30:00", "shot 2025-12-18 18-22-53.png",
        "Telephone and Telegraph Corporation, Copyright (C) 2012-2022", "in Calle 12, 2010-2018", "rev. 07-05-2021 12",
        "rights clause at FAR 52.227-19, as applicable", "handle: 1895.22/1013", "redirects (201/301/302/307/308)",
        "soft_interrupts=2134212, syscalls=0", ":widths: 25 50 25 25", "Version: 9.24.0.43", "numpy==1.24.0.43",
        "Versions after 1.11.1.1 need more", "http://127.0.0.1 and 0.0.0.0", "tokenizer=community/gpt2-large2",
    ],
)  # fmt: skip
def test_what_real_documents_hold_that_is_no_value(text: str) -> None:
    """Forms that were wrongly found in the documents of Python packages."""
    assert find(text) == []


@pytest.mark.parametrize(
    "text",
    ["My number is [212-555-5555]", "'[020 8366 1177]'", "Austin, TX 78741\n[800-292-9263]", "E164: '[+442083661177]'",
     "call [(212) 555-5555] now", "Büro: [030/123 456 78]"],
)  # fmt: skip
def test_phones_as_real_documents_write_them(text: str) -> None:
    plain, begin = text.replace("[", "").replace("]", ""), text.index("[")
    assert find(plain) == [Found(begin, text.index("]") - 1, "PHONE")]


def test_entropy() -> None:
    assert entropy("aaaa") == 0
    assert entropy("abcd") == 2  # four letters, equally often: log2 4


TEXT = "Write to Anna.Rossi@example.org or +39 347 123 4567, IBAN DE89 3704 0044 0532 0130 00."


def rows_of(file: Path, number: int) -> Path:
    with file.open("w") as out:
        for at in range(number):
            said = f"I am user{at % 7}@example.org, ask {TEXT if at % 5 == 0 else 'nobody'}"
            row = {"id": at, "messages": [{"role": "user", "content": said}], "note": "plain"}
            out.write(json.dumps(row) + "\n")
    return file


def read(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_values_become_the_same_placeholders_everywhere(tmp_path: Path) -> None:
    found = scrub(Settings(str(rows_of(tmp_path / "a.jsonl", 20)), tmp_path / "b.jsonl"))
    rows = read(tmp_path / "b.jsonl")
    assert len(rows) == 20 == found.rows == found.changed
    said = rows[0]["messages"][0]["content"]
    assert said == "I am <EMAIL_1>, ask Write to <EMAIL_2> or <PHONE_1>, IBAN <IBAN_1>."
    assert rows[5]["messages"][0]["content"].startswith("I am <EMAIL_7>, ask Write to <EMAIL_2> or <PHONE_1>")
    assert rows[7]["messages"][0]["content"] == "I am <EMAIL_1>, ask nobody"  # users come again after seven
    assert found.distinct == {"EMAIL": 8, "IBAN": 1, "PHONE": 1}
    assert found.found == {"EMAIL": 24, "IBAN": 4, "PHONE": 4}
    assert found.fields == {"messages[].content": 32}
    assert rows[3]["id"] == 3
    assert not list(tmp_path.glob(".*"))  # what was needed on the way is gone


def test_the_report_holds_no_value(tmp_path: Path) -> None:
    scrub(Settings(str(rows_of(tmp_path / "a.jsonl", 10)), tmp_path / "b.jsonl"))
    text = (tmp_path / "b.jsonl.report.json").read_text()
    report = json.loads(text)
    for value in ("Rossi", "rossi", "347", "4567", "3704", "example"):
        assert value not in text.replace(str(tmp_path), "")
    assert report["samples"]["IBAN"][0] == {
        "where": "a.jsonl:1", "field": "messages[0].content", "form": "aa00 0000 0000 0000 0000 00",
    }  # fmt: skip
    assert form("x" * 99) == "a" * 40 + "... (99 characters)"
    assert form("राम १²") == "aaa 00"  # the vowel's mark is no letter, and is part of the name
    scrub(Settings(str(secret_file(tmp_path)), tmp_path / "d.jsonl"))
    told = json.loads((tmp_path / "d.jsonl.report.json").read_text())["samples"]["SECRET"]
    assert told[0]["form"] == "16 characters"  # signs between the letters of a password are part of it


def secret_file(folder: Path) -> Path:
    file = folder / "c.jsonl"
    file.write_text(json.dumps({"text": "password: 9t#R~q7!Zk@2w-Vb"}) + "\n")
    return file


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_killed_run_goes_on_to_the_same_output(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSONL is taken up in the middle, CSV read up to there again."""
    monkeypatch.setattr(scrubbing, "EVERY", 10)
    data = rows_of(tmp_path / "a.jsonl", 95)
    if kind == "csv":
        data = tmp_path / "a.csv"
        with data.open("w", newline="") as out:
            writer = csv.writer(out)
            writer.writerow(["text"])
            writer.writerows([f"row {at}: user{at % 7}@example.org"] for at in range(95))
    whole = scrub(Settings(str(data), tmp_path / "whole.jsonl"))

    def kill(rows: int) -> None:
        if rows == 40:
            raise KeyboardInterrupt

    settings = Settings(str(data), tmp_path / "again.jsonl")
    with pytest.raises(KeyboardInterrupt):
        scrub(settings, kill)
    assert not settings.output.exists()
    part = tmp_path / ".again.jsonl.part"
    with part.open("a") as out:
        out.write("what was written after the last commit")
    assert scrub(settings) == whole
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_what_is_kept_on_the_way_holds_no_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrubbing, "EVERY", 10)

    def kill(rows: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scrub(Settings(str(rows_of(tmp_path / "a.jsonl", 30)), tmp_path / "b.jsonl"), kill)
    kept = (tmp_path / ".b.jsonl.numbers").read_bytes()
    assert (tmp_path / ".b.jsonl.numbers").stat().st_mode & 0o077 == 0
    assert b"rossi" not in kept.lower()
    assert b"user1" not in kept


def test_changed_data_are_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrubbing, "EVERY", 10)

    def kill(rows: int) -> None:
        raise KeyboardInterrupt

    settings = Settings(str(rows_of(tmp_path / "a.jsonl", 30)), tmp_path / "b.jsonl")
    with pytest.raises(KeyboardInterrupt):
        scrub(settings, kill)
    rows_of(tmp_path / "a.jsonl", 31)
    assert scrub(settings).rows == 31
    assert len(read(settings.output)) == 31


def test_rows_that_can_not_be_read_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a@example.org"}\nnot json\n{"text": "plain"}\n')
    found = scrub(Settings(str(file), tmp_path / "b.jsonl"))
    assert (found.rows, found.changed, found.unreadable) == (2, 1, 1)
    assert [row["text"] for row in read(tmp_path / "b.jsonl")] == ["<EMAIL_1>", "plain"]


def test_kinds_and_fields_can_be_chosen(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"a": TEXT, "b": TEXT}) + "\n")
    scrub(Settings(str(file), tmp_path / "b.jsonl", kinds=("IBAN",), fields=("b",)))
    row = read(tmp_path / "b.jsonl")[0]
    assert row["a"] == TEXT
    assert row["b"] == TEXT.replace("DE89 3704 0044 0532 0130 00", "<IBAN_1>")


def test_parquet_is_read_too(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"text": [TEXT, "plain"], "tags": [["a@b.org"], []]}), tmp_path / "a.parquet")
    found = scrub(Settings(str(tmp_path / "a.parquet"), tmp_path / "b.jsonl"))
    assert found.found == {"EMAIL": 2, "PHONE": 1, "IBAN": 1}
    assert read(tmp_path / "b.jsonl")[0]["tags"] == ["<EMAIL_2>"]


def test_names_of_fields_and_what_json_has_no_form_for_are_looked_through(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    file = tmp_path / "a.jsonl"
    file.write_text(
        json.dumps({"a@example.org": {"B@example.org": 1, "b@example.org": 2, "n": [True, None, 2.5]}}) + "\n"
    )
    scrub(Settings(str(file), tmp_path / "b.jsonl"))
    row = read(tmp_path / "b.jsonl")[0]
    assert row == {"<EMAIL_1>": {"<EMAIL_2>": 1, "<EMAIL_2>'": 2, "n": [True, None, 2.5]}}  # none of them is lost
    report = (tmp_path / "b.jsonl.report.json").read_text()
    assert "example" not in report.replace(str(tmp_path), "")
    codes = pa.array([b"a@example.org"], pa.binary(13))
    parquet.write_table(pa.table({"code": codes}), tmp_path / "a.parquet")
    scrub(Settings(str(tmp_path / "a.parquet"), tmp_path / "c.jsonl"))
    assert read(tmp_path / "c.jsonl") == [{"code": "b'<EMAIL_1>'"}]


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    file = rows_of(tmp_path / "a.jsonl", 2)
    with pytest.raises(DataError, match="not overwritten"):
        scrub(Settings(str(file), file))
    with pytest.raises(DataError, match="JSONL"):
        scrub(Settings(str(file), tmp_path / "b.parquet"))


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, output = rows_of(tmp_path / "a.jsonl", 3), tmp_path / "b.jsonl"
    with pytest.raises(SystemExit) as ended:
        cli.main(["scrub", str(file), "--output", str(output), "--kind", "email"])
    assert ended.value.code == 0
    assert "3 of 3 rows changed" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        cli.main(["scrub", str(file), "--output", str(tmp_path / "c.jsonl"), "--kind", "SHOE_SIZE"])
    assert ended.value.code == 2
    assert "no such kind" in capsys.readouterr().err


def test_a_language_without_a_model_is_refused(tmp_path: Path) -> None:
    """Nothing is downloaded, nor is anything written."""
    file = rows_of(tmp_path / "a.jsonl", 2)
    with pytest.raises(LuthierError, match="no model of spaCy"):
        scrub(Settings(str(file), tmp_path / "b.jsonl", languages=("tlh",)))
    assert [one.name for one in tmp_path.iterdir()] == ["a.jsonl"]


def test_the_largest_model_of_a_language_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    there = ["en_core_web_sm", "de_core_news_lg", "en_core_web_md", "de_core_news_sm", "en_own"]
    found = [EntryPoint(name, name, "spacy_models") for name in there]
    monkeypatch.setattr(naming, "entry_points", lambda group: found)
    assert naming.model_of("en") == "en_core_web_md"
    assert naming.model_of("de") == "de_core_news_lg"


@pytest.fixture
def ruled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A pipeline of spaCy that knows its entities by a list, in place of a trained one."""
    spacy = pytest.importorskip("spacy")
    pytest.importorskip("presidio_analyzer")
    pipeline = spacy.blank("en")
    ruler = pipeline.add_pipe("entity_ruler")
    ruler.add_patterns(
        [{"label": label, "pattern": said} for label, said in
         (("PERSON", "Anna Rossi"), ("GPE", "Rome"), ("ORG", "Fiat"), ("NORP", "Italian"), ("DATE", "Monday"))]
    )  # fmt: skip
    pipeline.to_disk(tmp_path / "pipeline")
    monkeypatch.setattr(naming, "_model", lambda language: EntryPoint(str(tmp_path / "pipeline"), "x", "spacy_models"))
    naming._analyzer.cache_clear()
    return "en"


@pytest.mark.slow  # spaCy takes long to import
def test_presidio_finds_the_entities_of_its_pipeline(ruled: str, tmp_path: Path) -> None:
    """Presidio's own engine; dates and firms tell of no person, and addresses keep their kind."""
    text = "Anna Rossi, an Italian, left Fiat in Rome on Monday: anna@example.org. Call Anna Rossi."
    found = [(text[begin:end], kind) for begin, end, kind in names(text, ruled)]
    assert sorted(found) == [
        ("Anna Rossi", "PERSON"), ("Anna Rossi", "PERSON"), ("Italian", "GROUP"), ("Rome", "LOCATION"),
    ]  # fmt: skip
    file = tmp_path / "a.jsonl"
    file.write_text(json.dumps({"text": text}) + "\n")
    report = scrub(Settings(str(file), tmp_path / "b.jsonl", languages=(ruled,)))
    said = "<PERSON_1>, an <GROUP_1>, left Fiat in <LOCATION_1> on Monday: <EMAIL_1>. Call <PERSON_1>."
    assert read(tmp_path / "b.jsonl") == [{"text": said}]
    assert report.models == {"en": str(tmp_path / "pipeline")}


@pytest.mark.slow
def test_a_trained_model_finds_names_in_prose(tmp_path: Path) -> None:
    pytest.importorskip("presidio_analyzer")
    try:
        naming.model_of("en")
    except LuthierError:
        pytest.skip("no English model of spaCy is installed")
    naming._analyzer.cache_clear()
    text = "My name is Margaret Thompson and I moved from Chicago to Berlin last year."
    found = {(text[begin:end], kind) for begin, end, kind in names(text, "en")}
    assert found == {("Margaret Thompson", "PERSON"), ("Chicago", "LOCATION"), ("Berlin", "LOCATION")}
