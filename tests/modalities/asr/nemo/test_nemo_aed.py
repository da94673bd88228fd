"""NeMo's encoder-decoder models with a prompt (Canary): prompts, losses, transcripts and files are NeMo's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from luthier.common.data.collect import collect
from luthier.common.data.plan import Planned
from luthier.common.data.processing import PlannedData
from luthier.common.errors import BadExample, ModelError, RecipeError
from luthier.common.evaluation.saved import evaluate_checkpoint
from luthier.common.seeding import seed_everything
from luthier.common.training.run import train
from luthier.modalities.asr.nemo.prompts import Prompts
from luthier.modalities.asr.utterance import Utterance

pytest.importorskip("nemo")

ROWS = (0, 1, 2, 6, 11)


@pytest.fixture(scope="module")
def spoken(manifest, tmp_path_factory) -> str:
    """The manifest with other languages, and a wish about punctuation, in some rows."""
    rows = [json.loads(line) for line in manifest.read_text(encoding="utf-8").splitlines()]
    rows[6] |= {"language": "it"}
    rows[11] |= {"pnc": "no", "source_lang": "it", "target_lang": "en", "taskname": "ast"}
    for row in rows:
        row["audio"] = str(manifest.parent / row["audio"])
    file = tmp_path_factory.mktemp("spoken") / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def predicted(task: Any, rows: tuple[int, ...] = ROWS) -> Any:
    found = collect(task.recipe.data.train, task.processing, task.recipe.data).examples
    task.eval()
    return task.predict(PlannedData(task.processing, found, None)[Planned(0, 0, rows)])


def gradients(task: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in task.named_parameters() if p.grad is not None}


def said(task: Any) -> None:
    """Sharpen an untrained model, so that its transcripts differ; what fills the vocabulary is never written."""
    with torch.no_grad():
        generator = torch.Generator().manual_seed(4)
        for name, parameter in task.nemo.transf_decoder.named_parameters():
            if "second_sub_layer" in name and name.endswith("weight"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        bias = task.nemo.log_softmax.mlp.layer0.bias
        bias[:13] = -100.0  # control tokens
        bias[len(task.processing.tokens.pieces) :] = -100.0


def batch_of(task: Any, spoken: str, rows: tuple[int, ...] = ROWS) -> Any:
    """The rows as NeMo's own loader batches them: Lhotse, its prompt function, its padding."""
    from lhotse import CutSet, MonoCut, Recording, SupervisionSegment
    from nemo.collections.asr.data.audio_to_text_lhotse_prompted import PromptedAudioToTextLhotseDataset

    listed = [json.loads(line) for line in Path(spoken).read_text(encoding="utf-8").splitlines()]
    cuts = []
    for number in rows:
        row, recording = listed[number], Recording.from_file(listed[number]["audio"])
        language = row.get("language") or row.get("source_lang") or "en"
        slots = {"source_lang": language, "target_lang": row.get("target_lang", language)}
        slots |= {"taskname": row.get("taskname", "asr"), "pnc": row.get("pnc", "yes")}
        supervision = SupervisionSegment(
            f"s{number}", recording.id, 0.0, recording.duration, text=row["text"], language=slots["target_lang"]
        )
        cut = MonoCut(
            f"c{number}", 0.0, recording.duration, 0, recording=recording, supervisions=[supervision], custom=slots
        )
        cuts.append(cut)
    found = PromptedAudioToTextLhotseDataset(task.nemo.tokenizer, task.nemo.prompt)[CutSet.from_cuts(cuts)]
    order = torch.tensor([[cut.id for cut in found.cuts].index(f"c{number}") for number in rows])
    for name, value in vars(found).items():
        if isinstance(value, torch.Tensor):
            setattr(found, name, value[order])
    return found


