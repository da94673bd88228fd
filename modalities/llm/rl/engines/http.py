"""The engine on servers: vLLM or SGLang, on other devices or hosts, asked over HTTP.

What is trained on was drawn with the weights that it is said to be drawn with, or the run ends with an error. A server
that is away, slow or busy is waited for, and one with other weights, such as one that was started again, is given the
right ones, both within bounds.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
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
    """Folder that this process writes weights to and all servers can read; default: `weights` in the run's output."""
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


class HttpEngine:
    """Draws completions on servers. The seeds go with the requests, but the same seed gives the same completion only as
    far as the server keeps to it.

    Args:
        section: addresses and bounds.
        folder: where weights are written, if the section names no folder.
    """

    def __init__(self, section: HttpSection, folder: Path):
        self._section, self.folder = section, folder
        clients = [
            Client(url, section.timeout, retries=0, token_variable=section.token_variable) for url in section.urls
        ]
        is_vllm = section.server == "vllm"
        self._places = [_Place(Vllm(one, section.model) if is_vllm else Sglang(one)) for one in clients]
        self._run, self._loads = secrets.token_hex(4), count(1)
        self._written: Path | None = None
        self.version = 0

    # ------------------------------------------------------------------ weights

    def update(self, version: int, weights: Weights) -> None:
        """Write the weights and have all servers load them.

        Raises:
            ServerError: one does not, within the bounds.
        """
        root = Path(self._section.folder or self.folder)
        folder, before = root / f"{self._run}-{version}", self._written
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        weights.save_pretrained(folder)
        self._written, self.version = folder.resolve(), version
        with ThreadPoolExecutor(len(self._places), "weights") as pool:
            list(pool.map(lambda place: self._patient(lambda: self._load(place)), self._places))
        if before is not None and before != self._written:  # until now, for servers that were started again
            shutil.rmtree(before, ignore_errors=True)

    def _load(self, place: _Place) -> None:
        """Have a server load the weights, under a name that no other load has."""
        assert self._written is not None
        name = f"luthier-{self._run}-{self.version}-{next(self._loads)}"
        is_adapter = (self._written / "adapter_config.json").is_file()
        place.name = ""
        place.server.load(self._written, name, is_adapter, self._section.load_timeout)
        place.name = name

    def _renew(self, place: _Place, name: str) -> None:
        """Give a server its weights anew, unless another request has just done so."""
        with place.lock:
            if place.name in (name, ""):
                log.warning(
                    "%s has other weights than those of step %d; loading them", place.server.client.url, self.version
                )
                self._load(place)

    # ------------------------------------------------------------------ completions

    def generate(
        self, prompts: Sequence[np.ndarray], sampling: Sampling, seeds: Sequence[Sequence[int]]
    ) -> list[list[Completion]]:
        """See `engine.Engine`.

        Raises:
            ServerError: a completion can't be had within the bounds; then none is given.
        """
        if self._written is None:
            raise ServerError("the servers were given no weights yet", where=self._section.urls[0])
        asked = [(prompt.tolist(), seed) for prompt, of in zip(prompts, seeds, strict=True) for seed in of]
        pool = ThreadPoolExecutor(self._section.workers * len(self._places), "completions")
        try:
            futures = [
                pool.submit(self._completion, number, prompt, sampling, seed)
                for number, (prompt, seed) in enumerate(asked)
            ]
            made = iter([future.result() for future in futures])
        finally:
            pool.shutdown(cancel_futures=True)
        return [[next(made) for _ in of] for of in seeds]

    def _completion(self, number: int, prompt: Sequence[int], sampling: Sampling, seed: int) -> Completion:
        """One completion, from the server whose turn it is, or from the next if that is away."""
        turns = count(number)
        return self._patient(lambda: self._drawn(self._places[next(turns) % len(self._places)], prompt, sampling, seed))

    def _drawn(self, place: _Place, prompt: Sequence[int], sampling: Sampling, seed: int) -> Completion:
        for left in range(self._section.retries, -1, -1):
            name = place.name
            try:
                made = place.server.complete(prompt, sampling, seed, name)
                if place.name != name:
                    raise OtherWeights("its weights were loaded anew meanwhile", where=place.server.client.url)
            except OtherWeights:
                if not left:
                    raise
                self._renew(place, name)
                continue
            if len(made.tokens) > sampling.max_new_tokens:
                raise ServerError(
                    "more tokens than were asked for", where=place.server.client.url, given=len(made.tokens)
                )
            return Completion(
                np.array(made.tokens, np.int32), np.array(made.log_probs, np.float32), made.finished, self.version
            )
        raise AssertionError

    def _patient(self, call: Callable[[], T]) -> T:
        """Call again while the server is unavailable."""
        deadline, wait = time.monotonic() + self._section.patience, 0.25
        while True:
            try:
                return call()
            except Unavailable as error:
                if time.monotonic() + wait > deadline:
                    raise
                log.warning("%s; it is tried again", str(error).splitlines()[0])
            time.sleep(wait)
            wait = min(2 * wait, 10.0)
