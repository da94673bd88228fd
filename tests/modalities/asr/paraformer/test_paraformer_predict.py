"""Transcripts: those of FunASR's own AutoModel, whatever the batch, and empty where no token is found."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from luthier.common.data.plan import Planned
from luthier.common.data.processing import Batch, PlannedData
from luthier.common.errors import RecipeError
from luthier.modalities.asr.paraformer.export import ParaformerExport

ELSEWHERE = """
import json, sys
from funasr import AutoModel
model = AutoModel(model=sys.argv[1], device="cpu", ncpu=1, disable_update=True, disable_pbar=True)
texts = [model.generate(input=path)[0].get("text", "") for path in sys.argv[2:]]
assert not [name for name in sys.modules if name.startswith("luthier")]
print(json.dumps(texts))
"""


def elsewhere(folder: Path, audio: list[str]) -> list[str]:
    """What FunASR transcribes in a process without luthier."""
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(folder), *audio], capture_output=True, text=True, check=False, cwd=folder,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def learned(task, batch, steps: int = 120):
    """A model that has learned the batch by heart, so that there are texts to compare."""
    task.train_mode()
    optimizer = torch.optim.Adam([p for p in task.parameters() if p.requires_grad], 3e-3)
    torch.manual_seed(0)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = task.loss(batch)
        (loss.sum / loss.count).backward()
        torch.nn.utils.clip_grad_norm_(task.parameters(), 5.0)
        optimizer.step()
    return task.eval()


def texts(task, batch) -> list[str]:
    indices = tuple(range(len(batch["utterances"])))
    return [record.hypothesis for record in task.predict(Batch(0, 0, indices, batch, 1.0, 1.0)).records]


@pytest.fixture(scope="module", params=["sanm", "conformer"])
def trained(request, make_task, collated, directory_of):
    """(task, batch): without masks of the features, which would hide what is to be learned."""
    path = directory_of(request.param, **({"specaug": None} if request.param == "conformer" else {}))
    task = make_task(path)
    batch = collated(task.processing, range(6))
    return learned(task, batch, 120 if request.param == "sanm" else 240), batch


def test_the_saved_model_gives_the_same_text_in_funasr(trained, tmp_path):
    """In a process that doesn't know us, from the directory alone."""
    task, batch = trained
    task.save_pretrained(tmp_path / "saved")
    found = texts(task, batch)
    assert len(set(found)) > 3
    pairs = zip(batch["utterances"], found, strict=True)
    assert task.score([task.record(item, text, "zh") for item, text in pairs])["cer"] < 0.6
    assert elsewhere(tmp_path / "saved", [str(item.audio) for item in batch["utterances"]]) == found


def test_a_transcript_does_not_depend_on_its_batch(trained, collated):
    task, batch = trained
    alone = [texts(task, collated(task.processing, [row]))[0] for row in range(6)]
    assert texts(task, batch) == alone


def test_the_saved_model_is_loaded_as_it_was(trained, make_task, tmp_path):
    task, batch = trained
    task.save_pretrained(tmp_path / "saved")
    again = make_task(task.recipe.model.path, weights=tmp_path / "saved").eval()
    state = task.paraformer.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in again.paraformer.state_dict().items())
    assert texts(again, batch) == texts(task, batch)


def test_an_empty_transcript(make_task, collated, sanm):
    """FunASR's inference gives a bare [] where no token is found."""
    task = make_task(sanm).eval()
    with torch.no_grad():
        task.paraformer.predictor.cif_output.bias.fill_(-30.0)
    records = task.predict(Batch(0, 0, (0, 1), collated(task.processing, (0, 1)), 1.0, 1.0)).records
    assert [record.hypothesis for record in records] == ["", ""]
    scores = task.score(records)
    assert scores["cer"] == 1.0
    assert scores["empty_hypotheses"] == 2


