"""Randomness as a function of where the run stands.

Before each batch the global generators are seeded from (seed, batch number). Dropout then needs no state to be saved,
an evaluation in between can't disturb it, and another number of ranks draws the same for the same batch.
"""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import torch

_accelerated = cache(torch.accelerator.is_available)  # each call would ask the driver


def seed_everything(seed: int) -> None:
    """Seed python, numpy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if _accelerated():
        torch.manual_seed(seed)
    else:  # torch would write down the call's stack for each kind of device that might still come: 1 ms
        torch.default_generator.manual_seed(seed)


def seed_batch(seed: int, number: int) -> None:
    """Seed all generators for batch `number`; neighbouring numbers give unrelated streams."""
    seed_everything(int(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)[0] >> np.uint64(1)))
