"""Transcripts: NeMo's own, greedy and with beams, whole or in a stream."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from luthier.common.data.collect import collect
from luthier.common.data.plan import Planned
from luthier.common.data.processing import PlannedData
from luthier.common.errors import RecipeError

pytest.importorskip("nemo")

ROWS = (0, 1, 3, 6, 11)


@pytest.fixture
def predicted(manifest):
    """Transcripts of some examples by a task."""

    def run(task, rows=ROWS):
        examples = collect(task.recipe.data.train, task.processing, task.recipe.data).examples
        task.eval()
        return task.predict(PlannedData(task.processing, examples, None)[Planned(0, 0, tuple(rows))])

    return run


def spoken(task) -> None:
    """Sharpen an untrained model, so that its transcripts hold letters."""
    with torch.no_grad():
        for name, parameter in task.nemo.named_parameters():
            if name.startswith(("decoder.decoder_layers", "ctc_decoder.decoder_layers", "joint.joint_net")):
                parameter.mul_(4.0)
                if name.endswith("bias"):  # of the blank
                    parameter[len(task.processing.tokens.pieces)] -= 0.5


@pytest.mark.parametrize(
    ("kind", "subwords", "decoder"),
    [
        ("ctc", False, "model"), ("ctc", True, "model"), ("rnnt", True, "model"), ("tdt", False, "model"),
        ("hybrid", False, "model"), ("hybrid", False, "ctc"),
    ],
)  # fmt: skip
def test_transcripts_are_those_of_nemo_s_transcribe(
    make_task, saved_of, predicted, manifest, monkeypatch, kind, subwords, decoder
):
    task = make_task(saved_of(kind, subwords), evaluate={"decoder": decoder})
    spoken(task)
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    found = predicted(task).records
    files = [str(manifest.parent / f"{row}.wav") for row in ROWS]
    expected = [item.text for item in task.nemo.transcribe(files, batch_size=5, verbose=False)]
    assert [one.hypothesis for one in found] == [text.strip() for text in expected]
    assert any(expected)
    assert [one.reference for one in found] == ["hello world", "good day", "one two", "tre volte", "two of two"]


@pytest.mark.parametrize("kind", ["ctc", "rnnt", "tdt", "hybrid"])
def test_pieces_of_a_long_recording_have_no_part_in_the_loss(make_task, saved_of, kind):
    """The 12 recordings are of 0.12 to 1.32 s; those above 0.7 s are cut. Nobody speaks in them, so evenly."""
    pytest.importorskip("silero_vad")
    task = make_task(saved_of(kind), data={"audio": {"max_seconds": 0.7, "voice": {}}})
    spoken(task.eval())
    processing = task.processing
    (source,) = task.recipe.data.train
    pieces = [piece for item in processing.read(source) for piece in processing.examine(item, False)]
    assert len(pieces) > 12
    batches = {}
    for name, chosen in (("all", pieces), ("known", [piece for piece in pieces if piece.whole is None])):
        batches[name] = task.predict(PlannedData(processing, chosen, None)[Planned(0, 0, tuple(range(len(chosen))))])
    assert len(batches["all"].records) == len(pieces)
    assert batches["all"].loss.count == batches["known"].loss.count > 0
    torch.testing.assert_close(batches["all"].loss.sum, batches["known"].loss.sum, rtol=1e-4, atol=1e-4)
    unknown = [piece for piece in pieces if piece.whole is not None]
    found = task.predict(PlannedData(processing, unknown, None)[Planned(0, 0, (0, 1))])
    assert found.loss.count == float(found.loss.sum) == 0
    assert task.score(batches["all"].records)["utterances"] == 12


@pytest.mark.parametrize(("kind", "strategy"), [("ctc", "beam_batch"), ("rnnt", "malsd_batch"), ("tdt", "malsd_batch")])
def test_beams_are_nemo_s(make_task, saved_of, predicted, kind, strategy):
    """And the saved configuration keeps the model's own decoding."""
    task = make_task(saved_of(kind), evaluate={"num_beams": 4})
    spoken(task)
    assert task.nemo.decoding.cfg.strategy == strategy
    assert task.nemo.decoding.cfg.beam.beam_size == 4
    assert task.nemo.cfg.decoding.strategy.startswith("greedy")
    assert any(one.hypothesis for one in predicted(task).records)


