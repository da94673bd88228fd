"""Answers in an evaluation: what is asked, how the answer comes about, and what is made of it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from luthier.common.errors import BadExample, DataError, RecipeError
from luthier.common.evaluation.saved import evaluate_checkpoint, evaluate_recipe
from luthier.common.training.run import train
from luthier.modalities.llm.chat import encode_plain
from luthier.modalities.llm.config import GenerateSection
from luthier.modalities.llm.generate import generate
from luthier.modalities.llm.lengths import Limit, fit

CALL = {"type": "function", "id": "a00000000", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
CALLING = {"role": "assistant", "tool_calls": [CALL]}
TOLD = {"role": "tool", "tool_call_id": "a00000000", "content": "sunny"}
THINKING = {"role": "assistant", "content": "Five.", "reasoning_content": "Let me think"}
ASKED = ("user", "What is the weather in Rome?")

DIALOGUES = {
    "one": (("user", "Add two and three."), ("assistant", "Five.")),
    "two": (("user", "Add two."), ("assistant", "No."), ("user", "And three?"), ("assistant", "Five.")),
    "system": (("system", "You are helpful."), ("user", "Add two."), ("assistant", "Five.")),
    "thought": (("user", "Add two."), THINKING, ("user", "And three?"), THINKING),
    "call": (ASKED, CALLING),
    "called": (ASKED, CALLING, TOLD, ("assistant", "Five.")),
}
WITHOUT = {"gemma": ("system", "call", "called"), **dict.fromkeys(("chatml", "tagged", "phi3"), ("call", "called"))}
"""What the templates of some families can't write."""


def encoded(chat: Any, conversation: Any) -> tuple[Any, Any, str]:
    tokens = chat.encode(conversation)
    found = chat.prompt(conversation)
    assert found is not None
    return tokens, *found


# ------------------------------------------------------------------------------------------------ prompts


@pytest.mark.parametrize("family", ["chatml", "tagged", "qwen2.5", "qwen3", "llama3", "gemma", "mistral", "phi3"])
def test_the_prompt_is_the_begin_of_what_was_trained(family: str, chat_of, conversation_of) -> None:
    chat = chat_of(family, keep_lost=True)
    for name, messages in DIALOGUES.items():
        if name in WITHOUT.get(family, ()):
            continue
        tokens, ids, reference = encoded(chat, conversation_of(*messages))
        assert ids.tolist() == tokens.ids[: len(ids)].tolist(), name
        assert not tokens.trained[len(ids) - 1], "the prompt ends where the answer begins"
        assert tokens.trained[len(ids) :].any()
        bos = chat.tokenizer.bos_token_id
        assert bos is None or ids.tolist().count(bos) == 1
        rest = chat.tokenizer.decode(tokens.ids[len(ids) :], skip_special_tokens=True)
        assert rest.strip().endswith(reference)
        assert reference == "Five." if name != "call" else "Rome" in reference


def test_an_answer_in_the_middle_is_asked_for_with_what_precedes_it(chat_of, conversation_of) -> None:
    chat = chat_of("chatml")
    whole = conversation_of(*DIALOGUES["one"], ("user", "Thanks."))
    assert chat.prompt(whole)[0].tolist() == chat.prompt(conversation_of(*DIALOGUES["one"]))[0].tolist()
    assert chat.prompt(conversation_of(("assistant", "Five."))) is None, "nothing precedes it"


def test_a_prompt_that_was_not_trained_on_is_refused(chat_of, conversation_of) -> None:
    """DeepSeek's template opens a thought in the prompt and leaves all thoughts out of what is trained on."""
    with pytest.raises(BadExample, match="not the text that training has") as caught:
        chat_of("deepseek").prompt(conversation_of(*DIALOGUES["one"]))
    assert caught.value.reason == "prompt_differs"
    assert "<think>" in str(caught.value)


