"""Language models for export: logits of documents, answers to prompts, and the metrics that follow from either."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch

from ...common.data.processing import Batch
from ...common.exportable import Exportable, Output
from ...common.merging import merged
from ...common.task import LossSum, Predicted
from .causal import Told
from .config import GenerateSection
from .generate import Generated, generate
from .tokens import IGNORED

ANSWER = 24
"""Most tokens of an answer that is compared."""


@dataclass(frozen=True)
class Document:
    """One document of a batch.

    Args:
        ids: all of its tokens.
        targets: [T] the token that follows at each place if it carries loss, else -100.
    """

    ids: list[int]
    targets: np.ndarray

    @property
    def prompt(self) -> list[int]:
        """What comes before the first token that carries loss; of a text that carries it throughout, the first half."""
        asked = np.flatnonzero(self.targets != IGNORED)
        first = int(asked[0]) if len(asked) else len(self.ids) - 1
        return self.ids[: (first + 1) if first else max(1, len(self.ids) // 2)]


def documents(data: dict[str, Any]) -> list[Document]:
    """The documents of a batch of `batch.join`."""
    ids, targets = data["input_ids"].cpu(), data["targets"].cpu().numpy()
    bounds = data["bounds"].tolist()
    spans = list(itertools.pairwise(bounds))
    return [Document(ids[begin:end].tolist(), targets[begin:end]) for begin, end in spans]


class TorchCausal:
    """A causal language model of transformers as a runner."""

    def __init__(self, model: Any):
        self.model = model.eval()

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """[T, V] float32."""
        given = torch.tensor([list(ids)], device=self.model.device)
        found: np.ndarray = self.model(input_ids=given, use_cache=False).logits[0].float().cpu().numpy()
        return found

    @torch.no_grad()
    def generate(self, ids: Sequence[int], most: int, ends: Collection[int]) -> list[int]:
        """The most probable tokens after a prompt, up to the first that ends the answer."""
        return generate(self.model, [np.array(ids)], GenerateSection(max_new_tokens=most), ends)[0].ids


class CausalExport(Exportable):
    """A causal language model, trained on texts or conversations."""

    form: ClassVar[str] = "causal_lm"

    @property
    def adapts(self) -> bool:
        return bool(self.task.recipe.model.adapts)

    @property
    def tokenizer(self) -> Any:
        return self.task.processing.tokenizer

    def trained(self) -> TorchCausal:
        return TorchCausal(self.task.causal)

    def save(self, directory: Path) -> None:
        settings = self.task.generation_config()
        model = merged(self.task.model)
        model.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)
        settings.save_pretrained(directory)

    def load(self, directory: Path) -> TorchCausal:
        from transformers import AutoModelForCausalLM

        return TorchCausal(AutoModelForCausalLM.from_pretrained(directory, **self._options()))

    def runner_of(self, model: Any) -> TorchCausal:
        return TorchCausal(model)

    def load_adapter(self, directory: Path) -> TorchCausal:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM, AutoTokenizer

        base: Any = AutoModelForCausalLM.from_pretrained(self.task.recipe.model.path, **self._options())
        tokens = len(AutoTokenizer.from_pretrained(directory))
        if tokens > base.get_input_embeddings().weight.shape[0]:
            base.resize_token_embeddings(tokens, mean_resizing=False)
        return TorchCausal(PeftModel.from_pretrained(base, str(directory)))

    def _options(self) -> dict[str, Any]:
        return {"dtype": "auto", "trust_remote_code": self.task.recipe.model.trust_remote_code}

    def documents(self, data: dict[str, Any]) -> list[Document]:
        """The documents of a batch."""
        return documents(data)

    def outputs(self, runner: Any, data: dict[str, Any]) -> list[Output]:
        """Logits of each document, and the most probable answer to its prompt."""
        ends = self.task.generation_config().eos_token_id or []
        found = []
        for one in self.documents(data):
            said = runner.generate(one.prompt, ANSWER, ends)
            found.append(Output(runner.logits(one.ids), str(self.tokenizer.decode(said))))
        return found

    def predict(self, runner: Any, batch: Batch) -> Predicted:
        """Loss and accuracy of each example, and the scores of answers that the recipe asks for."""
        data = batch.data
        parts = iter(self.documents(data))
        told, done = [], 0
        for end, fields, where in zip(data["ends"], data["fields"], data["where"], strict=True):
            loss, right, count = 0.0, 0, 0
            while done < end:  # an example may have several documents
                part = next(parts)
                done += len(part.ids)
                losses, hits = judged(runner, part)
                loss, right, count = loss + float(losses.sum()), right + int(hits.sum()), count + len(losses)
            told.append(Told(loss, right, count, fields, where))
        answers = {}
        if hasattr(self.task, "answered"):
            with answering(self.task, runner):
                answers = self.task.answered(batch, told)
        summed = LossSum(torch.tensor(sum(one.loss for one in told)), sum(one.count for one in told))
        return Predicted([answers.get(row, one) for row, one in enumerate(told)], summed)


class PolicyExport(CausalExport):
    """A language model trained on preferences. Its metrics compare it with the reference, whose log-probabilities are
    kept from the first evaluation, as an export takes the model that gives them apart."""

    def __init__(self, task: Any):
        super().__init__(task)
        self._reference: dict[int, torch.Tensor] = {}

    def documents(self, data: dict[str, Any]) -> list[Document]:
        found = []
        for group in data["groups"]:
            for number in range(len(group.rests)):
                whole = group.document(number)
                targets = np.full(len(whole), IGNORED, dtype=np.int64)
                targets[:-1] = np.where(whole.trained[1:], whole.ids[1:], IGNORED)
                found.append(Document(whole.ids.tolist(), targets))
        return found

    def predict(self, runner: Any, batch: Batch) -> Predicted:
        """What the task makes of the runner's log-probabilities."""
        task, number = self.task, batch.number
        if number not in self._reference and getattr(task, "needs_reference", True):
            self._reference[number] = task.reference_log_probs(batch.data)
        own = [-float(judged(runner, part)[0].sum()) for part in self.documents(batch.data)]
        given = {
            "_run": lambda data: SimpleNamespace(last_hidden_state=[None]),
            "answer_log_probs": lambda hidden, data: torch.tensor(own),
            "reference_log_probs": lambda data: self._reference[number],
        }
        with answering(task, runner), instead(task, **given):
            return self.own_predict(batch)