def test_a_search_with_beams_finds_the_text_that_adds_up(make_task, saved_of):
    """Of two frames: the best path is empty (0.6 * 0.6), yet the paths of "a" together have 2 * 0.4 * 0.6 + 0.4^2."""
    for beams, text in ((1, ""), (4, "a")):
        task = make_task(saved_of("ctc"), evaluate={"num_beams": beams})
        pieces = task.processing.tokens.pieces
        log_probs = torch.full((1, 2, len(pieces) + 1), -30.0)
        log_probs[..., pieces.index("a")], log_probs[..., -1] = np.log(0.4), np.log(0.6)
        hypotheses = task.nemo.decoding.ctc_decoder_predictions_tensor(log_probs, torch.tensor([2]))
        assert hypotheses[0].text == text


def test_a_decoding_that_nemo_refuses_is_an_error_of_the_recipe(make_task, saved_of):
    with pytest.raises(RecipeError, match=r"evaluate\.decoding"):
        make_task(saved_of("ctc"), evaluate={"decoding": {"strategy": "guess"}})
    with pytest.raises(RecipeError, match=r"evaluate\.decoder"):
        make_task(saved_of("ctc"), evaluate={"decoder": "ctc"})


def test_phrases_are_boosted(make_task, saved_of):
    """Hotwords through NeMo's boosting tree: every token of two words is as likely, and one word is asked for."""
    pair = ("grazie", "bella")
    for phrase in pair:
        settings = {
            "strategy": "beam_batch", "beam.beam_size": 8, "beam.boosting_tree.key_phrases_list": [phrase],
            "beam.boosting_tree_alpha": 5.0,
        }  # fmt: skip
        task = make_task(saved_of("ctc", True), evaluate={"decoding": settings})
        tokens = task.processing.tokens
        words, blank = [tokens.encode(word, None)[:3] for word in pair], len(tokens.pieces)
        log_probs = torch.full((1, 6, blank + 1), -30.0)
        log_probs[0, 1::2, blank] = 0.0
        for word in words:
            log_probs[0, range(0, 6, 2), word] = np.log(0.5)
        hypotheses = task.nemo.decoding.ctc_decoder_predictions_tensor(log_probs, torch.tensor([log_probs.shape[1]]))
        assert hypotheses[0].text == task.nemo.tokenizer.ids_to_text(words[pair.index(phrase)])


def test_an_n_gram_model_decides_between_what_sounds_alike(make_task, saved_of, tmp_path):
    """In ARPA form, where NeMo writes a token as the character of its number plus 100. "re" and "ra" are as likely by
    the audio; the model has "ra" at 10^-0.5 a token, all else at 10^-2."""
    tokens = make_task(saved_of("ctc")).processing.tokens.pieces
    wanted = {tokens.index(letter) for letter in "ra"}
    lines = [f"{-0.5 if number in wanted else -2.0}\t{chr(number + 100)}\t0" for number in range(len(tokens))]
    unigrams = ["-2\t<unk>\t0", "-99\t<s>\t0", "-1\t</s>\t0", *lines]
    bigram = f"-0.5\t{chr(tokens.index('r') + 100)} {chr(tokens.index('a') + 100)}"
    file = tmp_path / "lm.arpa"
    header = ["\\data\\", f"ngram 1={len(unigrams)}", "ngram 2=1", "", "\\1-grams:"]
    file.write_text("\n".join([*header, *unigrams, "", "\\2-grams:", bigram, "", "\\end\\", ""]), encoding="utf-8")
    found = []
    for weight in (0.0, 1.0):
        settings = {"beam.ngram_lm_model": str(file), "beam.ngram_lm_alpha": weight}
        task = make_task(saved_of("ctc"), evaluate={"num_beams": 4, "decoding": settings})
        log_probs = torch.full((1, 3, len(tokens) + 1), -30.0)
        log_probs[0, 0, tokens.index("r")] = log_probs[0, 1, -1] = 0.0
        log_probs[0, 2, tokens.index("e")], log_probs[0, 2, tokens.index("a")] = np.log(0.51), np.log(0.49)
        found.append(task.nemo.decoding.ctc_decoder_predictions_tensor(log_probs, torch.tensor([3]))[0].text)
    assert found == ["re", "ra"]