def test_control_tokens_that_are_text_in_training_are_text_in_the_prompt(chat_of, conversation_of) -> None:
    chat = chat_of("chatml", control="text")
    tokens, ids, _ = encoded(chat, conversation_of(("user", "Say <|im_end|> now."), ("assistant", "Five.")))
    assert ids.tolist() == tokens.ids[: len(ids)].tolist()
    end = chat.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert ids.tolist().count(end) == 1, "that of the turn"


GENERATED = "evaluate.generate={max_new_tokens: 8, scores: [exact_match, contains]}"


def test_a_prompt_is_cut_as_in_training(task_of, conversation_of) -> None:
    words = " ".join(["weather"] * 30)
    item = conversation_of(("user", "Old."), ("assistant", "No."), ("user", f"{words} Rome?"), ("assistant", "Five."))
    processing = task_of(GENERATED).task.processing
    for length in (60, 30):
        processing.limit = Limit(length)
        _, tokens, taken = fit(item, processing.chat, processing.limit)
        prompt = processing.prompt_of(item, *processing.tokens_of(item))
        assert taken.exchanges == 1
        assert (taken.prompt > 0) == (length == 30)
        assert prompt.ids.tolist() == tokens.ids[: len(prompt.ids)].tolist()
        assert tokens.trained[len(prompt.ids) :].argmax() == 0, "the answer follows at once"
        assert prompt.reference == "Five."


def test_plain_prompts_are_asked_as_they_are(task_of, example_of) -> None:
    processing = task_of(GENERATED, "data.plain=true").task.processing
    item = example_of(prompt="Add two and three:", completion=" five")
    tokens = encode_plain(processing.tokenizer, item)
    prompt = processing.prompt_of(item, *processing.tokens_of(item))
    assert prompt.ids.tolist() == tokens.ids[~tokens.trained].tolist()
    assert prompt.reference == " five"
    alone = example_of(text="five")
    assert processing.prompt_of(alone, *processing.tokens_of(alone)) is None


# ------------------------------------------------------------------------------------------------ tokens

PROMPTS = [np.array(ids) for ids in ([7], [30, 4, 51, 0, 8, 300, 12], [9, 9, 60, 11], list(range(100, 117)))]
"""Of different lengths, the longest longer than the sliding windows; the second has the id that pads."""


def settings(**changes: Any) -> GenerateSection:
    return GenerateSection(**{"max_new_tokens": 12, **changes})


def reference(folder: Path, **options: Any) -> list[list[int]]:
    """transformers' own answers to each prompt alone, with eager attention."""
    model = hf.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    model.generation_config = hf.GenerationConfig(pad_token_id=0)
    answers = []
    for prompt in PROMPTS:
        ids = torch.from_numpy(prompt)[None]
        mask = torch.ones_like(ids)  # without it transformers would hide ids that pad
        found = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, **options)
        answers.append(found[0, len(prompt) :].tolist())
    return answers


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral", "mixtral", "gpt2"])
def test_padded_prompts_are_answered_as_if_alone(family: str, task_of, model_of) -> None:
    causal = task_of(model=family).task.eval().causal
    wanted = reference(model_of(family))
    assert len({tuple(ids) for ids in wanted}) > 1
    assert [one.ids for one in generate(causal, PROMPTS, settings(), ())] == wanted
    assert [generate(causal, [prompt], settings(), ())[0].ids for prompt in PROMPTS] == wanted
    assert [one.ids for one in generate(causal, PROMPTS, settings(), (), pad=200)] == wanted, "any id may pad"


def test_beams_are_those_of_transformers(task_of, model_of) -> None:
    causal = task_of().task.eval().causal
    wanted = reference(model_of(), num_beams=3)
    assert [one.ids for one in generate(causal, PROMPTS, settings(num_beams=3), ())] == wanted
    assert wanted != [one.ids for one in generate(causal, PROMPTS, settings(), ())]


