"""Directories, weights and parts: what is loaded, what is refused, and what FunASR does on the side and we don't."""

from __future__ import annotations

import json
import logging
import random
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from luthier.common.errors import LuthierError, ModelError, RecipeError
from luthier.modalities.asr.paraformer.directory import read


def copied(path: str, folder: Path) -> Path:
    return Path(shutil.copytree(path, folder / "model"))


def changed(path: str, folder: Path, **values: torch.Tensor | None) -> str:
    """The directory with some weights replaced or (None) taken away."""
    target = copied(path, folder)
    state = torch.load(target / "model.pt", weights_only=True)
    for name, value in values.items():
        name = name.replace("__", ".")
        if value is None:
            del state[name]
        else:
            state[name] = value
    torch.save(state, target / "model.pt")
    return str(target)


# ---------------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("wrapped", ["", "state_dict", "model_state_dict"])
def test_the_weights_are_those_of_the_file(sanm, make_task, tmp_path, wrapped):
    path = copied(sanm, tmp_path)
    state = torch.load(path / "model.pt", weights_only=True)
    if wrapped:
        torch.save({wrapped: {f"module.{name}": value for name, value in state.items()}}, path / "model.pt")
    found = make_task(str(path)).paraformer.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_missing_weights_are_an_error(sanm, make_task, tmp_path):
    """FunASR prints a line and goes on with random ones."""
    path = changed(sanm, tmp_path, decoder__output_layer__bias=None)
    with pytest.raises(ModelError, match=r"decoder\.output_layer\.bias"):
        make_task(path)


def test_a_weight_of_another_shape_is_an_error(sanm, make_task, tmp_path):
    """FunASR logs a line and goes on with random ones."""
    path = changed(sanm, tmp_path, encoder__after_norm__weight=torch.ones(16))
    with pytest.raises(ModelError, match=r"encoder\.after_norm\.weight"):
        make_task(path)


def test_a_longer_table_than_the_token_list_is_an_error(sanm, make_task, tmp_path):
    path = copied(sanm, tmp_path)
    tokens = json.loads((path / "tokens.json").read_text())
    (path / "tokens.json").write_text(json.dumps([*tokens[:-2], tokens[-1]]))
    with pytest.raises(ModelError, match="another shape"):
        make_task(str(path))


def test_unused_weights_are_told(sanm, make_task, tmp_path, caplog):
    make_task(changed(sanm, tmp_path, timestamp__weight=torch.ones(3)))
    assert "1 weights are not part of the model: timestamp.weight" in caplog.text


def test_pickled_code_is_not_run(sanm, make_task, tmp_path):
    class Harmful:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "touched",))

    path = copied(sanm, tmp_path)
    torch.save({"state_dict": Harmful()}, path / "model.pt")
    with pytest.raises(ModelError, match="the weights can't be read"):
        make_task(str(path))
    assert not (tmp_path / "touched").exists()


def test_a_directory_without_weights_starts_from_random_ones(directory_of, make_task, caplog):
    path = directory_of("sanm", weights=False)
    with caplog.at_level(logging.WARNING):
        states = []
        for seed in (0, 0, 1):
            torch.manual_seed(seed)
            states.append(make_task(path).paraformer.state_dict()["encoder.encoders0.0.feed_forward.w_1.weight"])
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])
    assert "starts from random weights" in caplog.text


# ---------------------------------------------------------------------------------------------- new tokens


@pytest.mark.parametrize("kind", ["sanm", "conformer"])
def test_fault_15_old_rows_are_kept_when_the_token_list_grows(request, kind, make_task, rows_of):
    path = request.getfixturevalue(kind)
    sections = {"data": {"train": rows_of("ab你好")}, "model": {"path": path, "new_tokens": "train"}}
    old, new = make_task(path).paraformer.state_dict(), make_task(path, **sections).paraformer.state_dict()
    grown = {name for name in old if old[name].shape != new[name].shape}
    heads = {"decoder.embed.0.weight", "decoder.output_layer.weight", "decoder.output_layer.bias"}
    assert grown == heads | ({"ctc.ctc_lo.weight", "ctc.ctc_lo.bias"} if kind == "conformer" else set())
    for name, value in old.items():
        assert torch.equal(new[name][: len(value)] if name in grown else new[name], value), name
        if name in grown:
            assert len(new[name]) == len(value) + 2
            torch.testing.assert_close(new[name][-1], value.mean(0))


