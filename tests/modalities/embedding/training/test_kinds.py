"""Decoders as embedding models and as rerankers, several data sets with their own losses, guides, shipped recipes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from sentence_transformers import CrossEncoder, SentenceTransformer

from luthier.common import reading
from luthier.common.errors import LuthierError
from luthier.common.training.run import train

WORDS = ["<pad>", "<unk>", "<eos>", "yes", "no", "judge", "ask", "tell", "query", ":", *"abcdefgh", *"01234567"]


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen 3 whose tokens are words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("qwen")
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(pattern=r"[a-z]+|\d|:", behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Digits(True)])
    fast = hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>", model_max_length=64
    )
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = hf.Qwen3Config(
        vocab_size=len(WORDS), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, initializer_range=0.2, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    hf.Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def test_a_decoder_pools_the_last_token_with_instructions(qwen: Path, task_of, pairs, tmp_path: Path) -> None:
    changes = ("model.pooling=last", "model.normalize=true", "data.prompts.query='judge : '")
    made = task_of(*changes, model=qwen, rows=pairs(5))
    assert not made.task.model.is_padded
    made.task.eval()
    data = made.batch(range(5)).data
    with torch.no_grad():
        vectors = made.task.embed(data)
    made.task.save_pretrained(tmp_path / "model")
    model = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    queries = model.encode_query([row["anchor"] for row in pairs(5)], convert_to_tensor=True)
    assert torch.allclose(vectors[data["queries"]], queries, atol=1e-5)
    assert torch.allclose(vectors.norm(dim=1), torch.ones(len(vectors)), atol=1e-5)


TEMPLATE = "model.template='judge query : {query} tell : {document} :'"


def test_a_language_model_reranks_by_yes_and_no(qwen: Path, task_of, pairs, tmp_path: Path) -> None:
    """The score is the difference of two logits after the last token, as transformers gives them for each alone."""
    made = task_of(TEMPLATE, kind="embedding.reranker", model=qwen, rows=pairs(5, negatives=3))
    assert not made.task.model.is_padded
    made.task.eval()
    data = made.batch(range(5)).data
    with torch.no_grad():
        found = made.task.logits(data)[:, 0]
    causal = hf.AutoModelForCausalLM.from_pretrained(qwen, dtype=torch.float32)
    for at, place in enumerate(data["documents"].tolist()):
        ids = data["input_ids"][place][data["attention_mask"][place].bool()][None]
        logits = causal(input_ids=ids).logits[0, -1]
        assert float(found[at]) == pytest.approx(float(logits[3] - logits[4]), abs=1e-5)
    made.task.save_pretrained(tmp_path / "model")
    text = f"judge query : {pairs(1)[0]['anchor']} tell : {pairs(1)[0]['positive']} :"
    saved = CrossEncoder(str(tmp_path / "model"), device="cpu")
    ids = saved.tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        score = saved({**ids})["scores"]
    assert float(score) == pytest.approx(float(found[0]), abs=1e-5)


def test_a_language_model_without_a_template_is_refused(qwen: Path, task_of, pairs) -> None:
    with pytest.raises(LuthierError, match=r"template|label"):
        task_of(kind="embedding.reranker", model=qwen, rows=pairs(3, negatives=2))


def test_data_sets_have_their_own_losses_and_batches(recipe_of, task_of, rows_of, pairs, left, tmp_path: Path) -> None:
    """A batch is of one data set, and its loss is that of a recipe which has that data set and that loss alone."""
    sets = {
        "contrastive": pairs(8),
        "cosent": [{"sentence1": f"ask a{n}", "sentence2": f"tell b{n} c1", "score": n / 8} for n in range(8)],
        "angle": [{"sentence1": f"ask c{n}", "sentence2": f"tell d{n}", "score": 1 - n / 8} for n in range(8)],
        "softmax": [{"premise": f"ask a{n}", "hypothesis": f"tell b{n}", "label": n % 3} for n in range(8)],
    }
    files = {loss: rows_of(tmp_path / f"{loss}.jsonl", rows) for loss, rows in sets.items()}
    sources = "data.train=[" + ", ".join(f"{{path: {file}, loss: {loss}}}" for loss, file in files.items()) + "]"
    made = task_of(sources)
    made.task.eval()
    for at, loss in enumerate(("contrastive", "cosent", "angle")):
        numbers = [number for number, example in enumerate(made.examples) if example.source == at]
        alone = task_of(f"data.train={files[loss]}", f"task.loss={loss}", output=f"alone-{loss}")
        alone.task.eval()
        found, expected = made.task.loss(made.batch(numbers).data), alone.task.loss(alone.batch(range(8)).data)
        assert found.count == expected.count
        assert float(found.sum) == pytest.approx(float(expected.sum), rel=1e-6)
    run = train(recipe_of(sources, output="mixed")).folder
    assert len(left.values(run)) == 8  # two batches of each


def test_a_guide_takes_out_false_negatives(task_of, pairs) -> None:
    """A guide that is the model itself finds some documents more similar than the positive; without them, the loss is
    smaller, and equal where there are none."""
    rows = [{**row, "positive": pairs(8)[at - 1]["positive"]} for at, row in enumerate(pairs(8))]  # none is the best
    plain = task_of(rows=rows)
    guided = task_of(f"task.loss.guide={plain.recipe.model.path}", rows=rows)
    plain.task.eval()
    guided.task.eval()
    data = plain.batch(range(8)).data
    before, after = plain.task.loss(data), guided.task.loss(data)
    vectors = plain.task.embed(data)
    scores = plain.task.compare(vectors[data["queries"]], vectors[data["documents"]])
    false = (scores > scores.diagonal()[:, None]) & ~torch.eye(8, dtype=torch.bool)
    assert false.any()
    assert float(after.sum) < float(before.sum)
    kept = torch.where(false, -torch.inf, scores) / 0.05
    expected = -(kept.log_softmax(dim=1).diagonal()).sum()
    assert float(after.sum) == pytest.approx(float(expected), rel=1e-4)
    assert not any(name.startswith("_guide") for name in guided.task.state_dict())


RECIPES = ["bi-encoder", "bi-encoder-cached", "matryoshka", "distill", "llm-embedder", "colbert", "splade", "reranker"]


@pytest.fixture
def shipped_of(bert_of, qwen: Path, rows_of, pairs, tmp_path: Path, recipe_of) -> Callable[[str], Any]:
    """A shipped recipe on a small model and a few rows."""
    return lambda name: shipped(name, bert_of, qwen, rows_of, pairs, tmp_path, recipe_of)


def shipped(name: str, bert_of: Any, qwen: Path, rows_of: Any, pairs: Any, tmp_path: Path, recipe_of: Any) -> Any:
    rows: list[dict[str, Any]] = pairs(13, negatives=3)[1:]  # the first has its positive among its negatives
    if name == "distill":
        rows = [{**row, "scores": [float(n) for n in range(1 + len(row["negatives"]), 0, -1)]} for row in rows]
    kinds = {"splade": "BertForMaskedLM", "reranker": "BertForSequenceClassification"}
    changes = {"num_labels": 1} if name == "reranker" else {}
    model = qwen if name == "llm-embedder" else bert_of(kinds.get(name, "BertModel"), **changes)
    file = rows_of(tmp_path / "rows.jsonl", rows)
    small = {
        "model.path": model, "data.train": file, "data.validation": file, "output": tmp_path / "run",
        "data.batch.examples": 4, "data.max_length": 32, "train.precision": "'32'", "train.accelerator": "cpu",
        "evaluate.every": "epoch",
    }  # fmt: skip
    if name == "colbert":
        small["data.query_max_length"] = 16
    if name == "matryoshka":
        small |= {"task.matryoshka.dimensions": "[32, 16]", "evaluate.dimensions": "[16]"}
    recipe_of()  # no fsync, no change of threads
    return reading.load(f"embedding/{name}", [f"{key}={value}" for key, value in small.items()])


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_the_check_finds_nothing_in_a_shipped_recipe(name: str, shipped_of, finds_nothing) -> None:
    assert finds_nothing(shipped_of(name))


@pytest.mark.parametrize("name", RECIPES)
def test_shipped_recipes_run(name: str, shipped_of) -> None:
    """Each is trained, evaluated, saved."""
    run = train(shipped_of(name)).folder
    assert (run / "metrics.json").exists()
    if name == "matryoshka":
        assert "ndcg@10 16/float32" in (run / "metrics.json").read_text()