@pytest.mark.parametrize("masked", [False, True])
def test_loss_and_gradient_are_nemo_s(make_task, saved_of, collated, spoken, masked):
    """NeMo's own `training_step` on NeMo's own batch, with dropout; with and without a loss on the prompt."""
    changes = {"preprocessor.dither": 0.0, "use_loss_mask_for_prompt": masked}
    sections = {"model": {"config": changes}, "data": {"train": spoken}}
    task, other = make_task(saved_of("canary"), **sections), make_task(saved_of("canary"), **sections)
    other.nemo.loss._per_token_reduction = True  # as NeMo has it
    other.nemo._optimizer = torch.optim.SGD(other.nemo.parameters(), 0.1)
    other.nemo._trainer = SimpleNamespace(log_every_n_steps=9)  # no metrics at the first step
    other.nemo.log_dict = lambda *_, **__: None  # needs a trainer of Lightning's
    data, theirs = collated(task.processing, ROWS), batch_of(task, spoken)
    assert data["lengths"].tolist() == theirs.prompted_transcript_lens.tolist()
    assert data["prompts"].tolist() == theirs.prompt_lens.tolist()
    for row, length in enumerate(data["lengths"].tolist()):
        assert data["tokens"][row, :length].tolist() == theirs.prompted_transcript[row, :length].tolist()
    for training in (False, True):
        for one in (task, other):
            one.train(training)
            one.zero_grad()
        seed_everything(5)
        expected = other.nemo.training_step(theirs, 0)["loss"]
        expected.backward()
        seed_everything(5)
        found = task.loss(data)
        places = data["lengths"] - (data["prompts"] if masked else 1)
        assert found.count == int(places.sum())
        (found.sum / found.count).backward()
        torch.testing.assert_close(found.sum / found.count, expected, rtol=1e-5, atol=1e-5)
        wanted = gradients(other)
        assert wanted.keys() == gradients(task).keys()
        for name, gradient in gradients(task).items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=2e-5, msg=name)


def test_sums_and_counts_add_up_and_the_search_leaves_no_dropout_behind(make_task, saved_of, spoken):
    """NeMo's search puts the decoder into training mode; the losses of later batches would be drawn."""
    task = make_task(saved_of("canary"), data={"train": spoken})
    whole = predicted(task).loss
    parts = [predicted(task, rows).loss for rows in ((0,), (1, 2, 6), (11,))]
    assert sum(part.count for part in parts) == whole.count
    assert sum(float(part.sum) for part in parts) == pytest.approx(float(whole.sum), rel=1e-4)
    assert not any(module.training for module in task.nemo.modules())


@pytest.mark.parametrize("beams", [1, 3])
def test_transcripts_are_those_of_nemo(make_task, saved_of, spoken, beams):
    """Of NeMo's own batches through NeMo's own `predict_step`, each row in its language. With beams the batches are of
    one row: in larger ones NeMo's beams go on from how other rows heard the prompt."""
    task = make_task(saved_of("canary"), data={"train": spoken}, evaluate={"num_beams": beams, "max_new_tokens": 12})
    said(task)
    found = [one.hypothesis for one in predicted(task).records]
    batches = [ROWS] if beams == 1 else [(row,) for row in ROWS]
    task.eval()
    theirs = [item[1] for batch in batches for item in task.nemo.predict_step(batch_of(task, spoken, batch))]
    assert found == [(one[0] if isinstance(one, list) else one).text.strip() for one in theirs]
    assert len(set(found)) > 1
    assert found == [predicted(task, (row,)).records[0].hypothesis for row in ROWS]
    assert task.nemo.cfg.decoding.beam.beam_size == 1  # the model's own setting is what is saved


def test_what_fills_the_vocabulary_is_never_written(make_task, saved_of, spoken):
    """NeMo rounds 73 tokens up to 80, and its tokenizer has no text for an untrained model's others."""
    task = make_task(saved_of("canary"), data={"train": spoken}, evaluate={"max_new_tokens": 4})
    task.nemo.log_softmax.mlp.layer0.bias.data[len(task.processing.tokens.pieces) :] = 100.0
    assert len(predicted(task).records) == len(ROWS)


def test_transcripts_end(make_task, saved_of, spoken, monkeypatch):
    """After the tokens that are asked for, where the model never ends by itself."""
    task = make_task(saved_of("canary"), data={"train": spoken}, evaluate={"max_new_tokens": 3})
    task.nemo.log_softmax.mlp.layer0.bias.data[[task.nemo.tokenizer.eos_id, task.nemo.tokenizer.pad_id]] = -100.0
    search, sizes = task.nemo.decoding.decode_predictions_tensor, []

    def watched(**given: Any) -> Any:
        found = search(**given)
        sizes.extend(len(one.y_sequence) for one in found)
        return found

    monkeypatch.setattr(task.nemo.decoding, "decode_predictions_tensor", watched)
    predicted(task)
    assert sizes == [3] * len(ROWS)


# ---------------------------------------------------------------------------------------------- prompts


