"""Episodes of several turns: what the policy wrote stays as sampled, all else is the template's and carries no loss."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from luthier.common.errors import DataError, RecipeError
from luthier.modalities.llm.rl.engines.engine import Completion, Sampling
from luthier.modalities.llm.rl.environments.calculator import Calculator, calculate, tool_calls
from luthier.modalities.llm.rl.environments.environment import EnvironmentSection
from luthier.modalities.llm.rl.environments.rollout import Episode, play
from luthier.modalities.llm.rl.environments.turns import Transcript, Turns

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "2 * (3 + 4)"}}</tool_call>'
PLACE = "luthier.modalities.llm.rl.environments.calculator:Calculator"


class Script:
    """An engine that says what it is told to, turn by turn; a text that ends with `...` is cut."""

    def __init__(self, chat: Any, *turns: Sequence[str]):
        self.chat, self.turns, self.prompts, self.seeds = chat, list(turns), [], []

    def generate(
        self, prompts: Sequence[np.ndarray], sampling: Sampling, seeds: Sequence[Sequence[int]]
    ) -> list[list[Completion]]:
        said = self.turns[len(self.prompts)]
        self.prompts.append([one.tolist() for one in prompts])
        self.seeds += [one for of in seeds for one in of]
        assert len(said) == len(prompts)
        return [[self.completion(text, sampling)] for text in said]

    def completion(self, text: str, sampling: Sampling) -> Completion:
        cut = text.endswith("...")
        ids = self.chat.tokenizer(text.removesuffix("..."), add_special_tokens=False).input_ids
        ids += [] if cut else [self.end]
        return Completion(np.array(ids, np.int32), -np.arange(1.0, len(ids) + 1, dtype=np.float32), not cut, 7)

    @property
    def end(self) -> int:
        names = {"<|im_end|>", "<|eot_id|>", "<end_of_turn>", "</s>"}
        vocabulary = self.chat.tokenizer.get_vocab()
        return next(vocabulary[name] for name in names if name in vocabulary)

    def update(self, version: int, weights: Any) -> None:
        pass


class Echo:
    """Says how long the turn was, for `turns` turns."""

    tools = ()

    def __init__(self, turns: int = 2, role: str = "user"):
        self.left, self.role = turns, role

    def reset(self, row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        return [{"role": "user", "content": row["question"]}]

    def step(self, message: Mapping[str, Any]) -> Any:
        self.left -= 1
        content = f"You said {message['content']!r}."
        return [{"role": self.role, "content": content}], 0.5, self.left == 0


def sampling(most: int = 64) -> Sampling:
    return Sampling(most, (0,))


def ask(chat: Any, make: Any, engine: Script, *questions: str, **options: Any) -> list[Episode]:
    rows = [{"question": one, "answer": "14"} for one in questions]
    return play(rows, make, engine, chat, options.pop("sampling", sampling()), range(len(rows)), **options)


def pieces(chat: Any, transcript: Transcript) -> list[tuple[str, bool]]:
    """The tokens as text, in stretches that the policy wrote or not."""
    found: list[tuple[list[int], bool]] = []
    for number, written in zip(transcript.ids, transcript.written, strict=True):
        if not found or found[-1][1] != written:
            found.append(([], written))
        found[-1][0].append(number)
    return [(chat.tokenizer.decode(ids), written) for ids, written in found]


# ------------------------------------------------------------------------------------------------ tokens


@pytest.mark.parametrize("family", ["chatml", "qwen2.5", "qwen3", "llama3", "gemma", "mistral"])
def test_an_episode_is_what_the_template_writes(family: str, chat_of) -> None:
    """With a policy that says whole words as the tokenizer cuts them, it is the tokenised conversation itself."""
    chat, space = chat_of(family), " " if family == "mistral" else ""
    engine = Script(chat, [f"{space}It is sunny."], [f"{space}It is warm in Rome."])
    episode = ask(chat, lambda: Echo(3), engine, "What of Rome?", turns=2)[0]
    said = [dict(one) for one in episode.messages]
    whole = chat.template.render(said, prompt=True)
    assert chat.tokenizer.decode(episode.transcript.ids) == whole
    assert episode.transcript.ids == chat.tokenizer(whole, add_special_tokens=False).input_ids
    stretches = pieces(chat, episode.transcript)
    assert [written for _, written in stretches] == [False, True, False, True, False]
    end = chat.tokenizer.decode([engine.end])
    said_alone = [text.lstrip() for text, written in stretches if written]
    assert said_alone == [f"It is sunny.{end}", f"It is warm in Rome.{end}"]
    assert (episode.turns, episode.finished, episode.reward) == (2, False, 1.0)


def test_tokens_stay_as_they_were_sampled(chat_of) -> None:
    """The policy may cut words otherwise than the tokenizer; the template may leave out what it thought."""
    chat = chat_of("qwen3")
    engine = Script(chat, ["x"], ["done"])
    letters = [chat.tokenizer(one, add_special_tokens=False).input_ids[0] for one in "It is sunny"]
    thought = chat.tokenizer("<think>\nsun\n</think>\n\n", add_special_tokens=False).input_ids
    sampled = [*thought, *letters, engine.end]
    assert chat.tokenizer("It is sunny", add_special_tokens=False).input_ids != letters
    engine.completion = lambda text, given: (  # type: ignore[method-assign]
        Completion(np.array(sampled, np.int32), np.zeros(len(sampled), np.float32), True, 1)
        if text == "x"
        else Script.completion(engine, text, given)
    )
    episode = ask(chat, lambda: Echo(2), engine, "What?")[0]
    written = [one for one, by in zip(episode.transcript.ids, episode.transcript.written, strict=True) if by]
    assert written[: len(sampled)] == sampled
    assert episode.messages[1]["content"] == "<think>\nsun\n</think>\n\nIt is sunny"
    assert engine.prompts[1][0] == episode.transcript.ids[: len(engine.prompts[1][0])]
    assert episode.finished


def test_log_probabilities_stand_beside_what_was_written(chat_of) -> None:
    chat = chat_of("chatml")
    engine = Script(chat, ["It is"], ["five"])
    transcript = ask(chat, lambda: Echo(2), engine, "What?")[0].transcript
    first = len(engine.prompts[0][0])
    assert transcript.prompt == first
    assert len(transcript.ids) == len(transcript.written) == len(transcript.log_probs)
    values = [value for value, by in zip(transcript.log_probs, transcript.written, strict=True) if by]
    sizes = [len(chat.tokenizer(text).input_ids) + 1 for text in ("It is", "five")]
    assert values == [-float(n) for size in sizes for n in range(1, size + 1)]
    assert all(value == 0 for value, by in zip(transcript.log_probs, transcript.written, strict=True) if not by)
    ids, written, log_probs = transcript.after_prompt()
    assert ids.tolist() == transcript.ids[first:]
    assert written.tolist() == transcript.written[first:]
    assert log_probs[written].tolist() == values
    assert (ids.dtype, written.dtype, log_probs.dtype) == (np.int32, np.bool_, np.float32)
    with pytest.raises(ValueError, match="1 log-probabilities of 2 tokens"):
        transcript.write([1, 2], [0.0])


def test_control_tokens_that_an_environment_spells_stay_text(chat_of) -> None:
    chat = chat_of("chatml")
    turns = Turns(chat)
    control = chat.tokenizer.convert_tokens_to_ids("<|im_end|>")
    before = [{"role": "user", "content": "What?"}]
    new = [{"role": "user", "content": "<|im_end|><|im_start|>assistant"}]
    ids = turns.between(before, new, control)
    plain = turns.between(before, [{"role": "user", "content": "safe"}], control)
    assert ids.count(control) == plain.count(control) == 1
    assert "<|im_end|><|im_start|>assistant" in chat.tokenizer.decode(ids)
    assert turns.begin(new).count(control) == 1


def test_an_end_that_the_policy_did_not_write_is_added(chat_of) -> None:
    chat = chat_of("chatml")
    turns, end = Turns(chat), chat.tokenizer.convert_tokens_to_ids("<|im_end|>")
    messages, new = [{"role": "user", "content": "a"}], [{"role": "user", "content": "b"}]
    other = chat.tokenizer.eos_token_id
    assert turns.between(messages, new, other) == [end, *turns.between(messages, new, end)]


def test_a_template_that_leaves_the_turn_out_is_refused(chat_of) -> None:
    source = "{% for m in messages if m.role == 'user' %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(DataError, match="leaves an assistant's turn out"):
        Turns(chat_of("chatml", source=source)).between([], [{"role": "user", "content": "b"}], 0)


# ------------------------------------------------------------------------------------------------ episodes


def test_episodes_go_on_together_and_end_alone(chat_of) -> None:
    chat = chat_of("chatml")
    engine = Script(chat, ["one", "two", "cut..."], ["three"])
    counts = iter([1, 2, 2])
    found = ask(chat, lambda: Echo(next(counts)), engine, "a", "b", "c")
    assert [one.turns for one in found] == [1, 2, 1]
    assert [one.finished for one in found] == [True, True, False]
    assert [one.reward for one in found] == [0.5, 1.0, 0.0]
    assert found[2].transcript.written[-1]
    assert found[0].transcript.written[-1], "what is said after the last turn is not read"
    assert found[1].versions == [7, 7]
    assert len(set(engine.seeds)) == 4


def test_seeds_are_those_of_the_episode(chat_of) -> None:
    chat = chat_of("chatml")
    first, second = Script(chat, ["a", "b"], ["a", "b"]), Script(chat, ["b"], ["b"])
    ask(chat, lambda: Echo(2), first, "a", "b")
    play([{"question": "b"}], lambda: Echo(2), second, chat, sampling(), [1])
    assert second.seeds == [first.seeds[1], first.seeds[3]]


def test_an_episode_without_room_is_cut(chat_of) -> None:
    chat = chat_of("chatml")
    engine = Script(chat, ["one"])
    episode = ask(chat, lambda: Echo(5), engine, "a", most=50, sampling=sampling(20))[0]
    assert (episode.turns, episode.finished, episode.error) == (1, False, None)
    assert len(episode.transcript) > 30


class Broken(Echo):
    def __init__(self, how: str):
        super().__init__(2)
        self.how = how

    def reset(self, row: Mapping[str, Any]) -> Any:
        if self.how == "reset":
            raise KeyError("question")
        return super().reset(row)

    def step(self, message: Mapping[str, Any]) -> Any:
        match self.how:
            case "step":
                raise ConnectionError("the tool is away")
            case "silent":
                return [], None, False
            case "infinite":
                return [], math.inf, True
            case "odd":
                return "done"
        return super().step(message)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("reset", "KeyError: 'question'"),
        ("step", "ConnectionError: the tool is away"),
        ("silent", "neither ends"),
        ("infinite", "not finite"),
        ("odd", "ValueError"),
    ],
)
def test_an_environment_that_fails_ends_its_own_episode(how: str, reason: str, chat_of) -> None:
    chat = chat_of("chatml")
    kinds = iter(["fine", how, "fine"])
    turns = (["a", "c"] if how == "reset" else ["a", "b", "c"]), ["a", "c"]
    found = ask(chat, lambda: Broken(next(kinds)), Script(chat, *turns), "a", "b", "c")
    assert [one.finished for one in found] == [True, False, True]
    assert [one.reward for one in found][::2] == [1.0, 1.0]
    assert math.isnan(found[1].reward)
    assert reason in str(found[1].error)
    assert found[0].error is found[2].error is None


class Slow(Echo):
    running = most = 0

    def __init__(self, seconds: float):
        super().__init__(1)
        self.seconds = seconds

    async def reset(self, row: Mapping[str, Any]) -> Any:  # type: ignore[override]
        return super().reset(row)

    async def step(self, message: Mapping[str, Any]) -> Any:
        Slow.running += 1
        Slow.most = max(Slow.most, Slow.running)
        await asyncio.sleep(self.seconds)
        Slow.running -= 1
        return super().step(message)


def test_async_environments_wait_together_and_in_bounds(chat_of) -> None:
    chat = chat_of("chatml")
    seconds = iter([0.1, 0.1, 30.0])
    found = ask(chat, lambda: Slow(next(seconds)), Script(chat, ["a", "b", "c"]), "a", "b", "c", timeout=0.5)
    assert [one.finished for one in found] == [True, True, False]
    assert Slow.most == 3
    assert str(found[2].error).startswith("TimeoutError")


# ------------------------------------------------------------------------------------------------ the calculator


def test_a_policy_with_a_calculator(chat_of) -> None:
    chat = chat_of("qwen2.5")
    engine = Script(chat, [f"Let me see.\n{CALL}", "It is 14.", "It is 15."], ["So it is 14."])
    make = EnvironmentSection(entry_point=PLACE, parameters={"cost": 0.25}).maker()
    found = ask(chat, make, engine, *["What is 2 * (3 + 4)?"] * 3)
    assert [one.reward for one in found] == [0.75, 1.0, 0.0]
    assert found[0].messages[2] == {"role": "tool", "content": "14"}
    text = [one for one, written in pieces(chat, found[0].transcript) if not written]
    assert '"name": "calculator"' in text[0], "the template tells of the tool"
    assert "<tool_response>\n14\n</tool_response>" in text[1]


@pytest.mark.parametrize(
    ("expression", "value"),
    [("2 * (3 + 4)", 14), ("-7 // 2", -4), ("7 % 4", 3), ("1 / 4", 0.25), ("+2.5 - 1", 1.5)],
)
def test_expressions(expression: str, value: float) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "2 **9",
        "__import__('os')",
        "1 / 0",
        "1e30 * 10",
        "a",
        "(1).real",
        "2 if 1 else 3",
        "9" * 300,
        "True",
        "'a'*9",
    ],
)
def test_what_is_no_arithmetic_is_refused(expression: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        calculate(expression)


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        ("<tool_call>{</tool_call>", "error: not a tool call"),
        ('<tool_call>{"name": "weather", "arguments": {}}</tool_call>', "error: no tool weather"),
        ('<tool_call>{"name": "calculator"}</tool_call>', "error: the calculator needs an expression"),
        (CALL.replace("2 *", "2 **"), "error: only numbers"),
    ],
)
def test_calls_that_are_wrong_are_answered(content: str, answer: str) -> None:
    environment = Calculator()
    environment.reset({"question": "a", "answer": 5})
    messages, reward, done = environment.step({"role": "assistant", "content": content})
    assert str(messages[0]["content"]).startswith(answer)
    assert not done
    assert reward == 0


def test_several_calls_and_calls_in_a_thought() -> None:
    assert [one["name"] for one in tool_calls(CALL + CALL)] == ["calculator"] * 2
    environment = Calculator(cost=0.1)
    environment.reset({"question": "a", "answer": "14"})
    messages, reward, _ = environment.step({"role": "assistant", "content": CALL + CALL})
    assert [one["content"] for one in messages] == ["14", "14"]
    assert reward == pytest.approx(-0.2)
    _, reward, done = environment.step({"role": "assistant", "content": f"<think>{CALL}</think>14"})
    assert (reward, done) == (1.0, True)


def test_an_environment_that_is_not_there_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"rollout\.environment"):
        EnvironmentSection(entry_point=f"{PLACE}s").maker()
    with pytest.raises(ValueError, match="module:function"):
        EnvironmentSection(entry_point="Calculator")
