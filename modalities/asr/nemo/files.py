"""NeMo's model files. A `.nemo` is a tar of a YAML configuration, weights and tokenizer files.

Nothing in it is run: weights are read as tensors only (`weights_only`), the tar is unpacked by NeMo's own safe
extraction, the model's class is one of a known list, and a part's class must be NeMo's or torch's (NeMo itself checks
that too, from 3.0 on).
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import tarfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import Any

from ....common.errors import ModelError, missing_extra

CLASSES = (
    "EncDecCTCModel", "EncDecCTCModelBPE", "EncDecRNNTModel", "EncDecRNNTBPEModel", "EncDecHybridRNNTCTCModel",
    "EncDecHybridRNNTCTCBPEModel", "EncDecMultiTaskModel",
)  # fmt: skip
"""NeMo's classes that can be trained here."""
AED = "EncDecMultiTaskModel"
"""NeMo's class of encoder-decoder models with a prompt, such as Canary."""
CONFIG, WEIGHTS, SAVED = "model_config.yaml", "model_weights.ckpt", "model.nemo"
_PARTS = ("nemo.collections.", "nemo.core.", "torch.nn.")
_UNUSED = ("train_ds", "validation_ds", "test_ds", "optim")
_UNIQUE = re.compile(r"^[0-9a-f]{32}_")


def nemo_asr() -> ModuleType:
    """NeMo's collection of recognisers, with its log kept to errors."""
    logging.getLogger("nv_one_logger").setLevel(logging.ERROR)  # says that it sends nothing anywhere
    logging.getLogger("hydra.utils").setLevel(logging.CRITICAL)  # calls a function that makes a decoder an error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import nemo.collections.asr as found
            from nemo.utils import logging as nemo_logging
    except ModuleNotFoundError as error:
        raise missing_extra(error.name or "nemo", "nemo") from error
    nemo_logging.setLevel(nemo_logging.ERROR)
    nemo_logging.captureWarnings(False)  # NeMo takes over Python's warnings when it is imported
    theirs: ModuleType = found
    return theirs


@dataclass(frozen=True)
class Origin:
    """What a model is made from.

    Args:
        file: the `.nemo` file, or the YAML file.
        config: NeMo's configuration of the model.
        name: NeMo's class.
    """

    file: Path
    config: Any
    name: str

    @property
    def has_weights(self) -> bool:
        return self.file.suffix == ".nemo"

    @property
    def is_aed(self) -> bool:
        """Whether an attention decoder writes, told by a prompt what to."""
        return self.name == AED

    @property
    def has_pieces(self) -> bool:
        """Whether it writes in subwords; else in characters."""
        return self.config.get("tokenizer") is not None


def read(path: str, changes: dict[str, Any]) -> Origin:
    """The configuration of a model, without its weights.

    Args:
        path: a `.nemo` file, a folder with one, a hub name, or a YAML file.
        changes: values by dotted key.

    Raises:
        ModelError: there is no such model, or it is of another kind.
    """
    nemo_asr()
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    file = _find(path)
    try:
        tree: Any = OmegaConf.create(
            _packed(file, CONFIG).decode() if file.suffix == ".nemo" else file.read_text("utf-8")
        )
        config = tree.model if "model" in tree else tree
        if file.suffix != ".nemo":
            for key in _UNUSED:
                config.pop(key, None)
        for key, value in changes.items():
            OmegaConf.update(config, key, value, force_add=True)
    except (OmegaConfBaseException, yaml.YAMLError, OSError, ValueError, tarfile.TarError) as error:
        raise unreadable(path, error) from error
    _refuse_foreign(OmegaConf.to_container(config), "")
    name = _class_name(config)
    if name == AED:  # a second model in the file, for times; NeMo reads it by itself and doesn't save it
        config.restore_timestamps_model = False
    return Origin(file, config, name)


def resolved(config: Any) -> Any:
    """The configuration with its references to other keys filled in, and standing on its own."""
    from omegaconf import OmegaConf

    return OmegaConf.create(OmegaConf.to_container(config, resolve=True))


def unpack(file: Path, folder: str) -> None:
    """Put the tokenizer files of a `.nemo` into a folder."""
    from nemo.utils.tar_utils import safe_extract

    with tarfile.open(file, "r:*") as tar:
        members = [member for member in tar if PurePosixPath(member.name).name not in (CONFIG, WEIGHTS)]
        safe_extract(tar, folder, [member for member in members if member.isfile()])


