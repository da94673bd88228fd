"""What licenses permit, by SPDX name, and what follows for a model made under several. Not legal advice: a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .secrets import distinct, named

if TYPE_CHECKING:
    from .recipe import Recipe

UNKNOWN = "unknown"


@dataclass(frozen=True)
class License:
    """What a license says of what is made from a work.

    Args:
        commercial: whether it may be used commercially.
        derivatives: whether changed works may be passed on.
        same: whether they have to stay under the same license.
        named: whether the source has to be named.
        note: a further condition.
    """

    commercial: bool = True
    derivatives: bool = True
    same: bool = False
    named: bool = True
    note: str = ""


_FREE = License()
_SAME = License(same=True)
_OWN = "the license has conditions of its own on use; read them"

LICENSES: Mapping[str, License] = {
    "apache-2.0": _FREE,
    "mit": _FREE,
    "bsd-2-clause": _FREE,
    "bsd-3-clause": _FREE,
    "isc": _FREE,
    "cc0-1.0": License(named=False),
    "unlicense": License(named=False),
    "pddl": License(named=False),
    "odc-by": _FREE,
    "cdla-permissive-2.0": _FREE,
    "cc-by-3.0": _FREE,
    "cc-by-4.0": _FREE,
    "cc-by-sa-3.0": _SAME,
    "cc-by-sa-4.0": _SAME,
    "odbl": _SAME,
    "gpl-3.0": _SAME,
    "lgpl-3.0": _SAME,
    "agpl-3.0": _SAME,
    "mpl-2.0": License(same=True, note="for the files that were changed"),
    "cc-by-nc-4.0": License(commercial=False),
    "cc-by-nc-sa-4.0": License(commercial=False, same=True),
    "cc-by-nd-4.0": License(derivatives=False),
    "cc-by-nc-nd-4.0": License(commercial=False, derivatives=False),
    "openrail": License(note=_OWN),
    "creativeml-openrail-m": License(note=_OWN),
    "openrail++": License(note=_OWN),
    "bigscience-openrail-m": License(note=_OWN),
    "llama2": License(note=_OWN),
    "llama3": License(note=_OWN),
    "llama3.1": License(note=_OWN),
    "llama3.2": License(note=_OWN),
    "llama3.3": License(note=_OWN),
    "gemma": License(note=_OWN),
}
"""Names as SPDX and the hub write them, in lower case."""


@dataclass(frozen=True)
class Verdict:
    """What may be done with a model made of several works.

    Args:
        stated: license of each work, by its name; `unknown` where none is stated.
        lines: what follows, one sentence each.
        usable: False: some license forbids passing it on; None: not known, as some license is not.
        output: the license that the model has to have, where one follows; else `other`.
    """

    stated: Mapping[str, str]
    lines: tuple[str, ...]
    usable: bool | None
    output: str


def verdict(stated: Mapping[str, str | None]) -> Verdict:
    """What follows from the licenses of the base model and the data.

    Args:
        stated: of each work, by its name; None: none is stated.
    """
    names = {work: (license or UNKNOWN).lower() for work, license in stated.items()}
    known = {work: LICENSES[name] for work, name in names.items() if name in LICENSES}
    unknown = [f"{work} ({name})" for work, name in names.items() if work not in known]
    forbidding = [work for work, one in known.items() if not one.derivatives]
    unpaid = [work for work, one in known.items() if not one.commercial]
    same = {names[work] for work, one in known.items() if one.same}
    clash = len(same) > 1 or (bool(unpaid) and any(LICENSES[name].commercial for name in same))
    lines = [f"Of these it is not known what they permit: {', '.join(unknown)}."] if unknown else []
    lines += [f"No changed work may be passed on, by the license of: {', '.join(forbidding)}."] if forbidding else []
    lines += [f"No commercial use, by the license of: {', '.join(unpaid)}."] if unpaid else []
    lines += [f"To be passed on under the same license: {', '.join(sorted(same))}."] if same else []
    if clash:
        lines.append("What these licenses ask for contradicts one another.")
    lines += [f"{work}: {one.note}." for work, one in known.items() if one.note]
    credited = [work for work, one in known.items() if one.named]
    lines += [f"To be named as sources: {', '.join(credited)}."] if credited else []
    usable = False if forbidding or clash else None if unknown else True
    return Verdict(names, tuple(lines), usable, "other" if unknown or clash else _output(set(names.values()), same))


def _output(every: set[str], same: set[str]) -> str:
    if len(every) == 1:
        return next(iter(every))
    return next(iter(same)) if same and not any(LICENSES[name].note for name in every - same) else "other"


def of(recipe: Recipe) -> Verdict:
    """What follows for a model that a recipe trains, from what its base and its training data state."""
    base = (named(recipe.model.path), stated_by(recipe.model.path))
    return verdict(distinct([base, *((source.label, stated_by(source.path)) for source in recipe.data.train)]))


def stated_by(place: str) -> str | None:
    """The license that a local model or data set states in the YAML head of its README.md; None: none is stated, or it
    is not on this machine."""
    folder = Path(place) if Path(place).is_dir() else Path(place).parent
    file = folder / "README.md"
    if not Path(place).exists() or not file.is_file():
        return None
    found = head(file.read_text(encoding="utf-8", errors="replace")).get("license")
    if isinstance(found, list):
        found = found[0] if len(found) == 1 else None
    return str(found) if isinstance(found, str) else None


def head(text: str) -> dict[str, Any]:
    """The YAML head of a README, {} without one."""
    import yaml

    if not text.startswith("---\n"):
        return {}
    try:
        found = yaml.safe_load(text[4:].partition("\n---")[0])
    except yaml.YAMLError:
        return {}
    return found if isinstance(found, dict) else {}
