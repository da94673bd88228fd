"""What a mining run is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from ....common.errors import LuthierError, missing_extra
from .. import roles

Method = Literal["dense", "bm25", "both"]
Sample = Literal["top", "random"]
RELATIVE_MARGIN = 0.95
"""Default of `relative_margin` where scores are similarities (Moreira et al., NV-Retriever, arXiv:2407.15831)."""


@dataclass(frozen=True)
class Settings:
    """A mining run.

    Args:
        data: rows with a query and its positive documents, or a BEIR folder.
        output: JSONL file to write; what the run has done so far lies beside it, in `output` + `.parts`.
        model: directory of a sentence-transformers model; needed unless `method` is `bm25`.
        split: split of `data`.
        roles: which column of `data` is what; empty: told by the columns' names.
        corpus: further documents, rows with a `text` or a BEIR folder; documents of `data` are always candidates.
        method: what ranks the documents; `both` joins the two rankings by reciprocal rank fusion.
        negatives: number asked for, for each query.
        first: first rank that is taken, from 1; a query's positives have no rank.
        last: last rank that is taken.
        margin: a candidate with a score above the positive's less this is taken for a false negative; None: off.
        relative_margin: a candidate with at least this share of the positive's score is taken for a false negative;
            0: off; None: 0.95, and off for BM25 scores.
        max_similarity: a candidate with a higher score is taken for a false negative; None: off.
        sample: `top`: the candidates that rank first (with `rescore`: that score highest); `random`: any, by `seed`.
        seed: of the sampling.
        rescore: directory of a cross-encoder, whose logits then are the scores; None: similarities by `model` are.
        scores: also write the scores of positives and negatives: for distillation, or for a reranker that adds to them.
        query_prompt: before each query; None: the prompt that the model was saved with.
        document_prompt: before each document; None: the prompt that the model was saved with.
        batch: texts that run through a model at once.
        shard: documents that are held in memory at once.
        piece: texts of one file of embeddings, and queries of one file of results.
        rescored_piece: queries of one file of rescored candidates.
    """

    data: str
    output: Path
    model: str | None = None
    split: str | None = None
    roles: Mapping[str, str] = field(default_factory=dict)
    corpus: str | None = None
    method: Method = "dense"
    negatives: int = 5
    first: int = 1
    last: int = 100
    margin: float | None = None
    relative_margin: float | None = None
    max_similarity: float | None = None
    sample: Sample = "top"
    seed: int = 0
    rescore: str | None = None
    scores: bool = False
    query_prompt: str | None = None
    document_prompt: str | None = None
    batch: int = 64
    shard: int = 50_000
    piece: int = 4096
    rescored_piece: int = 256

    @property
    def parts(self) -> Path:
        """Folder of what the run has done so far."""
        return self.output.with_name(self.output.name + ".parts")

    @property
    def methods(self) -> tuple[str, ...]:
        return ("dense", "bm25") if self.method == "both" else (self.method,)

    @property
    def has_similarities(self) -> bool:
        """Whether scores can be compared with a margin: BM25's can't, they say how many words two texts share."""
        return self.rescore is not None or self.method != "bm25"

    @property
    def least_share(self) -> float:
        """`relative_margin` with its default; 0: off."""
        if self.relative_margin is None:
            return RELATIVE_MARGIN if self.has_similarities else 0.0
        return self.relative_margin

    def check(self) -> None:
        """Raises LuthierError for settings that don't fit together, and for a package that is not installed."""
        if "dense" in self.methods and self.model is None:
            raise LuthierError(
                "no model to embed with", where="--model", given=None, do="give --model, or --method bm25"
            )
        try:
            if self.roles:
                roles.layout_of_roles(self.roles)
        except ValueError as error:
            given = " ".join(f"{role}={column}" for role, column in self.roles.items())
            raise LuthierError(str(error), where="--role", given=given) from error
        if not 1 <= self.first <= self.last:
            given, expected = f"--first {self.first} --last {self.last}", "ranks from 1, the first not after the last"
            raise LuthierError("not a range of ranks", where="--first", given=given, expected=expected)
        if self.last - self.first + 1 < self.negatives:
            raise LuthierError(
                "the range of ranks has fewer candidates than negatives are asked for",
                where="--negatives",
                given=f"{self.negatives} negatives from ranks {self.first} to {self.last}",
                do="ask for fewer, or for a larger --last",
            )
        limits = {"--margin": self.margin, "--relative-margin": self.relative_margin}
        for name, value in (limits | {"--max-similarity": self.max_similarity}).items():
            if value and not self.has_similarities:
                problem = "BM25 scores are no similarities that a margin could be applied to"
                raise LuthierError(
                    problem, where=name, given=value, do="leave it out, or give --rescore or --method both"
                )
        for name, value in limits.items():
            if value is not None and value < 0:
                raise LuthierError("a margin is not negative", where=name, given=value, expected="0 or more")
        if self.output.exists() and not self.parts.exists():
            problem = "the file exists already, is of no earlier mining, and is not overwritten"
            raise LuthierError(problem, where=self.output, do="give another --output")
        if self.scores and not self.has_similarities:
            problem = "BM25 scores are not written: they differ from query to query in what they mean"
            raise LuthierError(problem, where="--scores", do="leave it out, or give --rescore or --method both")
        self._check_packages()

    def _check_packages(self) -> None:
        needed = {"sentence_transformers": "sentence-transformers"} if self.model or self.rescore else {}
        needed |= {"faiss": "faiss-cpu"} if "dense" in self.methods else {}
        needed |= {"bm25s": "bm25s"} if "bm25" in self.methods else {}
        for module, package in needed.items():
            if find_spec(module) is None:
                raise missing_extra(package, "embedding")
