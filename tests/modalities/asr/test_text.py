"""Normalised text, and the units that are counted. The expected forms are Whisper's own, or derived by hand."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.whisper.english_normalizer import BasicTextNormalizer, EnglishTextNormalizer

from luthier.modalities.asr.text import is_unsegmented, normalize, words

whisper_basic = BasicTextNormalizer(remove_diacritics=False)
whisper_english = EnglishTextNormalizer({})

WITHOUT_MARKS = [
    ("it", "Perché no? L'università è (forse) più «lontana» — e così via..."),
    ("fr", "Ça va ? J'ai déjà mangé à l'hôtel, naïvement [rires]; où êtes-vous ?"),
    ("de", "Straße, Größe & Übermut: „Schön!“ 3,5 % <lacht>"),
    ("es", "¿Mañana? ¡Sí, señor! El pingüino nº 2."),
    ("ru", "Ёжик и йод — «всё ещё» №5, объект?"),
    ("zh", "我喜欢猫,你呢?「是的」。"),
    ("ja", "コーヒーを、ください!がんばって。"),
    ("ko", "안녕하세요, 세계!"),
    (None, "ΑΒΓ, ½ TEXT™"),
]


@pytest.mark.parametrize(("language", "text"), WITHOUT_MARKS)
def test_equals_whisper_where_there_is_no_mark(language, text):
    assert normalize(text, language) == whisper_basic(text).strip()


# Unassigned ones (Cn) are left out: `regex` may know a newer Unicode than Python does, where they are marks.
@given(st.text(alphabet=st.characters(exclude_categories=["Mn", "Mc", "Me", "Cf", "Cs", "Cn"], exclude_characters="İ")))
@settings(max_examples=200, deadline=None)
def test_equals_whisper_on_any_text_that_has_no_mark(text):
    composed = unicodedata.normalize("NFKC", text)
    if not any(unicodedata.category(c)[0] == "M" for c in composed):
        assert normalize(text, "it") == " ".join(whisper_basic(unicodedata.normalize("NFC", text)).split())


@pytest.mark.parametrize("language", ["en", "EN", "en-US", "en_gb", "English"])
def test_english_equals_whisper(language):
    text = "Mr. Neil can't pay $20 million, um, for the CAFÉ (no way) on the twenty-first!"
    assert normalize(text, language) == whisper_english(text).strip()
    assert normalize(text, language).startswith("mister neil can not pay $20000000 for the cafe")


def test_english_spellings_are_the_callers():
    assert normalize("The COLOUR.", "en") == "the colour"
    assert normalize("The COLOUR.", "en", {"colour": "color"}) == "the color"
    assert normalize("colour", "it", {"colour": "color"}) == "colour"


@pytest.mark.parametrize(
    ("language", "text", "expected"),
    [
        ("hi", "हिन्दी, में।", "हिन्दी में"),
        ("bn", "বাংলাদেশের রাজধানী ঢাকা।", "বাংলাদেশের রাজধানী ঢাকা"),
        ("ta", "தமிழ்! மொழி", "தமிழ் மொழி"),
        ("th", "ที่นี่ “น้ำ”", "ที่นี่ น้ำ"),
        ("lo", "ນ້ຳ", "ນ້ຳ"),
        ("km", "ភាសា\u200bខ្មែរ។", "ភាសា ខ្មែរ"),
        ("my", "မြန်မာ၊", "မြန်မာ"),
        ("ar", "مُحَمَّد، هنا؟", "مُحَمَّد هنا"),
        ("he", "שָׁלוֹם!", "שָׁלוֹם"),
        ("yo", "Ọ̀rẹ́, mi", "ọ̀rẹ́ mi"),
    ],
)
def test_marks_on_letters_stay(language, text, expected):
    assert normalize(text, language) == unicodedata.normalize("NFKC", expected).replace("ํา", "ำ").replace("ໍາ", "ຳ")
    assert len(normalize(text, language).split()) < len(whisper_basic(text).split())


def test_accents_stay_and_their_encoding_does_not_matter():
    assert normalize("È perché", "it") == "è perché"
    assert normalize("El Niño", "es") == "el niño"
    assert normalize(unicodedata.normalize("NFD", "È perché İ"), "it") == normalize("È perché İ", "it")


def test_case_does_not_count_in_turkish():
    assert normalize("İSTANBUL IŞIK", "tr") == normalize("istanbul ışık", "tr") == "istanbul ışık"
    assert normalize("İstanbul", "it") == "istanbul"


def test_invisible_characters_are_no_words():
    assert normalize("\ufeffso\u00adle \u200d mio \u200f❤️‍🔥 1️⃣", "it") == "sole mio 1"
    assert normalize("葛\U000e0100城", "ja") == "葛城"
    assert normalize("می‌روم", "fa") == "می‌روم", "the joiner is part of the spelling"


@pytest.mark.parametrize("language", ["en", "hi", "zh", None])
@given(text=st.text())
@settings(max_examples=100, deadline=None)
def test_single_spaces_and_none_at_the_ends(language, text):
    result = normalize(text, language)
    assert result == " ".join(result.split())


@pytest.mark.parametrize(
    "language", ["zh", "zh-CN", "cmn_hans_cn", "Chinese", "yue", "JA", "th_th", "lo", "my", "km", "bo"]
)
def test_unsegmented(language):
    assert is_unsegmented(language)


@pytest.mark.parametrize("language", ["it", "ko", "vi", "hi", "english", "", None])
def test_segmented(language):
    assert not is_unsegmented(language)


def test_words():
    assert words(" il  gatto\tnero\n", "it") == ["il", "gatto", "nero"]
    assert words("我 喜欢猫", "zh-CN") == ["我", "喜", "欢", "猫"]
    assert words(normalize("ที่นี่ น้ำ", "th"), "th") == ["ที่", "นี่", "น้ำ"]
    assert words("  ", "it") == words("  ", "zh") == []
