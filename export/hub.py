"""Uploading an artifact, on explicit request only."""

from __future__ import annotations

import json
from pathlib import Path

from ..common.errors import ExportError
from .artifact import PARITY


def push(folder: Path, repository: str) -> str:
    """Upload an artifact to a hub repository, which is made private if there is none; gives its address.

    Raises:
        ExportError: the artifact is not usable, or the upload failed.
    """
    file = folder / PARITY
    if not file.is_file() or not json.loads(file.read_text(encoding="utf-8")).get("usable"):
        raise ExportError("only an artifact that passed its comparison is uploaded", where=folder)
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        address = api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(repo_id=repository, folder_path=str(folder), commit_message="luthier export")
    except (HfHubHTTPError, OSError, ValueError) as error:
        problem = str(error).strip().splitlines()[0]
        raise ExportError(f"the upload failed: {problem}", where=repository, given=folder) from error
    return str(address)
