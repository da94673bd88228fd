"""One recipe, run once to its end and then interrupted again and again, from outside and by real signals."""

from __future__ import annotations

import random
import re
import shutil
import signal
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ..checkpoint import directory
from ..errors import CheckpointError, LuthierError
from ..recipe import Recipe
from ..training.output import CHECKPOINTS
from ..training.signals import exit_code
from . import compare, processes
from .compare import Difference
from .processes import Sitting
from .watch import PAUSE, Watch, unfinished

STARTING, TRAINING, SAVING = "SIGKILL while starting", "SIGKILL in training", "SIGKILL inside a save"
SIGNALS = {number.name: number for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
RESUMING = re.compile(r"resuming from \S*step-(\d+)")


@dataclass
class Interruption:
    """One interruption of a run.

    Args:
        way: what it turned out to be: a kill that was meant for a save and came too late is one in training.
        step: the last optimizer step that had been done.
        resumed: step of the checkpoint that the run went on from; 0: from the start; None: it has not gone on yet.
        largest: largest difference between its run, when that had come to its end, and the uninterrupted one.
    """

    way: str
    step: int
    resumed: int | None = None
    largest: float = 0.0


@dataclass
class Report:
    """All interruptions, and each difference of a run that had come to its end from the uninterrupted one.

    Args:
        steps: optimizer steps of a run.
        tolerance: difference that still counts as equal, as a share of the largest magnitude.
        runs: interrupted runs that came to their end.
    """

    steps: int
    tolerance: float = 0.0
    runs: int = 0
    interruptions: list[Interruption] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)

    @property
    def unequal(self) -> list[Difference]:
        return [each for each in self.differences if each.size > self.tolerance or not self.tolerance]


@dataclass(frozen=True)
class Reference:
    """The uninterrupted run: its folder, and how long (s) it and its parts took, which says when to interrupt."""

    folder: Path
    whole: float
    start: float
    step: float
    save: float


