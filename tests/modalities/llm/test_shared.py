"""Answers that share their prompt are what each would be alone: hidden states, losses and gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from torch import Tensor

from luthier.common import attention
from luthier.common.errors import ModelError
from luthier.modalities.llm.batch import Group, join_groups
from luthier.modalities.llm.model import decode
from luthier.modalities.llm.tokens import Document

FAMILIES = ("llama", "qwen3", "gemma2", "mistral", "phi3", "granite", "cohere", "gpt2")


def document(ids: list[int], untrained: int) -> Document:
    return Document(np.array(ids, dtype=np.int32), np.arange(len(ids)) >= untrained)


GROUPS = [
    Group.of([document([5, 6, 7, 8, 9, 10, 11, 12, 20, 21, 22], 8), document([5, 6, 7, 8, 9, 10, 11, 12, 30], 8)]),
    Group.of([document([5, 40, 41], 1), document([6, 42, 43, 44], 1)]),  # nothing in common
    Group.of([document([7, 50, 51, 52], 2), document([7, 50, 51, 53, 54], 2), document([7, 50, 61, 62, 63, 64], 2)]),
]


def test_what_is_shared_stands_once() -> None:
    """A prompt, and answers that begin alike; at least one token is left of each."""
    assert [len(group.shared) for group in GROUPS] == [8, 0, 2]
    assert [len(group) for group in GROUPS] == [8 + 3 + 1, 3 + 4, 2 + 2 + 3 + 4]
    begins = Group.of([document([1, 2, 3], 1), document([1, 2, 3, 4], 1)])
    assert [len(begins.shared), *map(len, begins.rests)] == [2, 1, 2]
    other = Group.of([document([1, 2, 3, 4], 1), document([1, 2, 3, 5], 2)])  # alike, but for what carries loss
    assert len(other.shared) == 1
    for group in GROUPS:
        assert group.document(0).ids.tolist() == [*group.shared.ids, *group.rests[0].ids]
    alone = Group.of([document([1, 2, 3], 1)])
    assert [len(alone.shared), *map(len, alone.rests)] == [0, 3]


def test_the_tensors_of_a_batch() -> None:
    """By hand: [7 50 | 51 52 | 51 53 54], after a group of one document of 2."""
    groups = [Group.of([document([1, 2], 0)]), Group.of([document([7, 50, 51, 52], 2), document([7, 50, 53, 54], 2)])]
    data = join_groups(groups)
    assert data["input_ids"].tolist() == [1, 2, 7, 50, 51, 52, 53, 54]
    assert data["position_ids"].tolist() == [0, 1, 0, 1, 2, 3, 2, 3]
    assert data["bounds"].tolist() == [0, 2, 4, 6, 8]
    assert data["key_bounds"].tolist() == [0, 2, 4, 8, 12]
    assert data["key_places"].tolist() == [0, 1, 2, 3, 2, 3, 4, 5, 2, 3, 6, 7]
    assert data["longest"] == 4
    assert data["places"].tolist() == [0, 3, 4, 3, 6]  # the prompt's last token predicts the first of both answers
    assert data["labels"].tolist() == [2, 51, 52, 53, 54]
    assert data["counts"].tolist() == [1, 2, 2]
    assert data["last"].tolist() == [1, 5, 7]


def losses(causal: Any, documents: list[Document]) -> Tensor:
    """[A] transformers' own summed cross-entropy of each document alone."""
    found = []
    for one in documents:
        ids = torch.from_numpy(one.ids.astype(np.int64))
        labels = torch.where(torch.from_numpy(one.trained), ids, -100)
        found.append(causal(input_ids=ids[None], labels=labels[None], num_items_in_batch=1, use_cache=False).loss)
    return torch.stack(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_as_each_alone(family: str, task_of, model_of) -> None:
    """Loss and gradients of transformers' eager attention, one document after the other, to 1e-5; with sliding windows
    shorter than the prompt (mistral, gemma2). All groups are packed in one row."""
    made = task_of(model=family)
    data = join_groups(GROUPS)
    hidden = decode(made.task.causal, data).last_hidden_state[0]
    single = made.task._head.log_probs(hidden[data["places"]], data["labels"])
    found = -torch.segment_reduce(single, "sum", lengths=data["counts"])
    theirs = hf.AutoModelForCausalLM.from_pretrained(model_of(family), attn_implementation="eager", dtype=torch.float32)
    expected = losses(theirs, [group.document(at) for group in GROUPS for at in range(len(group.rests))])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    factors = torch.linspace(-1, 2, len(found))  # as preferences have them, of both signs
    (found * factors).sum().backward()
    (expected * factors).sum().backward()
    wanted = {name: one.grad for name, one in theirs.named_parameters() if one.grad is not None}
    largest = max(float(one.abs().max()) for one in wanted.values())
    for name, parameter in made.task.model.named_parameters():
        assert float((parameter.grad - wanted[name]).abs().max()) <= 1e-5 * largest, name


def test_answers_do_not_see_each_other(task_of) -> None:
    """Another first answer changes nothing of the second, to the bit where the row keeps its shape."""
    made = task_of()
    first, second = (
        join_groups([Group.of([document([5, 6, at, 8, 9], 2), document([5, 6, 21, 22], 2)])]) for at in (7, 70)
    )
    hidden = [decode(made.task.causal, data).last_hidden_state[0] for data in (first, second)]
    assert torch.equal(hidden[0][:2], hidden[1][:2])
    assert torch.equal(hidden[0][5:], hidden[1][5:])
    assert not torch.allclose(hidden[0][2:5], hidden[1][2:5])


def test_a_model_that_breaks_shared_prompts_is_refused(task_of, monkeypatch: pytest.MonkeyPatch) -> None:
    from luthier.modalities.llm.probe import probe_shared

    made = task_of()
    probe_shared(made.task.causal, made.task._head)
    masks = attention.as_mask
    monkeypatch.setattr(attention, "as_mask", lambda bounds, longest, keys=None: masks(bounds, longest))
    with pytest.raises(ModelError, match="share a prompt"):
        probe_shared(made.task.causal, made.task._head)
