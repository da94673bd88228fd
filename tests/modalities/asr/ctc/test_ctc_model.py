"""What is trained and what is not, and what is saved: transformers loads it and writes the same text."""

from __future__ import annotations

import pytest
import soundfile as sf
import torch
import transformers as hf
from peft import PeftModel
from safetensors.torch import load_file

from luthier.common.data.processing import Batch
from luthier.common.errors import ModelError, RecipeError

FAMILIES = ("wav2vec2:group", "wav2vec2:layer", "hubert:layer", "wavlm:layer", "wav2vec2-bert", "parakeet_ctc")


def texts(task, data) -> list[str]:
    batch = Batch(0, 0, tuple(range(len(data["utterances"]))), data, 1.0, 1.0)
    return [record.hypothesis for record in task.eval().predict(batch).records]


def read_alone(model, path, data) -> list[str]:
    """Texts by transformers alone: its processor, its model, its greedy decoding, one recording at a time."""
    processor = hf.AutoProcessor.from_pretrained(path)
    found = []
    for utterance in data["utterances"]:
        wave = sf.read(utterance.audio, dtype="float32")[0]
        inputs = processor(audio=[wave], sampling_rate=16000, return_tensors="pt")
        with torch.no_grad():
            ids = model.eval()(**inputs).logits.argmax(-1)
        if (mask := inputs.get("attention_mask")) is not None and hasattr(model, "_get_subsampling_output_length"):
            ids = ids[:, : int(model._get_subsampling_output_length(mask.sum(-1)))]
        found += [processor.decode(row).strip() for row in ids]
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_saved_loads_in_transformers_and_writes_the_same(make_task, model_of, collated, tmp_path, family):
    task = make_task(model_of(family), task={"vocabulary": "extend"})
    data = collated(task.processing, range(8))
    expected = texts(task, data)
    assert len(set(expected)) > 4
    task.save_pretrained(tmp_path)
    assert (tmp_path / "preprocessor_config.json").is_file()
    model = hf.AutoModelForCTC.from_pretrained(tmp_path)
    assert read_alone(model, tmp_path, data) == expected
    again = make_task(model_of(family), tmp_path)
    assert texts(again, data) == expected
    for name, parameter in task.named_parameters():
        assert torch.equal(parameter, dict(again.named_parameters())[name]), name


def test_a_grown_vocabulary_is_saved_with_the_model(make_task, model_of, changed, collated, tmp_path):
    path, data = model_of("wav2vec2:group"), {"train": changed("saved", "città 9", "è")}
    task = make_task(path, data=data, task={"vocabulary": "extend"})
    task.save_pretrained(tmp_path)
    model, tokenizer = hf.AutoModelForCTC.from_pretrained(tmp_path), hf.AutoTokenizer.from_pretrained(tmp_path)
    assert model.config.vocab_size == len(task.processing.vocabulary.tokens) == model.lm_head.out_features
    assert tokenizer.decode(tokenizer("città 9").input_ids, group_tokens=False) == "città 9"
    assert tokenizer.pad_token_id == model.config.pad_token_id == 0
    again = make_task(path, tmp_path)  # the recipe's own data are not read again
    assert again.processing.vocabulary.tokens == task.processing.vocabulary.tokens
    batch = collated(task.processing, (0, 1))
    assert texts(again, batch) == texts(task, batch)


@pytest.mark.parametrize("grown", [False, True])
def test_an_adapter_is_saved_alone_and_goes_on(make_task, model_of, changed, collated, tmp_path, grown):
    """PEFT's task types call a model with arguments that these have not (fault 7): none is given."""
    path = model_of("wav2vec2:layer")
    sections = {"model": {"lora": {"rank": 4, "target_modules": ["q_proj", "v_proj"]}}}
    if grown:
        sections |= {"data": {"train": changed("lora", "città", "è")}, "task": {"vocabulary": "extend"}}
    task = make_task(path, **sections)
    trained = {name for name, parameter in task.named_parameters() if parameter.requires_grad}
    assert all("lora_" in name or ("lm_head.modules_to_save" in name and grown) for name in trained)
    assert any("lm_head" in name for name in trained) == grown
    data = collated(task.processing, (0, 1))
    optimizer = torch.optim.Adam([p for p in task.parameters() if p.requires_grad], lr=0.01)
    before = task.loss(data).sum
    for _ in range(3):
        optimizer.zero_grad()
        task.loss(data).sum.backward()
        optimizer.step()
    assert task.loss(data).sum < before
    task.save_pretrained(tmp_path)
    expected = texts(task, data)
    again = make_task(path, tmp_path, **sections)
    assert texts(again, data) == expected
    assert {name for name, parameter in again.named_parameters() if parameter.requires_grad} == trained
    base = hf.AutoModelForCTC.from_pretrained(
        path, vocab_size=len(task.processing.vocabulary.tokens), ignore_mismatched_sizes=True
    )
    assert read_alone(PeftModel.from_pretrained(base, str(tmp_path)), tmp_path, data) == expected


