"""Rows of each shape, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from luthier.common.data.rows import Row
from luthier.common.errors import BadExample
from luthier.modalities.llm.conversation import Conversation, Message, Text, ToolCall
from luthier.modalities.llm.shapes import SHAPES, items, shape_of

ASKED, ANSWERED = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


def row(**fields) -> Row:
    return Row(fields, "rows.jsonl:1", Path(), "rows")


def said(conversation: Conversation) -> list[tuple[str, str | None]]:
    return [(one.role, one.content) for one in conversation.messages]


@pytest.mark.parametrize(
    ("fields", "shape"),
    [
        ({"text": "a"}, "text"),
        ({"messages": []}, "messages"),
        ({"prompt": "a", "completion": "b"}, "prompt_completion"),
        ({"instruction": "a", "input": "", "output": "b"}, "alpaca"),
        ({"conversations": []}, "sharegpt"),
        ({"text": "", "messages": [ASKED]}, "messages"),  # a table's empty column
        ({"text": None, "messages": []}, "messages"),
        ({"prompt": "a", "messages": []}, "messages"),
    ],
)
def test_the_shape_of_a_row(fields, shape) -> None:
    assert shape_of(row(**fields)) == shape
    assert shape in SHAPES


@pytest.mark.parametrize(
    ("fields", "reason", "named"),
    [
        ({"question": "a", "answer": "b"}, "unknown_shape", "the keys question, answer"),
        ({"text": "a", "messages": [ASKED]}, "ambiguous_shape", "text: text; messages: messages"),
    ],
)
def test_rows_without_a_clear_shape(fields, reason, named) -> None:
    with pytest.raises(BadExample) as error:
        shape_of(row(**fields))
    assert error.value.reason == reason
    assert named in str(error.value)


def test_an_ambiguous_row_with_its_shape_named(example_of) -> None:
    fields = {"text": "a", "messages": [ASKED, ANSWERED]}
    assert isinstance(example_of("text", **fields), Text)
    found = example_of("messages", **fields)
    assert said(found) == [("user", "a"), ("assistant", "b")]
    assert found.extra == {"text": "a"}


def test_text(example_of) -> None:
    assert example_of(text=" a ", topic="x") == Text(" a ", "rows.jsonl:1", "rows", extra={"topic": "x"})


def test_messages_with_everything(example_of) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    tool = {"name": "weather", "parameters": {}}
    found = example_of(
        messages=[
            {"role": "developer", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ann"},
            {"role": "assistant", "content": None, "reasoning": "r", "tool_calls": [call]},
            {"role": "tool", "content": "", "tool_call_id": "c1"},
            {"role": "assistant", "content": "b", "weight": 0},
            {"role": "assistant", "content": "b", "train": True},
        ],
        tools=[tool],
        chat_template_kwargs={"enable_thinking": False},
        topic="x",
    )
    assert found.messages == (
        Message("system", "s"),
        Message("user", "ab", name="Ann"),
        Message("assistant", None, "r", (ToolCall("weather", {"city": "Rome"}, "c1"),)),
        Message("tool", "", tool_call_id="c1"),
        Message("assistant", "b", train=False),
        Message("assistant", "b", train=True),
    )
    assert found.tools == ({"type": "function", "function": tool},)
    assert (found.variables, found.extra) == ({"enable_thinking": False}, {"topic": "x"})


@pytest.mark.parametrize("arguments", ['{"city": "Rome"}', {"city": "Rome"}])
def test_arguments_as_text_or_object_are_the_same(arguments, conversation_of) -> None:
    call = {"function": {"name": "weather", "arguments": arguments}}
    found = conversation_of(ASKED, {"role": "assistant", "tool_calls": [call]}).messages[1]
    assert found.tool_calls[0].arguments == {"city": "Rome"}
    function = {"name": "weather", "arguments": {"city": "Rome"}}
    assert found.as_dict() == {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    as_text = found.as_dict("string")["tool_calls"][0]["function"]["arguments"]
    assert json.loads(as_text) == {"city": "Rome"}


def test_the_older_function_call(conversation_of) -> None:
    call = {"name": "weather", "arguments": "{}"}
    found = conversation_of(
        ASKED, {"role": "assistant", "content": None, "function_call": call}, {"role": "function", "content": "x"}
    )
    assert found.messages[1].tool_calls == (ToolCall("weather", {}),)
    assert found.messages[2].role == "tool"


def test_lists_as_json_text(example_of) -> None:
    assert said(example_of(messages=json.dumps([ASKED, ANSWERED]), tools="[]")) == [("user", "a"), ("assistant", "b")]


def test_prompt_and_completion_of_text(example_of) -> None:
    found = example_of(prompt="a", completion=" b")
    assert found == Text(" b", "rows.jsonl:1", "rows", "a")
    assert said(found.as_conversation()) == [("user", "a"), ("assistant", " b")]


def test_prompt_and_completion_of_messages(example_of) -> None:
    found = example_of(prompt=[ASKED, ANSWERED, ASKED], completion=[ANSWERED])
    assert [one.train for one in found.messages] == [False, False, False, None]
    assert said(example_of(prompt="a", completion=[ANSWERED])) == [("user", "a"), ("assistant", "b")]


def test_alpaca(example_of) -> None:
    found = example_of(
        instruction="Translate", input="casa", output="house", system="Be brief.", history=[["q", "r"]], topic="x"
    )
    assert said(found) == [
        ("system", "Be brief."),
        ("user", "q"),
        ("assistant", "r"),
        ("user", "Translate\ncasa"),
        ("assistant", "house"),
    ]
    assert found.extra == {"topic": "x"}
    assert said(example_of(instruction="Go", input=None, output="ok"))[0] == ("user", "Go")


def test_sharegpt(example_of) -> None:
    found = example_of(
        system="Be brief.",
        conversations=[
            {"from": "human", "value": "a"},
            {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Rome"}}'},
            {"from": "observation", "value": "sunny"},
            {"from": "gpt", "value": "b", "weight": 1},
        ],
        tools=json.dumps([{"name": "weather"}]),
    )
    assert found.messages == (
        Message("system", "Be brief."),
        Message("user", "a"),
        Message("assistant", None, tool_calls=(ToolCall("weather", {"city": "Rome"}),)),
        Message("tool", "sunny"),
        Message("assistant", "b", train=True),
    )
    assert found.tools == ({"type": "function", "function": {"name": "weather"}},)


def test_weight_counts_for_assistants_only(conversation_of) -> None:
    found = conversation_of(ASKED | {"weight": 1}, ANSWERED | {"weight": 1})
    assert [one.train for one in found.messages] == [None, True]


CALLING = {"role": "assistant", "content": None}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"text": " \n"}, "empty_text"),
        ({"text": 3}, "bad_content"),
        ({"text": "\ud800"}, "not_unicode"),
        ({"messages": []}, "no_messages"),
        ({"messages": "[{"}, "bad_json"),
        ({"messages": {"role": "user"}}, "bad_content"),
        ({"messages": ["a"]}, "bad_content"),
        ({"messages": [ASKED]}, "no_assistant"),
        ({"messages": [ASKED, {"role": "assistant", "content": " "}]}, "empty_answer"),
        ({"messages": [ASKED, {"role": "assistant"}]}, "empty_answer"),
        ({"messages": [{"role": "user", "content": ""}, ANSWERED]}, "empty_message"),
        ({"messages": [{"role": "critic", "content": "a"}, ANSWERED]}, "unknown_role"),
        ({"messages": [{"content": "a"}, ANSWERED]}, "unknown_role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, ANSWERED]}, "not_text"),
        ({"messages": [ASKED, ANSWERED | {"weight": 0.5}]}, "bad_flag"),
        ({"messages": [ASKED, ANSWERED | {"weight": 0, "train": True}]}, "bad_flag"),
        ({"messages": [ASKED, CALLING | {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
         "bad_arguments"),
        ({"messages": [ASKED, CALLING | {"tool_calls": [{"function": {"name": "f", "arguments": [1]}}]}]},
         "bad_arguments"),
        ({"messages": [ASKED, CALLING | {"tool_calls": [{"function": {}}]}]}, "bad_tool_call"),
        ({"messages": [ASKED | {"tool_calls": [{"name": "f"}]}, ANSWERED]}, "bad_tool_call"),
        ({"messages": [ASKED, ANSWERED], "tools": [{"parameters": {}}]}, "bad_tools"),
        ({"messages": [ASKED, ANSWERED], "tools": "[{"}, "bad_json"),
        ({"prompt": "a", "completion": ""}, "empty_answer"),
        ({"instruction": "a", "output": ""}, "empty_answer"),
        ({"instruction": "", "output": "b"}, "empty_message"),
        ({"instruction": "a", "output": "b", "history": ["q"]}, "bad_content"),
        ({"conversations": [{"from": "narrator", "value": "a"}]}, "unknown_role"),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": "{"}]}, "bad_json"),
    ],
)  # fmt: skip
def test_what_is_refused(fields, reason, example_of) -> None:
    with pytest.raises(BadExample) as error:
        example_of(**fields)
    assert error.value.reason == reason
    assert str(error.value).startswith("rows.jsonl:1: ")


def test_an_answer_without_loss_may_be_empty(conversation_of) -> None:
    assert conversation_of(ASKED, ANSWERED | {"content": "", "weight": 0}, ASKED, ANSWERED)


def test_each_row_of_a_source_gives_one_item(tmp_path) -> None:
    lines = ({"text": "a"}, {"messages": [ASKED, ANSWERED]}, {"x": 1})
    (tmp_path / "rows.jsonl").write_text("\n".join([*map(json.dumps, lines), "{"]))
    found = list(items(str(tmp_path / "rows.jsonl"), source="s"))
    assert [type(one) for one in found] == [Text, Conversation, BadExample, BadExample]
    assert [one.where for one in found] == [f"rows.jsonl:{number}" for number in (1, 2, 3, 4)]
    assert [one.reason for one in found[2:]] == ["unknown_shape", "unreadable_row"]


def test_a_shape_that_rows_must_have(tmp_path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}')
    found = list(items(str(tmp_path / "rows.jsonl"), shape="messages"))
    assert [one.reason for one in found if isinstance(one, BadExample)] == ["missing_field"]