def test_a_row_without_a_known_text_has_no_part_in_the_loss(make_task, gathered, sanm):
    """A piece of a long recording, which is transcribed all the same."""
    task = make_task(sanm).eval()
    processing = task.processing
    example = gathered(processing).examples[11]
    piece = replace(example, whole=example)
    batch = processing.collate([processing.encode(item, None) for item in (example, piece)], None)
    alone = processing.collate([processing.encode(example, None)], None)
    found, expected = (
        task.predict(Batch(0, 0, (0, 1)[: len(data["text"])], data, 1.0, 1.0)) for data in (batch, alone)
    )
    assert len(found.records) == 2
    assert found.loss.count == expected.loss.count
    torch.testing.assert_close(found.loss.sum, expected.loss.sum, rtol=1e-5, atol=0)
    nothing = processing.collate([processing.encode(piece, None)], None)
    assert task.predict(Batch(0, 0, (0,), nothing, 1.0, 1.0)).loss is None


def test_scores_are_against_the_raw_text(make_task, collated, sanm, rows_of):
    """Also where the token list can't write it."""
    task = make_task(sanm, task={"kind": "asr.paraformer", "unknown": "keep"}, data={"train": rows_of("你好, World")})
    records = task.eval().predict(Batch(0, 0, (0,), collated(task.processing, (0,)), 1.0, 1.0)).records
    assert records[0].reference == "你好, World"


def test_a_beam_search_with_the_ctc_head(make_task, collated, directory_of, make_recipe):
    path = directory_of("conformer", specaug=None)
    task = make_task(path, evaluate={"num_beams": 3, "decoding_ctc_weight": 0.4})
    batch = collated(task.processing, range(4))
    names = set(learned(task, batch, 60).state_dict())
    found = texts(task, batch)
    assert set(task.state_dict()) == names  # the search holds the CTC head; it must not be saved twice
    expected = []
    from funasr.models.paraformer.model import Paraformer

    for row in range(4):
        features = batch["speech"][row : row + 1, : batch["speech_lengths"][row]]
        with torch.no_grad():
            result = Paraformer.inference(
                task.paraformer, features, batch["speech_lengths"][row].reshape(1, 1), key=["x"],
                tokenizer=task.processing.tokens.tokenizer, data_type="fbank", device="cpu", beam_size=3,
                decoding_ctc_weight=0.4, token_list=task.processing.tokens.listed,
            )  # fmt: skip
        task.paraformer.beam_search = None
        expected.append(result[0][0]["text"])
    assert found == expected
    with pytest.raises(RecipeError, match="num_beams and decoding_ctc_weight"):
        make_recipe(path, evaluate={"num_beams": 3})


def test_a_graph_that_finds_no_token_writes_nothing_and_has_no_loss(make_task, collated, directory_of):
    """What an exported graph says of silence, read by FunASR's own decoding."""
    task = make_task(directory_of("sanm"))
    batch = collated(task.processing, range(2))
    export = ParaformerExport(task)
    silent = export.runner_of(lambda features: np.zeros((0, 1), np.float32))
    found = export.predict(silent, Batch(0, 0, (0, 1), batch, 1.0, 1.0))
    assert [record.hypothesis for record in found.records] == ["", ""]
    assert found.loss is None
    outputs = export.outputs(silent, batch)
    assert [(one.text, len(one.numbers)) for one in outputs] == [("", 0), ("", 0)]


def test_pieces_of_a_long_recording_have_no_part_in_the_loss(make_task, sanm):
    """The 12 recordings are of 0.6 to 1.7 s; those above 1 s are cut. Nobody speaks in them, so evenly."""
    pytest.importorskip("silero_vad")
    task = make_task(sanm, data={"audio": {"max_seconds": 1.0, "voice": {}}}).eval()
    processing = task.processing
    (source,) = task.recipe.data.train
    pieces = [piece for item in processing.read(source) for piece in processing.examine(item, False)]
    assert len(pieces) > 12

    def predicted(chosen):
        return task.predict(PlannedData(processing, chosen, None)[Planned(0, 0, tuple(range(len(chosen))))])

    every, known = predicted(pieces), predicted([piece for piece in pieces if piece.whole is None])
    assert len(every.records) == len(pieces)
    assert every.loss.count == known.loss.count > 0
    torch.testing.assert_close(every.loss.sum, known.loss.sum, rtol=1e-4, atol=1e-4)
    assert task.score(every.records)["utterances"] == 12