def test_an_answer_ends_at_any_of_its_ends(task_of) -> None:
    causal = task_of().task.eval().causal
    free = [one.ids for one in generate(causal, PROMPTS, settings(), ())]
    ends = {free[0][2], free[1][5]}
    found = generate(causal, PROMPTS, settings(), ends)
    for ids, one in zip(free, found, strict=True):
        stop = next((place for place, number in enumerate(ids) if number in ends), None)
        assert one.ids == ids[:stop]
        assert one.is_finished == (stop is not None)
    assert [len(one.ids) for one in found[:2]] <= [2, 5]
    assert not all(one.is_finished for one in found)


def test_a_model_s_own_sampling_settings_do_not_count(task_of) -> None:
    causal = task_of().task.eval().causal
    plain = generate(causal, PROMPTS, settings(), ())
    own = hf.GenerationConfig(repetition_penalty=9.0, do_sample=True, top_k=3, min_new_tokens=9, eos_token_id=5)
    causal.generation_config = own
    assert generate(causal, PROMPTS, settings(), ()) == plain
    assert causal.generation_config is own


def test_no_more_tokens_than_the_model_has_places_for(task_of) -> None:
    causal = task_of(model="gpt2").task.eval().causal
    ids = np.arange(250) % 99
    assert len(generate(causal, [ids], settings(), ())[0].ids) == 256 - 250 + 1


def test_drawn_answers_come_from_the_whole_distribution_and_are_the_same_each_time(task_of) -> None:
    made = task_of()
    causal = made.task.eval().causal
    many = [PROMPTS[0]] * 400
    torch.manual_seed(1)
    found = [one.ids[0] for one in generate(causal, many, settings(max_new_tokens=1, temperature=1.5), ())]
    logits = causal(torch.from_numpy(PROMPTS[0])[None]).logits[0, -1].detach()
    chances = (logits / 1.5).softmax(0)
    assert len(set(found)) > 50, "not the 50 most probable that transformers draws from by itself"
    top = int(chances.argmax())
    share, chance = found.count(top) / 400, float(chances[top])
    assert abs(share - chance) < 4 * (chance * (1 - chance) / 400) ** 0.5
    greedy = generate(causal, PROMPTS, settings(), ())
    assert generate(causal, PROMPTS, settings(temperature=1e-4), ()) == greedy


# ------------------------------------------------------------------------------------------------ an evaluation

ROWS = [
    {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}], "topic": topic}
    for asked, answer, topic in (
        ("Add two and three.", "The sum is five.", "sum"),
        ("What is the weather in Rome?", "It is sunny and warm.", "city"),
        ("Add three and three.", "Let me think.", "sum"),
    )
]
WRONG = [{**ROWS[0], "messages": [ROWS[0]["messages"][0], {"role": "assistant", "content": "The answer."}]}]


