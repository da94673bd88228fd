"""Loss masks of the families' templates. Expected segments are written by hand from the documented formats: after what
the model is prompted with, all that it says, with the token that ends its turn."""

from __future__ import annotations

import re

import pytest

from luthier.common.errors import BadExample, DataError

SYSTEM = ("system", "Be brief.")
TWO_TURNS = (("user", "Add two."), ("assistant", "Five."), ("user", "Thanks"), ("assistant", "Welcome."))

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = '{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}'
CALL = {"id": "a12345678", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome", "n": 2}'}}
WITH_TOOLS = (
    ("user", "Weather?"),
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "sunny", "tool_call_id": "a12345678"},
    ("assistant", "Sunny."),
)

CHATML_TURNS = [
    ("<|im_start|>user\nAdd two.<|im_end|>\n<|im_start|>assistant\n", False),
    ("Five.<|im_end|>", True),
    ("\n<|im_start|>user\nThanks<|im_end|>\n<|im_start|>assistant\n", False),
    ("Welcome.<|im_end|>", True),
    ("\n", False),
]


def after(text: str, segments: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    return [(text + segments[0][0], False), *segments[1:]]


PLAIN = {
    "chatml": (CHATML_TURNS, after("<|im_start|>system\nBe brief.<|im_end|>\n", CHATML_TURNS)),
    "tagged": (CHATML_TURNS, after("<|im_start|>system\nBe brief.<|im_end|>\n", CHATML_TURNS)),
    "qwen2.5": (
        after("<|im_start|>system\nYou are helpful.<|im_end|>\n", CHATML_TURNS),
        after("<|im_start|>system\nBe brief.<|im_end|>\n", CHATML_TURNS),
    ),
    "qwen3": (
        [*CHATML_TURNS[:3], ("<think>\n\n</think>\n\nWelcome.<|im_end|>", True), ("\n", False)],
        after(
            "<|im_start|>system\nBe brief.<|im_end|>\n",
            [*CHATML_TURNS[:3], ("<think>\n\n</think>\n\nWelcome.<|im_end|>", True), ("\n", False)],
        ),
    ),
    "llama3": tuple(
        [
            (
                "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\n"
                f"{system}<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nAdd two.<|eot_id|>"
                "<|start_header_id|>assistant<|end_header_id|>\n\n",
                False,
            ),
            ("Five.<|eot_id|>", True),
            (
                "<|start_header_id|>user<|end_header_id|>\n\nThanks<|eot_id|>"
                "<|start_header_id|>assistant<|end_header_id|>\n\n",
                False,
            ),
            ("Welcome.<|eot_id|>", True),
        ]
        for system in ("", "Be brief.")
    ),
    "gemma": (
        [
            ("<bos><start_of_turn>user\nAdd two.<end_of_turn>\n<start_of_turn>model\n", False),
            ("Five.<end_of_turn>", True),
            ("\n<start_of_turn>user\nThanks<end_of_turn>\n<start_of_turn>model\n", False),
            ("Welcome.<end_of_turn>", True),
            ("\n", False),
        ],
        None,  # refuses a system's message
    ),
    "mistral": tuple(
        [
            ("<s>[INST] Add two.[/INST]", False),
            (" Five.</s>", True),
            (f"[INST] {system}Thanks[/INST]", False),
            (" Welcome.</s>", True),
        ]
        for system in ("", "Be brief.\n\n")  # before the last question
    ),
    "phi3": tuple(
        [
            (f"{system}<|user|>\nAdd two.<|end|>\n<|assistant|>\n", False),
            ("Five.<|end|>", True),
            ("\n<|user|>\nThanks<|end|>\n<|assistant|>\n", False),
            ("Welcome.<|end|>", True),
            ("\n<|endoftext|>", False),
        ]
        for system in ("", "<|system|>\nBe brief.<|end|>\n")
    ),
    "deepseek": tuple(
        [
            (f"<｜begin▁of▁sentence｜>{system}<｜User｜>Add two.<｜Assistant｜>", False),
            ("Five.<｜end▁of▁sentence｜>", True),
            ("<｜User｜>Thanks<｜Assistant｜>", False),
            ("Welcome.<｜end▁of▁sentence｜>", True),
        ]
        for system in ("", "Be brief.")
    ),
}


def test_every_family_has_its_expected_segments(families) -> None:
    assert set(PLAIN) == set(families)


@pytest.mark.parametrize("family", PLAIN)
def test_turns_without_system(family, chat_of, conversation_of, segments_of) -> None:
    chat = chat_of(family)
    assert segments_of(chat.tokenizer, chat.encode(conversation_of(*TWO_TURNS))) == PLAIN[family][0]


@pytest.mark.parametrize("family", PLAIN)
def test_turns_with_system(family, chat_of, conversation_of, segments_of) -> None:
    chat, conversation = chat_of(family), conversation_of(SYSTEM, *TWO_TURNS)
    if PLAIN[family][1] is None:
        with pytest.raises(BadExample, match="System role not supported") as error:
            chat.encode(conversation)
        assert error.value.reason == "template_refused"
        assert "line 3: {{- raise_exception" in str(error.value)
        return
    assert segments_of(chat.tokenizer, chat.encode(conversation)) == PLAIN[family][1]


@pytest.mark.parametrize("family", PLAIN)
def test_one_turn(family, chat_of, conversation_of, segments_of) -> None:
    """The first segments of two turns, where the template treats the last turn as the first."""
    chat = chat_of(family)
    found = segments_of(chat.tokenizer, chat.encode(conversation_of(*TWO_TURNS[:2])))
    first = PLAIN[family][0][1][0]
    thought = "<think>\n\n</think>\n\n" if family == "qwen3" else ""
    assert found[1] == (thought + first, True)
    assert [carries for _, carries in found].count(True) == 1


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        (
            "llama3",
            [
                (
                    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\n"
                    f"<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n{SCHEMA}\n\nWeather?<|eot_id|>"
                    "<|start_header_id|>assistant<|end_header_id|>\n\n",
                    False,
                ),
                ('{"name": "weather", "parameters": {"city": "Rome", "n": 2}}<|eot_id|>', True),
                (
                    '<|start_header_id|>ipython<|end_header_id|>\n\n"sunny"<|eot_id|>'
                    "<|start_header_id|>assistant<|end_header_id|>\n\n",
                    False,
                ),
                ("Sunny.<|eot_id|>", True),
            ],
        ),
        (
            "qwen2.5",
            [
                (
                    f"<|im_start|>system\nYou are helpful.\n\n# Tools\n<tools>\n{SCHEMA}\n</tools><|im_end|>\n"
                    "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n",
                    False,
                ),
                (
                    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "n": 2}}\n</tool_call><|im_end|>',
                    True,
                ),
                (
                    "\n<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
                    False,
                ),
                ("Sunny.<|im_end|>", True),
                ("\n", False),
            ],
        ),
        (
            "qwen3",
            [
                (
                    f"<|im_start|>system\n# Tools\n<tools>\n{SCHEMA}\n</tools><|im_end|>\n"
                    "<|im_start|>user\nWeather?<|im_end|>\n<|im_start|>assistant\n",
                    False,
                ),
                (
                    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "n": 2}}\n</tool_call><|im_end|>',
                    True,
                ),
                (
                    "\n<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
                    False,
                ),
                ("<think>\n\n</think>\n\nSunny.<|im_end|>", True),
                ("\n", False),
            ],
        ),
        (
            "mistral",
            [
                (f"<s>[AVAILABLE_TOOLS] [{SCHEMA}][/AVAILABLE_TOOLS][INST] Weather?[/INST]", False),
                (
                    '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome", "n": 2}, "id": "a12345678"}]</s>',
                    True,
                ),
                ('[TOOL_RESULTS] {"content": sunny, "call_id": "a12345678"}[/TOOL_RESULTS]', False),
                (" Sunny.</s>", True),
            ],
        ),
        (
            "deepseek",  # concatenates the arguments, so it is given their JSON text
            [
                ("<｜begin▁of▁sentence｜><｜User｜>Weather?<｜Assistant｜>", False),
                (
                    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n"
                    '{"city": "Rome", "n": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜><｜end▁of▁sentence｜>',
                    True,
                ),
                ("<｜tool▁output▁begin｜>sunny<｜tool▁output▁end｜><｜Assistant｜>", False),
                ("Sunny.<｜end▁of▁sentence｜>", True),
            ],
        ),
    ],
)
def test_tools(family, expected, chat_of, conversation_of, segments_of) -> None:
    chat = chat_of(family)
    assert segments_of(chat.tokenizer, chat.encode(conversation_of(*WITH_TOOLS, tools=[WEATHER]))) == expected


