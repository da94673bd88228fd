"""`luthier doctor`: versions, devices, and what each extra can do here."""

from __future__ import annotations

import os
import shutil
from importlib.metadata import PackageNotFoundError, requires, version

from rich.table import Table

from . import record
from .console import console

SKIPPED = {"dev"}


def doctor() -> None:
    """Print what is installed, what is missing for each extra, devices and disk."""
    table = Table("package", "version")
    for name, found in record.versions().items():
        table.add_row(name, found)
    console.print(table)
    extras = Table("extra", "state")
    for extra, packages in sorted(extra_packages().items()):
        missing = [package for package in packages if not _installed(package)]
        state = f"missing {', '.join(missing)}: pip install 'luthier\\[{extra}]'" if missing else "ready"
        extras.add_row(extra, state)
    console.print(extras)
    free = shutil.disk_usage(os.getcwd()).free
    for device in record.devices():
        console.print(f"device: {device}", highlight=False)
    console.print(f"disk: {free / 1e9:.0f} GB free here", highlight=False)


def extra_packages() -> dict[str, list[str]]:
    """The packages of each extra, from the installed package's own metadata."""
    from packaging.requirements import Requirement

    found: dict[str, list[str]] = {}
    for text in requires("luthier") or []:
        requirement = Requirement(text)
        marker = str(requirement.marker or "")
        if "extra ==" not in marker:
            continue
        extra = marker.split("extra ==")[1].strip().strip("\"'")
        if extra not in SKIPPED and requirement.name != "luthier":
            found.setdefault(extra, []).append(requirement.name)
    return found


def _installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True
