"""An HTTP server that is scripted."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from sharpdraft.lab.backends.server import Server

Serving = Callable[[type["Handler"]], str]
"""Starts a server and returns its URL."""
Connect = Callable[..., "Server"]
"""A `Server` whose connections are ended with the test."""


class Handler(BaseHTTPRequestHandler):
    """Answers a prompt with its ids counted on, in chunks of one to three tokens, and counts drafts
    as vLLM does."""

    drafts = accepted = 0
    asked: ClassVar[list[dict[str, Any]]] = []
    lock = threading.Lock()
    prefix = ""
    models: str | None = json.dumps({"data": [{"id": "tiny"}]})
    over: ClassVar[threading.Event]
    """Set when the server ends, for those that keep silent until then."""

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == f"{self.prefix}/v1/models" and self.models is not None:
            self._say(self.models)
        elif self.path == f"{self.prefix}/metrics" and (text := self.metrics()):
            self._say(text)
        else:
            self.send_error(404)

    def metrics(self) -> str:
        """What /metrics says; 404 for nothing."""
        labels = '{engine="0",model_name="a b}"}'
        by_context = '{context="0-512",engine="0"}'
        return (
            f"# HELP vllm:spec_decode_num_drafts_total Number.\n"
            f"vllm:spec_decode_num_drafts_total{labels} {self.drafts:.1f}\n"
            f"vllm:spec_decode_num_draft_tokens_total{labels} {self.drafts * 5:.1f}\n"
            f"vllm:spec_decode_num_accepted_tokens_total{labels} {self.accepted:.1f}\n"
            f"vllm:spec_decode_num_drafts_by_context_total{by_context} 99999.0\n"
        )

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        cls = type(self)
        with cls.lock:
            cls.asked.append(body)
        if self.path != f"{self.prefix}/v1/completions":
            self._say('{"detail": "Not Found"}', "application/json", 404)
        else:
            self.complete(body)

    def complete(self, body: dict[str, Any]) -> None:
        """Answer a request for a completion."""
        cls = type(self)
        if len(body["prompt"]) > 100:
            self._say('data: {"error": {"message": "too long"}}\n\n', "text/event-stream")
            return
        words = [str(body["prompt"][-1] + 1 + i) for i in range(body["max_tokens"])]
        lines = []
        while words:
            chunk, words = words[:3], words[3:]
            with cls.lock:
                cls.drafts += 1
                cls.accepted += len(chunk) - 1
            lines.append(json.dumps({"choices": [{"text": " ".join(chunk) + " "}]}))
        lines.append(
            json.dumps({"choices": [], "usage": {"completion_tokens": body["max_tokens"]}})
        )
        events = "".join(f"data: {line}\n\n" for line in lines) + "data: [DONE]\n\n"
        self._say(events, "text/event-stream")

    def _say(
        self,
        text: str,
        kind: str = "text/plain",
        status: int = 200,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Connection", "close")
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())


class Odd(Handler):
    """Streams as servers may: comments, events without a space, in pieces, bytes cut anywhere; it
    counts no drafts."""

    def metrics(self) -> str:
        return ""

    def complete(self, body: dict[str, Any]) -> None:
        text = (
            ': a comment\n\ndata:{"choices": [{"text": "café "}]}\r\n\r\n'
            "event: completion\nid: 7\n"
            'data: {"choices":\ndata: [{"text": "β"}]}\n\n'
            'data: {"choices": [], "usage": {"completion_tokens": 9}}\n\n'
            "data: [DONE]\n\ndata: not read\n\n"
        )
        self._say("", "text/event-stream; charset=utf-8")
        for byte in text.encode():
            self.wfile.write(bytes([byte]))


class Habit(Odd):
    """Streams `body` in three chunks, cut within an event. `rest`: what it does behind that:
    "end", "break" inside of a chunk, or keep "silent"."""

    protocol_version = "HTTP/1.1"
    body = b""
    kind = "text/event-stream"
    rest = "end"

    def complete(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", self.kind)
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Connection", "close")
        self.end_headers()
        for part in (self.body[:17], self.body[17:40], self.body[40:]):
            if part:
                self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                self.wfile.flush()
        if self.rest == "silent":
            self.over.wait()
        self.wfile.write(b"40\r\nda" if self.rest == "break" else b"0\r\n\r\n")


class Busy(Handler):
    """Refuses the first requests, each by one of `refusals`: a status and headers. It counts no
    tokens."""

    refusals: ClassVar[list[tuple[int, dict[str, str]]]] = []

    def complete(self, body: dict[str, Any]) -> None:
        with type(self).lock:
            refusal = self.refusals.pop(0) if self.refusals else None
        if refusal is None:
            super().complete(body)
        else:
            said = '{"error": {"message": "Rate limit reached"}}'
            self._say(said, "application/json", refusal[0], refusal[1])


class Chat(Odd):
    """Chats alone, thinking before it says what it was asked; it counts no tokens."""

    thoughts = ("w1 w2", " w3")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/chat/completions":
            self._say('{"detail": "Not Found"}', "application/json", 404)
            return
        cls = type(self)
        with cls.lock:
            cls.asked.append(body)
        deltas: list[dict[str, Any]] = [
            {"role": "assistant", "content": ""},
            {"reasoning_content": self.thoughts[0]},
            {"reasoning": self.thoughts[1]},
            *({"content": f"{word} "} for word in body["messages"][-1]["content"].split()),
        ]
        choices: list[dict[str, Any]] = [{"index": 0, "delta": delta} for delta in deltas]
        choices.append({"index": 0, "delta": None, "finish_reason": "stop"})
        lines = (json.dumps({"choices": [choice]}) for choice in choices)
        self._say("".join(f"data: {line}\n\n" for line in lines), "text/event-stream")


class Locked(Handler):
    """Wants a key, and repeats one that is wrong."""

    key = "sk-right-0123456789"

    def do_GET(self) -> None:
        if self._let_in():
            super().do_GET()

    def do_POST(self) -> None:
        if self._let_in():
            super().do_POST()

    def _let_in(self) -> bool:
        given = self.headers.get("Authorization", "")
        if given == f"Bearer {self.key}":
            return True
        said = {
            "error": {"message": f"Incorrect API key provided: {given.removeprefix('Bearer ')}"}
        }
        self._say(json.dumps(said), "application/json", 401)
        return False


class Loading(Handler):
    """Is not ready when it is asked for the first time, and for the second."""

    loading = 2

    def do_GET(self) -> None:
        cls = type(self)
        cls.loading -= 1
        if cls.loading < 0:
            super().do_GET()
        else:
            self._say('{"error": {"message": "Loading model"}}', "application/json", 503)


class Refusing(Odd):
    """Refuses every prompt by a status."""

    def complete(self, body: dict[str, Any]) -> None:
        self._say('{"error":\n"maximum context length is 7"}', "application/json", 400)


class Plain(Odd):
    """Answers without a stream."""

    def complete(self, body: dict[str, Any]) -> None:
        self._say('{"choices": [{"text": "not streamed"}]}', "application/json")


def fresh(handler: type[Handler], **attributes: Any) -> type[Any]:
    """A kind of handler with attributes of its own."""
    return type("Fresh", (handler,), {"asked": [], **attributes})


@contextmanager
def serve() -> Iterator[Serving]:
    """Starts servers, and ends them."""
    with ExitStack() as running:

        def start(handler: type[Handler]) -> str:
            over = threading.Event()
            handler.over = over
            server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            running.callback(server.server_close)
            running.callback(server.shutdown)
            running.callback(over.set)
            return f"http://127.0.0.1:{server.server_port}"

        yield start