# ---------------------------------------------------------------------------------------------- what is trained


def trained(task) -> set[str]:
    return {name.removeprefix("model.") for name, parameter in task.named_parameters() if parameter.requires_grad}


def test_the_feature_encoder_is_frozen_unless_asked(make_task, wav2vec2):
    frozen, whole = (trained(make_task(wav2vec2, model={"freeze_feature_encoder": off})) for off in (True, False))
    assert set(whole - frozen) == {name for name in whole if ".feature_extractor." in name} != set()
    assert trained(make_task(wav2vec2, model={"freeze_encoder": True})) == {"lm_head.weight", "lm_head.bias"}
    with pytest.raises(RecipeError, match="freeze_encoder"):
        make_task(wav2vec2, model={"freeze_encoder": True, "lora": {}})


def test_frozen_parts_stay_in_eval_mode(make_task, wav2vec2):
    """Fault 19."""
    task = make_task(wav2vec2, model={"freeze_feature_encoder": True})
    task.train_mode()
    assert not task.speech.wav2vec2.feature_extractor.training
    assert task.speech.wav2vec2.encoder.training


def test_batch_norms_keep_their_statistics_unless_asked(make_task, model_of, collated):
    path = model_of("parakeet_ctc")
    for kind, moves in (("keep", False), ("train", True)):
        task = make_task(path, model={"batch_norm": kind})
        task.train_mode()
        before = {name: value.clone() for name, value in task.named_buffers() if "running_mean" in name}
        task.loss(collated(task.processing))
        assert before
        for name, value in task.named_buffers():
            if name in before:
                assert torch.equal(value, before[name]) != moves


def test_masks_and_layerdrop_are_off_unless_asked(make_task, wav2vec2, collated):
    """The models' own settings have both on; with masks the loss depends on the random state."""
    from luthier.common.seeding import seed_batch

    def losses(**model) -> list[float]:
        task = make_task(wav2vec2, model=model)
        task.train_mode()
        found = []
        for number in (0, 1, 0):
            seed_batch(5, number)
            found.append(float(task.loss(collated(task.processing)).sum.detach()))
        return found

    plain = losses()
    assert plain[0] == plain[1] == plain[2]
    for asked in (
        {"mask": {"time_probability": 0.5, "time_length": 3}},
        {"mask": {"time_probability": 0.0, "feature_probability": 0.3, "feature_length": 4}},
        {"dropout": 0.3},
        {"layerdrop": 0.5},
    ):
        first, second, again = losses(**asked)
        assert first == again, asked
        assert len({plain[0], first, second}) > 1, asked


def test_left_out_layers_have_gradients_all_the_same(make_task, wav2vec2, collated):
    """DDP waits for the gradient of every trained parameter."""
    task = make_task(wav2vec2, model={"layerdrop": 0.9})
    task.train_mode()
    torch.manual_seed(0)
    loss = task.loss(collated(task.processing))
    loss.sum.backward()
    assert all(parameter.grad is not None for parameter in task.parameters() if parameter.requires_grad)
    assert any((parameter.grad == 0).all() for parameter in task.parameters() if parameter.requires_grad)


def test_unmasked_models_do_not_train_the_mask(make_task, wav2vec2):
    assert "wav2vec2.masked_spec_embed" not in trained(make_task(wav2vec2))
    assert "wav2vec2.masked_spec_embed" in trained(make_task(wav2vec2, model={"mask": {}}))
    only = {"mask": {"time_probability": 0.0, "feature_probability": 0.1}}
    assert "wav2vec2.masked_spec_embed" not in trained(make_task(wav2vec2, model=only))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_bfloat16_model_takes_float32_audio(make_task, model_of, collated, checkpointing):
    for family in ("wav2vec2:group", "wav2vec2-bert"):
        plain = make_task(model_of(family))
        data = collated(plain.processing)
        task = make_task(model_of(family), train={"precision": "bf16-true", "gradient_checkpointing": checkpointing})
        task.train_mode()
        loss = task.loss(data)
        loss.sum.backward()
        assert loss.sum.dtype == torch.float32
        assert float(loss.sum.detach()) == pytest.approx(float(plain.loss(data).sum.detach()), rel=0.03)