THOUGHTS = (
    ("user", "Add two."),
    {"role": "assistant", "content": "Five.", "reasoning_content": "Two and three."},
    ("user", "Thanks"),
    {"role": "assistant", "content": "Welcome.", "reasoning_content": "Be kind."},
)


def test_qwen3_drops_earlier_thoughts(chat_of, conversation_of, segments_of) -> None:
    chat = chat_of("qwen3")
    found = segments_of(chat.tokenizer, chat.encode(conversation_of(*THOUGHTS)))
    assert found == [
        *CHATML_TURNS[:3],
        ("<think>\nBe kind.\n</think>\n\nWelcome.<|im_end|>", True),
        ("\n", False),
    ]


def test_thoughts_inside_the_content_are_the_same(chat_of, conversation_of, segments_of) -> None:
    chat = chat_of("qwen3")
    inside = [("user", "Add two."), ("assistant", "<think>\nTwo and three.\n</think>\n\nFive.")]
    inside += [("user", "Thanks"), ("assistant", "<think>\nBe kind.\n</think>\n\nWelcome.")]
    beside = chat.encode(conversation_of(*THOUGHTS))
    found = chat.encode(conversation_of(*inside))
    assert found.ids.tolist() == beside.ids.tolist()
    assert found.trained.tolist() == beside.trained.tolist()


