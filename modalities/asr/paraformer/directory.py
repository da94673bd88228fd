"""FunASR's model directories: `config.yaml` beside `model.pt`, `am.mvn`, `tokens.json`, `seg_dict` or `bpe.model`."""

from __future__ import annotations

import json
import logging
import random
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from copy import deepcopy
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from ....common.errors import ModelError, missing_extra

WEIGHTS, CMVN, TOKENS, SEG_DICT, PIECES = "model.pt", "am.mvn", "tokens.json", "seg_dict", "bpe.model"


def funasr() -> ModuleType:
    """FunASR's `register` module, with the tables of its classes.

    Only classes are taken from there: FunASR's `AutoModel` asks a model hub, seeds every random generator and sets the
    number of threads.
    """
    drawn = random.getstate()  # some of its imports draw numbers
    with nullcontext() if "funasr.register" in sys.modules else quiet():
        try:
            import funasr.register as register  # type: ignore[import-untyped]
        except ImportError as error:
            raise missing_extra("funasr", "funasr") from error
    random.setstate(drawn)
    found: ModuleType = register
    return found


@contextmanager
def quiet() -> Iterator[None]:
    """Nothing that FunASR prints, or logs with the root logger, which it would configure."""
    root, nowhere = logging.getLogger(), logging.NullHandler()

    def ours(record: logging.LogRecord) -> bool:
        return "funasr" not in record.pathname

    root.addHandler(nowhere)
    root.addFilter(ours)
    try:
        with redirect_stdout(StringIO()):
            yield
    finally:
        root.removeFilter(ours)
        root.removeHandler(nowhere)


def registered(table: str, name: str) -> Any:
    """A class of FunASR by the name that a configuration gives.

    Args:
        table: `model`, `tokenizer`, `encoder`, ...
    """
    classes = getattr(funasr().tables, f"{table}_classes")
    if name not in classes:
        raise ModelError(
            f"FunASR has no {table} of this name", where="config.yaml", given=name, expected=", ".join(sorted(classes))
        )
    return classes[name]


@dataclass(frozen=True)
class Directory:
    """What a model directory holds.

    Args:
        path: the directory.
        config: `config.yaml`, without the names of the files below.
        tokens: the token list, None with sentence pieces.
        seg_dict: dictionary from words to their tokens.
        pieces: SentencePiece model.
        cmvn: mean and variance of the features.
        weights: the parameters, None where the model starts from random ones.
    """

    path: Path
    config: dict[str, Any]
    tokens: list[str] | None
    seg_dict: Path | None
    pieces: Path | None
    cmvn: Path | None
    weights: Path | None

    @property
    def tokenizer(self) -> dict[str, Any]:
        section: dict[str, Any] = self.config["tokenizer_conf"]
        return section

    @property
    def frontend(self) -> dict[str, Any]:
        section: dict[str, Any] = self.config["frontend_conf"]
        return section

    @property
    def model(self) -> dict[str, Any]:
        section: dict[str, Any] = self.config["model_conf"]
        return section

    def beside(self, base: Directory) -> Directory:
        """This one, with the weights of another."""
        return replace(self, weights=base.weights)


