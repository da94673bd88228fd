"""The engine on servers: vLLM or SGLang, on other devices or hosts, asked over HTTP.

What is trained on was drawn with the weights that it is said to be drawn with, or the run ends with an error. A server
that is away, slow or busy is waited for, and one with other weights, such as one that was started again, is given the
right ones, both within bounds.
"""

from __future__ import annotations

import logging
import math
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import numpy as np
from pydantic import Field

from .....common.recipe import Section
from ..web import Client, ServerError, Unavailable
from .engine import Completion, Sampling, Weights
from .servers import OtherWeights, Server, Sglang, Vllm

log = logging.getLogger(__name__)

T = TypeVar("T")

Url = Annotated[str, Field(pattern=r"^https?://")]


class HttpSection(Section):
    """Servers that draw completions."""

    server: Literal["vllm", "sglang"] = "vllm"
    """What runs there; `servers.Vllm` and `servers.Sglang` say how it has to be started."""
    urls: tuple[Url, ...] = Field(min_length=1)
    """Addresses; with several, the prompts are spread over them."""
    model: str | None = None
    """Name under which vLLM serves the model; default: its first."""
    folder: str | None = None
    """Folder that the first process of the training writes weights to and that the others and all servers can read;
    default: `weights` in the run's output."""
    timeout: float = Field(600, gt=0)
    """Seconds for a completion."""
    load_timeout: float = Field(600, gt=0)
    """Seconds for loading new weights."""
    patience: float = Field(300, ge=0)
    """Seconds for which a server that is not reached, too slow or busy is tried again, such as one that is starting."""
    retries: int = Field(3, ge=0)
    """How often a server that turns out to have other weights is given the right ones during one completion."""
    workers: int = Field(64, ge=1)
    """Requests at a time to each server, which makes batches of them."""
    token_variable: str | None = None
    """Name of an environment variable that holds a bearer token."""


class _Place:
    """A server, and the name of the weights that it was given."""

    def __init__(self, server: Server):
        self.server, self.name, self.lock = server, "", threading.Lock()


@dataclass(frozen=True)
class Given:
    """Weights that all servers have been given.

    Args:
        version: of the weights.
        folder: that holds them.
        names: under which each server knows them.
    """

    version: int
    folder: Path
    names: tuple[str, ...]

    @property
    def is_adapter(self) -> bool:
        return (self.folder / "adapter_config.json").is_file()

    @property
    def prefix(self) -> str:
        """What all names begin with that are given to these weights, by whatever process."""
        return f"luthier-{self.folder.name}-"


