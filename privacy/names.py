"""Named entities, by Presidio with a model of spaCy (`pip install 'luthier[names]'`, and a model for the language)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ..common.errors import LuthierError, missing_extra

ENTITIES = {"PERSON": "PERSON", "LOCATION": "LOCATION", "NRP": "GROUP"}
"""Presidio's entities that tell of a person, and the names of their placeholders; organizations are left, of which the
small models see far too many. What has a form is found by `kinds`."""
SIZES = ("sm", "md", "lg", "trf")
"""Ends of the models' names, the smallest first."""


def names(text: str, language: str) -> Iterator[tuple[int, int, str]]:
    """(begin, end, placeholder's name) of each entity of a text in a language, such as `en`."""
    for found in _analyzer(language).analyze(text=text, language=language, entities=list(ENTITIES)):
        yield found.start, found.end, ENTITIES[found.entity_type]


def model_of(language: str) -> str:
    """Name and version of the installed model of a language, the largest of several; nothing is downloaded.

    Raises:
        LuthierError: there is none.
    """
    model = _model(language)
    return f"{model.name} {model.dist.version if model.dist else ''}".strip()


def _model(language: str) -> EntryPoint:
    found = [one for one in entry_points(group="spacy_models") if one.name.split("_")[0] == language]
    if not found:
        name = f"{language}_{'core_web' if language in ('en', 'zh') else 'core_news'}_sm"
        raise LuthierError(
            "no model of spaCy for this language is installed",
            where="--names",
            given=language,
            do=f"install one, such as {name} (`python -m spacy download {name}`)",
        )
    return max(found, key=lambda one: [size in one.name.split("_") for size in reversed(SIZES)])


@cache
def _analyzer(language: str) -> Any:
    model = _model(language).name
    try:
        from presidio_analyzer import AnalyzerEngine, RecognizerRegistry
        from presidio_analyzer.nlp_engine import SpacyNlpEngine
        from presidio_analyzer.predefined_recognizers import SpacyRecognizer
    except ImportError as error:
        raise missing_extra("presidio-analyzer", "names") from error
    recognizer = SpacyRecognizer(supported_language=language, supported_entities=list(ENTITIES))
    return AnalyzerEngine(
        nlp_engine=SpacyNlpEngine([{"lang_code": language, "model_name": model}]),
        registry=RecognizerRegistry([recognizer], supported_languages=[language]),  # none that would ask the network
        supported_languages=[language],
    )
