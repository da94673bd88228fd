"""Ranks that watch each other: a run of several processes that hangs or loses one ends soon, and says why.

Each rank has a thread that writes, every second, how far its main thread is to a file in OUTPUT/.ranks/, and reads the
files of the others. It works without the main thread, which may hang, and without the network, which may be gone.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies.launchers import subprocess_script as lightnings
from torch import distributed

from ..data import workers
from ..errors import LuthierError
from .output import RANKS, Output
from .peers import SILENT, Peer, machine
from .signals import leave, workers_shielded

EXIT_LOST = 75
"""Exit code of a run that ended because a rank hung or died without a word: the same command goes on from the last
checkpoint (`EX_TEMPFAIL` of sysexits.h)."""

EVERY = 1.0
"""Seconds between two looks at the others."""
PATIENCE = 10.0
"""Seconds that a rank which has failed, or has lost the connection, is waited for."""
OBSERVER = "_launch_process_observer"
"""Lightning's function that starts a watch over the processes that it has launched."""


# ---------------------------------------------------------------------------------------------- marks


@dataclass
class _Marks:
    """How far the main thread is: places that all ranks pass in turn, moves of any kind, and what it does now."""

    passed: int = 0
    moves: int = 0
    doing: str = "starting"


_marks = _Marks()


def mark(doing: str) -> None:
    """This rank comes to a place that all ranks pass; who has passed fewer holds up the others."""
    _marks.passed += 1
    _marks.moves += 1
    _marks.doing = doing


def beat() -> None:
    """This rank gets on, within something that takes long, such as a batch of an evaluation."""
    _marks.moves += 1


def _where() -> tuple[str, bool]:
    """The line at which the main thread is, and whether it waits for other ranks there; asked by another thread."""
    if threading.current_thread() is threading.main_thread():
        return "", False
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "", False
    file = frame.f_code.co_filename
    waits = os.path.join("torch", "distributed") in file
    return f"{file}:{frame.f_lineno} in {frame.f_code.co_name}", waits


# ---------------------------------------------------------------------------------------------- errors


def translated(error: BaseException) -> BaseException:
    """The error in our words, where the library's don't say what to do."""
    if workers.lost(error):
        return LuthierError(
            "a data worker was killed",
            where="data.workers",
            given=str(error).split("\n")[0] or type(error).__name__,
            do="memory has most often run out: lower data.workers, or close other programs; the same command goes on "
            "from the last checkpoint",
        )
    if isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt):
        return error.__context__  # Lightning makes exit code 1 of it
    return error


def _of_connection(error: BaseException) -> bool:
    """Whether it only says that another rank is not there any more."""
    if isinstance(error, distributed.DistError):
        return True
    words = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


_launched: list[subprocess.Popen[Any]] = []
"""Ranks 1, 2, ... where Lightning has started them from this process, which it does once."""


@dataclass(frozen=True)
class Verdict:
    """Why the run ends: the rank at fault, what to say, and the exit code of the others."""

    rank: int
    say: str
    code: int


# ---------------------------------------------------------------------------------------------- the watch