class HttpEngine:
    """Draws completions on servers. The seeds go with the requests, but the same seed gives the same completion only as
    far as the server keeps to it.

    Several processes of a training ask the same servers. The first one gives the weights, and tells the others what it
    has given; any of them gives them anew to a server that was started again.

    Args:
        section: addresses and bounds.
        folder: where weights are written, if the section names no folder.
    """

    gathers: Literal["nothing", "first", "every"] = "first"

    def __init__(self, section: HttpSection, folder: Path):
        self._section, self.folder = section, folder
        clients = [
            Client(url, section.timeout, retries=0, token_variable=section.token_variable) for url in section.urls
        ]
        is_vllm = section.server == "vllm"
        self._places = [_Place(Vllm(one, section.model) if is_vllm else Sglang(one)) for one in clients]
        self._run, self._loads = secrets.token_hex(4), count(1)
        self._given: Given | None = None

    # ------------------------------------------------------------------ weights

    def update(self, version: int, weights: Weights) -> None:
        """Write the weights and have all servers load them, in the first process of the training; the others wait.

        Raises:
            ServerError: a server does not, within the bounds.
        """
        from .....common.training.ranks import agree

        self.take(agree(lambda: self.give(version, weights)))

    def give(self, version: int, weights: Weights) -> Given:
        """Write the weights and have all servers load them."""
        root = Path(self._section.folder or self.folder)
        folder, before = root / f"{self._run}-{version}", self._given
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        weights.save_pretrained(folder)
        given = self._given = Given(version, folder.resolve(), ())
        with ThreadPoolExecutor(len(self._places), "weights") as pool:
            list(pool.map(lambda place: self._patient(lambda: self._load(place, given)), self._places))
        if before is not None and before.folder != given.folder:  # until now, for servers that were started again
            shutil.rmtree(before.folder, ignore_errors=True)
        return Given(version, given.folder, tuple(place.name for place in self._places))

    def take(self, given: Given) -> None:
        """Go on with weights that all servers have been given, by this process or another one."""
        self._given = given
        for place, name in zip(self._places, given.names, strict=True):
            self._adopt(place, name, given)

    def _adopt(self, place: _Place, name: str, given: Given) -> None:
        if place.name != name:
            place.server.adopt(name, given.is_adapter)
            place.name = name

    def _load(self, place: _Place, given: Given) -> None:
        """Have a server load the weights, under a name that no other load has."""
        name = f"{given.prefix}{self._run}.{next(self._loads)}"
        place.name = ""
        place.server.load(given.folder, name, given.is_adapter, self._section.load_timeout)
        place.name = name

    def _renew(self, place: _Place, name: str, error: OtherWeights, given: Given) -> None:
        """See that a server has its weights again: another request may have loaded them anew, or another process."""
        with place.lock:
            if place.name not in (name, ""):
                return
            url, has = place.server.client.url, error.has
            if has is not None and has != name and has.startswith(given.prefix):
                log.warning("%s was given its weights anew by another process", url)
                self._adopt(place, has, given)
                return
            log.warning("%s has other weights than those of step %d; loading them", url, given.version)
            self._load(place, given)

    # ------------------------------------------------------------------ completions

    def generate(
        self, prompts: Sequence[np.ndarray], sampling: Sampling, seeds: Sequence[Sequence[int]]
    ) -> list[list[Completion]]:
        """See `engine.Engine`.

        Raises:
            ServerError: a completion can't be had within the bounds; then none is given.
        """
        given = self._given
        if given is None:
            raise ServerError("the servers were given no weights yet", where=self._section.urls[0])
        asked = [(prompt.tolist(), seed) for prompt, of in zip(prompts, seeds, strict=True) for seed in of]
        pool = ThreadPoolExecutor(self._section.workers * len(self._places), "completions")
        try:
            futures = [
                pool.submit(self._completion, number, prompt, sampling, seed, given)
                for number, (prompt, seed) in enumerate(asked)
            ]
            made = iter([future.result() for future in futures])
        finally:
            pool.shutdown(cancel_futures=True)
        return [[next(made) for _ in of] for of in seeds]

    def _completion(
        self, number: int, prompt: Sequence[int], sampling: Sampling, seed: int, given: Given
    ) -> Completion:
        """One completion, from the server whose turn it is, or from the next if that is away."""
        turns = count(number)
        places = self._places
        return self._patient(lambda: self._drawn(places[next(turns) % len(places)], prompt, sampling, seed, given))

    def _drawn(self, place: _Place, prompt: Sequence[int], sampling: Sampling, seed: int, given: Given) -> Completion:
        for left in range(self._section.retries, -1, -1):
            name = place.name
            try:
                made = place.server.complete(prompt, sampling, seed, name)
                if place.name != name:
                    raise OtherWeights("its weights were loaded anew meanwhile", where=place.server.client.url)
            except OtherWeights as error:
                if not left:
                    raise
                self._renew(place, name, error, given)
                continue
            if len(made.tokens) > sampling.max_new_tokens:
                raise ServerError(
                    "more tokens than were asked for", where=place.server.client.url, given=len(made.tokens)
                )
            return Completion(
                np.array(made.tokens, np.int32), np.array(made.log_probs, np.float32), made.finished, given.version
            )
        raise AssertionError

    def _patient(self, call: Callable[[], T]) -> T:
        """Call again while the server is unavailable; its time counts from when that is known: a call may be long."""
        deadline, wait = math.inf, 0.25
        while True:
            try:
                return call()
            except Unavailable as error:
                deadline = min(deadline, time.monotonic() + self._section.patience)
                if time.monotonic() + wait > deadline:
                    raise
                log.warning("%s; it is tried again", str(error).splitlines()[0])
            time.sleep(wait)
            wait = min(2 * wait, 10.0)