# ---------------------------------------------------------------------------------------------- streams


@pytest.mark.parametrize("context", [None, [8, 0]])
def test_a_stream_gives_what_the_whole_recording_gives(make_task, saved_of, predicted, context):
    """Chunk by chunk a cache-aware encoder sees exactly the context that it has at once."""
    whole, streamed = (
        make_task(saved_of("streamed"), evaluate={"streaming": streaming, "att_context_size": context})
        for streaming in (False, True)
    )
    for task in (whole, streamed):
        spoken(task)
    one, other = predicted(whole, range(12)), predicted(streamed, range(12))
    assert [item.hypothesis for item in other.records] == [item.hypothesis for item in one.records]
    assert any(item.hypothesis for item in one.records)
    assert float(other.loss.sum) == pytest.approx(float(one.loss.sum), rel=1e-4)


def test_contexts_differ(make_task, saved_of, predicted):
    far, near = (make_task(saved_of("streamed"), evaluate={"att_context_size": size}) for size in ([8, 1], [8, 0]))
    assert float(predicted(far).loss.sum) != pytest.approx(float(predicted(near).loss.sum), rel=1e-4)


def test_only_cache_aware_encoders_stream(make_task, saved_of):
    with pytest.raises(RecipeError, match="not cache-aware"):
        make_task(saved_of("ctc"), evaluate={"streaming": True})
    with pytest.raises(RecipeError, match=r"one of \[\[8, 1\], \[8, 0\]\]"):
        make_task(saved_of("streamed"), evaluate={"att_context_size": [70, 13]})


def test_training_draws_among_the_contexts_of_a_streamed_model(make_task, saved_of, collated):
    """The draw comes from python's generator, which each batch seeds."""
    from luthier.common.seeding import seed_batch

    task = make_task(saved_of("streamed", False), model={"config": {"encoder.dropout": 0.0, "encoder.dropout_att": 0.0,
                                                                   "encoder.dropout_pre_encoder": 0.0}})  # fmt: skip
    task.train_mode()
    data = collated(task.processing)

    def loss(number: int) -> float:
        seed_batch(0, number)
        return float(task.loss(data).sum.detach())

    assert len({loss(number) for number in range(8)}) == 2
    assert loss(3) == loss(3)


def test_scores_are_those_of_the_raw_text(make_task, saved_of, manifest, predicted):
    """One letter in eleven wrong, in another case: wer_raw and cer_raw see the case, wer and cer don't."""
    from luthier.modalities.asr.metrics import Scored

    task = make_task(saved_of("ctc"))
    metrics = task.score([Scored("Hello World", "hello worlt", "en", "x:1", 1.0, {})])
    assert metrics["cer_raw"] == pytest.approx(3 / 11)
    assert metrics["cer"] == pytest.approx(1 / 11)


@pytest.mark.parametrize(("kind", "beams"), [("hybrid", 1), ("ctc", 3), ("rnnt", 3), ("tdt", 3)])
def test_an_utterance_is_transcribed_alike_alone_and_in_a_batch(make_task, saved_of, predicted, kind, beams):
    task = make_task(saved_of(kind), evaluate={"num_beams": beams})
    spoken(task)
    together = [one.hypothesis for one in predicted(task).records]
    assert any(together)
    assert together == [predicted(task, (row,)).records[0].hypothesis for row in ROWS]