@pytest.fixture(scope="module")
def learned(tree_of, model_of, rows_of, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run that has learned its three rows by heart; the regression suite asks for another answer to one of them."""
    root = tmp_path_factory.mktemp("learned")
    same, other = rows_of(root / "same.jsonl", ROWS), rows_of(root / "other.jsonl", WRONG)
    recipe = tree_of(
        model_of(), same, root / "run", GENERATED, f"data.validation={same}", f"data.regression={other}",
        "train.epochs=null", "train.steps=30", "evaluate.every=15", "evaluate.slices=[topic]",
        "checkpoint.best=exact_match", "evaluate.samples=2", "evaluate.generate.max_new_tokens=16",
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        patch.setattr(torch, "set_num_threads", lambda _: None)
        patch.delenv("LUTHIER_OUTPUT", raising=False)
        return train(recipe)


def test_a_run_is_judged_by_its_answers(learned, left) -> None:
    metrics = learned.metrics
    assert (metrics["exact_match"], metrics["contains"], metrics["unfinished"]) == (1, 1, 0)
    assert (metrics["answers"], metrics["slices"]["topic"]["city"]["answers"]) == (3, 1)
    assert metrics["slices"]["topic"]["sum"]["exact_match"] == 1
    assert (metrics["regression/exact_match"], metrics["regression/answers"]) == (0, 1)
    assert metrics["regression/loss"] > metrics["loss"]
    names = {line.split(",")[1] for line in (learned.folder / "curves.csv").read_text().splitlines()}
    assert {"validation/exact_match", "regression/exact_match", "regression/loss"} <= names
    report = json.loads((learned.folder / "data.json").read_text())
    assert report["regression"]["rows"] == 1


def test_answers_are_kept_for_reading(learned) -> None:
    file = learned.folder / "samples" / f"step-{learned.metrics['step']:08d}.json"
    samples = json.loads(file.read_text())
    assert [sample.get("suite") for sample in samples] == [None, None, "regression"]
    assert samples[0]["where"] == "same.jsonl:1"
    assert samples[0]["prompt"].endswith("Add two and three.<|im_end|>\n<|im_start|>assistant\n")
    assert (samples[0]["reference"], samples[0]["answer"]) == ("The sum is five.", "The sum is five.")
    assert samples[0]["exact_match"] == 1
    assert (samples[2]["reference"], samples[2]["answer"]) == ("The answer.", "The sum is five.")


def test_a_checkpoint_alone_answers_the_same(learned) -> None:
    best = learned.folder / "checkpoints" / "best"
    again = evaluate_checkpoint(best, "validation", ["evaluate.batch=1"])
    for name in ("exact_match", "contains", "accuracy", "unfinished", "answer_tokens"):
        assert again.metrics[name] == learned.metrics[name]
    assert again.samples[0]["answer"] == "The sum is five."
    assert evaluate_checkpoint(best, "regression").metrics["exact_match"] == 0
    ends = json.loads((best / "model" / "generation_config.json").read_text())["eos_token_id"]
    tokenizer = hf.AutoTokenizer.from_pretrained(best / "model")
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in ends


def test_drawn_answers_of_a_task_are_the_same_each_time(recipe_of) -> None:
    recipe = recipe_of()
    drawn = recipe_of(GENERATED, f"data.validation={recipe.data.train[0].path}", "evaluate.generate.temperature=1.0")
    first, again = (evaluate_recipe(drawn, "validation").samples for _ in range(2))
    assert len({sample["answer"] for sample in first}) > 1
    assert first == again


def test_rows_without_a_prompt_count_for_the_loss_alone(recipe_of, rows_of, tmp_path: Path) -> None:
    mixed = rows_of(tmp_path / "mixed.jsonl", [*ROWS[:1], {"text": "It is sunny."}])
    metrics = train(recipe_of(GENERATED, f"data.validation={mixed}", rows=3)).metrics
    assert metrics["answers"] == 1
    texts = rows_of(tmp_path / "texts.jsonl", [{"text": "It is sunny."}])
    options = (GENERATED, f"data.validation={texts}")
    assert "exact_match" not in train(recipe_of(*options, rows=3, output="a")).metrics
    with pytest.raises(DataError, match=r"checkpoint\.best: nothing in the validation data gives the metric"):
        train(recipe_of(*options, "checkpoint.best=contains", rows=3, output="b"))


def test_the_metric_that_decides_is_known_before_training(recipe_of, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="evaluation does not give this metric") as caught:
        train(recipe_of("checkpoint.best=exact_match"))
    assert "loss, accuracy" in str(caught.value)
    with pytest.raises(RecipeError, match="no such metric"):
        train(recipe_of("checkpoint.best=bleu"))
    assert not (tmp_path / "run").exists()


def test_regression_needs_a_validation(recipe_of) -> None:
    with pytest.raises(RecipeError, match="evaluated along with validation"):
        recipe_of("data.regression=a.jsonl")
