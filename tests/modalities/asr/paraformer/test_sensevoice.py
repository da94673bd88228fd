"""SenseVoice: loss and gradients are those of FunASR's forward, and FunASR alone loads what is saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from luthier.common.data.plan import Planned
from luthier.common.data.processing import PlannedData
from luthier.common.errors import BadExample, ModelError
from luthier.common.training.run import train
from luthier.modalities.asr.paraformer import network, sensevoice

ROWS = (0, 1, 2, 11)
TAGS = {
    24884: "<|zh|>", 24885: "<|en|>", 24992: "<|nospeech|>", 24993: "<|Speech|>", 24994: "<|BGM|>", 25001: "<|HAPPY|>",
    25004: "<|NEUTRAL|>", 25016: "<|withitn|>", 25017: "<|woitn|>",
}  # fmt: skip
"""Some of the released vocabulary's control tokens, where FunASR's code looks for them."""
CONFIG = {
    "model": "SenseVoiceSmall",
    "model_conf": {"length_normalized_loss": True, "sos": 1, "eos": 2, "ignore_id": -1, "lsm_weight": 0.1},
    "encoder": "SenseVoiceEncoderSmall",
    "encoder_conf": {
        "output_size": 32, "attention_heads": 2, "linear_units": 64, "num_blocks": 2, "tp_blocks": 1,
        "dropout_rate": 0.1, "attention_dropout_rate": 0.1, "input_layer": "pe", "kernel_size": 5,
        "sanm_shfit": 0, "selfattention_layer_type": "sanm", "normalize_before": True,
    },
    "frontend": "WavFrontend",
    "frontend_conf": {
        "fs": 16000, "window": "hamming", "n_mels": 80, "frame_length": 25, "frame_shift": 10, "lfr_m": 7, "lfr_n": 6,
    },
    "tokenizer": "SentencepiecesTokenizer",
    "tokenizer_conf": {"bpemodel": None, "unk_symbol": "<unk>", "split_with_space": True},
}  # fmt: skip


def pieces(file: Path, letters: str, tags: dict[int, str] = TAGS) -> None:
    """A SentencePiece model of 25055 pieces: letters, control tokens at their places, and what is never written."""
    from sentencepiece import sentencepiece_model_pb2 as schema

    model = schema.ModelProto()
    kind = schema.ModelProto.SentencePiece
    listed = [("<unk>", kind.UNKNOWN), ("<s>", kind.CONTROL), ("</s>", kind.CONTROL), ("▁", kind.NORMAL)]
    listed += [(letter, kind.NORMAL) for letter in letters]
    for number in range(25055):
        name, what = listed[number] if number < len(listed) else (f"unused{number}", kind.UNUSED)
        if number in tags:
            name, what = tags[number], kind.USER_DEFINED
        model.pieces.add(piece=name, score=0.0 if what != kind.NORMAL else -1.0, type=what)
    model.trainer_spec.model_type = schema.TrainerSpec.UNIGRAM
    model.normalizer_spec.add_dummy_prefix = False
    file.write_bytes(model.SerializeToString())


@pytest.fixture(scope="module")
def voice(tmp_path_factory, manifest, auto_model) -> str:
    """A directory with the random weights that FunASR makes."""
    folder = tmp_path_factory.mktemp("voice")
    texts = [json.loads(line)["text"] for line in manifest.read_text(encoding="utf-8").splitlines()]
    pieces(folder / "bpe.model", "".join(sorted(set("".join(texts)))))
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG), encoding="utf-8")
    given = {**CONFIG, "tokenizer_conf": {**CONFIG["tokenizer_conf"], "bpemodel": str(folder / "bpe.model")}}
    with torch.random.fork_rng():
        torch.save(auto_model(**given, seed=7).model.state_dict(), folder / "model.pt")
    return str(folder)


@pytest.fixture(scope="module")
def tagged(manifest, tmp_path_factory) -> str:
    """The manifest with emotions, events and styles in some rows, as FunASR's own manifests have them."""
    rows = [json.loads(line) for line in manifest.read_text(encoding="utf-8").splitlines()]
    rows[1] |= {"emo_target": "<|HAPPY|>", "event_target": "<|BGM|>", "with_or_wo_itn": "<|withitn|>"}
    for row in rows:
        row["audio"] = str(manifest.parent / row["audio"])
    file = tmp_path_factory.mktemp("tagged") / "rows.jsonl"
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def spoken(model: Any) -> None:
    """Sharpen an untrained model so that it writes, and not only what nobody reads."""
    with torch.no_grad():
        model.ctc.ctc_lo.weight.mul_(20)
        model.ctc.ctc_lo.bias.fill_(-30.0)
        model.ctc.ctc_lo.bias[[*range(4, 20), *TAGS]] = 0.0


@pytest.mark.usefixtures("_randomness")
def test_loss_and_gradients_equal_funasr(voice, tagged, make_task, collated, auto_model):
    """In training mode, with dropout and the draws of which rows are told their language."""
    task = make_task(voice, data={"train": tagged})
    with torch.random.fork_rng():
        model = auto_model(voice).model.train()
    for module in model.modules():
        if type(module) is torch.nn.Dropout:
            module.__class__ = network.Dropout
    task.train_mode()
    batch = collated(task.processing, ROWS)
    assert batch["text"][1, :4].tolist() == [24884, 25001, 24994, 25016]
    assert batch["text"][0, :4].tolist() == [24884, 25004, 24993, 25017]
    torch.manual_seed(3)
    found = task.loss(batch)
    (found.sum / found.count).backward()
    torch.manual_seed(3)
    names = ("speech", "speech_lengths", "text", "text_lengths")
    expected, stats, _ = model(**{name: batch[name].clone() for name in names})
    expected.squeeze().backward()
    assert found.count == len(ROWS)
    torch.testing.assert_close(found.sum / found.count, expected.squeeze(), rtol=1e-5, atol=1e-5)
    assert found.logs["rich"] / found.count == pytest.approx(float(stats["loss_rich"]), rel=1e-5)
    theirs = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    ours = {name: p.grad for name, p in task.paraformer.named_parameters() if p.grad is not None}
    assert ours.keys() == theirs.keys() == {name for name, _ in model.named_parameters()}
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-3, atol=1e-5, msg=name)