class Rounds:
    """Runs of one recipe, below one folder.

    Args:
        recipe: the resolved recipe, with `train.steps` and `checkpoint.every`; its output is not used.
        place: where everything is written.
        forked: see `Sitting`.
        seed: of the moments at which the runs are interrupted.
    """

    def __init__(self, recipe: Recipe, place: Path, forked: bool = True, seed: int = 0):
        assert recipe.train.steps is not None
        assert recipe.checkpoint.every is not None
        self.steps, self.every = recipe.train.steps, recipe.checkpoint.every
        self.place, self.forked, self.random = place, forked, random.Random(seed)
        self.file = place / "recipe.yaml"
        self.file.write_text(recipe.dump(), encoding="utf-8")
        self.report = Report(self.steps)
        if forked:
            processes.warm_up(recipe)

    def sit(self, output: Path) -> Sitting:
        """Start the recipe in a folder, or let it go on there."""
        log = self.place / f"{output.name}.log"
        return Sitting(["train", str(self.file), f"output={output}"], log, self.forked)

    def alone(self, name: str = "uninterrupted") -> Reference:
        """Run without interruption, and measure."""
        output = self.place / name
        watch, sitting = Watch(output), self.sit(output)
        start, trained, since, saves = 0.0, 0.0, 0.0, []
        with _ended(sitting):
            while sitting.exit_code() is None:
                now, saving = time.monotonic() - sitting.started, watch.saving()
                start = start or (now if watch.begun() else 0.0)
                trained = now if watch.step() < self.steps else trained
                if saving and not since:
                    since = now
                if since and not saving:
                    saves.append(now - since)
                    since = 0.0
                watch.pause()
            _finished(sitting, "the run failed without any interruption")
        whole = time.monotonic() - sitting.started
        step = max(0.0, trained - start - sum(saves)) / self.steps
        return Reference(output, whole, start or whole, step, statistics.median(saves) if saves else PAUSE)

    # ------------------------------------------------------------------ interrupted

    def interrupt(self, reference: Reference, wanted: Counter[str]) -> None:
        """Interrupt runs until each way has happened as often as `wanted` says; each run is then finished and compared.

        Raises:
            LuthierError: a run did not go on, or left a checkpoint that counts and is not whole; its folder stays.
        """
        wanted, sittings = +wanted, 0
        bound = 20 + 10 * wanted.total()
        while wanted:
            if sittings > bound:
                given = ", ".join(f"{number} x {way}" for way, number in wanted.items())
                raise LuthierError("the run is too short to be interrupted as often", given=given, do="raise --steps")
            sittings += self._round(reference, wanted)

    def _round(self, reference: Reference, wanted: Counter[str]) -> int:
        """One run from its start to its end, interrupted on the way; gives the number of sittings it took."""
        output = self.place / f"interrupted-{self.report.runs + 1}"
        here: list[Interruption] = []
        sittings, going = 0, True
        while going:
            sittings += 1
            whole = newest_whole(output / CHECKPOINTS)
            watch, sitting = Watch(output), self.sit(output)
            with _ended(sitting):
                found = self._interrupt(self._choose(wanted), watch, sitting, reference)
                if found is None and sitting.exit_code(_patience(reference)) is None:
                    raise _failed("the run hangs", sitting)
                if found is None:
                    _finished(sitting, f"the run did not go on after {here[-1].way if here else 'its start'}")
            going = found is not None
            _resumed(here, watch, sitting, whole)
            if found is not None:
                _whole(output, found)
                here.append(found)
                wanted.subtract([found.way])
                for way in [way for way, number in wanted.items() if number <= 0]:
                    del wanted[way]
        self._compare(reference, output, here)
        return sittings

    def _choose(self, wanted: Counter[str]) -> str | None:
        return self.random.choice(sorted(wanted.elements())) if wanted else None

    def _interrupt(self, way: str | None, watch: Watch, sitting: Sitting, reference: Reference) -> Interruption | None:
        """Interrupt a sitting; None if it came to its end before, or is to be left alone (`way` None)."""
        if way is None or not self._moment(way, watch, sitting, reference):
            return None
        begun, step = watch.begun(), newest(watch.root)
        if way in SIGNALS:
            step = max(step, watch.step())
            sitting.signal(SIGNALS[way])
            return self._stopped(way, step, watch, sitting, reference)
        if sitting.kill() != -signal.SIGKILL:
            return None  # it had ended
        if begun:
            way, step = SAVING if unfinished(watch.root) else TRAINING, watch.step()
        return Interruption(way, step)

    def _moment(self, way: str, watch: Watch, sitting: Sitting, reference: Reference) -> bool:
        """Wait for a random moment of the kind that a way asks for; False if the sitting ends before."""
        done, patience = newest(watch.root), _patience(reference)
        if way == STARTING:
            delay = reference.start
        elif way == SAVING:
            delay, which = reference.save, self.random.randint(1, max(1, (self.steps - done) // self.every))
            if not watch.until(lambda: bool(watch.saving()) and len(watch.saves) >= which, sitting, patience):
                return False
        else:
            delay, target = reference.step, self.random.randint(done + 1, max(done + 1, self.steps - 1))
            if not watch.until(lambda: watch.step() >= target, sitting, patience):
                return False
        return sitting.exit_code(self.random.uniform(0, delay)) is None

    def _stopped(
        self, way: str, step: int, watch: Watch, sitting: Sitting, reference: Reference
    ) -> Interruption | None:
        """What a signal, sent after `step`, has led to; None if it came when the run was about to end anyway."""
        code = sitting.exit_code(_patience(reference))
        if code == 0:
            return None
        expected = exit_code(SIGNALS[way])
        ended = code == -SIGNALS[way] and newest(watch.root) == self.steps  # the handlers were gone already
        if code != expected and not ended:
            raise _failed(f"{way} ended the run with exit code {code} instead of {expected}", sitting)
        if newest(watch.root) < step:
            raise _failed(f"{way} after step {step} saved nothing", sitting)
        return Interruption(way, step)

    def _compare(self, reference: Reference, output: Path, here: list[Interruption]) -> None:
        """Compare a run that has come to its end; it is removed if it is equal."""
        found = compare.curves_differ(reference.folder, output)
        last = [newest_whole(folder / CHECKPOINTS) for folder in (reference.folder, output)]
        if last[0] != last[1] or not last[0]:
            raise CheckpointError("the run has come to another last checkpoint", where=output, given=last[1])
        paths = [folder / CHECKPOINTS / directory.name(last[0]) for folder in (reference.folder, output)]
        found += compare.checkpoints_differ(*paths)
        for interruption in here:
            interruption.largest = max((difference.size for difference in found), default=0.0)
        self.report.interruptions += here
        self.report.differences += [Difference(f"{output.name}/{each.where}", each.size) for each in found]
        self.report.runs += 1
        if not found:
            shutil.rmtree(output)


# ---------------------------------------------------------------------------------------------- what lies on the disk


def newest(root: Path) -> int:
    """Step of the newest checkpoint under a folder, by its name; 0: there is none."""
    return max((directory.step_of(path) for path in directory.committed(root)), default=0)


def newest_whole(root: Path) -> int:
    """Step that a run has to go on from: of the newest whole checkpoint, or one that only lacked its renaming."""
    sealed = [root / name.removesuffix(directory.PARTIAL) for name in unfinished(root)]
    found = [path for path in directory.committed(root) if directory.fault(path) is None]
    found += [
        path for path in sealed if path not in found and directory.fault(Path(f"{path}{directory.PARTIAL}")) is None
    ]
    return max((directory.step_of(path) for path in found), default=0)


def _whole(output: Path, interruption: Interruption) -> None:
    """Raise if a checkpoint that counts is not whole."""
    for path in directory.committed(output / CHECKPOINTS):
        if reason := directory.fault(path):
            raise CheckpointError(
                f"{interruption.way} left a checkpoint that counts and is not whole", where=path, given=reason
            )


def _resumed(here: list[Interruption], watch: Watch, sitting: Sitting, whole: int) -> None:
    """Note for the interruptions before this sitting where the run went on, if this one has come so far."""
    printed = RESUMING.search(sitting.printed())
    if not printed and not watch.begun():
        return
    step = int(printed.group(1)) if printed else 0
    if step != whole:
        raise _failed(
            f"the run went on from step {step}, though the newest whole checkpoint is of step {whole}", sitting
        )
    for interruption in here:
        if interruption.resumed is None:
            interruption.resumed = step


# ---------------------------------------------------------------------------------------------- sittings


def _patience(reference: Reference) -> float:
    """Seconds after which a sitting hangs."""
    return 60.0 + 10 * reference.whole


@contextmanager
def _ended(sitting: Sitting) -> Iterator[None]:
    """Whatever happens, no process is left."""
    try:
        yield
    finally:
        if sitting.exit_code() is None:
            sitting.kill()


def _finished(sitting: Sitting, problem: str) -> None:
    if code := sitting.exit_code():
        raise _failed(f"{problem} (exit code {code})", sitting)


def _failed(problem: str, sitting: Sitting) -> LuthierError:
    return LuthierError(problem, where=sitting.log, given=f"it printed\n{sitting.tail()}")
