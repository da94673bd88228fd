"""From rows to batches: tokens with prompts, what is cut, texts that are the same, and the layout of a batch.

Expected tokens come from the tokenizer itself, called with its own truncation, and from sentence-transformers.
"""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import transformers as hf

from luthier.common.errors import BadExample, DataError, RecipeError
from luthier.modalities.embedding.example import key_of
from luthier.modalities.embedding.processing import EmbeddingProcessing

PAIRS = [
    {"anchor": "ask q0", "positive": "tell d0", "negatives": ["tell d1", "tell d2"]},
    {"anchor": "ask q1", "positive": "tell d1"},
    {"anchor": "ask q0", "positive": "tell d3 and more"},
]


def ids_of(tokenizer: Any, text: str, **options: Any) -> list[int]:
    return list(tokenizer(text, **options).input_ids)


def rows_as_ids(data: dict[str, Any], places: Any) -> list[list[int]]:
    """The tokens of texts of a batch, without padding."""
    return [data["input_ids"][at][data["attention_mask"][at].bool()].tolist() for at in places.tolist()]


# ------------------------------------------------------------------------------------------------ tokens


def test_tokens_are_the_tokenizers_own(prepared, bert_of) -> None:
    processing, found = prepared(PAIRS)
    tokenizer = hf.AutoTokenizer.from_pretrained(bert_of())
    one = found.examples[0]
    assert one.query.ids.tolist() == ids_of(tokenizer, "ask q0")
    assert [text.ids.tolist() for text in one.documents] == [ids_of(tokenizer, f"tell d{at}") for at in range(3)]
    assert one.labels == (1.0, 0.0, 0.0)
    assert (one.where, one.fields, one.cut) == ("rows.jsonl:1", {}, 0)
    assert processing.cost(one) == 4 * 4  # [CLS] ask q0 [SEP], three times more of the same length
    assert found.report.cost == sum(processing.cost(each) for each in found.examples)


def test_what_is_cut_is_counted_and_equals_the_tokenizers_own_truncation(prepared, bert_of) -> None:
    """Fault 4: texts were cut in silence."""
    long = "tell d1 d2 d3 d4 d5 d6 d7"  # 8 tokens and 2 special ones
    processing, found = prepared([{"anchor": "ask q0 q1 q2 q3", "positive": long}, PAIRS[1]], max_length=6)
    tokenizer = hf.AutoTokenizer.from_pretrained(bert_of())
    one = found.examples[0]
    assert one.documents[0].ids.tolist() == ids_of(tokenizer, long, truncation=True, max_length=6)
    assert (one.query.cut, one.documents[0].cut, one.cut) == (1, 4, 5)
    assert found.report.noted == {"query tokens cut": 1, "document tokens cut": 4}
    assert "1 query tokens cut, 4 document tokens cut" in found.report.summary()
    shown = processing.show(processing.collate(found.examples, None), 0)
    assert (" [4 tokens cut]", False) in shown.tokens


def test_queries_may_have_a_limit_of_their_own(prepared) -> None:
    _, found = prepared([{"anchor": "ask q0 q1 q2", "positive": "tell d0 d1 d2"}], query_max_length=4)
    assert (len(found.examples[0].query.ids), len(found.examples[0].documents[0].ids)) == (4, 6)


def test_the_models_own_limit_and_no_more_than_it_has_positions(prepared, data_recipe_of, sentence_model_of) -> None:
    text = " ".join(["tell"] * 100)
    _, plain = prepared([{"anchor": text, "positive": text}])
    assert len(plain.examples[0].query.ids) == 64  # positions of the model, though its tokenizer allows 512
    _, saved = prepared([{"anchor": text, "positive": text}], model=sentence_model_of(max_length=16))
    assert len(saved.examples[0].query.ids) == 16
    _, raised = prepared([{"anchor": text, "positive": text}], model=sentence_model_of(max_length=16), max_length=32)
    assert len(raised.examples[0].query.ids) == 32
    with pytest.raises(RecipeError, match=r"data.max_length: longer than the model can read[^$]*at most 64"):
        EmbeddingProcessing(data_recipe_of(PAIRS, max_length=65))


