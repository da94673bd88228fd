"""The page of a run: what is on it, and that nothing put into it gets out of its place."""

from __future__ import annotations

import base64
import json
import re
import wave
from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from luthier.common.pages.media import Media, grey
from luthier.common.pages.render import number
from luthier.report.aligned import Piece, aligned
from luthier.report.page import thinned, write
from luthier.report.runs import read, read_all
from luthier.report.samples import rollouts, samples

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7 * 7 }}\"'&"


def page(*folders: Path) -> str:
    output = folders[0].parent / "out" / "report.html"
    write(folders, output)
    return output.read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------------------ words


def test_words_are_aligned_with_the_fewest_changes() -> None:
    assert aligned("the cat sat down", "the dog sat") == [
        Piece("same", "the", "the"), Piece("changed", "cat", "dog"), Piece("same", "sat", "sat"), Piece("lost", "down"),
    ]  # fmt: skip
    assert aligned("a b", "a b c d") == [Piece("same", "a b", "a b"), Piece("added", heard="c d")]
    assert aligned("Hello, World!", "hello world") == [Piece("same", "Hello, World!", "hello world")]
    assert aligned("", "") == []


def test_a_text_without_spaces_is_aligned_by_characters() -> None:
    assert aligned("你好世界", "你世界") == [
        Piece("same", "你", "你"),
        Piece("lost", "好"),
        Piece("same", "世界", "世界"),
    ]


def test_a_text_too_long_is_not_aligned() -> None:
    assert [one.kind for one in aligned("a " * 700, "b " * 700)] == ["changed"]


# ------------------------------------------------------------------------------------------------ page


def test_hostile_text_stays_text(run_at) -> None:
    """Wherever a user's text can stand: samples, slices, recipe, data, names."""
    folder = run_at(
        "run",
        metrics={"wer": 0.5, "slices": {HOSTILE: {HOSTILE: {"wer": 0.5}}}},
        samples=[{"where": HOSTILE, "reference": f"a {HOSTILE}", "hypothesis": HOSTILE}, {"x": HOSTILE}],
    )
    data = {HOSTILE: {"rows": 1, "kept_rows": 0, "examples": 0, "dropped": {HOSTILE: 1}, "named": {HOSTILE: [HOSTILE]}}}
    (folder / "data.json").write_text(json.dumps(data))
    curves = (folder / "curves.csv").read_text() + f'10,"{HOSTILE.replace(chr(34), chr(34) * 2)}",1.0\n'
    (folder / "curves.csv").write_text(curves)
    text = page(folder)
    assert text.count("<script") == 2, "the data of the curves and the code that draws them"
    assert "<img" not in text
    assert "onerror=alert" in text, "as text"
    assert re.search(r"\{\{ 7 \* 7 \}\}|&#34;", text)
    assert "49" not in re.findall(r"<td[^>]*>(.*?)</td>", text)
    known = json.loads(re.search(r'id="curves-data">(.*?)</script>', text, re.DOTALL).group(1))
    assert HOSTILE in known["points"]


def test_the_page_needs_no_network(run_at) -> None:
    text = page(run_at())
    assert "default-src 'none'" in text
    assert not re.findall(r"(?:src|href)=\"(?!#|data:)", text)
    assert "http://www.w3.org/2000/svg" in text, "a name, not an address that is asked"
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)


def test_metrics_have_bounds_where_single_examples_are_known(run_at, utterances) -> None:
    text = page(run_at("a", examples=utterances([1, 2, 3, 4] * 10)))
    assert re.search(r"0\.25 <small>\[0\.2\d*, 0\.\d+\]</small>", text)
    assert "were not kept" not in text
    bare = page(run_at("b"))
    assert re.search("were not kept by [^/]*/b,", bare)


def test_several_runs_stand_beside_each_other(run_at, tmp_path: Path) -> None:
    one, other = run_at("x/run"), run_at("y/run", learning_rate=2e-4, torch="2.15.0")
    assert [run.name for run in read_all([one, other])] == ["x/run", "y/run"]
    text = page(one, other)
    assert "optim.learning_rate" in text
    assert re.search(r'<tr class="differs"><th>torch</th><td>2\.14\.1</td><td>2\.15\.0</td></tr>', text)
    known = json.loads(re.search(r'id="curves-data">(.*?)</script>', text, re.DOTALL).group(1))
    assert known["runs"] == ["x/run", "y/run"]
    assert known["points"]["train/loss"][0][0] == [10, 3.0]
    assert known["first"] == ["train/loss", "validation/wer"]


def test_a_run_that_has_just_begun_has_a_page(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text("task: {kind: llm.sft}\n")
    text = page(tmp_path / "run")
    assert "No evaluation yet" in text
    assert "not finished" in text


def test_secrets_are_left_out(run_at) -> None:
    folder = run_at()
    (folder / "recipe.yaml").write_text(
        "{task: {kind: x, api_key: hunter2}, model: {path: 'https://me:hunter2@host/m'}}"
    )
    record = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**record, "command": "luthier train x task.api_key=hunter2"}))
    text = page(folder)
    assert "hunter2" not in text
    assert "(left out)" in text