class Watch(Callback):
    """Marks where training is, and ends the run if it hangs or a rank is lost. Give it to the trainer as the last.

    As a context manager it is on from when the output is known to the end of the run. With one process only errors are
    put into our words. A run that loses a rank ends with the code of that rank's error, or with `EXIT_LOST`.

    Args:
        output: of the run.
        rank: of this process.
        ranks: number of processes.
        timeout: seconds without progress on any rank after which the run hangs.
    """

    def __init__(self, output: Output, rank: int, ranks: int, timeout: float):
        self.rank, self.timeout, self.sitting = rank, timeout, output.sitting
        self.folder = output.folder / RANKS
        self.peers = [Peer(number, self.folder, output.sitting) for number in range(ranks)]
        self._others = [peer for peer in self.peers if peer.rank != rank]
        self._me, self._batch = psutil.Process(), 0
        self._over, self._wake = threading.Event(), threading.Event()
        self._error: tuple[str, int] | None = None
        self._failed = self._cut = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True, name="watch")
        self._observer, self._shield = getattr(lightnings, OBSERVER), workers_shielded()

    # ------------------------------------------------------------------ on and off

    def __enter__(self) -> Watch:
        mark("setting up")
        self._shield.__enter__()
        if len(self.peers) > 1:
            self.folder.mkdir(exist_ok=True)
            self._write()
            self._thread.start()
            # Lightning's own watch kills all without a word when a process that it has started fails; ours speaks.
            setattr(lightnings, OBSERVER, _launched.extend)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        setattr(lightnings, OBSERVER, self._observer)
        self._shield.__exit__(None, None, None)
        told = translated(error) if error is not None else None
        if self._thread.is_alive():
            if told is not None:
                self.fail(told)
                if self._cut:
                    self._thread.join(2 * PATIENCE)  # it finds out why, says so and ends the process
                    told = LuthierError(
                        "the connection between the ranks broke", where=f"rank {self.rank}", given=str(error)[:300]
                    )
            self._over.set()
            self._wake.set()
            self._thread.join()
            if told is None:
                self._file.unlink(missing_ok=True)
        if told is not error and told is not None:
            raise told from error

    def fail(self, error: BaseException) -> None:
        """Tell the others why this rank ends. An error that comes of theirs is not told, but looked into."""
        if self._failed or self._cut or len(self.peers) == 1:
            return
        told = translated(error)
        if _of_connection(told):
            self._cut = time.monotonic()
            return
        text = str(told) if isinstance(told, LuthierError) else f"{type(told).__name__}: {told}".rstrip(": ")
        self._error = text, 2 if isinstance(told, LuthierError) else 130 if isinstance(told, KeyboardInterrupt) else 1
        self._failed = time.monotonic()
        self._wake.set()  # the thread writes it: no handler of a signal, such as torch's for workers, disturbs it there

    # ------------------------------------------------------------------ Lightning's hooks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Lightning's handlers of SIGTERM and SIGUSR1 stop without saving, broadcast while others compute, and requeue
        # a SLURM job with a checkpoint of their own; ours are installed when training starts.
        trainer._signal_connector.register_signal_handlers = _nothing  # type: ignore[method-assign]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        mark("loading the first batch")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._batch = getattr(batch, "number", batch_idx)
        mark(f"forward of batch {self._batch}")

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        mark(f"backward of batch {self._batch}")

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        mark(f"optimizer step after batch {self._batch}")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        mark(f"loading the batch after batch {self._batch}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        mark("finishing")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.fail(exception)  # before the connections are torn down, so that the others know why

    # ------------------------------------------------------------------ the thread

    @property
    def _file(self) -> Path:
        return self.peers[self.rank].file

    def _write(self, verdict: Verdict | None = None) -> None:
        at, waits = _where()
        record = {
            "sitting": self.sitting,
            "rank": self.rank,
            "pid": self._me.pid,
            "began": self._me.create_time(),
            "machine": machine(),
            "host": socket.gethostname(),
            **asdict(_marks),
            "at": at,
            "waits": waits,
            "written": time.time_ns(),
            "error": self._error,
            "verdict": asdict(verdict) if verdict else None,
        }
        self.peers[self.rank].note(record)
        new = self._file.with_suffix(".new")
        try:
            new.write_text(json.dumps(record), encoding="utf-8")
            new.replace(self._file)
        except OSError:  # the disk is full or away for a moment; the others are patient
            return

    def _run(self) -> None:
        every, last = max(EVERY, len(self.peers) / 32), time.monotonic()  # each reads all
        while not self._over.is_set():
            self._wake.wait(every)
            self._wake.clear()
            self._write()
            for peer in self._others:
                peer.read()
                if time.monotonic() - last > SILENT / 2:  # this process, or the disk, has stood still
                    peer.forgive()
            last = time.monotonic()
            verdict = self._look()
            if verdict is not None and not self._over.is_set():
                self._end(verdict)
        self._write()

    def _look(self) -> Verdict | None:
        for peer in self._others:
            if peer.record.get("verdict"):
                return Verdict(**peer.record["verdict"])
        if self._failed:  # it ends by itself; but not if tearing down hangs
            assert self._error is not None
            late = time.monotonic() - self._failed > 3 * PATIENCE
            return Verdict(self.rank, f"rank {self.rank} failed: {self._error[0]}", self._error[1]) if late else None
        for peer in self._others:
            if peer.record.get("error") and (peer.gone() or time.monotonic() - peer.failed > PATIENCE):
                text, code = peer.record["error"]
                return Verdict(peer.rank, f"rank {peer.rank} failed: {text}", code)
        for peer in self._others:
            if not peer.record.get("error") and (peer.dead() or self._never_came(peer)):
                return Verdict(peer.rank, self._died(peer), EXIT_LOST)
        return self._hang()

    def _hang(self) -> Verdict | None:
        """If no rank gets on any more: the one that the others wait for."""
        now = time.monotonic()
        running = [peer for peer in self.peers if not peer.over]
        quiet = now - max(peer.moved for peer in running)
        cut = self._cut and now - self._cut > PATIENCE  # a wait that has run out is a reason to look sooner
        if len(running) == 1 or not (quiet > self.timeout or (cut and quiet > PATIENCE)):
            return None
        peer = min(running, key=Peer.order)
        error = LuthierError(
            f"rank {peer.rank} does not answer, and the others wait for it",
            given=f"{peer.told()}, for {now - peer.moved:.0f} s",
            expected=f"progress within train.timeout = {self.timeout:g} s",
            do="look at that machine (its log, memory, device and network); the same command goes on from the last "
            "checkpoint; raise train.timeout if this just takes long",
        )
        return Verdict(peer.rank, str(error), EXIT_LOST)

    def _never_came(self, peer: Peer) -> bool:
        """Whether a process that Lightning has started ended before it had a file."""
        process = self._process(peer)
        return not peer.record and process is not None and process.poll() not in (None, 0)

    @staticmethod
    def _process(peer: Peer) -> subprocess.Popen[Any] | None:
        return _launched[peer.rank - 1] if 0 < peer.rank <= len(_launched) else None

    def _died(self, peer: Peer) -> str:
        process = self._process(peer)
        code = process.poll() if process is not None else None
        how = "" if code is None else f" by {signal.Signals(-code).name}" if code < 0 else f" with exit code {code}"
        return str(
            LuthierError(
                f"rank {peer.rank} has died",
                given=f"it ended{how}; last heard of: {peer.told()}",
                do="look for its own message above and in the system's log (memory that ran out leaves none); the same "
                "command goes on from the last checkpoint",
            )
        )

    def _end(self, verdict: Verdict) -> None:
        """End this process; the first of the ranks that are not at fault says why."""
        self._write(verdict)
        able = [peer for peer in self.peers if peer.rank != verdict.rank and not (peer.over or peer.gone())]
        speaker = min(able, key=lambda peer: peer.rank, default=self.peers[self.rank])
        if speaker.rank == self.rank:
            self._end_process(self.peers[verdict.rank], verdict.code)
            leave(verdict.code, f"error: {verdict.say}")
        before = time.monotonic()
        while time.monotonic() - before < PATIENCE and not speaker.gone():
            time.sleep(0.1)
        leave(verdict.code)

    def _end_process(self, peer: Peer, code: int) -> None:
        """A rank that hangs may not be able to end itself."""
        if code == EXIT_LOST and peer.rank != self.rank and peer.here and not peer.gone():
            os.kill(peer.record["pid"], signal.SIGKILL)


def _nothing() -> None:
    """In place of Lightning's signal handlers."""