def connector() -> Any:
    """NeMo's reader and writer of `.nemo` files; it reads tensors only, and the same model gives the same bytes."""
    import torch
    from nemo.core.connectors.save_restore_connector import SaveRestoreConnector

    class Connector(SaveRestoreConnector):  # type: ignore[misc]
        @staticmethod
        def _load_state_dict_from_disk(model_weights: str, map_location: Any = "cpu") -> Any:
            # NeMo leaves the choice to an environment variable.
            return torch.load(model_weights, map_location=map_location, weights_only=True)

        @staticmethod
        def _make_nemo_file_from_folder(filename: str, source_dir: str) -> None:
            _name_by_content(Path(source_dir))
            os.makedirs(os.path.dirname(filename), exist_ok=True)
            with tarfile.open(filename, "w:") as tar:
                for file in sorted(Path(source_dir).iterdir()):
                    tar.add(file, arcname=f"./{file.name}", filter=_timeless)

    return Connector()


def unreadable(path: str, error: Exception) -> ModelError:
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ModelError(
        f"the model can't be loaded: {first}",
        where="model.path",
        given=path,
        expected="a .nemo file, a folder that holds one, a hub name, or a YAML configuration",
    )


def _find(path: str) -> Path:
    place = Path(path)
    if place.is_dir():
        found = sorted(place.glob("*.nemo"))
        if len(found) != 1:
            raise unreadable(path, FileNotFoundError(f"the folder holds {len(found)} .nemo files"))
        return found[0]
    if place.is_file():
        if place.suffix not in (".nemo", ".yaml", ".yml"):
            raise unreadable(path, ValueError("neither a .nemo nor a .yaml file"))
        return place
    if place.is_absolute() or len(place.parts) != 2 or place.suffix in (".nemo", ".yaml", ".yml"):
        raise unreadable(path, FileNotFoundError("no such file"))
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(path, f"{place.name}.nemo"))
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


def _packed(file: Path, name: str) -> bytes:
    """A file out of a `.nemo`."""
    with tarfile.open(file, "r:*") as tar:
        for member in tar:
            if PurePosixPath(member.name).name == name:
                content = tar.extractfile(member)
                return content.read() if content is not None else b""
    raise ValueError(f"the archive holds no {name}")


def _refuse_foreign(node: Any, place: str) -> None:
    """Refuse classes that are neither NeMo's nor torch's, as making an object of a class runs its code."""
    if isinstance(node, list):
        for number, item in enumerate(node):
            _refuse_foreign(item, f"{place}[{number}]")
    if not isinstance(node, dict):
        return
    for key, value in node.items():
        where = f"{place}.{key}" if place else str(key)
        if key == "_target_" and not str(value).startswith(_PARTS):
            problem, expected = "the model's configuration names a class of elsewhere", "classes of NeMo or torch.nn"
            raise ModelError(problem, where=where, given=value, expected=expected)
        _refuse_foreign(value, where)


def _class_name(config: Any) -> str:
    name = str(config.get("target") or "").rpartition(".")[2]
    if not name:  # NeMo's example configurations leave it to the script
        subword = config.get("tokenizer") is not None
        if "prompt_format" in config:
            name = AED
        elif "aux_ctc" in config:
            name = "EncDecHybridRNNTCTCBPEModel" if subword else "EncDecHybridRNNTCTCModel"
        elif "joint" in config:
            name = "EncDecRNNTBPEModel" if subword else "EncDecRNNTModel"
        else:
            name = "EncDecCTCModelBPE" if subword else "EncDecCTCModel"
    if name not in CLASSES:
        raise ModelError(
            "a model of this class can't be trained here", where="target", given=name, expected=", ".join(CLASSES)
        )
    return name


def _name_by_content(folder: Path) -> None:
    """NeMo puts a random name before that of a tokenizer file; a hash of its content does as well."""
    config = folder / CONFIG
    text = config.read_text("utf-8")
    for file in _unique(folder):
        name = hashlib.sha256(file.read_bytes()).hexdigest()[:32] + file.name[32:]
        text = text.replace(file.name, name)
        file.rename(folder / name)
    config.write_text(text, "utf-8")


def _unique(folder: Path) -> Iterator[Path]:
    yield from [file for file in sorted(folder.iterdir()) if _UNIQUE.match(file.name)]


def _timeless(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.mtime, member.uid, member.gid, member.uname, member.gname = 0, 0, 0, "", ""
    member.mode = 0o644
    return member
