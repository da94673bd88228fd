"""Texts that are nearly the same, against comparing all pairs."""

from __future__ import annotations

import random
from itertools import combinations

from luthier.common.inspect.near import ALIKE, STRETCH, pairs


def in_common(one: list[str], other: list[str]) -> float:
    """Jaccard index of stretches, as it is defined."""
    sets = [{tuple(text[at : at + STRETCH]) for at in range(len(text) - STRETCH + 1)} for text in (one, other)]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def test_what_is_found_is_what_comparing_all_pairs_finds() -> None:
    """120 texts of 20 to 60 words, a third of them copies of others with up to 4 words changed."""
    draw = random.Random(0)
    words = [f"w{at}" for at in range(300)]
    texts = [draw.choices(words, k=draw.randint(20, 60)) for _ in range(80)]
    for at in range(40):
        copy = list(texts[at])
        for _ in range(at % 5):
            copy[draw.randrange(len(copy))] = draw.choice(words)
        texts.append(copy)
    expected = [
        (one, other)
        for one, other in combinations(range(len(texts)), 2)
        if in_common(texts[one], texts[other]) >= ALIKE
    ]
    assert 8 < len(expected) < 40, "there are pairs on both sides of the bound"
    assert pairs(texts) == expected


def test_words_in_another_order_are_not_the_same() -> None:
    text = [str(at) for at in range(30)]
    assert pairs([text, text[::-1]]) == []


def test_short_texts_and_no_texts() -> None:
    assert pairs([]) == []
    assert pairs([["a", "b"], ["a", "b"], [], []]) == []


def test_a_crowd_of_equal_texts_is_not_compared_pair_by_pair() -> None:
    texts = [["the", "same", "few", "words"]] * 300
    assert len(pairs(texts)) == 299