def test_a_prompt_is_laid_out_as_the_rows_the_recipe_and_the_model_say(make_task, saved_of):
    """In this order; what is shown carries loss after the prompt."""
    task = make_task(saved_of("canary"), task={"language": "it", "prompt": {"pnc": "no"}})
    processing, pieces = task.processing, task.processing.tokens.pieces

    def prompt(**more: Any) -> list[str]:
        return [pieces[one] for one in processing.prompt(Utterance("", "", "x:1", **more))]

    start = "<|startoftranscript|>"
    assert prompt() == [start, "<|it|>", "<|transcribe|>", "<|it|>", "<|nopnc|>"]
    assert prompt(language="en") == [start, "<|en|>", "<|transcribe|>", "<|en|>", "<|nopnc|>"]
    assert prompt(extra={"pnc": "yes", "target_lang": "en", "task": "translate"}) == [
        start, "<|it|>", "<|translate|>", "<|en|>", "<|pnc|>",
    ]  # fmt: skip
    assert processing.language(Utterance("", "", "x:1", extra={"target_lang": "en"})) == "en"


def test_newer_prompts_have_more_slots_and_the_model_s_defaults(languages):
    """Of `canary2`: the order of the template of Canary-flash, and what its training takes where nobody says it."""
    from nemo.collections.common.prompts import PromptFormatter
    from nemo.collections.common.prompts.canary2 import Canary2PromptFormatter
    from omegaconf import OmegaConf

    class Tokenizer:
        langs = ("spl_tokens", "en-US", "it")
        special_tokens = ("<|en|>", "<|it|>")
        unk_id = -1

        def text_to_ids(self, text: str) -> list[int]:
            return [ord(letter) for letter in text]

    defaults = [{"role": "user", "slots": {"pnc": "<|nopnc|>", "source_lang": "<|en|>", "target_lang": "<|en|>"}}]
    config = OmegaConf.create({"prompt_format": "canary2", "prompt_defaults": defaults})
    assert PromptFormatter.resolve("canary2") is Canary2PromptFormatter
    prompts = Prompts(config, Tokenizer(), {"itn": "yes"})

    def text(utterance: Utterance, language: str | None) -> str:
        return "".join(map(chr, prompts.encode(utterance, language)))

    rest = "<|nopnc|><|itn|><|notimestamp|><|nodiarize|>"
    begin = "<|startofcontext|>{}<|startoftranscript|><|emo:undefined|>"
    assert text(Utterance("", "", "x"), None) == begin.format("") + "<|en|><|en|>" + rest
    assert text(Utterance("", "", "x", prompt="before"), "it") == begin.format("before") + "<|it|><|it|>" + rest
    assert prompts.target(prompts.values(Utterance("", "", "x"), None)) == "en-US"
    with pytest.raises(BadExample, match="no token of this language"):
        prompts.encode(Utterance("", "", "x"), "de")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({}, "no_language"),
        ({"language": "de"}, "unknown_language"),
        ({"language": "en", "pnc": "maybe"}, "bad_prompt"),
        ({"language": "en", "text": "hello w\u00f6rld"}, "unknown_characters"),
        ({"language": "en", "text": "hello " * 40}, "text_too_long"),
    ],
)
def test_rows_without_a_prompt_or_a_text_are_named(make_task, saved_of, write_manifest, tone, tmp_path, row, reason):
    """The decoder has 64 places."""
    file = write_manifest(tmp_path, [tone(1, 1.0)], [{"text": "hello world", **row}])
    task = make_task(saved_of("canary"), task={"language": None}, data={"train": str(file)})
    (source,) = task.recipe.data.train
    (example,) = task.processing.read(source)
    with pytest.raises(BadExample) as caught:
        task.processing.examine(example, True)
    assert caught.value.reason == reason


def test_what_makes_no_sense_is_refused(make_task, saved_of):
    with pytest.raises(RecipeError, match=r"task\.prompt[\s\S]*itn[\s\S]*source_lang"):
        make_task(saved_of("canary"), task={"prompt": {"itn": "yes"}})
    with pytest.raises(RecipeError, match="takes no prompt"):
        make_task(saved_of("ctc"), task={"prompt": {"pnc": "yes"}})
    with pytest.raises(ModelError, match="prompt_format"):
        make_task(saved_of("canary"), model={"config": {"prompt_format": "llama2"}})
    with pytest.raises(ModelError, match="predict_last_k"):
        make_task(saved_of("canary"), model={"config": {"loss.predict_last_k": 1}})


