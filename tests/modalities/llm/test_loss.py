"""Loss and gradients are those of transformers' own loss on the same tokens, for every family of models.

The reference runs the model with transformers' eager attention on the same documents as a padded batch, with labels and
`num_items_in_batch`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from luthier.common.data.processing import Batch

FAMILIES = (
    "llama", "llama-tied", "qwen3", "gemma2", "mistral", "phi3", "mixtral", "qwen3-moe", "granite", "cohere", "gpt2",
)  # fmt: skip


def padded(batch: Batch) -> dict[str, Tensor]:
    """The documents of a joined batch as rows that are padded at the right."""
    bounds = batch.data["bounds"].tolist()
    rows = list(pairwise(bounds))
    ids = torch.zeros(len(rows), batch.data["longest"], dtype=torch.long)
    labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    for row, (begin, end) in enumerate(rows):
        ids[row, : end - begin] = batch.data["input_ids"][begin:end]
        labels[row, 1 : end - begin] = batch.data["targets"][begin : end - 1]
        mask[row, : end - begin] = 1
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def reference(folder: Any) -> nn.Module:
    model = hf.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    return model.train()


def their_loss(model: Any, batch: Batch, count: float) -> Tensor:
    more = {"output_router_logits": True} if getattr(model.config, "router_aux_loss_coef", 0) else {}
    found: Tensor = model(**padded(batch), num_items_in_batch=count, use_cache=False, **more).loss
    return found


def same_gradients(ours: nn.Module, theirs: nn.Module, bound: float = 1e-5) -> None:
    wanted = dict(theirs.named_parameters())
    found = {name: parameter.grad for name, parameter in ours.named_parameters()}
    assert found.keys() == wanted.keys()
    largest = max(float(parameter.grad.abs().max()) for parameter in wanted.values())
    assert largest > 1e-3
    for name, parameter in wanted.items():
        assert float((found[name] - parameter.grad).abs().max()) <= bound * largest, name


@pytest.mark.parametrize("documents", [[3], [0, 1, 2, 3, 4]], ids=["one", "several"])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_equal_transformers(family: str, documents: list[int], task_of, model_of) -> None:
    made = task_of(model=family)
    made.task.train_mode()
    batch = made.batch(documents)
    assert len(batch.data["bounds"]) == len(documents) + 1
    loss = made.task.loss(batch.data)
    (loss.sum / loss.count).backward()
    theirs = reference(model_of(family))
    expected = their_loss(theirs, batch, loss.count)
    expected.backward()
    assert float(loss.sum.detach()) / loss.count == pytest.approx(float(expected.detach()), rel=1e-5)
    same_gradients(made.task.model, theirs)


@pytest.mark.parametrize("family", FAMILIES)
def test_fault_11_a_document_is_alone_in_its_row(family: str, task_of) -> None:
    """Logits of each joined document equal its own alone, with sliding windows shorter than the documents."""
    made = task_of(model=family)
    made.task.eval()
    numbers = [0, 1, 2, 5]

    def logits(chosen: list[int]) -> Tensor:
        with torch.no_grad():
            return made.task._head.logits(made.task._run(made.batch(chosen).data).last_hidden_state[0])

    joined = logits(numbers)
    alone = [logits([number]) for number in numbers]
    assert min(len(one) for one in alone) > 6
    for found, expected in zip(joined.split([len(one) for one in alone]), alone, strict=True):
        assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())
    assert float((joined[: len(alone[1])] - alone[1]).abs().max()) > 0.1  # they are no constants


def test_fault_12_no_loss_on_the_first_token_of_a_document(task_of) -> None:
    """The end of one document does not predict the next; in a plain text the first token could carry loss."""
    made = task_of(rows=[{"text": "Rome is warm"}, {"text": "Add two"}])
    data = made.batch([0, 1]).data
    first = int(data["bounds"][1])
    assert made.examples[1].documents[0].trained[0]
    assert data["targets"][first - 1] == -100
    assert (data["targets"][: first - 1] == data["input_ids"][1:first]).all()


def test_fault_17_there_is_no_padding_to_count_positions_in(task_of) -> None:
    """Each document counts from 0; the batch has as many tokens as its documents (positions against transformers' own
    padded batch: see the loss above)."""
    made = task_of()
    batch = made.batch([0, 4, 2])
    assert len(batch.data["input_ids"]) == sum(len(made.examples[number]) for number in (0, 4, 2)) == batch.padded
    for begin, end in pairwise(batch.data["bounds"].tolist()):
        assert batch.data["position_ids"][begin:end].tolist() == list(range(end - begin))


# ------------------------------------------------------------------------------------------------ what is added


VARIATIONS: list[dict[str, Any]] = [
    {"label_smoothing": 0.2},
    {"z_weight": 0.05},
    {"dynamic": True},
    {"label_smoothing": 0.1, "z_weight": 0.01, "dynamic": True},
]


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite"])
@pytest.mark.parametrize("kind", VARIATIONS, ids=str)
def test_smoothing_z_loss_and_dft_by_their_formulas_on_whole_logits(
    kind: dict[str, Any], family: str, task_of, model_of
) -> None:
    """With p the softmax, y the token, V the vocabulary: (1 - e) log p_y + e / V sum log p, times p_y held constant for
    DFT, and z log^2 of the partition; on transformers' own logits."""
    made = task_of(*(f"task.loss.{name}={value}" for name, value in kind.items()), model=family)
    made.task.train_mode()
    batch = made.batch([0, 1, 2])
    loss = made.task.loss(batch.data)
    loss.sum.backward()
    theirs = reference(model_of(family))
    rows = padded(batch)
    labels = rows.pop("labels")[:, 1:]
    logits = theirs(**rows, use_cache=False).logits[:, :-1][labels != -100]
    labels = labels[labels != -100]
    log_p = logits.log_softmax(dim=1)
    right, smoothing = log_p[torch.arange(len(labels)), labels], kind.get("label_smoothing", 0.0)
    losses = -(1 - smoothing) * right - smoothing * log_p.mean(dim=1)
    if kind.get("dynamic"):
        losses = losses * right.detach().exp()
    expected = (losses + kind.get("z_weight", 0.0) * logits.logsumexp(dim=1).square()).sum()
    expected.backward()
    assert len(labels) == loss.count
    assert float(loss.sum.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    same_gradients(made.task.model, theirs)


def test_noise_on_embeddings_is_bounded_by_each_document_s_length(task_of) -> None:
    """NEFTune: uniform within alpha / sqrt(tokens x width) of the document, in training only."""
    made = task_of("task.neftune_alpha=5")
    data = made.batch([0, 4]).data
    inner = made.task.causal.get_decoder()
    seen: list[Tensor] = []
    inner.register_forward_pre_hook(lambda _, __, given: seen.append(given["inputs_embeds"].detach()), with_kwargs=True)
    plain = made.task.causal.get_input_embeddings()(data["input_ids"]).detach()
    made.task.train_mode()
    for _ in range(50):
        made.task.loss(data)
    noise = torch.stack([one[0] for one in seen]) - plain
    for begin, end in pairwise(data["bounds"].tolist()):
        bound = 5 / ((end - begin) * plain.shape[1]) ** 0.5
        found = noise[:, begin:end]
        assert 0.98 * bound < float(found.abs().max()) <= bound * 1.0001
        assert float(found.mean()) == pytest.approx(0, abs=0.02 * bound)
        assert float(found.std()) == pytest.approx(bound / 3**0.5, rel=0.02)
    made.task.eval()
    seen.clear()
    made.task.predict(made.batch([0, 4]))
    torch.testing.assert_close(seen[0][0], plain, rtol=0, atol=0)


def test_the_router_s_loss_is_weighed_by_the_tokens_with_loss(task_of) -> None:
    """Mixtral's balance of a batch counts as often as tokens carry loss there, so that the mean over a window is one
    over tokens; its mean is logged."""
    made = task_of(model="mixtral")
    made.task.train_mode()
    loss = made.task.loss(made.batch([0, 1]).data)
    out = made.task.causal(
        **{name: value for name, value in padded(made.batch([0, 1])).items() if name != "labels"},
        output_router_logits=True, use_cache=False,
    )  # fmt: skip
    assert made.task.log_names == ("router",)
    assert loss.logs["router"] / loss.count == pytest.approx(float(out.aux_loss), rel=1e-5)


@pytest.mark.parametrize("family", ["llama", "mixtral", "gemma2"])
@pytest.mark.parametrize("lora", [False, True])
def test_activation_checkpointing_changes_no_gradient(family: str, lora: bool, task_of) -> None:
    adapter = ("model.lora.target_modules=all-linear", "model.lora.rank=2") if lora else ()
    found = []
    for checkpointing in (False, True):
        made = task_of(*adapter, f"train.gradient_checkpointing={checkpointing}", model=family)
        layers = [module for module in made.task.modules() if getattr(module, "gradient_checkpointing", False)]
        assert bool(layers) == checkpointing
        made.task.train_mode()
        loss = made.task.loss(made.batch([0, 1, 2]).data)
        loss.sum.backward()
        found.append({name: p.grad for name, p in made.task.named_parameters() if p.requires_grad})
    plain, again = found
    assert plain.keys() == again.keys()
    for name in plain:
        torch.testing.assert_close(again[name], plain[name], rtol=0, atol=0)
