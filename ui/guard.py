"""Who may speak to the page: only requests to its own address, from its own pages, with its token."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Guard:
    """An ASGI application in front of another.

    A request with another `Host` is refused (a name that is made to point here, DNS rebinding), as is one that a page
    of another origin sends, which may be another server of this machine, and one without the token. The token comes
    once in the address, `/?token=...`, and is then kept in a cookie that scripts can't read and other sites can't make
    a browser send.

    Args:
        app: what is guarded.
        token: the secret.
        hosts: `name:port` of the page, as browsers send them.
    """

    def __init__(self, app: App, token: str, hosts: Iterable[str]):
        self.app, self._token = app, token
        self._hosts = frozenset(host.lower() for host in hosts)
        self.cookie = "luthier_" + "_".join(sorted({host.rpartition(":")[2] for host in self._hosts}))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if headers.get("host", "").lower() not in self._hosts:
            return await _answer(send, 421, "This page does not go by that name.")
        origin = headers.get("origin")
        if origin is not None and origin.lower().partition("://")[2] not in self._hosts:
            return await _answer(send, 403, "A page of another origin may not use this one.")
        given = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])[0]
        if scope["method"] == "GET" and scope["path"] == "/" and self._is_token(given):
            cookie = f"{self.cookie}={self._token}; Path=/; HttpOnly; SameSite=Strict"
            return await _answer(send, 303, "", [("location", "/"), ("set-cookie", cookie)])
        if not self._is_token(self._kept(headers.get("cookie", ""))):
            return await _answer(send, 401, "Open the address that `luthier ui` has printed; it holds the token.")
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and headers.get("sec-fetch-mode") != "navigate":
            return await _answer(send, 403, "A page of another origin may not use this one.")  # images have no Origin
        await self.app(scope, receive, _unframed(send))

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode("utf-8", "replace"), self._token.encode())

    def _kept(self, header: str) -> str:
        """The cookie, also beside others that are no valid ones: all servers of a machine share its cookies."""
        pairs = (pair.strip().partition("=") for pair in header.split(";"))
        return next((value for name, _, value in pairs if name == self.cookie), "")


def _unframed(send: Send) -> Send:
    """No other page may show this one inside of it, where clicks can be stolen."""

    async def sent(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            more = [(b"x-frame-options", b"DENY"), (b"x-content-type-options", b"nosniff")]
            message = {**message, "headers": [*message.get("headers", []), *more]}
        await send(message)

    return sent


async def _answer(send: Send, status: int, text: str, headers: Iterable[tuple[str, str]] = ()) -> None:
    plain = [("content-type", "text/plain; charset=utf-8"), ("cache-control", "no-store"), *headers]
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in plain]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": text.encode()})
