"""What is cut from examples that are too long."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from luthier.common.errors import BadExample
from luthier.modalities.llm.chat import encode_plain
from luthier.modalities.llm.conversation import Text
from luthier.modalities.llm.lengths import Cut, Limit, cut, fit
from luthier.modalities.llm.tokens import Tokens


def tokens(pattern: str) -> Tokens:
    """`h` fixed, `p` prompt, `a` answer, `.` what follows; ids count from 0."""
    signs = np.array(list(pattern))
    return Tokens(np.arange(len(signs)), signs == "a", signs == "p")


def kept(pattern: str, limit: Limit) -> str:
    found, _ = cut(tokens(pattern), limit)
    return "".join(pattern[number] for number in found.ids)


def test_what_fits_is_left_alone() -> None:
    one = tokens("hpa")
    assert cut(one, Limit(3)) == (one, Cut())
    assert not Cut()


def test_the_prompt_is_cut_at_the_asked_side() -> None:
    left, taken = cut(tokens("hppphaa"), Limit(5))
    assert left.ids.tolist() == [0, 3, 4, 5, 6]  # the first token and the one before the answer stay
    assert taken == Cut(prompt=2)
    right, _ = cut(tokens("hppphaa"), Limit(5, prompt="right"))
    assert right.ids.tolist() == [0, 1, 4, 5, 6]


def test_what_follows_the_answer_goes_first() -> None:
    found, taken = cut(tokens("hppaa.."), Limit(6))
    assert found.ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert taken == Cut(tail=1)


def test_the_answer_s_end_is_cut_only_if_asked() -> None:
    with pytest.raises(BadExample) as error:
        cut(tokens("hpaaaaaa"), Limit(4))
    assert error.value.reason == "too_long"
    assert kept("hpaaaaaa", Limit(4, answer="right")) == "hpaa"


def test_the_prompt_keeps_its_share() -> None:
    """Of 8 tokens half are the prompt's: it has 6, so 2 go, and the answer gives the other 4."""
    found, taken = cut(tokens("ppppppaaaaaaaa"), Limit(8, answer="right"))
    assert found.ids.tolist() == [2, 3, 4, 5, 6, 7, 8, 9]
    assert taken == Cut(prompt=2, answer=4)


def test_a_prompt_that_must_stay() -> None:
    with pytest.raises(BadExample):
        cut(tokens("ppppa"), Limit(4, prompt="keep"))
    assert kept("ppaaa", Limit(4, prompt="keep", answer="right")) == "ppaa"


def test_an_example_without_target() -> None:
    with pytest.raises(BadExample) as error:
        cut(tokens("hpp"), Limit(9))
    assert error.value.reason == "no_target"


@pytest.mark.parametrize("options", [{"max_length": 0}, {"max_length": 4, "prompt_share": 1.0}])
def test_limits_that_make_no_sense(options) -> None:
    with pytest.raises(ValueError, match="max_length"):
        Limit(**options)


limits = st.builds(
    Limit,
    st.integers(1, 20),
    prompt=st.sampled_from(["left", "right", "keep"]),
    answer=st.sampled_from(["right", "keep"]),
    prompt_share=st.sampled_from([0.0, 0.3, 0.5, 0.9]),
)


@given(pattern=st.text("hpa.", min_size=1, max_size=30), limit=limits)
def test_a_cut_fits_counts_and_never_removes_the_answer(pattern, limit) -> None:
    one = tokens(pattern)
    try:
        found, taken = cut(one, limit)
    except BadExample as error:
        if error.reason == "no_target":
            assert "a" not in pattern
            return
        # Refused only if nothing that the policy allows makes it fit, with one token of the answer at least.
        first, last = pattern.index("a"), pattern.rindex("a")
        fixed = pattern[:first].count("p") if limit.prompt == "keep" else 0
        fixed += first - pattern[:first].count("p")
        assert fixed + (1 if limit.answer == "right" else last + 1 - first) > limit.max_length
        return
    assert len(found) <= limit.max_length or not taken
    assert len(found) + taken.tokens == len(one)
    assert found.trained[found.ids.tolist().index(pattern.index("a"))]
    assert (np.diff(found.ids) > 0).all()
    assert [pattern[number] for number in found.ids if number < pattern.index("a")].count("h") == pattern[
        : pattern.index("a")
    ].count("h")


# ------------------------------------------------------------------------------------------------ conversations

SYSTEM = ("system", "Be brief.")
EXCHANGES = [[("user", f"Question {number}?"), ("assistant", f"Answer {number}.")] for number in range(6)]


@pytest.mark.parametrize("keep", range(1, 7))
def test_the_oldest_exchanges_are_dropped_whole(keep, chat_of, conversation_of) -> None:
    """A limit of exactly what the last `keep` exchanges take leaves these, and the system's message."""
    chat = chat_of("chatml")
    whole = conversation_of(SYSTEM, *chain(*EXCHANGES))
    wanted = conversation_of(SYSTEM, *chain(*EXCHANGES[-keep:]))
    expected = chat.encode(wanted)
    conversation, found, taken = fit(whole, chat, Limit(len(expected)))
    assert conversation.messages == wanted.messages
    assert found.ids.tolist() == expected.ids.tolist()
    assert taken == Cut(exchanges=6 - keep, messages=2 * (6 - keep))
    if keep < 6:
        assert fit(whole, chat, Limit(len(expected) + 1))[2] == taken


def test_the_last_exchange_is_cut_at_its_prompt(chat_of, conversation_of, segments_of) -> None:
    chat = chat_of("chatml")
    last = [("user", "one two three four five six"), ("assistant", "Seven.")]
    alone = chat.encode(conversation_of(SYSTEM, *last))
    conversation, found, taken = fit(conversation_of(SYSTEM, *EXCHANGES[0], *last), chat, Limit(len(alone) - 6))
    assert len(conversation.messages) == 3
    assert (taken.exchanges, taken.messages, taken.prompt, taken.tail) == (1, 2, 5, 1)
    text = chat.tokenizer.decode(found.ids.tolist())
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    assert text.endswith("six<|im_end|>\n<|im_start|>assistant\nSeven.<|im_end|>")


def test_exchanges_after_the_last_answer_with_loss_are_not_dropped_for(chat_of, conversation_of) -> None:
    """Only exchanges before the answer may go, so there is always one to learn."""
    chat = chat_of("chatml")
    first = [EXCHANGES[0][0], {"role": "assistant", "content": "Answer 0.", "train": True}]
    rest = [(one[0], {"role": "assistant", "content": one[1][1], "train": False}) for one in EXCHANGES[1:3]]
    whole = conversation_of(*first, *chain(*rest))
    needed = len(chat.encode(conversation_of(*first))) - 1
    conversation, found, taken = fit(whole, chat, Limit(needed))
    assert conversation == whole
    assert found.trained.any()
    assert taken == Cut(tail=len(chat.encode(whole)) - needed)


def test_all_turns_kept(chat_of, conversation_of) -> None:
    chat = chat_of("chatml")
    whole = conversation_of(*chain(*EXCHANGES))
    with pytest.raises(BadExample) as error:
        fit(whole, chat, Limit(20, turns="keep"))
    assert error.value.reason == "too_long"


def test_plain_text_is_cut_before_its_answer(tokenizer_of) -> None:
    tokenizer = tokenizer_of("chatml")
    one = encode_plain(tokenizer, Text(" b", "x:1", prompt="1 2 3 4"))
    found, taken = cut(one, Limit(len(one) - 2))
    assert found.ids.tolist() == one.ids.tolist()[2:]
    assert taken == Cut(prompt=2)
