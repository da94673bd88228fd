"""The toy task under DeepSpeed: as a script it trains the jobs of a JSON file, as `toy.py` does.

Stage 3 leaves small parameters whole; here it may not, as all of them are small.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "training"))

import torch
import toy
from torch import Tensor

from luthier.common import kinds
from luthier.common.strategies import deepspeed

_config = deepspeed.config
_forward = toy.Net.forward


def config(recipe: Any) -> dict[str, Any]:
    made = _config(recipe)
    if made["zero_optimization"]["stage"] == 3:
        made["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    return made


def forward(self: Any, x: Tensor) -> Tensor:
    """With input in the weights' format, as the models of the modalities have it."""
    given = x if torch.is_autocast_enabled(x.device.type) else x.to(self.first.weight.dtype)
    return _forward(self, given).float()


def main() -> None:
    deepspeed.config = config
    toy.Net.forward = forward
    sys.modules.update(toy.modules())
    kinds.modules()[toy.KIND] = toy.MODULE
    for job in json.loads(Path(sys.argv[1]).read_text()):
        toy._run(job, int(os.environ.get("LOCAL_RANK", "0")))


if __name__ == "__main__":
    main()
