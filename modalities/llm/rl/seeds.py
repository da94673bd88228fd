"""Seeds of what is drawn."""

from __future__ import annotations

import numpy as np


def seed(*key: int) -> int:
    """A seed of 63 bits, unrelated to those of other keys."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1))