def test_what_the_prompt_forces_carries_no_loss(chat_of, conversation_of, segments_of) -> None:
    """With thinking off, the prompt writes the empty thought; history has none."""
    chat = chat_of("qwen3", variables={"enable_thinking": False})
    assert segments_of(chat.tokenizer, chat.encode(conversation_of(*TWO_TURNS))) == [
        *CHATML_TURNS[:2],
        ("\n<|im_start|>user\nThanks<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("Welcome.<|im_end|>", True),
        ("\n", False),
    ]
    of_the_row = conversation_of(*TWO_TURNS, chat_template_kwargs={"enable_thinking": False})
    assert segments_of(chat.tokenizer, chat_of("qwen3").encode(of_the_row))[3] == ("Welcome.<|im_end|>", True)


def test_a_prompt_that_opens_the_thought(chat_of, conversation_of, segments_of) -> None:
    chat = chat_of("deepseek")
    said = [*TWO_TURNS[:3], ("assistant", "<think>\nBe kind.\n</think>\n\nWelcome.")]
    assert segments_of(chat.tokenizer, chat.encode(conversation_of(*said)))[2:] == [
        ("<｜User｜>Thanks<｜Assistant｜><think>\n", False),
        ("Be kind.\n</think>\n\nWelcome.<｜end▁of▁sentence｜>", True),
    ]


@pytest.mark.parametrize("family", ["llama3", "gemma", "mistral"])
def test_trimmed_contents(family, chat_of, conversation_of) -> None:
    """Their templates trim answers, so spaces around them change nothing."""
    chat = chat_of(family)
    plain = chat.encode(conversation_of(("user", "Add"), ("assistant", "Five.")))
    spaced = chat.encode(conversation_of(("user", "Add"), ("assistant", " \n Five.\n ")))
    assert spaced.ids.tolist() == plain.ids.tolist()
    assert spaced.trained.tolist() == plain.trained.tolist()


def test_an_assistant_speaks_first(chat_of, conversation_of, segments_of) -> None:
    chat = chat_of("chatml")
    found = segments_of(chat.tokenizer, chat.encode(conversation_of(("assistant", "Hi."), *TWO_TURNS[:2])))
    assert found == [
        ("<|im_start|>assistant\n", False),
        ("Hi.<|im_end|>", True),
        ("\n<|im_start|>user\nAdd two.<|im_end|>\n<|im_start|>assistant\n", False),
        ("Five.<|im_end|>", True),
        ("\n", False),
    ]


def test_one_answer_inside_another(chat_of, conversation_of, segments_of) -> None:
    """Equal and nested texts are told apart by place."""
    chat = chat_of("chatml")
    said = (("user", "a"), ("assistant", "a"), ("user", "assistant\na"), ("assistant", "a a"))
    assert [text for text, carries in segments_of(chat.tokenizer, chat.encode(conversation_of(*said))) if carries] == [
        "a<|im_end|>",
        "a a<|im_end|>",
    ]


TAGS = "{%- generation -%}", "{%- endgeneration -%}"
UNTAGGED = re.compile("|".join(map(re.escape, TAGS)))


def test_tags_and_derivation_agree(chat_of, tokenizer_of, conversation_of) -> None:
    """The same template with its tags taken out gives the same mask."""
    tagged, untagged = (
        chat_of("tagged"),
        chat_of("tagged", source=UNTAGGED.sub("", tokenizer_of("tagged").chat_template)),
    )
    assert tagged.template.has_tags
    assert not untagged.template.has_tags
    for conversation in (conversation_of(SYSTEM, *TWO_TURNS), conversation_of(*TWO_TURNS[:2])):
        one, other = tagged.encode(conversation), untagged.encode(conversation)
        assert one.ids.tolist() == other.ids.tolist()
        assert one.trained.tolist() == other.trained.tolist()


def test_two_tags_in_a_message(chat_of, conversation_of, segments_of) -> None:
    source = (
        "{%- for message in messages -%}<|im_start|>{{ message['role'] }}{{ ': ' }}"
        "{%- if message['role'] == 'assistant' -%}"
        "{%- generation -%}{{ message['reasoning_content'] }}{%- endgeneration -%}"
        "{{ ' so ' }}{%- generation -%}{{ message['content'] }}<|im_end|>{%- endgeneration -%}"
        "{%- else -%}{{ message['content'] }}<|im_end|>{%- endif -%}{%- endfor -%}"
    )
    chat = chat_of("chatml", source=source)
    said = (("user", "Add"), {"role": "assistant", "content": "Five.", "reasoning_content": "Three."})
    assert segments_of(chat.tokenizer, chat.encode(conversation_of(*said))) == [
        ("<|im_start|>user: Add<|im_end|><|im_start|>assistant: ", False),
        ("Three.", True),
        (" so ", False),
        ("Five.<|im_end|>", True),
    ]


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}", "no end token"),
        (  # always ends with the begin of an answer: what ends a turn can't be told from it
            "{% for m in messages %}{{ '<|im_start|>' + m.role + ' ' + m.content + '<|im_end|>' }}{% endfor %}"
            "<|im_start|>assistant ",
            "no end token",
        ),
        (  # the prompt is another text than the turn's begin
            "{% for m in messages %}{{ '<|im_start|>' + m.role + ' ' + m.content + '<|im_end|>' }}{% endfor %}"
            "{% if add_generation_prompt %}Answer: {% endif %}",
            "what it writes before the turn",
        ),
    ],
)
def test_what_can_t_be_derived_is_refused_with_the_template_s_line(source, problem, chat_of, conversation_of) -> None:
    with pytest.raises(DataError, match=problem) as error:
        chat_of("chatml", source=source).encode(conversation_of(*TWO_TURNS))
    assert not isinstance(error.value, BadExample)
    assert "chat template, line 1: {% for m in messages %}" in str(error.value)


def test_an_answer_that_the_template_leaves_out(chat_of, conversation_of) -> None:
    source = "{% for m in messages if m.role == 'user' %}{{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(BadExample) as error:
        chat_of("chatml", source=source).encode(conversation_of(*TWO_TURNS))
    assert error.value.reason == "answer_lost"


def test_a_system_s_message_that_the_template_leaves_out(chat_of, conversation_of, tokenizer_of) -> None:
    source = "{%- set messages = messages[1:] -%}" + tokenizer_of("chatml").chat_template
    with pytest.raises(BadExample) as error:
        chat_of("chatml", source=source).encode(conversation_of(SYSTEM, *TWO_TURNS))
    assert error.value.reason == "message_lost"
    assert chat_of("chatml", source=source, keep_lost=True).encode(conversation_of(SYSTEM, *TWO_TURNS))
