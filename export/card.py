"""The model card of an artifact, in the hub's format, from the run record."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from ..common.checkpoint import directory
from ..common.exportable import Exportable
from ..common.licenses import Verdict
from ..common.licenses import of as licenses_of
from ..common.recipe import Recipe
from ..common.secrets import distinct, named, without_secrets
from .formats import Target

PIPELINES = {
    "causal_lm": "text-generation",
    "speech_seq2seq": "automatic-speech-recognition",
    "ctc": "automatic-speech-recognition",
    "paraformer": "automatic-speech-recognition",
    "nemo": "automatic-speech-recognition",
    "embedding": "sentence-similarity",
    "multi_vector": "sentence-similarity",
    "sparse": "feature-extraction",
    "reranker": "text-ranking",
    "scorer": "text-classification",
    "text_to_image": "text-to-image",
}
"""What the hub calls a task, by form."""


def card(checkpoint: Path, recipe: Recipe, exportable: Exportable, target: Target, parity: Mapping[str, Any]) -> str:
    """The text of README.md.

    Args:
        checkpoint: of which the run record and metrics are told.
        recipe: the resolved recipe. Of paths only the last part is told, of what looks like a secret nothing.
        exportable: the model.
        target: the format.
        parity: `parity.json`.
    """
    record = _read(checkpoint / "run.json")
    metrics = _read(checkpoint / "metrics.json")
    base, licenses = named(recipe.model.path), licenses_of(recipe)
    parts = [
        _head(recipe, exportable, licenses, base),
        f"# {base}, tuned with Luthier\n",
        f"`{recipe.task.kind}`, tuned from `{base}`{' with an adapter' if exportable.adapts else ''}; exported to "
        f"`{target.format}` in {parity['dtype']} from `{checkpoint.name}`.\n",
        f"## Serve\n\nBy {target.runtime}:\n\n```\n{target.serve.format(path='PATH')}\n```\n",
        _licenses(licenses),
        _base(base, record),
        _data(record),
        _metrics(metrics),
        _parity(parity),
        f"## Recipe\n\n```yaml\n{yaml.safe_dump(clean(recipe.model_dump(mode='json')), sort_keys=False)}```\n",
        _versions(record),
    ]
    return "\n".join(part for part in parts if part)


def origin(checkpoint: Path, recipe: Recipe) -> dict[str, Any]:
    """What an artifact was made of, for programs: checkpoint, base model, data, metrics by slice, licenses."""
    record = _read(checkpoint / "run.json")
    manifest = directory.sha256(checkpoint / directory.MANIFEST)
    hashes = {
        name: distinct((named(path), digest) for path, digest in (facts.get("sha256") or {}).items())
        for name, facts in (record.get("data") or {}).items()
    }
    return {
        "checkpoint": {"name": checkpoint.name, "manifest_sha256": manifest},
        "base": {"name": named(recipe.model.path), "sha256": (record.get("model") or {}).get("sha256")},
        "data": hashes,
        "metrics": _read(checkpoint / "metrics.json"),
        "licenses": asdict(licenses_of(recipe)),
    }


def clean(value: Any) -> Any:
    """Plain values without secrets, users of addresses, and folders of this machine."""
    return without_secrets(value, text=named)


def _read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return found


def _head(recipe: Recipe, exportable: Exportable, licenses: Verdict, base: str) -> str:
    known: dict[str, Any] = {"library_name": exportable.library}
    if not Path(recipe.model.path).exists():
        known["base_model"] = recipe.model.path  # a hub name, which the hub links
    known["pipeline_tag"] = PIPELINES[exportable.form]
    if licenses.output != "other" or licenses.stated[base] != "unknown":
        known["license"] = licenses.output
    known["tags"] = ["luthier", recipe.task.kind.partition(".")[2]]
    return f"---\n{yaml.safe_dump(known, sort_keys=False)}---\n"


def _licenses(licenses: Verdict) -> str:
    rows = "\n".join(f"| {work} | {license} |" for work, license in licenses.stated.items())
    lines = "\n".join(f"- {line}" for line in licenses.lines)
    return f"## Licenses\n\nAs they are stated beside each; no legal advice.\n\n| work | license |\n| --- | --- |\n{rows}\n\n{lines}\n"  # noqa: E501


def _base(base: str, record: Mapping[str, Any]) -> str:
    digest = (record.get("model") or {}).get("sha256")
    return f"## Base model\n\n`{base}`{f', weights SHA-256 `{digest}`' if digest else ''}\n"


def _data(record: Mapping[str, Any]) -> str:
    rows = []
    for name, facts in (record.get("data") or {}).items():
        for path, digest in (facts.get("sha256") or {}).items():
            rows.append(f"| {name} | {named(path)} | {facts.get('rows', '')} | {digest or ''} |")
    if not rows:
        return ""
    return "\n".join(
        ["## Data\n", "| set | name | rows of the set | SHA-256 |", "| --- | --- | --- | --- |", *rows, ""]
    )


def _metrics(metrics: Mapping[str, Any]) -> str:
    plain = {name: value for name, value in metrics.items() if _is_number(value) and name != "step"}
    if not plain:
        return ""
    lines = ["## Metrics\n", "Of the checkpoint, on its validation set.\n", "| metric | value |", "| --- | --- |"]
    lines += [f"| {name} | {value:.4f} |" for name, value in plain.items()]
    for name, groups in (metrics.get("slices") or {}).items():
        names = sorted({key for values in groups.values() for key, value in values.items() if _is_number(value)})
        lines += ["", f"| {name} | {' | '.join(names)} |", f"| --- |{' --- |' * len(names)}"]
        for group, values in groups.items():
            cells = [f"{values[key]:.4f}" if _is_number(values.get(key)) else "" for key in names]
            lines.append(f"| {group} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _parity(parity: Mapping[str, Any]) -> str:
    same = parity["same_text"]
    text = "" if same is None else f" Of {parity['inputs']} texts {same} are the same."
    lines = [
        "## Compared with the trained model\n",
        f"In {parity['runtime'] or 'its library'}, on {parity['inputs']} inputs of the {parity['data']} set: the largest "  # noqa: E501
        f"difference is {parity['largest_difference']:.3g} (allowed: {parity['allowed_difference']:.3g}), the mean "
        f"{parity['mean_difference']:.3g}.{text}\n",
    ]
    if parity["metrics"]:
        lines += ["| metric | trained | artifact |", "| --- | --- | --- |"]
        for name, values in parity["metrics"].items():
            lines.append(f"| {name} | {_cell(values['trained'])} | {_cell(values['artifact'])} |")
    return "\n".join([*lines, ""])


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _versions(record: Mapping[str, Any]) -> str:
    rows = "\n".join(f"- {name} {value}" for name, value in (record.get("versions") or {}).items())
    return f"## Versions\n\n{rows}\n" if rows else ""
