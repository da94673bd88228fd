"""The registry of models: MLflow's, with what an artifact says of itself, and stages that have to be earned.

A version goes candidate -> canary -> production -> archived, one step at a time; from anywhere to archived. Canary and
production each are an alias of MLflow's, so that `models:/NAME@production` is what serves; they hold one version, and
the one that was there before is archived. A database keeps where an artifact lies, a server keeps the artifact.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..common.checkpoint.directory import sha256
from ..common.errors import ExportError, missing_extra
from ..common.secrets import command_without_secrets, named
from .artifact import ARTIFACT, PARITY

STAGES = ("candidate", "canary", "production", "archived")
HELD = ("canary", "production")
"""Stages that one version has at a time."""
PREFIX = "luthier."
STAGE = f"{PREFIX}stage"
"""The tag that a version of ours has."""
RUNS = "runs:/"
"""How the address of a file begins that a server holds: then come the run and its path in it."""
ABSENT = "RESOURCE_DOES_NOT_EXIST"
"""MLflow's code for what it doesn't have."""
EXPERIMENT, UPLOADED = "luthier registry", "artifact"
"""Where the runs of a server stand that hold artifacts, and each artifact's folder in its run."""


@dataclass(frozen=True)
class Version:
    """One version of a model.

    Args:
        name: of the model.
        number: of the version.
        stage: one of `STAGES`.
        source: folder of the artifact, or its address on the server, `runs:/RUN/artifact`.
        sha256: of its `artifact.json`, which holds the hash of each of its files.
        facts: what `artifact.json` says: kind, form, format, dtype, checkpoint, base, data, metrics, licenses.
        parity: what `parity.json` says; {}: there is none.
    """

    name: str
    number: int
    stage: str
    source: str
    sha256: str
    facts: Mapping[str, Any]
    parity: Mapping[str, Any]

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the artifact itself, by name."""
        found = {name: values.get("artifact") for name, values in (self.parity.get("metrics") or {}).items()}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def slices(self) -> dict[str, float]:
        """Metrics of the checkpoint by slice: `slice/value/metric`."""
        groups = (self.facts.get("metrics") or {}).get("slices") or {}
        return {
            f"{name}/{value}/{metric}": float(number)
            for name, values in groups.items()
            for value, found in values.items()
            for metric, number in found.items()
            if isinstance(number, int | float)
        }

    def lacks(self) -> list[str]:
        """Why it may not be served; nothing: it may."""
        found = [] if self.parity else ["there is no parity report"]
        found += [f"the parity report says: {fault}" for fault in self.parity.get("faults") or ()]
        if self.parity and not self.parity.get("usable") and not found:
            found.append("the parity report says that it is not usable")
        if self.parity.get("deciding_metric") not in self.metrics:
            found.append("there is no evaluation of the artifact")
        if (self.facts.get("licenses") or {}).get("usable") is False:
            found.append(" ".join(self.facts["licenses"]["lines"]))
        return found


class Registry:
    """A registry of MLflow's.

    Args:
        uri: `sqlite:///FILE`, the address of another database, or that of a server, `https://HOST`.
    """

    def __init__(self, uri: str):
        try:
            from mlflow import MlflowClient
            from mlflow.exceptions import MlflowException
        except ImportError as error:
            raise missing_extra("mlflow", "track") from error
        for name in ("alembic", "mlflow"):
            logging.getLogger(name).setLevel(logging.ERROR)  # they tell of each table that is made
        self.uri, self._error = named(uri), MlflowException
        with self._told(self.uri):
            self.client = MlflowClient(tracking_uri=uri, registry_uri=uri)

    @contextmanager
    def _told(self, where: str) -> Iterator[None]:
        """A context whose errors of MLflow's are told as ours."""
        try:
            yield
        except (self._error, OSError) as error:  # an upload fails with those of requests
            problem = next(iter(str(error).strip().splitlines()), type(error).__name__)
            given = command_without_secrets(problem)
            raise ExportError("MLflow's registry refuses this", where=where, given=given) from error

    def add(self, artifact: Path, name: str) -> Version:
        """Register an artifact as a candidate.

        Raises:
            ExportError: it is none, its files are not those that were sealed, or MLflow refuses it.
        """
        digest, facts = whole(artifact)
        parity = artifact / PARITY
        tags = {
            "stage": STAGES[0],
            "sha256": digest,
            "facts": json.dumps({key: value for key, value in facts.items() if key != "files"}),
            "parity": parity.read_text(encoding="utf-8") if parity.is_file() else "{}",
        }
        with self._told(name):
            if not self.client.search_registered_models(f"name = '{name}'"):
                self.client.create_registered_model(name)
            source, run = self._placed(artifact, name)
            made = self.client.create_model_version(
                name, source, run, tags={f"{PREFIX}{key}": value for key, value in tags.items()}
            )
        return self.version(name, int(made.version))

    def _placed(self, artifact: Path, name: str) -> tuple[str, str | None]:
        """(address, run) of an artifact. A server knows no folder of this machine and is sent the files, in a run."""
        if not self.uri.startswith("http"):
            return artifact.resolve().as_uri(), None
        known = self.client.get_experiment_by_name(EXPERIMENT)
        place = known.experiment_id if known else self.client.create_experiment(EXPERIMENT)
        run: str = self.client.create_run(place, run_name=name).info.run_id
        done = "FAILED"
        try:
            self.client.log_artifacts(run, str(artifact), UPLOADED)
            done = "FINISHED"
        finally:
            self.client.set_terminated(run, done)
        return f"{RUNS}{run}/{UPLOADED}", run

    @contextmanager
    def folder(self, version: Version) -> Iterator[Path]:
        """The folder of a version's artifact; what a server holds is fetched for that time.

        Raises:
            ExportError: the server doesn't give it.
        """
        if not version.source.startswith(RUNS):
            yield Path(version.source)
            return
        run, path = version.source.removeprefix(RUNS).split("/", 1)
        with TemporaryDirectory() as place:
            with self._told(version.source):
                found = Path(self.client.download_artifacts(run, path, place))
            yield found

    def version(self, name: str, number: int) -> Version:
        """A version that is registered.

        Raises:
            ExportError: there is none, or it is none of ours.
        """
        with self._told(name):
            try:
                found = self.client.get_model_version(name, str(number))
            except self._error as error:
                if error.error_code != ABSENT:
                    raise
                raise ExportError("there is no such version", where=name, given=number) from error
        if not _is_ours(found):
            raise ExportError("the version was not registered by `luthier registry add`", where=f"{name} {number}")
        return _read(found)

    def versions(self, name: str | None = None) -> list[Version]:
        """All versions, of one model or of all, by name and number."""
        with self._told(name or "all models"):
            found = self.client.search_model_versions(f"name = '{name}'" if name else None)
        ours = [_read(one) for one in found if _is_ours(one)]
        return sorted(ours, key=lambda one: (one.name, one.number))

    def promote(self, name: str, number: int, stage: str) -> Version:
        """Move a version to a stage.

        Raises:
            ExportError: the stage is not the next one, or the version has not earned it.
        """
        version = self.version(name, number)
        place = STAGES.index(version.stage)
        reachable = tuple(dict.fromkeys((*STAGES[place + 1 : place + 2], *(STAGES[3:] if place < 3 else ()))))
        if stage not in reachable:
            raise ExportError(
                f"a version that is {version.stage} can't become that", where=f"{name} {number}", given=stage,
                expected=" or ".join(reachable) or "nothing more", do="register the artifact again",
            )  # fmt: skip
        displaced: list[Version] = []
        if stage in HELD:
            self._earned(version)
            displaced = [other for other in self.versions(name) if other.stage == stage]
        with self._told(name):
            if stage in HELD:  # first, so that one serves at any time
                self.client.set_registered_model_alias(name, stage, str(number))
            if version.stage in HELD:
                self.client.delete_registered_model_alias(name, version.stage)
            self._tag(version, stage)
            for other in displaced:
                self._tag(other, "archived")
        return self.version(name, number)

    def _earned(self, version: Version) -> None:
        lacks = version.lacks()
        if not lacks:
            with self.folder(version) as folder:
                if whole(folder)[0] != version.sha256:
                    lacks = ["the artifact is another one than when it was registered"]
        if lacks:
            raise ExportError(
                "the version may not be served", where=f"{version.name} {version.number}", given="; ".join(lacks),
                do="export it anew with `luthier export`, and register that",
            )  # fmt: skip

    def _tag(self, version: Version, stage: str) -> None:
        self.client.set_model_version_tag(version.name, str(version.number), STAGE, stage)


def whole(artifact: Path) -> tuple[str, dict[str, Any]]:
    """(hash, facts) of an artifact's `artifact.json`, once all files are as it says.

    Raises:
        ExportError: it is no artifact, or a file is missing or another one.
    """
    file = artifact / ARTIFACT
    if not file.is_file():
        raise ExportError("no artifact of `luthier export`", where=artifact, expected=ARTIFACT)
    facts: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    for name, known in facts["files"].items():
        if not (artifact / name).is_file() or sha256(artifact / name) != known["sha256"]:
            raise ExportError("a file of the artifact is missing or another one", where=artifact / name)
    return sha256(file), facts


def _is_ours(found: Any) -> bool:
    return STAGE in found.tags


def _read(found: Any) -> Version:
    from urllib.parse import unquote, urlparse

    tags = {key.removeprefix(PREFIX): value for key, value in found.tags.items() if key.startswith(PREFIX)}
    source = found.source if found.source.startswith(RUNS) else unquote(urlparse(found.source).path)
    return Version(
        found.name, int(found.version), tags["stage"], source, tags["sha256"],
        json.loads(tags["facts"]), json.loads(tags["parity"]),
    )  # fmt: skip