# ---------------------------------------------------------------------------------------------- files

ALONE = """
import json, logging, sys
from nemo.utils import logging as nemo_logging
nemo_logging.setLevel(logging.ERROR)
from nemo.collections.asr.models import ASRModel
model = ASRModel.restore_from(sys.argv[1], map_location="cpu").eval()
found = model.transcribe(sys.argv[2:], batch_size=4, verbose=False, source_lang="en", target_lang="en", pnc="yes")
assert not any(name.split(".")[0] == "luthier" for name in sys.modules)
print(json.dumps([one.text for one in found]))
"""


@pytest.fixture(scope="module")
def still() -> dict[str, Any]:
    names = ("ffn_dropout", "attn_score_dropout", "attn_layer_dropout")
    decoder = {f"transf_decoder.config_dict.{name}": 0.0 for name in (*names, "embedding_dropout")}
    encoder = {f"encoder.{name}": 0.0 for name in ("dropout", "dropout_att", "dropout_pre_encoder")}
    return {**decoder, **encoder, **{f"transf_encoder.{name}": 0.0 for name in names}, "loss.label_smoothing": 0.0}


@pytest.fixture(scope="module")
def learned(make_recipe, canary_config, manifest, still, tmp_path_factory):
    """(folder, outcome) of a model that has learned the 12 recordings by heart, from a configuration alone."""
    folder = tmp_path_factory.mktemp("runs") / "canary"
    recipe = make_recipe(
        canary_config, model={"config": still},
        data={"validation": str(manifest), "batch": {"examples": 6}},
        optim={"learning_rate": 5e-3, "warmup": 10, "schedule": "cosine"},
        train={"steps": 250, "log_every": 50}, evaluate={"every": 250}, checkpoint={"best": "cer"},
        output=str(folder),
    )  # fmt: skip
    return folder, train(recipe)


@pytest.mark.slow
def test_nemo_alone_restores_what_was_learned_and_writes_the_same(learned, manifest):
    """In a process that knows nothing of this package. NeMo pads what is shorter than a second, so only longer ones."""
    folder, outcome = learned
    assert outcome.metrics["cer"] <= 0.1
    best = folder / "checkpoints" / "best"
    files = [str(manifest.parent / f"{number}.wav") for number in (0, 2, 6, 8, 9, 11)]
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(best / "model" / "model.nemo"), *files],
        capture_output=True, text=True, check=False, timeout=600, cwd=manifest.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    texts = json.loads(done.stdout.strip().splitlines()[-1])
    (sample_file,) = (folder / "samples").glob("step-*250.json")
    wrote = {one["reference"]: one["hypothesis"] for one in json.loads(sample_file.read_text(encoding="utf-8"))}
    rows = [json.loads(line)["text"] for line in manifest.read_text(encoding="utf-8").splitlines()]
    compared = [(wrote[rows[n]], text) for n, text in zip((0, 2, 6, 8, 9, 11), texts, strict=True) if rows[n] in wrote]
    assert len(compared) >= 3
    assert [one for one, _ in compared] == [other.strip() for _, other in compared]
    again = evaluate_checkpoint(best)
    assert again.metrics["loss"] == pytest.approx(outcome.metrics["loss"], rel=1e-5)
    assert again.metrics["cer"] == outcome.metrics["cer"]


def test_what_is_saved_goes_on_and_nemo_restores_it(make_task, saved_of, spoken, tmp_path):
    """With the model's own decoding and tokenizers; the same model gives the same bytes."""
    from nemo.collections.asr.models import ASRModel

    task = make_task(saved_of("canary"), data={"train": spoken}, evaluate={"num_beams": 4})
    said(task)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        task.save_pretrained(tmp_path / name)
    assert (tmp_path / "one" / "model.nemo").read_bytes() == (tmp_path / "two" / "model.nemo").read_bytes()
    restored = ASRModel.restore_from(str(tmp_path / "one" / "model.nemo"), map_location="cpu")
    expected = task.nemo.state_dict()
    assert restored.state_dict().keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in restored.state_dict().items())
    assert restored.cfg.decoding.beam.beam_size == 1
    again = make_task(saved_of("canary"), tmp_path / "one", data={"train": spoken}, evaluate={"num_beams": 4})
    assert [one.hypothesis for one in predicted(again).records] == [one.hypothesis for one in predicted(task).records]
    with tarfile.open(tmp_path / "one" / "model.nemo") as tar:
        config = yaml.safe_load(tar.extractfile("./model_config.yaml").read())
    assert config["target"].endswith(".EncDecMultiTaskModel")


