"""Real processes for tests of several ranks, without waiting each time for the libraries to be imported.

Run as a script it is a server that has imported everything; it forks the processes of a launch: ranks as a script or
SLURM starts them, torchrun's agents with their ranks, or a single one. Each runs `luthier train` on the toy task.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

FILE = Path(__file__)
ROOT = FILE.resolve().parents[3]
OWN = ("LUTHIER_OUTPUT", "LOCAL_RANK", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK")


# ------------------------------------------------------------------------------------------------ in the tests


class Launched:
    """The processes of one launch; their output is in `log`, one file each."""

    def __init__(self, pids: list[int], log: Path):
        self.pids, self.log = pids, log

    def codes(self, timeout: float = 60) -> list[int]:
        """Exit codes of all, once they have ended; negative: the signal that killed it."""
        return _ask({"wait": self.pids, "timeout": timeout})["codes"]  # type: ignore[no-any-return]

    def said(self, number: int | None = None) -> str:
        """What the process with this number has printed, or all of them."""
        numbers = range(len(self.pids)) if number is None else [number]
        return "".join(Path(f"{self.log}.{at}").read_text() for at in numbers)


def start(
    log: Path, jobs: list[dict[str, Any]], environments: list[dict[str, str]], torchrun: list[str] | None = None
) -> Launched:
    """Start one process for each environment; each runs the jobs.

    Args:
        log: prefix of the files for their output.
        jobs: {"recipe": file, "overrides": [...], "actions": [...]}; see `Action`.
        environments: variables of each process, besides those of this one.
        torchrun: its options; each process is then an agent of torchrun that starts ranks.
    """
    request = {"log": str(log), "jobs": jobs, "environments": environments, "torchrun": torchrun}
    return Launched(_ask(request)["pids"], log)


def by_script(ranks: int) -> list[dict[str, str]]:
    """As a script starts ranks by hand."""
    port = str(free_port())
    common = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def by_slurm(ranks: int, job: str) -> list[dict[str, str]]:
    """As `srun` starts ranks on one node."""
    common = {
        "SLURM_NTASKS": str(ranks), "SLURM_NTASKS_PER_NODE": str(ranks), "SLURM_NNODES": "1", "SLURM_NODEID": "0",
        "SLURM_JOB_ID": job, "SLURM_JOB_NAME": "luthier", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    return [{**common, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(ranks)]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def until(done: Callable[[], Any], timeout: float = 60) -> None:
    """Wait until it is so."""
    before = time.monotonic()
    while not done():
        assert time.monotonic() - before < timeout, "it did not come to that within the time"
        time.sleep(0.05)


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in OWN and not name.startswith("SLURM_")}
    path = os.pathsep.join([str(ROOT / "src"), kept.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


@cache
def _server() -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    server = subprocess.Popen([sys.executable, str(FILE)], stdin=pipe, stdout=pipe, text=True, env=environment())
    atexit.register(server.kill)
    return server


def _ask(request: dict[str, Any]) -> Any:
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(request) + "\n")
    server.stdin.flush()
    answer = json.loads(server.stdout.readline())
    assert "late" not in answer, f"processes that have not ended: {answer['late']}"
    return answer


# ------------------------------------------------------------------------------------------------ in the processes


def _toy() -> Any:
    spec = importlib.util.spec_from_file_location("luthier_toy_module", FILE.with_name("toy.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    sys.modules.update(module.modules())
    module.kinds.modules()[module.KIND] = module.MODULE
    return module


def _do(what: str, output: Path, rank: int) -> None:
    """One action.

    hang: sleep forever; pause: write OUTPUT.at-RANK and wait for OUTPUT.go; stuck: wait in a call that runs no
    handlers; raise, refuse: an error; kill worker: a child process; any other: the name of a signal to this process.
    """
    from luthier.common.errors import LuthierError

    if what == "hang":
        while True:
            time.sleep(60)
    elif what == "pause":
        Path(f"{output}.at-{rank}").write_text(str(os.getpid()))
        until(Path(f"{output}.go").exists)
    elif what == "stuck":
        Path(f"{output}.at-{rank}").write_text(str(os.getpid()))
        mutex = ctypes.create_string_buffer(64)  # as a collective that waits for a rank: in C, undisturbed by signals
        for _ in range(2):
            ctypes.CDLL(None).pthread_mutex_lock(mutex)
    elif what == "raise":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    elif what == "refuse":
        raise LuthierError("the batch is not of this world", where="train.jsonl:7")
    elif what == "kill worker":
        import psutil

        psutil.Process().children()[0].kill()
    else:
        os.kill(os.getpid(), getattr(signal, what))


def _train(jobs: list[dict[str, Any]]) -> int:
    """Run the jobs as `luthier train` does; the exit code of the last one."""
    from lightning.pytorch import Callback

    from luthier.common import cli
    from luthier.common.training import run

    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", os.environ.get("LOCAL_RANK", "0"))))

    class Actions(Callback):
        def __init__(self, job: dict[str, Any]):
            self.job, self.output = job, Path(job["recipe"]).with_suffix("")

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            for action in self.job.get("actions", ()):
                if action["batch"] == batch_idx and rank in action.get("ranks", [rank]):
                    _do(action["do"], self.output, rank)

    train, code = run.train, 0
    for number, job in enumerate(jobs):
        run.train = partial(train, callbacks=[Actions(job)])
        try:
            code = cli.main(["train", job["recipe"], *job.get("overrides", [])]) or 0
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        finally:
            run.train = train
        Path(f"{job['recipe']}.{number}.rank{rank}").write_text(str(code))
    return code


def _agent(options: list[str], jobs: list[dict[str, Any]]) -> int:
    """What `torchrun OPTIONS` does, but that its ranks are forked instead of started anew."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, get_args_parser

    config, _, _ = config_from_args(get_args_parser().parse_args([*options, "--start-method", "fork", str(FILE)]))
    try:
        elastic_launch(config, _rank)(jobs)
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _rank(jobs: list[dict[str, Any]]) -> None:
    sys.exit(_train(jobs))


def _fork(request: dict[str, Any], number: int) -> int:
    if pid := os.fork():
        return pid
    code = 1
    try:
        os.setpgid(0, 0)
        log = os.open(f"{request['log']}.{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(request["environments"][number])
        jobs = request["jobs"]
        Path(f"{request['log']}.json").write_text(json.dumps(jobs))
        sys.argv = [str(FILE), f"{request['log']}.json"]  # what Lightning starts anew for the other ranks
        code = _agent(request["torchrun"], jobs) if request["torchrun"] else _train(jobs)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(pids: list[int], timeout: float) -> dict[str, Any]:
    codes: dict[int, int] = {}
    before = time.monotonic()
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() - before > timeout:
            return {"late": [pid for pid in pids if pid not in codes]}
        time.sleep(0.02)
    return {"codes": [codes[pid] for pid in pids]}


def serve() -> None:
    _toy()
    import torch.distributed.run

    import luthier.common.cli
    import luthier.common.training.run  # noqa: F401

    torch.set_num_threads(1)
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answer = _wait(request["wait"], request["timeout"])
        else:
            answer = {"pids": [_fork(request, number) for number in range(len(request["environments"]))]}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _toy()
        sys.exit(_train(json.loads(Path(sys.argv[1]).read_text())))
    serve()
