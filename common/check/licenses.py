"""May what is trained be passed on, by what the base model and the data state?"""

from __future__ import annotations

from .. import licenses
from ..errors import LuthierError
from ..recipe import Recipe


def permitted(recipe: Recipe) -> tuple[None, str]:
    """The licenses that are stated, and what follows; what is not known is said to be unknown, and fails nothing."""
    found = licenses.of(recipe)
    stated = "; ".join(f"{work}: {license}" for work, license in found.stated.items())
    told = f"{stated}. {' '.join(found.lines)}"
    if found.usable is False:
        raise LuthierError(
            "what is trained may not be passed on", where="model.path, data.train", given=told,
            expected="licenses that permit changed works and don't contradict one another",
            do="train from another model or on other data, or keep what is trained to yourself",
        )  # fmt: skip
    return None, told
