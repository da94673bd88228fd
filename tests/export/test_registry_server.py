"""The registry on a server of MLflow's, which is a package of its own: without it these tests are skipped.

`MLFLOW_SERVER` names the program `mlflow` of another environment that has it.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from luthier.common.errors import ExportError
from luthier.export import artifact
from luthier.export.registry import Registry

pytest.importorskip("mlflow")
PROGRAM = os.environ.get("MLFLOW_SERVER") or (shutil.which("mlflow") if find_spec("flask") else None)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(PROGRAM is None, reason="mlflow-skinny has no server")]

SERVED = """
import mlflow
mlflow.set_tracking_uri(sys.argv[1])
place = pathlib.Path(mlflow.artifacts.download_artifacts("models:/speech@production", dst_path=sys.argv[2]))
print(json.dumps({str(path.relative_to(place)): path.read_text() for path in place.rglob("*") if path.is_file()}))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """(address, the folder in which it keeps artifacts) of a server."""
    folder = tmp_path_factory.mktemp("server")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        str(PROGRAM), "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{folder / 'server.db'}", "--artifacts-destination", str(folder / "kept"),
    ]  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    with (folder / "log").open("w") as log:
        lean = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        running = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=lean, start_new_session=True)
    try:
        answers(f"{address}/health", running, folder / "log")
        yield address, folder / "kept"
    finally:
        os.killpg(running.pid, 15)
        running.wait(60)


def answers(address: str, running: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a server answers."""
    until = time.monotonic() + 600
    while time.monotonic() < until:
        assert running.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(address, timeout=60) as found:
                assert found.status == 200
            return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(log.read_text())


def make(folder: Path, weights: str) -> Path:
    """An artifact as `luthier export` leaves it, with a folder in it."""
    (folder / "onnx").mkdir(parents=True)
    (folder / "onnx" / "model.onnx").write_text(weights)
    metrics = {"wer": {"trained": 0.25, "artifact": 0.25, "better": "min"}}
    parity = {"usable": True, "faults": [], "deciding_metric": "wer", "metrics": metrics}
    (folder / "parity.json").write_text(json.dumps(parity))
    artifact.seal(folder, {"kind": "asr.ctc", "licenses": {"usable": True}})
    return folder


def test_a_server_holds_the_artifact_itself(server, outside, tmp_path: Path) -> None:
    """It is served from there once the folder of this machine is gone, and what was changed there is not promoted."""
    address, kept = server
    place = make(tmp_path / "a", "some weights")
    texts = {str(path.relative_to(place)): path.read_text() for path in place.rglob("*") if path.is_file()}
    registry = Registry(address)
    made = registry.add(place, "speech")
    assert (made.number, made.stage) == (1, "candidate")
    assert made.source.startswith("runs:/")
    shutil.rmtree(place)
    assert registry.promote("speech", 1, "canary").stage == "canary"
    assert registry.promote("speech", 1, "production").stage == "production"
    assert outside(SERVED, address, tmp_path) == texts
    registry.add(make(tmp_path / "b", "other weights"), "speech")
    run = registry.version("speech", 2).source.split("/")[1]
    assert registry.client.get_run(run).info.status == "FINISHED"
    (held,) = kept.rglob(f"{run}/artifacts/artifact/onnx/model.onnx")
    held.write_text("weights that came by another way")
    with pytest.raises(ExportError, match=r"model\.onnx"):
        registry.promote("speech", 2, "canary")
    assert [one.stage for one in registry.versions("speech")] == ["production", "candidate"]
    with pytest.raises(ExportError, match="no such version"):
        registry.version("speech", 3)
