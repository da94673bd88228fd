"""What every training of a causal language model shares: loss over joined documents, token metrics, saving."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...common import task
from ...common.data.processing import Batch
from ...common.evaluation.each import Each, Part
from ...common.losses import TokenLoss
from ...common.task import LossSum, Predicted
from . import harness
from .model import ADAPTER, Head, decode, load_model
from .probe import probe
from .tokens import IGNORED


@dataclass(frozen=True)
class Told:
    """What the model makes of one example of an evaluation.

    Args:
        loss: summed cross-entropy of its tokens that carry loss, in nats.
        right: how many of them were the most probable.
        count: how many there are.
        fields: what it may be sliced by.
        where: place of the row.
    """

    loss: float
    right: int
    count: int
    fields: Mapping[str, Any] = field(default_factory=dict)
    where: str = ""


class CausalTask(task.Task):
    """Trains a causal language model, or an adapter of it. A subclass gives the data path."""

    metrics: ClassVar[dict[str, str]] = {"loss": "min", "accuracy": "max"}

    recipe: Any
    model: Any

    def __init__(self, recipe: Any, weights: Path | None = None):
        super().__init__(recipe, weights)
        self.processing = self.make_processing(recipe, weights)
        tokenizer = self.processing.tokenizer  # type: ignore[attr-defined]
        self._ends = self.processing.terminators()  # type: ignore[attr-defined]  # now: what it refuses, it refuses early
        self.model, causal = load_model(recipe, tokenizer, weights)
        self._causal = [causal]  # in a list, so that its parameters are not registered twice
        self._head = Head(causal, self.token_loss(recipe))
        probe(causal, self._head, recipe.data.max_length)
        self._balance = getattr(sys.modules[type(causal).__module__], "load_balancing_loss_func", None)
        weight = getattr(causal.config.get_text_config(), "router_aux_loss_coef", None)
        self._router_weight = float(weight or 0.0) if self._balance else 0.0
        if self._router_weight:
            self.log_names = ("router",)

    @classmethod
    def metrics_of(cls, recipe: Any) -> dict[str, str]:
        """Loss and accuracy, and what the benchmarks give."""
        return {**CausalTask.metrics, **harness.names(recipe.evaluate.harness)}

    @property
    def need_not_fall(self) -> str:
        """-p log p rises with the probability p of a token up to 1/e."""
        return "a token's own probability weighs it" if self.token_loss(self.recipe).dynamic else ""

    @staticmethod
    def token_loss(recipe: Any) -> TokenLoss:
        """The loss of a token."""
        section = recipe.task.loss
        return TokenLoss(section.label_smoothing, section.z_weight, section.dynamic)

    @property
    def causal(self) -> Any:
        """The transformers model inside."""
        return self._causal[0]

    def compile_parts(self) -> None:
        task.compile_layers(self.causal)

    # ------------------------------------------------------------------ loss

    def loss(self, data: dict[str, Any]) -> LossSum:
        """Cross-entropy of the tokens that carry loss; others are not projected onto the vocabulary."""
        out = self._run(data)
        asked = data["targets"] != IGNORED
        count = int(asked.sum())
        total = self._head.loss(out.last_hidden_state[0][asked], data["targets"][asked])
        if not self._router_weight:
            return LossSum(total, count)
        router = self._router_loss(out.router_logits) * count
        return LossSum(total + self._router_weight * router, count, {"router": float(router.detach())})

    def _run(self, data: dict[str, Any]) -> Any:
        """The decoder's output over a row of documents [N], with noise on the embeddings if the recipe asks for it."""
        embedded = None
        if self.training and self.recipe.task.neftune_alpha:
            embedded = self.causal.get_input_embeddings()(data["input_ids"][None])
            embedded = embedded + _noise(embedded, data["bounds"], self.recipe.task.neftune_alpha)
        return decode(self.causal, data, embedded, **({"output_router_logits": True} if self._router_weight else {}))

    def _router_loss(self, logits: Any) -> Tensor:
        """Load-balancing loss of the experts, by the model's own function (Fedus et al., arXiv:2101.03961)."""
        assert self._balance is not None
        config = self.causal.config.get_text_config()
        number = getattr(config, "num_experts", None) or config.num_local_experts
        found: Tensor = self._balance(logits, number, config.num_experts_per_tok, None)
        return found

    # ------------------------------------------------------------------ evaluation

    @torch.no_grad()
    def predict(self, batch: Batch) -> Predicted:
        """Loss and accuracy of each example; the loss is the plain one, whatever training adds to it."""
        return self.told(self._run(batch.data).last_hidden_state[0], batch.data)

    def told(self, hidden: Tensor, data: dict[str, Any]) -> Predicted:
        """Loss and accuracy of each example, from the last hidden states [N, D] of a batch."""
        asked = data["targets"] != IGNORED
        losses, right = self._head.statistics(hidden[asked], data["targets"][asked])
        ends = torch.tensor(data["ends"], device=losses.device)
        places = torch.bucketize(asked.nonzero()[:, 0], ends, right=True)
        zeros = torch.zeros(len(ends), dtype=torch.float64, device=losses.device)
        sums = zeros.index_add(0, places, losses.double()).tolist()
        rights = torch.bincount(places[right], minlength=len(ends)).tolist()
        counts = torch.bincount(places, minlength=len(ends)).tolist()
        columns = zip(sums, rights, counts, data["fields"], data["where"], strict=True)
        told = [Told(*values) for values in columns]
        return Predicted(told, LossSum(losses.double().sum(), len(losses)))

    def score(self, records: Sequence[Any]) -> dict[str, Any]:
        slices = {name: parts(records, name) for name in self.recipe.evaluate.slices}
        found = {
            name: {value: self.means(part) for value, part in groups.items()}
            for name, groups in slices.items()
            if len(groups) > 1
        }
        return {**self.means(records), "slices": found}

    def means(self, records: Sequence[Any]) -> dict[str, Any]:
        """The metrics of some examples together."""
        return _means(records)

    def parts(self, record: Any) -> dict[str, Part]:
        """What one example adds to those of `means` that are ratios of sums."""
        return {"loss": (record.loss, record.count), "accuracy": (record.right, record.count)}

    def each(self, records: Sequence[Any]) -> list[Each]:
        return [Each(one.where, self.parts(one), one.fields) for one in records]

    def measure(self) -> dict[str, float]:
        section, train = self.recipe.evaluate.harness, self.recipe.train
        if section is None:
            return {}
        tokenizer = self.processing.tokenizer  # type: ignore[attr-defined]
        return harness.measure(self.causal, tokenizer, section, self.recipe.evaluate.batch, train.precision, train.seed)

    # ------------------------------------------------------------------ saving

    def save_pretrained(self, directory: Path) -> None:
        options: dict[str, Any] = {}
        if self.recipe.model.adapts:
            # An adapter holds the rows of new tokens itself; PEFT would add both whole tables, and other adapters.
            options = {"save_embedding_layers": False, "selected_adapters": [ADAPTER]}
        self.model.save_pretrained(directory, **options)
        self.processing.tokenizer.save_pretrained(directory)  # type: ignore[attr-defined]
        self.generation_config().save_pretrained(directory)

    def exportable(self) -> Any:
        from .export import CausalExport

        return CausalExport(self)

    def generation_config(self) -> Any:
        """The generation config, with every token at which the trained turns end."""
        from copy import deepcopy

        config = deepcopy(self.causal.generation_config)
        config._from_model_config = False
        before = config.eos_token_id
        known = [] if before is None else [before] if isinstance(before, int) else list(before)
        config.eos_token_id = list(dict.fromkeys([*known, *self._ends])) or None
        config.pad_token_id = self.processing.tokenizer.pad_token_id  # type: ignore[attr-defined]
        return config


def _means(records: Sequence[Told]) -> dict[str, Any]:
    count = sum(record.count for record in records)
    if not count:
        return {"loss": float("nan"), "accuracy": float("nan"), "tokens": 0}
    return {
        "loss": sum(record.loss for record in records) / count,
        "accuracy": sum(record.right for record in records) / count,
        "tokens": count,
    }


def parts(records: Sequence[Any], name: str) -> dict[str, list[Any]]:
    """The examples for each value of a field."""
    found: dict[str, list[Any]] = defaultdict(list)
    for record in records:
        if record.fields.get(name) is not None:
            found[str(record.fields[name])].append(record)
    return dict(sorted(found.items()))


def _noise(embedded: Tensor, bounds: Tensor, alpha: float) -> Tensor:
    """[1, N, D] noise, uniform within alpha / sqrt(T D) for a document of T tokens (Jain et al., NEFTune,
    arXiv:2310.05914)."""
    sizes = bounds.diff().long()
    reach = alpha / (sizes * embedded.shape[2]).sqrt()
    wide = reach.repeat_interleave(sizes)[None, :, None].to(embedded.dtype)
    return nn.init.uniform_(torch.empty_like(embedded), -1, 1) * wide