def read(path: str) -> Directory:
    """Read a directory, by `configuration.json` where it names the files (as ModelScope has it), else by their names.

    Raises:
        ModelError: it isn't there, or not complete. Nothing is ever fetched from a hub.
    """
    folder = Path(path)
    metas = _metas(folder)
    config_file = folder / metas.get("config", "config.yaml")
    if not config_file.is_file():
        raise ModelError(
            "no FunASR model here", where="model.path", given=path, expected="a directory that holds config.yaml",
            do="download the model first",
        )  # fmt: skip
    config = _config(config_file)
    inner = metas | metas.get("tokenizer_conf", {}) | metas.get("frontend_conf", {})

    def file(name: str, *given: Any) -> Path | None:
        candidates = [folder / name, *(folder / value for value in given if isinstance(value, str))]
        return next((candidate for candidate in candidates if candidate.is_file()), None)

    tokenizer, frontend = config["tokenizer_conf"], config["frontend_conf"]
    cmvn_given = frontend.pop("cmvn_file", None)
    cmvn = file(CMVN, inner.get("cmvn_file"), cmvn_given)
    if cmvn is None and cmvn_given is not None:
        raise ModelError("the file of the features' mean and variance is missing", where=config_file, given=cmvn_given)
    listed = tokenizer.pop("token_list", None)
    words = (tokenizer.pop(name, None) for name in ("seg_dict", "seg_dict_file"))
    pieces = file(PIECES, inner.get("bpemodel"), tokenizer.pop("bpemodel", None))
    return Directory(
        folder,
        config,
        None if pieces else _tokens(file(TOKENS, "tokens.txt", inner.get("token_list"), listed), listed, config_file),
        file(SEG_DICT, inner.get("seg_dict"), inner.get("seg_dict_file"), *words),
        pieces,
        cmvn,
        file(WEIGHTS, inner.get("init_param")),
    )


def write(directory: Directory, folder: Path, tokens: list[str] | None, seg_dict: dict[str, str] | None) -> None:
    """Write all but the weights, as `funasr.AutoModel` reads it.

    Args:
        directory: what the model started from, with the settings it was trained with.
        tokens: the token list.
        seg_dict: tokens of words, where the token list has such a dictionary.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = deepcopy(directory.config)
    config["frontend_conf"]["dither"] = 0.0  # on, it makes transcripts random
    with (folder / "config.yaml").open("w", encoding="utf-8") as file:
        yaml.safe_dump(config, file, sort_keys=False, allow_unicode=True)
    if tokens is not None:
        (folder / TOKENS).write_text(json.dumps(tokens, ensure_ascii=False, indent=0), encoding="utf-8")
    if seg_dict is not None:
        lines = "".join(f"{word} {pieces}\n" for word, pieces in seg_dict.items())
        (folder / SEG_DICT).write_text(lines, encoding="utf-8")
    for kept, name in ((directory.pieces, PIECES), (directory.cmvn, CMVN)):
        if kept is not None and kept != folder / name:
            shutil.copyfile(kept, folder / name)


def _metas(folder: Path) -> dict[str, Any]:
    file = folder / "configuration.json"
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8")).get("file_path_metas", {})
    except (ValueError, AttributeError) as error:
        raise ModelError("not a readable configuration", where=file, given=error) from error
    return found if isinstance(found, dict) else {}


def _config(file: Path) -> dict[str, Any]:
    """The configuration with its references (`${...}`) filled in, and with all sections."""
    funasr()  # it brings omegaconf
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        config: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    except (OmegaConfBaseException, yaml.YAMLError, OSError) as error:
        raise ModelError("the configuration can't be read", where=file, given=error) from error
    if not isinstance(config, dict) or not isinstance(config.get("model"), str):
        raise ModelError("the configuration names no model", where=file, expected="`model: Paraformer`")
    for name in ("tokenizer", "frontend"):
        if not isinstance(config.get(name), str):
            raise ModelError(f"the configuration names no {name}", where=file, given=config.get(name))
    for name in ("model_conf", "tokenizer_conf", "frontend_conf"):
        config[name] = config.get(name) or {}
    return config


def _tokens(file: Path | None, listed: Any, config: Path) -> list[str]:
    if file is not None:
        text = file.read_text(encoding="utf-8")
        listed = json.loads(text) if file.suffix == ".json" else [line.rstrip() for line in text.splitlines()]
    if not isinstance(listed, list):
        raise ModelError("the model has no token list", where=config.parent, expected=f"{TOKENS} (a JSON list)")
    if len(set(listed)) != len(listed):
        raise ModelError("a token stands twice in the token list", where=file or config)
    return [str(token) for token in listed]
