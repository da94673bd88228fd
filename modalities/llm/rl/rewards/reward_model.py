"""The reward of a trained reward model, computed in this process."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .....common.checkpoint import directory
from .....common.data.rows import Row
from .....common.errors import BadExample, ModelError
from .....common.reading import build, load
from ... import shapes
from ...batch import Group, join_groups
from ...pairing import fit_together
from ...preferences import Preference
from ...reward.model import scores
from ...reward.task import Task
from ...tokens import Document
from .answer import Answer, Scorer, Unscored, failed
from .config import Model

_PLACE = "rewards.model.path"


def model(section: Model) -> Scorer:
    """See `config.Model`. Answers to the same prompt share it, as in the model's own training, and are cut as there.

    Raises:
        LuthierError: no reward model can be loaded from there.
    """
    task = _task(section.path)
    column = _column(task, section.class_name)
    task.to(torch.device("cuda" if torch.cuda.is_available() else "cpu")).eval()

    def scorer(answers: Sequence[Answer]) -> list[float | Unscored | None]:
        found: list[float | Unscored | None] = [None] * len(answers)
        groups: dict[str, list[tuple[int, Document]]] = defaultdict(list)
        for number, answer in enumerate(answers):
            try:
                document = _document(task, answer)
            except BadExample as error:
                found[number] = failed(error)
                continue
            groups[repr(answer.prompt)].append((number, document))
        for batch in _batches(list(groups.values()), section.tokens):
            values = _scored(task, [Group.of([one for _, one in part]) for part in batch], column)
            for (number, _), value in zip([one for part in batch for one in part], values, strict=True):
                found[number] = value
        return found

    return scorer


def _task(path: str) -> Task:
    """The task of a checkpoint, or of a folder of a model."""
    folder = Path(path).resolve()
    if (folder / "recipe.yaml").is_file():
        directory.verify(folder)
        recipe = load(folder / "recipe.yaml")
        if recipe.task.kind != "llm.reward":
            raise ModelError("not a reward model", where=_PLACE, given=recipe.task.kind, expected="llm.reward")
        return Task(recipe, folder / "model")
    tree: dict[str, Any] = {
        "task": {"kind": "llm.reward"},
        "model": {"path": path},
        "data": {"train": "none", "max_length": 1_000_000},
        "output": "none",
    }
    config = folder / "config.json"
    if config.is_file():
        known = json.loads(config.read_text(encoding="utf-8"))
        names = list((known.get("id2label") or {}).values())
        if len(names) > 1:
            tree["task"] |= {"loss": "classification", "labels": names}
        tree["data"]["max_length"] = known.get("max_position_embeddings") or 1_000_000
    return Task(build(tree, _PLACE))


def _column(task: Task, name: str | None) -> int | None:
    """The class whose log-probability is the score; None: the model gives one score."""
    labels = task.recipe.task.labels
    if labels is None and name is None:
        return None
    if labels is None or name not in labels:
        expected = "none: the model gives one score" if labels is None else f"one of {', '.join(labels)}"
        raise ModelError("no such class", where="rewards.model.class_name", given=name, expected=expected)
    return labels.index(name)


def _document(task: Task, answer: Answer) -> Document:
    """An answer with its prompt, as the model was trained on them."""
    kept = {key: answer.row.get(key) for key in ("tools", "chat_template_kwargs")}
    prompt = answer.prompt if isinstance(answer.prompt, str) else list(answer.prompt)
    row = Row({**kept, "prompt": prompt, "completion": answer.completion}, "answer", Path(), "rewards")
    item = shapes.item(row, "prompt_completion")
    whole = Preference((item,), 1 if isinstance(prompt, str) else len(prompt), "answer")
    tokens, _ = fit_together(whole, task.processing.encoded, task.processing.limit)
    return Document.of(tokens[0])


def _batches(groups: Sequence[list[tuple[int, Document]]], most: int) -> Iterator[list[list[tuple[int, Document]]]]:
    """Groups of answers to one prompt, as many as have `most` tokens; a larger group is cut, a document never."""
    batch: list[list[tuple[int, Document]]] = []
    tokens = 0
    for group in groups:
        part: list[tuple[int, Document]] = []
        for number, document in group:
            if tokens + len(document) > most and (batch or part):
                yield [*batch, part] if part else batch
                batch, part, tokens = [], [], 0
            part.append((number, document))
            tokens += len(document)
        batch.append(part)
    if batch:
        yield batch


@torch.inference_mode()
def _scored(task: Task, groups: Sequence[Group], column: int | None) -> list[float]:
    data = join_groups(groups)
    device = task.scorer.device
    found = scores(task.scorer, {key: one.to(device) if isinstance(one, Tensor) else one for key, one in data.items()})
    values = found[:, 0] if column is None else found.log_softmax(dim=1)[:, column]
    return [float(one) for one in values.cpu()]
