"""The losses of pairs by name."""

from __future__ import annotations

from . import dpo
from .cpo import cpo
from .orpo import orpo
from .pairs import PairLoss
from .simpo import simpo

LOSSES: dict[str, PairLoss] = {**dpo.LOSSES, "orpo": orpo, "simpo": simpo, "cpo": cpo}
