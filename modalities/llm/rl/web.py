"""JSON over HTTP, with a bound on the whole of a request and on how often it is tried again."""

from __future__ import annotations

import http.client
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from ....common.errors import LuthierError

logger = logging.getLogger(__name__)

_BUSY = (408, 425, 429, 500, 502, 503, 504)
"""Answers that may be others the next time."""


class ServerError(LuthierError):
    """A server is not there, or does not do what is asked of it.

    Args:
        status: of its answer, if that says so.
    """

    def __init__(self, problem: str, *, status: int | None = None, **details: object):
        super().__init__(problem, **details)
        self.status = status


class Unavailable(ServerError):
    """It was not reached, took too long, or was busy or broken; another try may help."""


class Client:
    """A server.

    Args:
        url: its address, `http://host:port` with an optional path.
        timeout: seconds for a request, all of it.
        retries: further tries after an `Unavailable`.
        wait: seconds before the first of them; each next waits twice as long, 30 s at most.
        token_variable: environment variable that holds a bearer token.
    """

    def __init__(
        self, url: str, timeout: float = 60.0, retries: int = 2, wait: float = 0.5, token_variable: str | None = None
    ):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ServerError("not an address of a server", given=url, expected="http://host:port")
        self.url, self.timeout, self.retries, self.wait = url.rstrip("/"), timeout, retries, wait
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port, self._root = parts.hostname, parts.port, parts.path.rstrip("/")
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if token_variable is not None:
            token = os.environ.get(token_variable)
            if not token:
                raise ServerError("the environment variable is not set", where=url, given=token_variable)
            self._headers["Authorization"] = f"Bearer {token}"

    def get(self, path: str, timeout: float | None = None) -> Any:
        """What a path holds; see `post`."""
        return self._again(lambda: self._once("GET", path, None, timeout or self.timeout))

    def post(self, path: str, body: Mapping[str, Any], timeout: float | None = None) -> Any:
        """The answer to a request, which may be sent more than once.

        Args:
            path: begins with `/`, or is empty.
            body: becomes JSON.
            timeout: seconds for one try, if other than usual.

        Returns:
            what the JSON says; text, if the answer is none by its content type.

        Raises:
            Unavailable: still so after the last try.
            ServerError: it refuses, or its JSON is none.
        """
        return self._again(lambda: self._once("POST", path, json.dumps(body).encode(), timeout or self.timeout))

    def _again(self, call: Callable[[], Any]) -> Any:
        wait = self.wait
        for left in range(self.retries, -1, -1):
            try:
                return call()
            except Unavailable as error:
                if not left:
                    raise
                logger.warning("%s; %d tries left", str(error).splitlines()[0], left)
                time.sleep(wait)
                wait = min(2 * wait, 30.0)
        raise AssertionError

    def _once(self, method: str, path: str, body: bytes | None, timeout: float) -> Any:
        where = f"{method} {self.url}{path}"
        deadline = time.monotonic() + timeout
        connection = self._kind(self._host, self._port, timeout=timeout)
        try:
            connection.request(method, self._root + path, body, self._headers)
            answer = connection.getresponse()
            text = _read(connection, answer, deadline)
        except TimeoutError as error:
            raise Unavailable(f"no answer within {timeout:g} s", where=where) from error
        except (OSError, http.client.HTTPException) as error:
            raise Unavailable(f"not reached: {type(error).__name__}: {error}", where=where) from error
        finally:
            connection.close()
        if answer.status in _BUSY:
            raise Unavailable(f"answers {answer.status} {answer.reason}", where=where, given=_shown(text))
        if answer.status >= 300:
            problem = f"answers {answer.status} {answer.reason}"
            raise ServerError(problem, where=where, given=_shown(text), status=answer.status)
        if "json" not in answer.getheader("Content-Type", ""):
            return text.decode("utf-8", "replace")
        try:
            return json.loads(text)
        except ValueError as error:
            raise ServerError("answers no JSON", where=where, given=_shown(text)) from error


def _read(connection: http.client.HTTPConnection, answer: http.client.HTTPResponse, deadline: float) -> bytes:
    """The body, by the deadline: a time-out of the socket alone would begin anew with each byte."""
    parts = []
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if connection.sock is not None:
            connection.sock.settimeout(left)
        part = answer.read1(65536)
        if not part:
            break
        parts.append(part)
    if answer.length:  # fewer bytes than were announced
        raise http.client.IncompleteRead(b"".join(parts), answer.length)
    return b"".join(parts)


def _shown(text: bytes) -> str:
    return text[:500].decode("utf-8", "replace")
