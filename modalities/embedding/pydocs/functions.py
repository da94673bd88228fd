"""Pairs of a function and its documentation, from Python's own standard library."""

from __future__ import annotations

import ast
import json
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

SKIPPED = {
    "__phello__", "__pycache__", "distutils", "dist-packages", "ensurepip", "idlelib", "lib-dynload", "lib2to3",
    "pydoc_data", "site-packages", "test", "tests", "tkinter", "turtledemo",
}  # fmt: skip
"""Folders left out: tests, made tables, and what distributions package separately."""

SHORTEST = 16
"""Characters of the shortest documentation that is used."""


def pairs() -> list[dict[str, str]]:
    """Rows of `anchor` (a function's name and signature), `positive` (the first paragraph of its documentation) and
    `module`; no text occurs twice. Source code is read, and none is run."""
    seen: set[str] = set()
    rows = []
    for name, signature, documentation in _documented():
        first = " ".join(documentation.split("\n\n")[0].split())
        if len(first) < SHORTEST or first in seen or name + signature in seen:
            continue
        seen |= {first, name + signature}
        rows.append({"anchor": name + signature, "positive": first, "module": name.partition(".")[0]})
    return rows


def make_pairs(folder: Path, seed: int = 0, validation: int = 400, test: int = 1000) -> None:
    """Write `train.jsonl`, `validation.jsonl` and `test.jsonl`; the same Python and arguments give the same files.

    Args:
        folder: where the files go; made if need be.
        seed: which functions are held out.
        validation: number of functions for evaluation during training.
        test: number of functions for the last evaluation.
    """
    rows = pairs()
    order = np.random.default_rng(seed).permutation(len(rows))
    parts = {"validation": order[:validation], "test": order[validation : validation + test]}
    parts["train"] = order[validation + test :]
    folder.mkdir(parents=True, exist_ok=True)
    for name, places in parts.items():
        lines = [json.dumps(rows[at], ensure_ascii=False) + "\n" for at in places]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def _documented() -> Iterator[tuple[str, str, str]]:
    """(name, signature, documentation) of each function, in the order of files and lines."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        if SKIPPED & set(parts) or parts[0].startswith(("config-", "_sysconfigdata")):
            continue
        module = ".".join(parts).removesuffix(".__init__")
        yield from _within(ast.parse(file.read_bytes()), module)


def _within(node: ast.AST, prefix: str) -> Iterator[tuple[str, str, str]]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        name = f"{prefix}.{child.name}"
        documentation = ast.get_docstring(child)
        if documentation and not isinstance(child, ast.ClassDef):
            yield name, f"({ast.unparse(child.args)})", documentation.strip()
        yield from _within(child, name)