@pytest.mark.parametrize("family", ["wav2vec2:group", "wav2vec2-bert", "parakeet_ctc"])
def test_checkpointed_layers_give_the_same_gradients(make_task, model_of, collated, family):
    gradients = []
    for on in (False, True):
        task = make_task(model_of(family), train={"gradient_checkpointing": on})
        task.train_mode()
        task.loss(collated(task.processing)).sum.backward()
        gradients.append({name: p.grad for name, p in task.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-6, msg=name)


# ---------------------------------------------------------------------------------------------- MMS


@pytest.fixture
def mms(model_of, tmp_path):
    """A model with adapters for two languages, as MMS has them: a vocabulary of each, a file of each."""
    import json
    import shutil

    from safetensors.torch import save_file

    folder = tmp_path / "mms"
    shutil.copytree(model_of("mms"), folder)
    vocabularies = {
        "eng": ["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefghijklmnopqrstuvwxyz'"],
        "ita": ["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdeghilmnoprstuvzàè"],
    }
    nested = {name: {token: at for at, token in enumerate(tokens)} for name, tokens in vocabularies.items()}
    (folder / "vocab.json").write_text(json.dumps(nested), encoding="utf-8")
    spoken = hf.Wav2Vec2CTCTokenizer(str(folder / "vocab.json"), target_lang="eng")
    extractor = hf.Wav2Vec2FeatureExtractor(return_attention_mask=True)
    hf.Wav2Vec2Processor(extractor, spoken).save_pretrained(folder)
    model = hf.Wav2Vec2ForCTC.from_pretrained(folder)
    for at, (name, tokens) in enumerate(vocabularies.items()):
        generator = torch.Generator().manual_seed(at)
        tensors = {
            key: torch.randn(value.shape, generator=generator) * 0.3 for key, value in model._get_adapters().items()
        }
        for key in ("lm_head.weight", "lm_head.bias"):
            tensors[key] = torch.randn(len(tokens), *tensors[key].shape[1:], generator=generator) * 0.3
        save_file(tensors, folder / f"adapter.{name}.safetensors", metadata={"format": "pt"})
    return str(folder)


def test_an_mms_adapter_is_chosen_trained_and_saved(make_task, mms, collated, changed, tmp_path):
    sections = {
        "model": {"language": "ita", "train_adapter": True},
        "data": {"train": changed("ita", "ciao bella", "buona sera", "tre volte")},
    }
    task = make_task(mms, **sections)
    tokens = task.processing.vocabulary.tokens
    assert "à" in tokens
    assert "w" not in tokens
    chosen = hf.Wav2Vec2ForCTC.from_pretrained(mms, target_lang="ita", ignore_mismatched_sizes=True)
    assert torch.equal(task.speech.lm_head.weight, chosen.lm_head.weight)
    assert all("adapter_layer" in name or "lm_head" in name for name in trained(task))
    assert any("adapter_layer" in name for name in trained(task))
    data = collated(task.processing, (0, 1, 2))
    task.loss(data).sum.backward()
    with torch.no_grad():
        for parameter in task.parameters():
            if parameter.requires_grad:
                parameter -= 1e-3 * parameter.grad
    folder = tmp_path / "saved"
    task.save_pretrained(folder)
    expected = texts(task, data)
    assert texts(make_task(mms, folder, **sections), data) == expected
    assert read_alone(hf.AutoModelForCTC.from_pretrained(folder), folder, data) == expected
    saved = load_file(folder / "adapter.ita.safetensors")
    assert torch.equal(saved["lm_head.weight"], task.speech.lm_head.weight)
    # As MMS's users load it: the file beside the base model.
    (folder / "adapter.ita.safetensors").replace(f"{mms}/adapter.ita.safetensors")
    other = hf.Wav2Vec2ForCTC.from_pretrained(mms, target_lang="ita", ignore_mismatched_sizes=True)
    assert read_alone(other, folder, data) == expected


def test_a_language_that_mms_does_not_know_starts_anew(make_task, mms, changed):
    data = {"train": changed("lij", "çioæ", "bón giorno")}
    task = make_task(mms, model={"train_adapter": True}, task={"vocabulary": "new"}, data=data)
    assert {"ç", "æ", "ó"} <= set(task.processing.vocabulary.tokens)
    assert any("adapter_layer" in name for name in trained(task))
    with pytest.raises(ModelError, match=r"model\.language"):
        make_task(mms, model={"language": "xyz"})


def test_a_model_without_adapters_says_so(make_task, wav2vec2):
    with pytest.raises(ModelError, match="adapters"):
        make_task(wav2vec2, model={"train_adapter": True})
