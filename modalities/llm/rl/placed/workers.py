"""Actors that Ray places: started when they are first needed, asked in parallel, and started again when they die."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

from .....common.errors import LuthierError, missing_extra
from ..engines.servers import OtherWeights
from .section import PlacementSection, WorkersSection

log = logging.getLogger(__name__)

Call = Callable[[Any], Any]
"""Is given an actor, and returns Ray's reference of what it was asked: `lambda actor: actor.score.remote(answers)`."""


class WorkerLost(LuthierError):
    """A worker died or did not answer, more often than is allowed."""


def require() -> None:
    """See that Ray is installed, without loading it.

    Raises:
        LuthierError: it names the extra that brings it.
    """
    if importlib.util.find_spec("ray") is None:
        raise missing_extra("ray", "ray")


def connected(address: str) -> Any:
    """The module `ray`, connected to a cluster; a connection that is there already is used.

    Raises:
        LuthierError: there is no such cluster.
    """
    require()
    ray: Any = importlib.import_module("ray")
    if ray.is_initialized():
        return ray
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    handler = signal.getsignal(signal.SIGTERM)
    options = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address=address, log_to_driver=False, configure_logging=False, **options)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise LuthierError(
            f"Ray can't be reached: {str(error).strip().splitlines()[0]}",
            where="rollout.placement.address",
            given=address,
            do="run `ray start` on this machine, or give local, to start one for this run",
        ) from error
    finally:
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray has put its own there, which would end the run unsaved
    return ray


@dataclass
class _Place:
    """A worker, if it lives, and whether it is prepared."""

    number: int
    actor: Any = None
    is_prepared: bool = False


class Workers:
    """Workers of one kind.

    Args:
        kind: class of the actors; its method `ready` does what takes long when one is started.
        arguments: of the class.
        name: what they are called in the recipe: `engines` or `rewards`.
        section: how many, and what each needs.
        placement: cluster and bounds.
        accept: looks at what `ready` gives, and raises if such a worker can't be used.
    """

    def __init__(
        self,
        kind: type,
        arguments: Sequence[Any],
        name: str,
        section: WorkersSection,
        placement: PlacementSection,
        accept: Callable[[Any], None] = lambda _: None,
    ):
        require()
        self._kind, self._arguments, self._name = kind, arguments, name
        self._section, self._placement, self._accept = section, placement, accept
        self._places = [_Place(number) for number in range(section.number)]
        self._prepare: Call | None = None

    @property
    def number(self) -> int:
        return len(self._places)

    @property
    def ray(self) -> Any:
        return connected(self._placement.address)

    def prepare(self, call: Call) -> None:
        """Ask all workers something, and from now on each that is started again, before anything else."""
        self._prepare = call
        for place in self._places:
            place.is_prepared = False
        self._together([partial(self._asked, place, None) for place in self._places])

    def map(self, calls: Sequence[Call]) -> list[Any]:
        """The results of calls, in their order, each made by a worker that is free.

        Raises:
            WorkerLost: one was lost too often; then there are no results.
            LuthierError: one could not be placed, or what it raised itself.
        """
        free: SimpleQueue[_Place] = SimpleQueue()
        for place in self._places:
            free.put(place)

        def made(call: Call) -> Any:
            place = free.get()
            try:
                return self._asked(place, call)
            finally:
                free.put(place)

        return self._together([partial(made, call) for call in calls])

    def _together(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        connected(self._placement.address)  # by this thread, which may restore the signals
        pool = ThreadPoolExecutor(len(self._places), self._name)
        try:
            futures = [pool.submit(call) for call in calls]
            return [future.result() for future in futures]
        finally:
            pool.shutdown(cancel_futures=True)

    def _asked(self, place: _Place, call: Call | None) -> Any:
        """What a worker answers, which is started and prepared first where it has to be."""
        errors = self.ray.exceptions
        for left in range(self._placement.restarts, -1, -1):
            try:
                if place.actor is None:
                    self._start(place)
                if not place.is_prepared and self._prepare is not None:
                    self._result(self._prepare(place.actor), self._placement.timeout)
                place.is_prepared = True
                return None if call is None else self._result(call(place.actor), self._placement.timeout)
            except (errors.RayActorError, errors.GetTimeoutError) as error:
                self._end(place)
                self._missed(place, error, left)
            except OtherWeights as error:
                place.is_prepared = False
                if not left:
                    raise
                log.warning("%s; it is given the right ones", str(error).splitlines()[0])
        raise AssertionError

    def _missed(self, place: _Place, error: Exception, left: int) -> None:
        reason = str(error).strip().splitlines()[0]
        where = f"rollout.placement.{self._name}, worker {place.number}"
        if not left:
            raise WorkerLost(
                "the worker died or was too slow, too often",
                where=where,
                given=reason,
                do="see Ray's logs; raise rollout.placement.timeout if it is only slow, or its restarts",
            ) from error
        log.warning("%s: %s; it is started again", where, reason)

    def _start(self, place: _Place) -> None:
        section, ray = self._section, self.ray
        needs = {"num_cpus": section.cpus, "num_gpus": section.gpus, "resources": dict(section.resources)}
        options = {**needs, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
        actor = ray.remote(self._kind).options(**options).remote(*self._arguments)
        place.actor, place.is_prepared = actor, False
        try:
            self._accept(self._result(actor.ready.remote(), self._placement.start_timeout))
        except ray.exceptions.GetTimeoutError as error:
            self._end(place)
            raise LuthierError(
                f"the worker was not there within {self._placement.start_timeout:g} s",
                where=f"rollout.placement.{self._name}",
                given=f"free: {ray.available_resources()}",
                expected=needs,
                do="ask for fewer workers or less for each, or raise rollout.placement.start_timeout",
            ) from error
        except LuthierError:
            self._end(place)
            raise

    def _end(self, place: _Place) -> None:
        if place.actor is not None:
            self.ray.kill(place.actor)
            place.actor = None

    def _result(self, reference: Any, seconds: float) -> Any:
        """What a reference stands for; an error of ours as it was raised."""
        try:
            return self.ray.get(reference, timeout=seconds)
        except self.ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, LuthierError):
                raise error.cause from None
            raise