def test_roberta_has_fewer_positions_than_it_says(tmp_path, data_recipe_of) -> None:
    from tokenizers import Tokenizer, models, processors

    words = ["<s>", "<pad>", "</s>", "<unk>", "a"]
    backend = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, "<unk>"))
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    names = dict(zip(("bos_token", "pad_token", "eos_token", "unk_token"), words, strict=False))
    hf.PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(tmp_path)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = hf.RobertaConfig(vocab_size=5, max_position_embeddings=18, pad_token_id=1, **sizes)
    model = hf.RobertaModel(config)
    model.save_pretrained(tmp_path)
    limit = EmbeddingProcessing(data_recipe_of(PAIRS, model=tmp_path)).limits["document"]
    assert limit == 16
    model(torch.zeros(1, limit, dtype=torch.int64))  # it can read so many, and no more
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.zeros(1, limit + 1, dtype=torch.int64))


def test_a_settings_file_and_a_tokenizer_that_pads_and_truncates(sentence_model_of, prepared) -> None:
    """A saved tokenizer may bring truncation and padding along, as that of all-MiniLM-L6-v2 does."""
    folder = sentence_model_of(max_length=32)
    backend = hf.AutoTokenizer.from_pretrained(folder).backend_tokenizer
    backend.enable_truncation(5)
    backend.enable_padding(length=12)
    backend.save(str(folder / "tokenizer.json"))
    _, found = prepared([{"anchor": "ask q0", "positive": "tell d0 d1 d2 d3 d4"}], model=folder)
    assert (len(found.examples[0].query.ids), len(found.examples[0].documents[0].ids)) == (4, 8)


