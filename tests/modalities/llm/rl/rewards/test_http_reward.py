"""A remote scorer: what it is sent, and what becomes of its failures."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from luthier.modalities.llm.rl import web
from luthier.modalities.llm.rl.rewards.answer import Answer
from luthier.modalities.llm.rl.rewards.config import Exact, Http
from luthier.modalities.llm.rl.rewards.rewards import Rewards
from luthier.modalities.llm.rl.web import Client, ServerError, Unavailable

Reply = Callable[[BaseHTTPRequestHandler, Any], None]


def give(handler: BaseHTTPRequestHandler, body: bytes, status: int = 200, kind: str = "application/json") -> None:
    handler.send_response(status)
    handler.send_header("Content-Type", kind)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


class Server:
    """A server that answers each POST by the function that `reply` is."""

    def __init__(self) -> None:
        self.reply: Reply = lambda handler, body: None
        self.bodies: list[Any] = []
        self.headers: list[dict[str, str]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.bodies.append(body)
                outer.headers.append(dict(self.headers))
                outer.reply(self, body)

            def log_message(self, *given: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web.time, "sleep", lambda seconds: None)


def lengths(handler: BaseHTTPRequestHandler, body: Any) -> None:
    give(handler, json.dumps({"scores": [len(one["completion"]) for one in body["answers"]]}).encode())


ANSWERS = [Answer([{"role": "user", "content": "q"}], "a" * n, n, n < 3, {"k": n}) for n in range(5)]


def test_answers_are_scored_in_batches(server: Server) -> None:
    server.reply = lengths
    found = Rewards([Http(url=server.url, batch=2)]).score(ANSWERS)
    np.testing.assert_array_equal(found.total, [0, 1, 2, 3, 4])
    assert sorted(len(body["answers"]) for body in server.bodies) == [1, 2, 2]
    first = next(one for body in server.bodies for one in body["answers"] if one["tokens"] == 3)
    assert first == {
        "prompt": [{"role": "user", "content": "q"}],
        "completion": "aaa",
        "tokens": 3,
        "finished": False,
        "row": {"k": 3},
    }


def test_a_score_that_is_missing_is_that_answer_s(server: Server) -> None:
    server.reply = lambda handler, body: give(handler, b'{"scores": [1, null, "x", true, 0.5]}')
    found = Rewards([Http(url=server.url)]).score(ANSWERS)
    np.testing.assert_array_equal(found.total, [1, np.nan, np.nan, 1, 0.5])
    assert [(one.answer, one.reason) for one in found.errors] == [
        (1, "the scorer gives none"), (2, "not a number: 'x'")
    ]  # fmt: skip


@pytest.mark.parametrize("body", [b'{"scores": [1]}', b"[1, 2]", b"{}", b'{"scores": 5}'])
def test_an_answer_of_another_form_is_no_score(server: Server, body: bytes) -> None:
    server.reply = lambda handler, _: give(handler, body)
    found = Rewards([Http(url=server.url), Exact(name="other", weight=0)]).score(ANSWERS)
    assert np.isnan(found.total).all()
    assert "does not give 5 scores" in found.errors[0].reason


def test_a_busy_server_is_asked_again(server: Server) -> None:
    def busy_at_first(handler: BaseHTTPRequestHandler, body: Any) -> None:
        lengths(handler, body) if len(server.bodies) == 3 else give(handler, b"later", 503)

    server.reply = busy_at_first
    found = Rewards([Http(url=server.url, retries=2)]).score(ANSWERS)
    assert not found.errors
    assert len(server.bodies) == 3


def test_the_tries_are_bounded(server: Server) -> None:
    server.reply = lambda handler, body: give(handler, b"later", 503)
    found = Rewards([Http(url=server.url, retries=1)]).score(ANSWERS)
    assert np.isnan(found.total).all()
    assert len(server.bodies) == 2
    assert "answers 503" in found.errors[0].reason


def test_a_refusal_is_not_repeated(server: Server) -> None:
    server.reply = lambda handler, body: give(handler, b"no such thing", 422)
    with pytest.raises(ServerError, match="answers 422"):
        Client(server.url, retries=5).post("/score", {})
    assert len(server.bodies) == 1


def test_a_server_that_takes_too_long_is_left(server: Server) -> None:
    server.reply = lambda handler, body: threading.Event().wait(3) and None
    started = time.monotonic()
    found = Rewards([Http(url=server.url, retries=1, timeout=0.3)]).score(ANSWERS[:1])
    assert time.monotonic() - started < 2
    assert "no answer within 0.3 s" in found.errors[0].reason


def test_one_that_sends_a_byte_now_and_then_too(server: Server) -> None:
    def drip(handler: BaseHTTPRequestHandler, body: Any) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        for _ in range(40):
            handler.wfile.write(b" ")
            handler.wfile.flush()
            threading.Event().wait(0.1)

    server.reply = drip
    started = time.monotonic()
    with pytest.raises(Unavailable, match="no answer within"):
        Client(server.url, timeout=0.5, retries=0).post("", {})
    assert time.monotonic() - started < 2


def test_an_answer_that_breaks_off_is_no_answer(server: Server) -> None:
    def half(handler: BaseHTTPRequestHandler, body: Any) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        handler.wfile.write(b'{"scores": [1]}')

    server.reply = half
    with pytest.raises(Unavailable, match="not reached"):
        Client(server.url, retries=0).post("", {})


def test_nobody_is_there() -> None:
    found = Rewards([Http(url="http://127.0.0.1:1", retries=1)]).score(ANSWERS[:2])
    assert len(found.errors) == 2
    assert "not reached: ConnectionRefusedError" in found.errors[0].reason


def test_what_is_no_json_is_told(server: Server) -> None:
    server.reply = lambda handler, body: give(handler, b"{")
    with pytest.raises(ServerError, match="no JSON"):
        Client(server.url).post("", {})
    server.reply = lambda handler, body: give(handler, b"Success", kind="text/plain")
    assert Client(server.url).post("", {}) == "Success"


def test_a_token_is_sent(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.reply = lengths
    monkeypatch.setenv("SCORER_TOKEN", "abc")
    Client(server.url, token_variable="SCORER_TOKEN").post("", {"answers": []})
    assert server.headers[0]["Authorization"] == "Bearer abc"
    monkeypatch.delenv("SCORER_TOKEN")
    with pytest.raises(ServerError, match="not set"):
        Rewards([Http(url=server.url, token_variable="SCORER_TOKEN")])


def test_a_row_that_is_no_json_has_no_score(server: Server) -> None:
    server.reply = lengths
    found = Rewards([Http(url=server.url, batch=1)]).score([Answer("q", "a", 1, True, {"x": object()}), ANSWERS[1]])
    np.testing.assert_array_equal(found.total, [np.nan, 1])
    assert "can't be sent" in found.errors[0].reason
