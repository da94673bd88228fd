"""`.nemo` files: what is read of them, and that nothing in them is run."""

from __future__ import annotations

import io
import pickle
import subprocess
import sys
import tarfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import yaml

from luthier.common.errors import LuthierError, ModelError
from luthier.modalities.asr.nemo import files

pytest.importorskip("nemo")


class Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def packed(file: Path, contents: dict[str, bytes]) -> str:
    with tarfile.open(file, "w:") as tar:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return str(file)


def config_in(nemo: str) -> dict:
    with tarfile.open(nemo) as tar:
        return yaml.safe_load(tar.extractfile("./model_config.yaml").read())


@pytest.mark.parametrize("forced", [False, True])
def test_weights_that_would_run_code_are_refused(make_task, saved_of, tmp_path, monkeypatch, forced):
    """Even where an environment variable asks torch to unpickle anything, which NeMo heeds."""
    if forced:
        monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    mark, weights = tmp_path / "was_run", io.BytesIO()
    torch.save({"encoder": Trap(mark)}, weights)
    config = yaml.safe_dump(config_in(saved_of("ctc"))).encode()
    path = packed(tmp_path / "trap.nemo", {files.CONFIG: config, files.WEIGHTS: weights.getvalue()})
    with pytest.raises(ModelError, match=r"model\.path"):
        make_task(path)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Trap(mark)))
    assert mark.exists(), "the trap works"


@pytest.mark.parametrize("target", ["os.system", "builtins.eval", "somewhere.Encoder", "torch.hub.load"])
def test_a_configuration_that_names_foreign_classes_is_refused(make_recipe, saved_of, tmp_path, target):
    tree = config_in(saved_of("ctc"))
    tree["encoder"]["pieces"] = [{"_target_": target, "command": "true"}]
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(tree))
    with pytest.raises(ModelError, match=rf"encoder\.pieces\[0\]\._target_[\s\S]*{target}"):
        files.read(str(file), {})


def test_models_of_other_kinds_are_named(tmp_path):
    file = tmp_path / "speaker.yaml"
    file.write_text(yaml.safe_dump({"target": "nemo.collections.asr.models.EncDecSpeakerLabelModel"}))
    with pytest.raises(ModelError, match=r"EncDecSpeakerLabelModel[\s\S]*EncDecCTCModel, "):
        files.read(str(file), {})


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.nemo", b"this is no archive"), ("a.yaml", b"{"), ("a.txt", b"x"), ("none.nemo", None), ("empty", None)],
)
def test_what_is_no_model_is_an_error_that_says_what_one_is(tmp_path, name, content):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"model\.path[\s\S]*a \.nemo file"):
        files.read(str(tmp_path / name), {})


def test_members_outside_of_the_archive_stay_outside(tmp_path):
    path = packed(tmp_path / "a.nemo", {"../outside.txt": b"x", "tokenizer.model": b"y"})
    with suppress(ValueError):
        files.unpack(Path(path), str(tmp_path / "into"))
    assert not (tmp_path / "outside.txt").exists()
    assert {file.name for file in tmp_path.iterdir()} <= {"a.nemo", "into"}


def test_the_class_of_an_example_configuration_is_inferred(tmp_path):
    """NeMo's example configurations have the model in a section, and name no class."""
    for keys, name in (
        ({"decoder": {}}, "EncDecCTCModel"),
        ({"decoder": {}, "tokenizer": {}}, "EncDecCTCModelBPE"),
        ({"joint": {}}, "EncDecRNNTModel"),
        ({"joint": {}, "aux_ctc": {}, "tokenizer": {}}, "EncDecHybridRNNTCTCBPEModel"),
    ):
        file = tmp_path / "config.yaml"
        file.write_text(yaml.safe_dump({"name": "x", "model": keys | {"train_ds": {"manifest_filepath": "???"}}}))
        origin = files.read(str(file), {"encoder.dropout": 0.2})
        assert origin.name == name
        assert origin.config.encoder.dropout == 0.2
        assert "train_ds" not in origin.config


@pytest.mark.parametrize("subwords", [False, True])
def test_the_same_model_is_saved_to_the_same_bytes_and_goes_on(make_task, saved_of, tmp_path, subwords):
    """NeMo's own have the time and random names in them."""
    task = make_task(saved_of("ctc", subwords))
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        task.save_pretrained(tmp_path / name)
    again = make_task(saved_of("ctc", subwords), weights=tmp_path / "one")
    (tmp_path / "three").mkdir()
    again.save_pretrained(tmp_path / "three")
    one, two, three = ((tmp_path / name / "model.nemo").read_bytes() for name in ("one", "two", "three"))
    assert one == two == three
    expected = task.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in again.state_dict().items())


def test_a_missing_nemo_names_its_extra(make_recipe, config_of, monkeypatch):
    from luthier.modalities.asr.nemo.task import Task

    recipe = make_recipe(config_of("ctc"))
    monkeypatch.setitem(sys.modules, "nemo.collections.asr", None)
    with pytest.raises(LuthierError, match=r"luthier\[nemo\]"):
        Task.make_processing(recipe)


def test_nemo_is_theirs_and_quiet(config_of):
    """Our package of the same name does not stand before it, and its import says nothing."""
    code = (
        "from luthier.modalities.asr.nemo import config, files, processing, task;"
        f"origin = files.read({config_of('ctc')!r}, {{}});"
        "import nemo, warnings; assert 'luthier' not in nemo.__file__, nemo.__file__;"
        "assert 'nemo' not in warnings.showwarning.__module__"
    )
    root = Path(files.__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (done.stdout + done.stderr).strip() == ""