def test_an_adapter_trains_the_rows_of_new_tokens(sanm, make_task, rows_of):
    model = {"path": sanm, "lora": {"rank": 2}, "new_tokens": "train"}
    task = make_task(sanm, data={"train": rows_of("ab你好")}, model=model)
    trained = [name for name, parameter in task.model.named_parameters() if parameter.requires_grad]
    assert any("decoder.embed" in name for name in trained)
    assert any("decoder.output_layer" in name for name in trained)
    plain = make_task(sanm, model={"path": sanm, "lora": {"rank": 2}})
    assert all("lora_" in name for name, parameter in plain.model.named_parameters() if parameter.requires_grad)


# ---------------------------------------------------------------------------------------------- parts


@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_frozen_parts_do_not_train_and_stay_in_eval_mode(conformer, make_task, lora):
    """The encoder's batch norms would drift otherwise (fault 19)."""
    task = make_task(conformer, model={"path": conformer, "freeze": ["encoder", "ctc"], "lora": lora})
    task.train_mode()
    trained = {name for name, parameter in task.paraformer.named_parameters() if parameter.requires_grad}
    assert trained
    assert not [name for name in trained if name.startswith(("encoder.", "ctc."))]
    assert not any(module.training for module in task.paraformer.encoder.modules())
    assert task.paraformer.training
    assert task.paraformer.decoder.training


def test_an_adapter_is_on_all_of_attention_by_default(sanm, make_task):
    task = make_task(sanm, model={"path": sanm, "lora": {"rank": 2}})
    adapted = {name.split(".lora_")[0] for name, _ in task.model.named_parameters() if ".lora_" in name}
    ends = {name.rpartition(".")[2] for name in adapted}
    assert ends == {"linear_q_k_v", "linear_out", "linear_q", "linear_k_v"}


def test_an_unknown_part_names_the_known(sanm, make_task):
    with pytest.raises(ModelError, match=r"model\.freeze(.|\n)*encoder, decoder, predictor"):
        make_task(sanm, model={"path": sanm, "freeze": ["enc"]})


def test_the_predictor_s_weight_of_0_is_refused_unless_given(directory_of, make_task):
    """FunASR's default: the number of tokens is never learned, and transcripts repeat characters."""
    path = directory_of("sanm", model_conf={"predictor_weight": None})
    with pytest.raises(RecipeError, match=r"task\.predictor_weight"):
        make_task(path)
    for given in (0.0, 1.0):
        task = make_task(path, task={"kind": "asr.paraformer", "predictor_weight": given})
        assert task.paraformer.predictor_weight == given
    make_task(path, model={"path": path, "freeze": ["predictor"]})