def test_losses_of_an_evaluation_draw_nothing_and_add_up(voice, tagged, make_task, examples):
    """The language is told to no row; whatever the batches, sums and counts add up."""
    task = make_task(voice, data={"train": tagged})
    task.eval()
    planned = PlannedData(task.processing, examples(task.processing), None)
    whole = task.predict(planned[Planned(0, 0, ROWS)]).loss
    torch.manual_seed(11)
    parts = [task.predict(planned[Planned(0, 0, rows)]).loss for rows in ((0, 1), (2,), (11,))]
    assert sum(part.count for part in parts) == whole.count == len(ROWS)
    assert sum(float(part.sum) for part in parts) == pytest.approx(float(whole.sum), rel=1e-4)
    assert task.paraformer.lid_int_dict


@pytest.mark.usefixtures("_randomness")
def test_funasr_alone_loads_it_and_writes_the_same(voice, tagged, make_task, examples, auto_model, tmp_path):
    task = make_task(voice, data={"train": tagged})
    spoken(task.paraformer)
    task.eval()
    task.save_pretrained(tmp_path)
    found = task.predict(PlannedData(task.processing, examples(task.processing), None)[Planned(0, 0, ROWS)]).records
    alone = auto_model(tmp_path)
    rows = [json.loads(line) for line in Path(tagged).read_text(encoding="utf-8").splitlines()]
    tags = 0
    for record, number in zip(found, ROWS, strict=True):
        style = "withitn" if number == 1 else "woitn"
        (theirs,) = alone.generate(rows[number]["audio"], text_norm=style)
        assert record.hypothesis == sensevoice.plain(theirs["text"])
        tags += theirs["text"].count("<|")
    assert tags
    assert any(record.hypothesis for record in found)
    again = make_task(voice, Path(tmp_path), data={"train": tagged})
    expected = task.paraformer.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in again.paraformer.state_dict().items())


def test_scores_are_those_of_the_transcript(voice, tagged, make_task, collated):
    """The best token of each frame, without repetitions and blanks, is what FunASR's inference writes."""
    task = make_task(voice, data={"train": tagged})
    spoken(task.paraformer)
    task.eval()
    outputs = task.exportable().outputs(task.paraformer, collated(task.processing, (0, 2)))
    for output in outputs:
        best = torch.from_numpy(output.numbers).argmax(-1).unique_consecutive().tolist()
        text = task.processing.tokens.tokenizer.decode([token for token in best if token])
        assert sensevoice.plain(text) == output.text


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"language": "it"}, "unknown_language"),
        ({"language": "zh", "emo_target": "<|BORED|>"}, "unknown_tag"),
        ({"language": "zh", "with_or_wo_itn": "<|BGM|>"}, "unknown_tag"),
        ({}, "no_language"),
        ({"language": "zh", "text": "你" * 8}, "too_short_for_ctc"),
    ],
)
def test_rows_that_can_t_be_trained_on_are_named(voice, make_processing, write_manifest, tones, tmp_path, row, reason):
    """0.6 s are 10 frames of 60 ms; the same character 8 times needs 15."""
    file = write_manifest(tmp_path, [tones(0, 0.6)], [{"text": "你好", **row}])
    processing = make_processing(voice, data={"train": str(file)})
    (example,) = [item for source in processing.recipe.data.train for item in processing.read(source)]
    with pytest.raises(BadExample) as caught:
        processing.examine(example, True)
    assert caught.value.reason == reason
    (kept,) = processing.examine(example, False)  # still a reference
    assert processing.encode(kept, None).ids == []


def test_another_vocabulary_is_refused(voice, make_processing, tmp_path):
    """FunASR would stop at the first row with a KeyError, or take one style for the other."""
    moved = {number + (1 if number > 25010 else 0): tag for number, tag in TAGS.items()}
    pieces(tmp_path / "bpe.model", "你好", moved)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(CONFIG), encoding="utf-8")
    with pytest.raises(ModelError, match=r"not that of SenseVoice[\s\S]*25016"):
        make_processing(str(tmp_path))


@pytest.mark.usefixtures("quick")
def test_it_learns_stops_and_resumes(voice, tagged, make_recipe, tmp_path, left, stops_and_resumes):
    def recipe(name: str) -> Any:
        return make_recipe(
            voice, data={"train": tagged, "validation": tagged, "batch": {"examples": 4}},
            optim={"learning_rate": 1e-2, "warmup": 0}, train={"steps": 6, "log_every": 1},
            evaluate={"every": 3}, checkpoint={"every": 2, "best": "loss"}, output=str(tmp_path / name),
        )  # fmt: skip

    whole = train(recipe("whole")).folder
    stops_and_resumes(recipe("stopped"), 3)
    assert left.curve(tmp_path / "stopped") == left.curve(whole)
    losses = left.values(whole)
    assert losses[-1] < losses[0]
