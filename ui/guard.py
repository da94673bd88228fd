"""Who may speak to the page: only requests to its own address, from its own pages, with its token."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlsplit

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Guard:
    """An ASGI application in front of another.

    A request with another `Host` is refused (a name that is made to point here, DNS rebinding), as is one that a page
    of another origin sends, and one without the token. The token comes once in the address, `/?token=...`, and is then
    kept in a cookie that scripts can't read and other sites can't make a browser send.

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
        if origin is not None and urlsplit(origin).netloc.lower() not in self._hosts:
            return await _answer(send, 403, "A page of another origin may not use this one.")
        given = parse_qs(scope.get("query_string", b"").decode("latin-1")).get("token", [""])[0]
        if scope["method"] == "GET" and scope["path"] == "/" and self._is_token(given):
            cookie = f"{self.cookie}={self._token}; Path=/; HttpOnly; SameSite=Strict"
            return await _answer(send, 303, "", [("location", "/"), ("set-cookie", cookie)])
        if not self._is_token(self._kept(headers.get("cookie", ""))):
            return await _answer(send, 401, "Open the address that `luthier ui` has printed; it holds the token.")
        await self.app(scope, receive, send)

    def _is_token(self, given: str) -> bool:
        return secrets.compare_digest(given.encode("utf-8", "replace"), self._token.encode())

    def _kept(self, header: str) -> str:
        try:
            found = SimpleCookie(header).get(self.cookie)
        except CookieError:
            return ""
        return found.value if found else ""


async def _answer(send: Send, status: int, text: str, headers: Iterable[tuple[str, str]] = ()) -> None:
    plain = [("content-type", "text/plain; charset=utf-8"), ("cache-control", "no-store"), *headers]
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in plain]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": text.encode()})
