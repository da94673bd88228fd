"""Named entities, by Presidio where it is installed (`pip install presidio-analyzer`, and a model of spaCy)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from ..common.errors import LuthierError

ENTITIES = {"PERSON": "PERSON", "LOCATION": "LOCATION", "NRP": "GROUP", "ORGANIZATION": "ORGANIZATION"}
"""Presidio's entities, and the names of their placeholders; what has a form is found by `kinds`."""
SCORE = 0.5
"""Least score of an entity."""


def names(text: str, language: str) -> Iterator[tuple[int, int, str]]:
    """(begin, end, placeholder's name) of each entity of a text in a language, such as `en`."""
    analyzer = _analyzer(language)
    known = [name for name in ENTITIES if name in analyzer.get_supported_entities(language)]
    for found in analyzer.analyze(text=text, language=language, entities=known, score_threshold=SCORE):
        yield found.start, found.end, ENTITIES[found.entity_type]


@cache
def _analyzer(language: str) -> Any:
    try:
        from presidio_analyzer import AnalyzerEngine  # type: ignore[import-not-found]
        from presidio_analyzer.nlp_engine import NlpEngineProvider  # type: ignore[import-not-found]
    except ImportError as error:
        do = "pip install presidio-analyzer, or leave --names out"
        raise LuthierError("Presidio is not installed", where="--names", given=language, do=do) from error
    size = "core_web" if language in ("en", "zh") else "core_news"
    model = {"lang_code": language, "model_name": f"{language}_{size}_sm"}
    try:
        engine = NlpEngineProvider(nlp_configuration={"nlp_engine_name": "spacy", "models": [model]}).create_engine()
    except (OSError, SystemExit, ValueError) as error:
        do = f"install spaCy's model {model['model_name']}"
        raise LuthierError("there is no model for this language", where="--names", given=language, do=do) from error
    return AnalyzerEngine(nlp_engine=engine, supported_languages=[language])
