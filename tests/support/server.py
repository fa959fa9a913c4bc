"""An HTTP server that is scripted."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any, ClassVar


class Handler(BaseHTTPRequestHandler):
    """Answers a prompt with its ids counted on, in chunks of one to three tokens, and counts drafts
    as vLLM does."""

    drafts = accepted = 0
    asked: ClassVar[list[dict[str, Any]]] = []
    lock = threading.Lock()

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._say(json.dumps({"data": [{"id": "tiny"}]}))
        elif self.path == "/metrics" and (text := self.metrics()):
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

    def _say(self, text: str, kind: str = "text/plain", status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
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


class Refusing(Odd):
    """Refuses every prompt by a status."""

    def complete(self, body: dict[str, Any]) -> None:
        self._say('{"error":\n"maximum context length is 7"}', "application/json", 400)


class Plain(Odd):
    """Answers without a stream."""

    def complete(self, body: dict[str, Any]) -> None:
        self._say('{"choices": [{"text": "not streamed"}]}', "application/json")


Serving = Callable[[type[Handler]], str]
"""Starts a server and returns its URL."""
