"""What is claimed in the README is what the tests show: each pair of task and format names the runtime that ran it."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from luthier.export import formats

HERE = Path(__file__).parent
README = HERE.parents[1] / "README.md"

FORMS = {
    "llm.sft": "causal_lm", "llm.dpo": "causal_lm", "llm.pretrain": "causal_lm", "asr.whisper": "speech_seq2seq",
    "asr.ctc": "ctc", "asr.paraformer": "paraformer", "asr.nemo": "nemo", "embedding.dense": "embedding",
    "embedding.sparse": "sparse", "embedding.multi_vector": "multi_vector", "embedding.reranker": "reranker",
    "diffusion.text_to_image": "text_to_image",
}  # fmt: skip


def claims() -> dict[str, dict[str, list[str]]]:
    """Kind -> format -> runtimes, of the marks `serves(format, kind, runtime)` on the tests beside this one."""
    found: dict[str, dict[str, list[str]]] = {kind: defaultdict(list) for kind in FORMS}
    for file in sorted(HERE.glob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            for mark in getattr(node, "decorator_list", ()):
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.serves":
                    format, kind, runtime = (ast.literal_eval(value) for value in mark.args)
                    found[kind][format].append(runtime)
    return found


def lines() -> list[str]:
    """The table as the README has it."""
    order = list(dict.fromkeys(target.format for target in formats.TARGETS))
    rows = []
    for kind, told in claims().items():
        cells = [f"{name} ({', '.join(told[name])})" for name in order if name in told]
        rows.append(f"| `{kind}` | {'; '.join(cells)} |")
    return rows


def test_every_pair_that_can_be_exported_has_a_test_that_serves_it() -> None:
    shown = {(format, FORMS[kind]) for kind, told in claims().items() for format in told}
    assert shown == {(target.format, target.form) for target in formats.TARGETS}


def test_the_table_of_tasks_in_the_readme_is_made_from_the_tests() -> None:
    """To renew it, print `lines()`."""
    text = README.read_text(encoding="utf-8").splitlines()
    begin = text.index("| task | formats, and what ran them in a test |") + 2
    assert text[begin : begin + len(lines())] == lines()
    assert not text[begin + len(lines())].startswith("|")
