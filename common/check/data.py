"""Is the data whole, apart from what it is judged by, and does the right part of it carry loss?"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Hashable

import torch

from ..console import progress
from ..data.collect import Collected
from ..data.plan import Plan
from ..errors import DataError, LuthierError
from ..inspect.statistics import padding
from ..training import data
from .checklist import NotApplicable
from .subject import Subject, largest

SETS = ("train", "validation", "regression", "test")


def counted(subject: Subject, name: str) -> tuple[Collected, str]:
    """Read and check a set; every row is accounted for."""
    if not getattr(subject.recipe.data, name):
        raise NotApplicable(f"the recipe has no data.{name}")
    began = time.perf_counter()
    collected = data.gather(subject.recipe, subject.processing, name)
    assert collected is not None
    if name == "train":
        subject.reading = time.perf_counter() - began
    subject.sets[name] = collected
    lines = [f"{collected.part}{collected.report.summary()}"]
    lines += [f"  {named[0]}" for named in collected.report.named.values()]
    return collected, "\n".join(lines)


def apart(subject: Subject) -> tuple[None, str]:
    """Whether nothing that the model is judged by is trained on: the same content, whatever the file or row."""
    known: Counter[int] = Counter()
    with progress("comparing data", "examples") as show:
        for done, example in enumerate(subject.given.examples, 1):
            known.update(map(_number, subject.processing.contents(example)))
            show(done, len(subject.given.examples))
    if not known:
        raise NotApplicable("what two of these examples share is not known")
    leaks = []
    for name in (each for each in SETS if each != "train" and each in subject.sets):
        examples = subject.sets[name].examples
        found = [one for one in examples if any(_number(key) in known for key in subject.processing.contents(one))]
        if found:
            first = subject.processing.name(found[0])
            leaks.append(f"data.{name}: {len(found)} of {len(examples)} examples, such as {first}")
    if leaks:
        raise DataError(
            "examples that the model is judged by are in the training data too",
            where="data.train",
            given="; ".join(leaks),
            do="take them out of data.train, or split the data anew",
        )
    again = sum(known.values()) - len(known)
    repeated = f"; {again} of its examples are there more than once" if again else ""
    return None, f"nothing of the other sets is in the training data{repeated}"


def _number(content: Hashable) -> int:
    """64 bits of a content, so that those of a whole data set stay in memory."""
    told = content if isinstance(content, bytes) else repr(content).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "big")


def doubts(subject: Subject) -> tuple[None, str]:
    """What the modality finds wrong with the checked examples together."""
    found: list[LuthierError] = list(subject.processing.doubts(subject.given.examples))
    if found:
        error = found[0]
        if len(found) == 1:
            raise error
        raise DataError("\n".join(one.told for one in found), do="\n".join(one.do for one in found if one.do))
    return None, f"{subject.processing.unit} of {len(subject.given.examples)} examples looked at"


def planned(subject: Subject) -> tuple[Plan, str]:
    """The batches of the training."""
    recipe = subject.recipe
    plan = data.plan(recipe, subject.given, subject.processing, 1, recipe.train.accumulate)
    if recipe.optim.warmup >= 1 and recipe.optim.warmup >= plan.steps:
        raise LuthierError(
            "the warm-up is as long as the training, so the learning rate is never reached",
            where="optim.warmup",
            given=f"{recipe.optim.warmup:g} of {plan.steps} optimizer steps",
            do="give a share, such as optim.warmup=0.1, or train longer",
        )
    subject.plan = plan
    return plan, f"{plan.steps} optimizer steps of {plan.per_step} batches; {padding(plan):.0%} padding"


def carries(subject: Subject) -> tuple[None, str]:
    """What carries loss in the largest batch, as the model sees it."""
    assert subject.plan is not None
    batch = subject.batch(largest(subject.plan))
    if batch.bad:
        raise batch.bad[0]
    shown = subject.processing.show(batch.data, 0)
    carrying = "".join(piece for piece, carries_loss in shown.tokens if carries_loss).strip()
    rest = sum(not carries_loss for _, carries_loss in shown.tokens)
    short = carrying if len(carrying) <= 160 else f"{carrying[:80]} ... {carrying[-75:]}"
    return None, f"{shown.title}: {short!r} carries loss, {rest} pieces do not"


def same(one: object, other: object) -> bool:
    """Whether two collated batches hold the same tensors."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and all(key in other and same(one[key], other[key]) for key in one)
    return True
