"""Memory of a device or of this process: what is free, and what is used at most."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil
import torch


def free(device: torch.device) -> int:
    """Bytes that can still be had."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def restart(device: torch.device) -> None:
    """Measure the peak from here on."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):  # the kernel's high-water mark of this process
        Path("/proc/self/clear_refs").write_text("5")


def peak(device: torch.device) -> int:
    """Most bytes in use since `restart`: of the device, or of this process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    status = Path("/proc/self/status")
    for row in status.read_text().splitlines() if status.exists() else ():
        if row.startswith("VmHWM:"):
            return int(row.split()[1]) * 1024
    return int(psutil.Process().memory_info().rss)


def used(device: torch.device) -> int:
    """Bytes in use now."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return int(psutil.Process().memory_info().rss)
