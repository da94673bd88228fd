"""What devices can do by their makers' data sheets, and which share of that a training is assumed to reach."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import psutil
import torch

from ..errors import LuthierError
from ..explain import nearest

UTILISATION = 0.4
"""Share of the peak that a training reaches: published runs of dense transformers lie between 0.3 and 0.55."""


@dataclass(frozen=True)
class Device:
    """One device.

    Args:
        name: as in the command.
        half: peak of dense products in 16 bits with sums in 32, in operations a second.
        single: peak in 32 bits; with TensorFloat-32 where the device has it.
        memory: in bytes.
    """

    name: str
    half: float
    single: float
    memory: float

    def peak(self, precision: str) -> float:
        """Operations a second in a recipe's precision."""
        return self.single if precision == "32" else self.half


KNOWN = {
    device.name: device
    for device in (
        Device("b200", 2250e12, 1125e12, 180e9),
        Device("h200", 989e12, 494e12, 141e9),
        Device("h100", 989e12, 494e12, 80e9),
        Device("a100", 312e12, 156e12, 80e9),
        Device("a100-40", 312e12, 156e12, 40e9),
        Device("mi300x", 1307e12, 653e12, 192e9),
        Device("l40s", 362e12, 183e12, 48e9),
        Device("l4", 121e12, 60e12, 24e9),
        Device("a10", 125e12, 62e12, 24e9),
        Device("rtx4090", 165e12, 82e12, 24e9),
        Device("rtx3090", 71e12, 35e12, 24e9),
        Device("v100", 125e12, 15.7e12, 32e9),
        Device("t4", 65e12, 8.1e12, 16e9),
    )
}


def find(name: str | None) -> Device:
    """The device of a name; None: the one of this machine.

    Raises:
        LuthierError: it is not in the table.
    """
    if name is None:
        found = find(_here())
        if found.name == "cpu":
            return found
        return replace(found, memory=float(torch.cuda.get_device_properties(0).total_memory))
    if name == "cpu":
        speed = _speed()
        return Device("cpu", speed, speed, float(psutil.virtual_memory().total))
    if name not in KNOWN:
        raise LuthierError(
            "no such device in the table", where="--device", given=name, expected=nearest(name, ["cpu", *KNOWN]),
            do="name one that is like it, and give --memory",
        )  # fmt: skip
    return KNOWN[name]


def _here() -> str:
    """The name in the table of this machine's device."""
    if not torch.cuda.is_available():
        return "cpu"
    called = torch.cuda.get_device_name().lower().replace(" ", "")
    return max((name for name in KNOWN if name.partition("-")[0] in called), key=len, default=called)


def _speed(size: int = 512, seconds: float = 0.2) -> float:
    """Operations a second that products of matrices reach on this CPU, tried out."""
    one = torch.rand(size, size)
    one @ one
    began, number = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        one @ one
        number += 1
    return 2.0 * size**3 * number / (time.perf_counter() - began)
