"""FunASR's contextual Paraformer: its loss with drawn hotwords, and its transcripts with given ones, are FunASR's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from luthier.common.data.plan import Planned
from luthier.common.data.processing import PlannedData
from luthier.common.errors import RecipeError
from luthier.common.training.run import train
from luthier.modalities.asr.paraformer import hotwords, network

ROWS = (0, 1, 2, 11)


@pytest.fixture(scope="module")
def contextual(directory_of, manifest) -> str:
    """As the released one is made, tiny; its dictionary has the characters one by one."""
    letters = sorted({letter for line in manifest.read_text(encoding="utf-8").splitlines()
                      for letter in json.loads(line)["text"]})  # fmt: skip
    return directory_of(
        "sanm", model="ContextualParaformer", decoder="ContextualParaformerDecoder",
        model_conf={"inner_dim": 32, "bias_encoder_type": "lstm"},
        seg_dict="".join(f"{letter} {letter}\n" for letter in letters),
    )  # fmt: skip


@pytest.mark.usefixtures("_randomness")
@pytest.mark.parametrize("rows", [ROWS, (3,)])
def test_loss_and_gradients_equal_funasr(contextual, make_task, collated, auto_model, whole_seed, rows):
    """In training mode, with dropout, the sampler's draws and a list of words. FunASR's can't take a batch of one; here
    it is compared, in evaluation mode, with that row twice."""
    task = make_task(contextual)
    with torch.random.fork_rng():
        model = auto_model(contextual).model
    for module in model.modules():
        if type(module) is torch.nn.Dropout:
            module.__class__ = network.Dropout
    batch = collated(task.processing, rows)
    batch |= hotwords.batch([[3, 4, 5], [6, 7]])
    names = ("speech", "speech_lengths", "text", "text_lengths")
    given = {name: batch[name].clone() for name in names}
    if len(rows) == 1:
        given = {name: torch.cat([value, value]) for name, value in given.items()}
        task.paraformer.sampling_ratio = model.sampling_ratio = 0.0
    for one in (task, model):
        one.train(len(rows) > 1)
    given |= {name: batch[name] for name in ("hotword_pad", "hotword_lengths")}
    seed = whole_seed(lambda: model(**given))
    torch.manual_seed(seed)
    found = task.loss(batch)
    (found.sum / found.count).backward()
    torch.manual_seed(seed)
    expected, _, _ = model(**given)
    expected.squeeze().backward()
    torch.testing.assert_close(found.sum / found.count, expected.squeeze(), rtol=1e-5, atol=1e-5)
    theirs = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    ours = {name: p.grad for name, p in task.paraformer.named_parameters() if p.grad is not None}
    assert ours.keys() == theirs.keys()
    assert float(ours["bias_embed.weight"].norm()) > 0
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("size", [1, 2, 3, 9, 13, 40])
def test_words_are_drawn_from_the_text(size):
    """As FunASR's data set has it: three texts of four give a word of 2 to 8 tokens, and some long ones two."""
    generator, ids = np.random.default_rng(0), list(range(100, 100 + size))
    found = [hotwords.drawn(ids, generator) for _ in range(2000)]
    words = [word for several in found for word in several]
    text = " ".join(map(str, ids))
    assert all(" ".join(map(str, word)) in text for word in words)
    if size == 1:
        assert not words
        return
    assert {len(word) for word in words} == set(range(2, min(8, size) + 1))
    assert sum(map(bool, found)) / 2000 == pytest.approx(0.75, abs=0.03)
    twice = sum(len(several) == 2 for several in found) / 2000
    assert twice == (pytest.approx(0.075, abs=0.02) if size > 12 else 0)


def test_training_hears_words_of_its_batch_and_an_evaluation_those_of_the_recipe(contextual, make_task, collated):
    task = make_task(contextual, evaluate={"hotwords": ["你好", "世界"]})
    encode = task.processing.tokens.encode
    plain = collated(task.processing, ROWS)
    assert plain["hotword_lengths"].tolist() == [2, 2, 1]
    assert plain["hotword_pad"].tolist() == [encode("你好"), encode("世界"), [1, 0]]
    batch = collated(task.processing, ROWS, np.random.default_rng(1))
    assert len(batch["hotword_lengths"]) > 1
    texts = ["".join(map(chr, ids[ids >= 0].tolist())) for ids in batch["text"]]
    for word, length in zip(batch["hotword_pad"][:-1], batch["hotword_lengths"], strict=False):
        assert any("".join(map(chr, word[:length].tolist())) in text for text in texts)
    again = collated(task.processing, ROWS, np.random.default_rng(1))
    assert torch.equal(again["hotword_pad"], batch["hotword_pad"])


@pytest.mark.usefixtures("_randomness")
@pytest.mark.parametrize("words", [(), ("你好", "世界")])
def test_funasr_alone_loads_it_and_writes_the_same(
    contextual, make_task, examples, auto_model, manifest, tmp_path, words
):
    task = make_task(contextual, evaluate={"hotwords": list(words)})
    with torch.no_grad():
        task.paraformer.predictor.cif_output.bias.add_(2.0)  # so that there are tokens
        task.paraformer.decoder.output_layer.weight.mul_(8)
    task.eval()
    task.save_pretrained(tmp_path)
    found = task.predict(PlannedData(task.processing, examples(task.processing), None)[Planned(0, 0, ROWS)])
    alone = auto_model(tmp_path)
    for record, number in zip(found.records, ROWS, strict=True):
        results = alone.generate(
            str(manifest.parent / f"{number}.wav"), **({"hotword": " ".join(words)} if words else {})
        )
        assert record.hypothesis == results[0]["text"]
    assert any(record.hypothesis for record in found.records)
    assert found.loss.count > 0


def test_words_change_what_is_heard(contextual, make_task, collated):
    losses = []
    for words in ([], ["你好"]):
        task = make_task(contextual, evaluate={"hotwords": words})
        task.eval()
        with torch.no_grad():
            losses.append(float(task._known_loss(collated(task.processing, ROWS)).sum))
    assert losses[0] != losses[1]


def test_words_for_a_model_that_hears_none_are_refused(sanm, contextual, make_task):
    with pytest.raises(RecipeError, match=r"evaluate\.hotwords[\s\S]*ContextualParaformer"):
        make_task(sanm, evaluate={"hotwords": ["你好"]})
    with pytest.raises(RecipeError, match="lacks it"):
        make_task(contextual, evaluate={"hotwords": ["囧"]})


@pytest.mark.usefixtures("quick")
def test_it_learns_stops_and_resumes(contextual, manifest, make_recipe, tmp_path, left, stops_and_resumes):
    """The draws are those of the batch: the same after a stop."""

    def recipe(name: str) -> Any:
        return make_recipe(
            contextual, data={"validation": str(manifest), "batch": {"examples": 5}},
            optim={"learning_rate": 3e-3, "warmup": 0}, train={"steps": 6, "log_every": 1},
            evaluate={"every": 3}, checkpoint={"every": 2, "best": "loss"}, output=str(tmp_path / name),
        )  # fmt: skip

    whole = train(recipe("whole")).folder
    stops_and_resumes(recipe("stopped"), 3)
    assert left.curve(Path(tmp_path / "stopped")) == left.curve(whole)
    losses = left.values(whole)
    assert losses[-1] < losses[0]
