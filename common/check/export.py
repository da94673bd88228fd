"""Does what is trained become what is served? The model merged, saved and loaded by its own library."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from ..data.plan import Planned
from ..data.processing import PlannedData
from ..errors import ExportError
from ..exportable import Exportable, comparable
from ..task import Task
from .checklist import NotApplicable
from .subject import Subject

INPUTS = 2
EXACT, ROUNDED = 2.0**-13, 2.0**-4
"""Largest difference as a share of the largest number: of 32 bits, and of fewer or of a quantised base."""


def exportable(subject: Subject, task: Task) -> tuple[Exportable, str]:
    """Whether the kind can be exported at all."""
    try:
        found = task.exportable()
    except ExportError as error:
        raise NotApplicable(error.problem, "use model/ of a checkpoint, which is in the model's own format") from error
    how = "an adapter, which is merged" if found.adapts else "the whole model"
    return found, f"{found.form}, {how}; see `luthier export --help` for formats"


def merged(subject: Subject, found: Exportable, folder: Path) -> tuple[None, str]:
    """What the trained model makes of a few inputs, and what the saved one makes of them in its own library."""
    recipe, task = subject.recipe, found.task.cpu().eval()
    name = next(each for each in ("validation", "test", "train") if each in subject.sets)
    batches = PlannedData(task.processing, subject.sets[name].examples, None)
    chosen = [batches[Planned(-1 - at, 0, (at,))] for at in range(min(INPUTS, len(subject.sets[name].examples)))]
    datas = [batch.data for batch in chosen if batch.data is not None]
    with torch.no_grad():
        runner = found.trained()
        expected = [output for data in datas for output in found.outputs(runner, data)]
        try:
            found.save(folder)
        except ExportError as error:  # such as an adapter of a quantised base, which is served beside it
            raise NotApplicable(error.problem, str(error.do or "")) from error
        runner = found.load(folder)
        after = [output for data in datas for output in found.outputs(runner, data)]
    pairs = [comparable(one, other) for one, other in zip(expected, after, strict=True)]
    scale = max(float(np.abs(one).max(initial=0.0)) for one, _ in pairs) or 1.0
    apart = max(float(np.abs(one.astype(np.float64) - other).max(initial=0.0)) for one, other in pairs) / scale
    rounded = recipe.train.precision == "bf16-true" or getattr(recipe.model, "quantization", "none") != "none"
    bound = ROUNDED if rounded else EXACT
    if not apart <= bound or math.isnan(apart):
        raise ExportError(
            "what is exported is not the model that was trained",
            given=f"outputs differ by {apart:.2g} of the largest",
            expected=f"at most {bound:.2g}",
        )
    return None, f"outputs of {len(pairs)} inputs within {apart:.1g} of the largest"