def test_resumed_runs_are_the_same(make_recipe, saved_of, spoken, tmp_path, left, stops_and_resumes, quick):
    """With dropout; the loss of the evaluation, after which NeMo's search would leave dropout on, too."""

    def recipe(name: str) -> Any:
        return make_recipe(
            saved_of("canary"), model={"lora": None},
            data={"train": spoken, "validation": spoken, "batch": {"examples": 3}},
            optim={"learning_rate": 1e-3, "warmup": 0}, train={"steps": 3, "log_every": 1}, evaluate={"every": 1,
            "max_new_tokens": 4}, checkpoint={"every": 1, "best": "loss"}, output=str(tmp_path / name),
        )  # fmt: skip

    whole = train(recipe("whole")).folder
    stops_and_resumes(recipe("stopped"), 2)
    for curve in ("train/loss", "validation/loss", "validation/cer"):
        assert left.curve(tmp_path / "stopped", curve) == left.curve(whole, curve)


def test_an_adapter_leaves_the_tied_output_alone(make_task, saved_of, collated):
    """Merged into the output layer it would change the table of tokens too; a frozen encoder gets none either."""
    lora = {"rank": 2, "target_modules": "all-linear"}
    task = make_task(saved_of("canary"), model={"lora": lora, "freeze_encoder": True})
    named = {name for name, p in task.named_parameters() if p.requires_grad}
    assert named
    assert all(".transf_decoder." in name for name in named)
    task.train_mode()
    task.loss(collated(task.processing)).sum.backward()
    assert gradients(task).keys() == named


def test_a_frozen_encoder_is_all_that_stands_before_the_decoder(make_task, saved_of):
    task = make_task(saved_of("canary"), model={"freeze_encoder": True})
    trained = {name.split(".")[0] for name, p in task.nemo.named_parameters() if p.requires_grad}
    assert trained == {"transf_decoder", "log_softmax"}


def test_another_vocabulary_keeps_the_rows_of_what_stays(make_task, saved_of, collated, tmp_path):
    """Control tokens and pieces in one SentencePiece model, as Canary-flash has them; also after saving."""
    import sentencepiece

    special = ["<|startoftranscript|>", "<|endoftext|>", "<pad>", "<|nospeech|>", "<|pnc|>", "<|nopnc|>", "<|en|>",
               "<|it|>", "<|transcribe|>", "<|translate|>"]  # fmt: skip
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["hello world", "good old day", "hello you", "my old world"]), vocab_size=34,
        model_prefix=str(tmp_path / "tokenizer"), model_type="bpe", bos_id=-1, eos_id=-1, minloglevel=2,
        user_defined_symbols=special, add_dummy_prefix=False,
    )  # fmt: skip
    lenient = {"task": {"unknown": "drop"}, "data": {"max_bad": 0.9}}
    old = make_task(saved_of("canary"))
    new = make_task(saved_of("canary"), model={"vocabulary": str(tmp_path)}, **lenient)
    before, after = old.processing.tokens.pieces, new.processing.tokens.pieces
    ids = {piece: number for number, piece in enumerate(before)}
    shared = set(ids) & set(after)
    assert {"<|endoftext|>", "<|en|>", "o"} < shared
    for name in ("transf_decoder._embedding.token_embedding.weight", "log_softmax.mlp.layer0.bias"):
        table, kept = new.nemo.state_dict()[name], old.nemo.state_dict()[name]
        assert len(table) == -(-len(after) // 8) * 8
        assert all(torch.equal(table[after.index(piece)], kept[ids[piece]]) for piece in shared), name
    head = new.nemo.log_softmax.mlp.layer0.weight
    assert head is new.nemo.transf_decoder.embedding.token_embedding.weight
    assert [after[one] for one in new.processing.prompt(Utterance("", "", "x", language="en"))][:1] == [special[0]]
    assert new.nemo.prompt.tokenizer is new.nemo.tokenizer
    (tmp_path / "saved").mkdir()
    new.save_pretrained(tmp_path / "saved")
    again = make_task(saved_of("canary"), tmp_path / "saved", **lenient)
    assert again.processing.tokens.pieces == after
    data = collated(new.processing, (0, 1))
    for one in (new, again):
        one.eval()
    assert float(again.loss(data).sum) == float(new.loss(data).sum)
