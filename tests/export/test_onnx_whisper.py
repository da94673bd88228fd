"""Whisper as ONNX graphs, run by onnxruntime and by sherpa-onnx in a process that does not know us."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from luthier.export import graph
from luthier.export.targets import onnx_whisper

TRAINED = ("train.steps=60", "optim.learning_rate=2e-3", "model.audio_context=dynamic")

TORCH = """
from transformers import WhisperForConditionalGeneration, WhisperProcessor
processor = WhisperProcessor.from_pretrained(folder)
model = WhisperForConditionalGeneration.from_pretrained(folder).eval()
given = processor(waves, sampling_rate=16000, return_tensors="pt").input_features
names = ["startoftranscript", "en", "transcribe", "notimestamps"]
prompt = processor.tokenizer.convert_tokens_to_ids([f"<|{name}|>" for name in names])
texts, logits = [], []
with torch.no_grad():
    for one in given:
        encoded, ids = model.model.encoder(one[None]), list(prompt)
        while len(ids) < 40 and ids[-1] != model.config.eos_token_id:
            found = model(encoder_outputs=encoded, decoder_input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            ids.append(int(found.argmax()))
            logits.append(found.tolist())
        texts.append(processor.tokenizer.decode(ids, skip_special_tokens=True).strip())
print(json.dumps({"texts": texts, "logits": logits}))
"""
ONNX = """
import base64, onnxruntime
from transformers import WhisperFeatureExtractor
encoder, decoder = (onnxruntime.InferenceSession(str(folder / f"{name}.onnx")) for name in ("encoder", "decoder"))
facts = encoder.get_modelmeta().custom_metadata_map
known = {int(line.split()[1]): base64.b64decode(line.split()[0]) for line in (folder / "tokens.txt").open()}
mel = WhisperFeatureExtractor.from_pretrained(folder)(waves, sampling_rate=16000, return_tensors="np").input_features
names = [one.name for one in encoder.get_outputs()]
heard = dict(zip(names, encoder.run(None, {"mel": mel})))
shape = [int(facts[name]) for name in ("n_text_layer", "n_text_ctx", "n_text_state")]
prompt = [int(one) for one in facts["sot_sequence"].split(",")] + [int(facts["no_timestamps"])]
texts, logits = [], []
for row in range(len(waves)):
    given = {name: value[:, row : row + 1] for name, value in heard.items()}
    cache = [np.zeros((shape[0], 1, *shape[1:]), np.float32)] * 2
    new, done, ids = prompt, 0, []
    while done + len(new) < 40:
        given |= dict(zip(("in_n_layer_self_k_cache", "in_n_layer_self_v_cache"), cache))
        found, *cache = decoder.run(None, {**given, "tokens": np.array([new]), "offset": np.array([done])})
        logits.append(found[0, -1].tolist())
        done, new = done + len(new), [int(found[0, -1].argmax())]
        if new[0] == int(facts["eot"]):
            break
        ids += new
    texts.append(b"".join(known[one] for one in ids).decode().strip())
print(json.dumps({"texts": texts, "logits": logits}))
"""
SHERPA = """
import sherpa_onnx
heard = sherpa_onnx.OfflineRecognizer.from_whisper(f"{folder}/encoder.onnx", f"{folder}/decoder.onnx",
                                                   tokens=f"{folder}/tokens.txt", language="en", tail_paddings=60)
print(json.dumps(written(heard)))
"""


@pytest.fixture(scope="module")
def waves(checkpoint_of) -> list[str]:
    """Recordings of 1 to 1.3 s, of those of the training: sherpa-onnx lets Whisper write 6 tokens a second."""
    folder = checkpoint_of("asr.whisper", *TRAINED).parents[2]
    return [str(folder / f"{number}.wav") for number in range(4, 8)]


@pytest.mark.serves("onnx", "asr.whisper", "onnxruntime")
@pytest.mark.slow
def test_onnxruntime(exported, outside_hearing, waves, same_texts) -> None:
    """Encoder and decoder with its cache give the same logits at each step, and the same text."""
    place, report = exported("asr.whisper", "onnx", *TRAINED)
    assert report["usable"]
    assert report["same_text"] == report["inputs"] == 4
    assert 0 < report["largest_difference"] <= report["allowed_difference"]
    assert report["metrics"]["wer"]["artifact"] == report["metrics"]["wer"]["trained"]
    whole, _ = exported("asr.whisper", "merged", *TRAINED)
    found, expected = outside_hearing(ONNX, place, *waves), outside_hearing(TORCH, whole, *waves)
    same_texts(found["texts"], expected["texts"])
    np.testing.assert_allclose(found["logits"], expected["logits"], atol=2e-3)
    assert not list(place.glob("*.safetensors")), "the weights are in the graphs"


@pytest.mark.serves("onnx", "asr.whisper", "sherpa-onnx")
@pytest.mark.slow
def test_sherpa(exported, outside_hearing, waves, same_texts) -> None:
    """It makes its own mel features, of the audio and no more."""
    pytest.importorskip("sherpa_onnx")
    place, _ = exported("asr.whisper", "onnx", *TRAINED)
    whole, _ = exported("asr.whisper", "merged", *TRAINED)
    same_texts(outside_hearing(SHERPA, place, *waves), outside_hearing(TORCH, whole, *waves)["texts"])


@pytest.mark.slow
def test_in_8_bits(exported) -> None:
    whole, _ = exported("asr.whisper", "onnx", *TRAINED)
    place, report = exported("asr.whisper", "onnx", *TRAINED, dtype="int8")
    assert report["usable"]
    assert report["largest_difference"] > 1e-4
    assert report["metrics"]["wer"]["artifact"] is not None
    for name in ("encoder.onnx", "decoder.onnx"):
        assert (place / name).stat().st_size < (whole / name).stat().st_size


def test_the_graphs_are_whisper(base_of) -> None:
    """Before they become ONNX: the same hidden states and logits as transformers', at any length, token by token."""
    from transformers import WhisperForConditionalGeneration

    torch.manual_seed(0)
    model = WhisperForConditionalGeneration.from_pretrained(base_of("whisper")).eval()
    config, mel = model.config, torch.randn(1, 80, 200)
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        expected = model(input_features=mel, decoder_input_ids=ids).logits
        encoder, decoder = onnx_whisper.Encoder(model), onnx_whisper.Decoder(model)
        heard = encoder(mel)
        cache = [torch.zeros(config.decoder_layers, 1, config.max_target_positions, config.d_model)] * 2
        found, done = [], 0
        for part in ids.split([3, 1, 1], dim=1):
            logits, *cache = decoder(part, *cache, *heard, torch.tensor([done]))
            found.append(logits)
            done += part.shape[1]
        shorter = encoder(mel[:, :, :60])
    torch.testing.assert_close(torch.cat(found, 1), expected, atol=1e-4, rtol=1e-4)
    assert shorter[0].shape == (config.decoder_layers, 1, 30, config.d_model)


def test_one_tensor_for_two_inputs(tmp_path) -> None:
    """A graph keeps its inputs apart, though the example has the same tensor for both."""

    class Difference(torch.nn.Module):
        def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            return one - 2 * other

    zeros = torch.zeros(3, 2)
    axes = {"one": {0: "rows"}, "other": {0: "rows"}}
    graph.write(Difference(), {"one": zeros, "other": zeros}, ["out"], axes, tmp_path / "a.onnx")
    given = {"one": np.full((5, 2), 7, np.float32), "other": np.full((5, 2), 3, np.float32)}
    np.testing.assert_array_equal(graph.Session(tmp_path / "a.onnx")(given)["out"], np.full((5, 2), 1, np.float32))
