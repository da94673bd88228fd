"""Query and document as one text: as the tokenizer joins a pair, or in a template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers as hf

from luthier.common.errors import DataError
from luthier.modalities.embedding.example import key_of
from luthier.modalities.embedding.reranker.processing import PairProcessing
from luthier.modalities.embedding.tokenizer import longest_first


def ids_of(tokenizer: Any, text: str, **options: Any) -> list[int]:
    return list(tokenizer(text, **options).input_ids)


LENGTHS = [(2, 3), (9, 3), (3, 9), (9, 9), (8, 9), (9, 8), (1, 14), (14, 1), (7, 5), (5, 7)]


@pytest.mark.parametrize("room", range(2, 20))
def test_longest_first_is_the_tokenizers_rule(bert_of, room: int) -> None:
    tokenizer = hf.AutoTokenizer.from_pretrained(bert_of())
    for first, second in LENGTHS:
        given = tokenizer(
            " ".join(["ask"] * first), " ".join(["tell"] * second), truncation="longest_first", max_length=room + 3
        ).input_ids
        ask, tell = tokenizer.convert_tokens_to_ids(["ask", "tell"])
        assert longest_first(first, second, room) == (given.count(ask), given.count(tell))


@pytest.mark.parametrize("max_length", [64, 12, 7])
def test_pairs_are_read_as_a_cross_encoder_reads_them(bert_of, data_recipe_of, collected_of, max_length: int) -> None:
    from sentence_transformers import CrossEncoder

    folder = bert_of("BertForSequenceClassification", num_labels=1)
    rows = [
        {"query": "ask q0 q1 q2 q3 q4 q5", "document": "tell d0 d1", "label": 1},
        {"query": "ask q0", "document": "tell d0 d1 d2 d3 d4 d5 d6 d7 and more", "label": 0},
        {"query": "ask q0 q1 q2 q3 q4 q5 q6", "document": "tell d0 d1 d2 d3 d4 d5 d6 d7", "label": 0},
    ]
    processing = PairProcessing(data_recipe_of(rows, model=folder, max_length=max_length))
    found = collected_of(processing)
    model = CrossEncoder(str(folder), device="cpu", max_length=max_length)
    for row, one in zip(rows, found.examples, strict=True):
        data = processing.collate([one], None)
        expected = model.preprocess([(row["query"], row["document"])])
        types = expected["token_type_ids"].tolist()
        assert data["input_ids"].tolist() == expected["input_ids"].tolist()
        assert data["token_type_ids"].tolist() == types
        assert (data["queries"].tolist(), data["query_keys"].tolist()) == ([-1], [key_of(row["query"])])
        assert data["document_keys"].tolist() == [key_of(row["document"])]
        whole = len(model.tokenizer(row["query"], row["document"]).input_ids)
        assert one.cut == whole - len(expected["input_ids"][0])
    if max_length == 7:  # of 4 tokens that are no special ones, 7 + 3, 2 + 16 and 8 + 9 want a place
        assert found.report.noted == {"query tokens cut": 5 + 0 + 6, "document tokens cut": 1 + 14 + 7}


def test_pairs_of_different_lengths_in_a_batch(bert_of, data_recipe_of, collected_of) -> None:
    """Padding carries no token type, and the second text begins where its own pair has it."""
    rows = [{"query": "ask q0", "documents": ["tell d0", "tell d0 d1 d2", "tell d0"], "labels": [1, 0, 0]}]
    processing = PairProcessing(data_recipe_of(rows, model=bert_of("BertForSequenceClassification")))
    data = processing.collate(collected_of(processing).examples, None)
    tokenizer = hf.AutoTokenizer.from_pretrained(bert_of())
    expected = tokenizer([("ask q0", "tell d0 d1 d2"), ("ask q0", "tell d0")], padding=True)
    assert data["input_ids"].tolist() == expected.input_ids
    assert data["token_type_ids"].tolist() == expected.token_type_ids
    assert data["documents"].tolist() == [1, 0, 1]
    assert data["labels"].tolist() == [1.0, 0.0, 0.0]


TEMPLATE = "<ask> {instruction} query: {query} passage: {document} <tell>"


def templated(data_recipe_of: Any, bert: Path, rows: list[Any], **data: Any) -> PairProcessing:
    model = {"path": str(bert), "template": TEMPLATE, "instruction": "a0"}
    return PairProcessing(data_recipe_of(rows, model=model, **data))


def test_a_template_with_both_in_their_places(bert_of, data_recipe_of, collected_of) -> None:
    rows = [{"query": "ask {document} q0", "documents": ["tell d0", "tell d0 d1 d2 d3"], "labels": [1, 0]}]
    processing = templated(data_recipe_of, bert_of(), rows)
    tokenizer = hf.AutoTokenizer.from_pretrained(bert_of())
    found = collected_of(processing).examples[0]
    for text, document in zip(found.documents, rows[0]["documents"], strict=True):
        whole = f"<ask> a0 query: ask {{document}} q0 passage: {document} <tell>"
        assert text.ids.tolist() == ids_of(tokenizer, whole, add_special_tokens=False)
        assert text.key == key_of(document)
    assert found.query.key == key_of(rows[0]["query"])
    assert processing.collate([found], None)["token_type_ids"] is None


def test_a_template_loses_the_end_of_the_document_only(bert_of, data_recipe_of, collected_of) -> None:
    rows = [
        {"query": "q0", "document": "d0 d1 d2 d3 d4", "label": 1},
        {"query": "q0 q1 q2", "document": "d0", "label": 0},
    ]
    whole = "<ask> a0 query: q0 passage: d0 d1 <tell>"
    tokenizer = hf.AutoTokenizer.from_pretrained(bert_of())
    expected = ids_of(tokenizer, whole, add_special_tokens=False)
    processing = templated(data_recipe_of, bert_of(), rows, max_length=len(expected))
    found = collected_of(processing)
    assert found.examples[0].documents[0].ids.tolist() == expected
    assert found.report.noted == {"document tokens cut": 3}
    assert found.report.dropped == {"too_long": 1}  # with two more tokens of query there is no room for a document
    assert "the query leaves no room for a document" in found.report.named["too_long"][0]


def test_a_reranker_has_no_use_for_texts_alone(bert_of, data_recipe_of, collected_of) -> None:
    rows = [{"text": "tell d0", "label": 1}, {"text": "tell d1", "label": 1}]
    with pytest.raises(DataError, match="no usable example") as caught:
        collected_of(PairProcessing(data_recipe_of(rows, model=bert_of())))
    assert "2 no_documents" in str(caught.value)
