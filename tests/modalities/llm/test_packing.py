"""Blocks of continued pretraining, and the tensors of batches."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from luthier.modalities.llm.batch import join
from luthier.modalities.llm.packing import block, blocks
from luthier.modalities.llm.tokens import Document


def document(length: int, first: int = 1, trained: bool = True) -> Document:
    return Document(np.arange(first, first + length, dtype=np.int32), np.full(length, trained))


# ------------------------------------------------------------------------------------------------ blocks


@given(lengths=st.lists(st.integers(0, 40), max_size=40), size=st.integers(1, 30))
def test_blocks_hold_every_token_once_in_order(lengths, size) -> None:
    """Tokens in == tokens out, token 0 with them; all blocks but the last are full."""
    total = sum(lengths)
    firsts = np.concatenate([[0], np.cumsum(lengths)])[:-1].tolist() if lengths else []
    documents = [document(length, first) for length, first in zip(lengths, firsts, strict=True)]
    plan = blocks(lengths, size)
    joined = [[number for one in block(pieces, documents) for number in one.ids.tolist()] for pieces in plan]
    assert [number for ids in joined for number in ids] == list(range(total))
    assert all(len(ids) == size for ids in joined[:-1])
    assert all(0 < len(ids) <= size for ids in joined[-1:])


def test_a_document_over_three_blocks() -> None:
    plan = [[(piece.document, piece.start, piece.stop) for piece in pieces] for pieces in blocks([2, 7, 1], 4)]
    assert plan == [[(0, 0, 2), (1, 0, 2)], [(1, 2, 6)], [(1, 6, 7), (2, 0, 1)]]


# ------------------------------------------------------------------------------------------------ tensors


def test_a_joined_batch() -> None:
    first, second, third = document(3, 10), document(2, 20), document(4, 30)
    second.trained[1] = False
    found = join([first, second, third])
    assert found["input_ids"].tolist() == [10, 11, 12, 20, 21, 30, 31, 32, 33]
    assert found["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]
    assert found["targets"].tolist() == [11, 12, -100, -100, -100, 31, 32, 33, -100]
    assert found["bounds"].tolist() == [0, 3, 5, 9]
    assert found["bounds"].dtype == torch.int32
    assert found["longest"] == 4
    assert first.trained.all()  # the document is as it was


@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6), trained=st.booleans())
def test_joined_batches_keep_every_document_and_predict_no_first_token(sizes, trained) -> None:
    documents = [document(size, 10 * number + 1, trained) for number, size in enumerate(sizes)]
    found = join(documents)
    for number, (begin, end) in enumerate(pairwise(found["bounds"].tolist())):
        ids = documents[number].ids.tolist()
        assert found["input_ids"][begin:end].tolist() == ids
        assert found["position_ids"][begin:end].tolist() == list(range(end - begin))
        assert found["targets"][begin:end].tolist() == [*(ids[1:] if trained else [-100] * len(ids[1:])), -100]
    assert found["input_ids"].dtype == found["position_ids"].dtype == found["targets"].dtype == torch.int64