def judged(runner: Any, part: Document) -> tuple[np.ndarray, np.ndarray]:
    """([R] cross-entropy of the tokens that carry loss, in nats, [R] whether each was the most probable)."""
    asked = np.flatnonzero(part.targets != IGNORED)
    logits, wanted = runner.logits(part.ids)[asked].astype(np.float64), part.targets[asked]
    top = logits.max(axis=1, keepdims=True)
    spread = top[:, 0] + np.log(np.exp(logits - top).sum(axis=1))
    return spread - logits[np.arange(len(asked)), wanted], logits.argmax(axis=1) == wanted


@contextmanager
def answering(task: Any, runner: Any) -> Iterator[None]:
    """A context in which a task's answers are those of a runner, the most probable token each time."""

    def answers(prompts: Sequence[np.ndarray], most: int, ends: Collection[int]) -> list[Generated]:
        said = [runner.generate(prompt.tolist(), most, ends) for prompt in prompts]
        return [Generated(ids, len(ids) < most) for ids in said]

    with instead(task, answers_of=answers):
        yield


@contextmanager
def instead(task: Any, **given: Any) -> Iterator[None]:
    """A context in which a task has other methods."""
    vars(task).update(given)
    try:
        yield
    finally:
        for name in given:
            del vars(task)[name]