def test_lower_case_where_the_model_was_saved_so(bert_of, tmp_path, prepared) -> None:
    import json
    import shutil

    folder = tmp_path / "cased"
    shutil.copytree(bert_of(), folder)
    tokenizer = hf.AutoTokenizer.from_pretrained(folder, do_lower_case=False)
    tokenizer.save_pretrained(folder)
    (folder / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": "", "type": "Transformer"}]))
    kept = {}
    for lower in (False, True):
        settings = {"max_seq_length": 20, "do_lower_case": lower}
        (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
        _, found = prepared([{"anchor": "ASK q0", "positive": "tell d0"}], model=folder)
        kept[lower] = found.examples[0].query.ids.tolist()
    assert kept[True] == ids_of(tokenizer, "ask q0")
    assert kept[False] != kept[True]


# ------------------------------------------------------------------------------------------------ prompts


def test_prompts_of_the_recipe_stand_before_texts_as_in_sentence_transformers(sentence_model_of, prepared) -> None:
    from sentence_transformers import SentenceTransformer

    folder = sentence_model_of()
    prompts = {"query": "query: ", "document": "passage: "}
    processing, found = prepared(PAIRS, model=folder, prompts=prompts)
    model = SentenceTransformer(str(folder), device="cpu")
    data = processing.collate(found.examples[:1], None)
    for role, text, at in (("query", "ask q0", data["queries"][0]), ("document", "tell d0", data["documents"][0])):
        expected = model.preprocess([text], prompt=prompts[role])
        assert rows_as_ids(data, at[None]) == expected["input_ids"].tolist()
        assert int(data["prompt_lengths"][at]) == expected["prompt_length"] == 3  # [CLS] query :
    assert found.examples[0].query.key == key_of("ask q0")  # of the text alone
    assert processing.prompts == prompts


def test_prompts_saved_with_the_model_unless_the_recipe_has_its_own(sentence_model_of, prepared, tmp_path) -> None:
    folder = sentence_model_of(prompts={"query": "query: ", "passage": "passage: "})
    processing, _ = prepared(PAIRS, model=folder)
    assert processing.prompts == {"query": "query: ", "document": "passage: "}
    changed, _ = prepared(PAIRS, model=folder, prompts={"query": ""})
    assert changed.prompts == {"query": "", "document": "passage: "}


def test_a_data_set_may_have_its_own_prompt(rows_of, tmp_path, prepared, bert_of) -> None:
    files = [str(rows_of(tmp_path / f"{name}.jsonl", PAIRS[1:2])) for name in "ab"]
    train = [{"path": files[0], "query_prompt": "query "}, {"path": files[1]}]
    _, found = prepared(train, prompts={"query": "passage "})
    tokenizer = hf.AutoTokenizer.from_pretrained(bert_of())
    expected = [ids_of(tokenizer, "query ask q1"), ids_of(tokenizer, "passage ask q1")]
    assert [one.query.ids.tolist() for one in found.examples] == expected


def test_texts_that_are_alike_get_the_same_prompt(prepared) -> None:
    rows = [{"sentence1": "tell d0", "sentence2": "tell d0", "score": 1.0}]
    processing, found = prepared(rows, prompts={"query": "query: ", "document": "passage: "})
    data = processing.collate(found.examples, None)
    assert data["queries"].tolist() == data["documents"].tolist() == [0]


def test_a_prompt_that_leaves_no_room_is_refused(data_recipe_of) -> None:
    with pytest.raises(RecipeError, match="leaves no room"):
        EmbeddingProcessing(data_recipe_of(PAIRS, max_length=8, prompts={"query": "ask ask ask ask ask ask "}))


# ------------------------------------------------------------------------------------------------ batches


def test_the_layout_of_a_batch(prepared, bert_of) -> None:
    processing, found = prepared(PAIRS)
    data = processing.collate(found.examples, None)
    tokenizer = hf.AutoTokenizer.from_pretrained(bert_of())
    texts = ["tell d3 and more", "ask q0", "tell d0", "tell d1", "tell d2", "ask q1"]
    expected = [ids_of(tokenizer, text) for text in texts]
    lengths = [len(ids) for ids in expected]
    assert lengths == sorted(lengths, reverse=True)
    assert data["input_ids"].tolist() == [[*ids, *[0] * (lengths[0] - len(ids))] for ids in expected]
    assert data["attention_mask"].tolist() == [[1] * n + [0] * (lengths[0] - n) for n in lengths]
    assert data["queries"].tolist() == [1, 5, 1]
    assert data["documents"].tolist() == [2, 3, 4, 3, 0]  # `tell d1` stands in two rows and is run once
    assert data["owner"].tolist() == [0, 0, 0, 1, 2]
    assert data["labels"].tolist() == [1.0, 0.0, 0.0, 1.0, 1.0]
    assert data["query_keys"].tolist() == [key_of(text) for text in ("ask q0", "ask q1", "ask q0")]
    assert data["document_keys"].tolist() == [key_of(texts[at]) for at in data["documents"].tolist()]
    both = sorted((key_of("tell d0"), key_of("tell d3 and more")))
    assert data["known"].tolist() == [both, [key_of("tell d1"), -1], both]
    assert data["classes"].tolist() == [-1, -1, -1]
    assert [data[name] for name in ("scores", "token_type_ids", "prompt_lengths")] == [None, None, None]
    assert (data["shape"], data["source"]) == ("groups", 0)
    assert data["where"] == ["rows.jsonl:1", "rows.jsonl:2", "rows.jsonl:3"]
    integers = ("input_ids", "attention_mask", "queries", "documents", "owner", "query_keys", "known", "classes")
    assert {data[name].dtype for name in integers} == {torch.int64}
    assert data["labels"].dtype == torch.float32


def test_keys_fit_into_a_tensor_and_tell_texts_apart() -> None:
    from hashlib import blake2b

    whole = int.from_bytes(blake2b(b"tell d0", digest_size=8).digest(), "big")
    assert key_of("tell d0") == whole // 2
    keys = [key_of(f"tell d{at}") for at in range(1000)]
    assert len(set(keys)) == 1000
    assert torch.tensor(keys).min() >= 0


def test_known_documents_are_those_of_each_data_set(rows_of, tmp_path, prepared) -> None:
    """What another data set calls relevant to the same query says nothing about this one."""
    rows = [[{"anchor": "ask q0", "positive": f"tell d{at}"}, {"anchor": "ask q0", "positive": "d7"}] for at in (1, 2)]
    files = [{"path": str(rows_of(tmp_path / f"{at}.jsonl", rows[at]))} for at in (0, 1)]
    processing, found = prepared(files)
    known = [tuple(sorted((key_of(f"tell d{at}"), key_of("d7")))) for at in (1, 1, 2, 2)]
    assert [one.known for one in found.examples] == known
    assert [processing.group(one) for one in found.examples] == [0, 0, 1, 1]


def test_judged_rows_are_known_by_their_grade(prepared) -> None:
    rows = [{"query": "ask q0", "document": f"tell d{at}", "label": at} for at in range(3)]
    _, found = prepared(rows)
    expected = tuple(sorted((key_of("tell d1"), key_of("tell d2"))))
    assert [one.known for one in found.examples] == [expected] * 3
    assert [one.labels for one in found.examples] == [(0.0,), (1.0,), (2.0,)]


def test_classes_and_labelled_texts(prepared) -> None:
    processing, found = prepared([{"text": f"tell d{at}", "label": at + 4} for at in range(3)])
    data = processing.collate(found.examples, None)
    assert data["classes"].tolist() == [4, 5, 6]
    assert data["queries"].tolist() == [0, 1, 2]
    assert [data[name].shape for name in ("documents", "owner", "labels", "known")] == [(0,), (0,), (0,), (3, 0)]
    assert data["shape"] == "labelled"
    assert processing.show(data, 1).facts["class"] == "5"
    processing, found = prepared([{"premise": "ask q0", "hypothesis": "tell d0", "label": "contradiction"}])
    data = processing.collate(found.examples, None)
    assert (data["classes"].tolist(), data["labels"].tolist(), data["shape"]) == ([2], [2.0], "classes")


def test_documents_without_a_query_have_none(prepared) -> None:
    from luthier.modalities.embedding.rows import Row

    processing, found = prepared(PAIRS)
    lone = processing.examine(Row("groups", None, ("tell d5",), (0.0,), (), "corpus.jsonl:1", 0), False)
    data = processing.collate([*found.examples[:1], *lone], None)
    assert data["queries"].tolist()[1] == -1
    assert data["query_keys"].tolist()[1] == -1
    assert data["owner"].tolist() == [0, 0, 0, 1]
    assert data["labels"].tolist() == [1.0, 0.0, 0.0, 0.0]


def test_a_teachers_scores(prepared) -> None:
    rows = [{"query": "ask q0", "pos": ["tell d0"], "neg": ["d1", "d2"], "pos_scores": [9], "neg_scores": [1, 2.5]}]
    processing, found = prepared(rows)
    data = processing.collate(found.examples, None)
    assert data["scores"].tolist() == [9.0, 1.0, 2.5]
    assert data["scores"].dtype == torch.float32
    with pytest.raises(DataError, match="some rows have a teacher's scores") as caught:
        prepared([*rows, {"query": "ask q1", "pos": ["tell d1"]}])
    assert "1 of 2" in str(caught.value)


def test_bad_rows_are_named_counted_and_left_out(prepared, data_recipe_of, collected_of) -> None:
    """Fault 12."""
    rows = [PAIRS[1], {"anchor": None, "positive": "tell d0"}, {"anchor": "ask q0", "positive": ""}, PAIRS[0]]
    _, found = prepared(rows)
    report = found.report
    assert (report.rows, report.kept_rows, report.dropped) == (4, 2, {"not_text": 1, "empty_text": 1})
    assert report.named["not_text"][0].startswith("rows.jsonl:2: 'anchor' is not a text")
    assert report.named["empty_text"][0].startswith("rows.jsonl:3: 'positive' is empty")
    with pytest.raises(BadExample, match=r"rows\.jsonl:2"):
        collected_of(EmbeddingProcessing(data_recipe_of(rows, on_bad="raise")))


def test_fields_are_kept_for_slices_in_an_evaluation_only(prepared, collected_of) -> None:
    rows = [{**PAIRS[1], "topic": "x", "other": "y"}]
    processing, found = prepared(rows, evaluate={"slices": ["source", "topic", "absent"]})
    assert found.examples[0].fields == {}
    assert collected_of(processing, training=False).examples[0].fields == {"source": "rows", "topic": "x"}


def test_sources_are_numbered_over_all_sets(rows_of, tmp_path, data_recipe_of, collected_of) -> None:
    file = str(rows_of(tmp_path / "a.jsonl", PAIRS))
    recipe = data_recipe_of([{"path": file}, {"path": file}], validation=file, test=[{"path": file, "weight": 2}])
    processing = EmbeddingProcessing(recipe)
    numbers = [{one.source for one in collected_of(processing, name == "train", name).examples}
               for name in ("train", "validation", "test")]  # fmt: skip
    assert numbers == [{0, 1}, {2}, {3}]
    assert processing.sources[3].weight == 2


def test_it_can_be_sent_to_a_worker(prepared) -> None:
    processing, found = prepared(PAIRS)
    sent, examples = pickle.loads(pickle.dumps((processing, found.examples)))
    assert sent.collate(examples, None)["known"].tolist() == processing.collate(found.examples, None)["known"].tolist()


def test_what_is_shown(prepared) -> None:
    processing, found = prepared(PAIRS)
    shown = processing.show(processing.collate(found.examples, None), 0)
    assert shown.title == "rows.jsonl:1"
    masked = "1 documents of other rows are relevant to it too, so they are no negatives"  # row 3 asks the same
    assert shown.facts == {"documents": "3", "data set": "rows", "masked": masked}
    text = "".join(piece for piece, _ in shown.tokens)
    assert text.index("ask q0") < text.index("label 1") < text.index("tell d0") < text.index("label 0")
    carried = "".join(piece for piece, carries in shown.tokens if carries)
    assert "tell d0" in carried
    assert "tell d1" not in carried