def test_activation_checkpoints_give_the_same_gradients(conformer, make_task, collated):
    found = []
    for checkpointed in (False, True):
        task = make_task(conformer, train={"steps": 1, "gradient_checkpointing": checkpointed, "accelerator": "cpu"})
        task.train_mode()
        torch.manual_seed(1)
        loss = task.loss(collated(task.processing))
        loss.sum.backward()
        found.append([loss.sum.detach(), *(p.grad for p in task.paraformer.parameters() if p.grad is not None)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_bfloat16_throughout_is_refused(sanm, make_recipe):
    with pytest.raises(RecipeError, match="bf16-mixed"):
        make_recipe(sanm, train={"steps": 1, "precision": "bf16-true"})


# ---------------------------------------------------------------------------------------------- on the side


def test_nothing_but_the_model_is_changed(sanm, make_task, monkeypatch):
    """FunASR's AutoModel asks a hub, seeds all random generators and sets the number of threads."""
    make_task(sanm)  # imports

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(torch, "set_num_threads", refuse)
    monkeypatch.setattr(torch.random, "manual_seed", refuse)
    before = random.getstate(), str(np.random.get_state()), logging.getLogger().level
    make_task(sanm)
    assert (random.getstate(), str(np.random.get_state()), logging.getLogger().level) == before


IMPORTED = """
import logging, random, sys
import numpy, torch
sys.path.insert(0, sys.argv[1])
torch.set_num_threads(3)
def state():
    return (random.getstate(), str(numpy.random.get_state()), torch.get_rng_state().tolist(), torch.get_num_threads(),
            torch.is_grad_enabled(), torch.get_default_dtype(), logging.getLogger().level, logging.getLogger().handlers)
before = state()
from luthier.modalities.asr.paraformer.directory import funasr
funasr()
after = state()
assert before == after, [(n, str(a)[:80], str(b)[:80]) for n, (a, b) in enumerate(zip(before, after)) if a != b]
"""


def test_importing_funasr_changes_and_prints_nothing():
    source = Path(__file__).parents[4] / "src"
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, str(source)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == ""


@pytest.mark.parametrize("name", ["paraformer-zh", "iic/speech_paraformer-large", "nowhere"])
def test_a_name_of_a_hub_is_refused(make_task, name):
    with pytest.raises(ModelError, match="no FunASR model here"):
        make_task(name)


def test_missing_funasr_names_its_extra(sanm, monkeypatch):
    monkeypatch.setitem(sys.modules, "funasr", None)
    monkeypatch.setitem(sys.modules, "funasr.register", None)
    with pytest.raises(LuthierError, match=r"luthier\[funasr\]"):
        read(sanm)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder": "SANEncoder"}, "FunASR has no encoder of this name"),
        ({"frontend": "S3prlFrontend"}, "features of this kind"),
        ({"model": "Parafomer"}, "FunASR has no model of this name"),
        ({"model": "ParaformerStreaming"}, "not trained here: its inference takes audio in pieces"),
    ],
)
def test_what_funasr_does_not_have_is_named(directory_of, make_task, changes, message):
    with pytest.raises(ModelError, match=message):
        make_task(directory_of("sanm", weights=False, **changes))


# ---------------------------------------------------------------------------------------------- directories


def test_files_named_by_a_configuration_are_found(sanm, tmp_path):
    """As ModelScope has it."""
    path = copied(sanm, tmp_path)
    names = {"config": "config.yaml", "init_param": "pytorch.pt", "tokenizer_conf": {"token_list": "vocabulary.json"},
             "frontend_conf": {"cmvn_file": "mean.mvn"}}  # fmt: skip
    for old, new in (("model.pt", "pytorch.pt"), ("tokens.json", "vocabulary.json"), ("am.mvn", "mean.mvn")):
        (path / old).rename(path / new)
    (path / "configuration.json").write_text(json.dumps({"file_path_metas": names}))
    found, expected = read(str(path)), read(sanm)
    assert (found.weights, found.cmvn) == (path / "pytorch.pt", path / "mean.mvn")
    assert found.tokens == expected.tokens
    assert found.config == expected.config


def test_a_token_list_may_be_lines_or_stand_in_the_configuration(sanm, directory_of, tmp_path):
    path = copied(sanm, tmp_path)
    expected = read(sanm).tokens
    (path / "tokens.json").unlink()
    (path / "tokens.txt").write_text("\n".join(expected) + "\n", encoding="utf-8")
    assert read(str(path)).tokens == expected
    listed = directory_of("sanm", weights=False, tokenizer_conf={"token_list": expected})
    (Path(listed) / "tokens.json").unlink()
    assert read(listed).tokens == expected
    assert "token_list" not in read(listed).tokenizer


def test_a_token_that_stands_twice_is_refused(directory_of):
    with pytest.raises(ModelError, match="twice"):
        read(directory_of("sanm", weights=False, tokens=["<blank>", "a", "a", "<unk>"]))


def test_mean_and_variance_that_do_not_fit_are_refused(sanm, make_processing, tmp_path):
    path = copied(sanm, tmp_path)
    config = (path / "config.yaml").read_text().replace("lfr_m: 7", "lfr_m: 5")
    (path / "config.yaml").write_text(config)
    with pytest.raises(ModelError, match="do not fit"):
        make_processing(str(path))