def test_parity_is_found_beside_the_run(run_at, tmp_path: Path) -> None:
    folder = run_at()
    step = folder / "checkpoints" / "step-00000040"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text("{}")
    for name, digest in (
        ("mine", "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"),  # SHA-256 of `{}`
        ("other", "0" * 64),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "artifact.json").write_text(json.dumps({"checkpoint": {"manifest_sha256": digest}}))
        parity = {
            "usable": True, "faults": [], "format": "onnx", "dtype": "int8", "runtime": "r", "data": "validation",
            "inputs": 3, "largest_difference": 1e-6, "allowed_difference": 1e-3, "same_text": None, "metrics": {},
        }  # fmt: skip
        (tmp_path / name / "parity.json").write_text(json.dumps(parity))
    text = page(folder)
    assert "<b>mine</b> onnx" in text
    assert "<b>other</b>" not in text


# ------------------------------------------------------------------------------------------------ samples


def sound(file: Path, seconds: float = 1.0) -> bytes:
    with wave.open(str(file), "wb") as stream:
        stream.setnchannels(1)
        stream.setsampwidth(2)
        stream.setframerate(8000)
        stream.writeframes(b"\1\0" * int(8000 * seconds))
    return file.read_bytes()


def test_speech_is_heard_and_its_earlier_transcripts_are_kept(run_at, tmp_path: Path) -> None:
    data = sound(tmp_path / "a.wav")
    sample = {
        "where": "v:1",
        "reference": "the cat",
        "hypothesis": "the dog",
        "audio": {"path": str(tmp_path / "a.wav")},
    }
    folder = run_at(samples=[sample])
    (folder / "samples" / "step-00000020.json").write_text(json.dumps([{**sample, "hypothesis": "a"}]))
    (card,) = samples(read(folder), Media()).texts
    assert card.sound == "data:audio/wav;base64," + base64.b64encode(data).decode()
    assert [step for step, _, _ in card.steps] == [40, 20]
    assert [one.kind for one in card.steps[0][1]] == ["same", "changed"]
    text = page(folder)
    assert '<span class="lost">[−cat]</span><span class="added">[+dog]</span>' in text
    assert "1 earlier" in text


def test_a_piece_of_a_recording_is_cut_out(tmp_path: Path) -> None:
    import io

    import soundfile

    sound(tmp_path / "a.wav", 3.0)
    address = Media().sound(tmp_path / "a.wav", 1.0, 1.5)
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(address.partition(",")[2])))
    assert (len(samples), rate) == (4000, 8000)
    assert Media().sound(tmp_path / "absent.wav") is None
    (tmp_path / "text.wav").write_text("no sound")
    assert Media().sound(tmp_path / "text.wav", 0.5) is None


def test_pictures_stand_in_a_row_by_step(run_at) -> None:
    folder = run_at(samples=[{"prompt": "a circle", "picture": "step-00000040-0.png", "left": "the base model's"}])
    (folder / "samples" / "step-00000040-0.png").write_bytes(grey([[0.0, 1.0]]))
    (folder / "samples" / "step-00000000.json").write_text(
        json.dumps([{"prompt": "a circle", "picture": "../run.json", "left": "the base model's"}])
    )
    ((title, steps),) = samples(read(folder), Media()).pictures
    assert title == "a circle (left: the base model's)"
    assert [step for step, _ in steps] == [0, 40]
    assert steps[0][1] is None, "nothing from outside of the folder"
    assert steps[1][1].startswith("data:image/png;base64,")


def test_found_passages_and_completions(run_at) -> None:
    folder = run_at(samples=[{"query": "q", "found 1": "0.874 + right", "found 2": "-0.5 - wrong one"}])
    (folder / "rollouts").mkdir()
    rows = [
        {"step": 0, "where": "a:1", "prompt": "2+2", "completion": f"c{at}", "reward": reward, "finished": at != 1}
        for at, reward in enumerate([0.0, 1.0, float("nan"), 0.5, 0.25, 0.75])
    ]
    parquet.write_table(pa.Table.from_pylist(rows), folder / "rollouts" / "rollout-00000000.parquet")
    kept = samples(read(folder), Media())
    assert kept.found == [("q", [(0.874, True, "right"), (-0.5, False, "wrong one")])]
    ((step, prompt, completions),) = rollouts(folder)
    assert (step, prompt) == (0, "2+2")
    assert [one["text"] for one in completions] == ["c1", "c3", "c4", "c2"], "from the best to the worst, 4 of 6"
    text = page(folder)
    assert "+ relevant" in text
    assert "(cut off)" in text
    assert "Against the reference" not in text, "there are none"
    assert "In brackets" not in text, "no results of single examples, no intervals"


def test_a_page_has_a_bound(tmp_path: Path) -> None:
    media = Media(most=100)
    assert media.bytes(b"x" * 80, "image/png") is not None
    assert media.bytes(b"x" * 80, "image/png") is None
    assert media.left_out == 1


def test_numbers_and_long_curves() -> None:
    assert [number(value) for value in (0.123456, 12_345, None, "a", True, 1e-7)] == [
        "0.1235", "12,345", "–", "a", "True", "1e-07",
    ]  # fmt: skip
    curve = [(at, float(at)) for at in range(10)]
    assert thinned(curve, 5) == [(1, 0.5), (3, 2.5), (5, 4.5), (7, 6.5), (9, 8.5)]
    assert thinned(curve, 10) == curve
