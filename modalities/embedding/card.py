"""The model card of a trained model: what it is, what it was trained on, how it is used."""

from __future__ import annotations

from typing import Any

import yaml

USE = {
    "SentenceTransformer": "model.encode_query(queries), model.encode_document(documents)",
    "SparseEncoder": "model.encode_query(queries), model.encode_document(documents)",
    "MultiVectorEncoder": "model.encode_query(queries), model.encode_document(documents)",
    "CrossEncoder": "model.predict([(query, document), ...])",
}
FIRST = "A document's score is what the model says plus {weight:g} times the score of the stage that found it."


def card(recipe: Any, kind: str) -> str:
    """The text of a model card.

    Args:
        recipe: the resolved recipe; names of data and base model are taken from it, not their paths.
        kind: class of sentence-transformers that loads the model.
    """
    base = recipe.model.path.rstrip("/").rpartition("/")[2]
    tags = ["sentence-transformers", recipe.task.kind.partition(".")[2], "luthier"]
    head = yaml.safe_dump({"library_name": "sentence-transformers", "tags": tags}, sort_keys=False)
    data = "\n".join(f"- {source.label} (weight {source.weight:g})" for source in recipe.data.train)
    prompts = {name: value for name, value in recipe.data.prompts.model_dump().items() if value}
    used = "\n".join(f"- {name}: `{value!r}`" for name, value in prompts.items()) or "none"
    weight = getattr(recipe.evaluate, "first_stage", 0.0)
    added = f"\n{FIRST.format(weight=weight)}\n" if weight else ""
    loss = yaml.safe_dump(recipe.task.loss.model_dump(mode="json"), sort_keys=False)
    return f"""---
{head}---

# {base}, tuned with Luthier

A `{kind}` of sentence-transformers, tuned from `{base}`{" with an adapter" if recipe.model.lora else ""}.

```python
from sentence_transformers import {kind}

model = {kind}("this folder")
{USE[kind]}
```
{added}
## Training data

{data}

## Prompts

{used}

## Loss

```yaml
{loss}```
"""
