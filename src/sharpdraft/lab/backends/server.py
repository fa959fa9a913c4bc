"""An OpenAI-compatible server as an arm of a bench: streamed completions, and what its metrics say
of drafts."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ...errors import SharpDraftError

_TIMEOUT = 600.0
_METRIC = re.compile(
    r"^vllm:spec_decode_num_(drafts|draft_tokens|accepted_tokens)_total(?:\{.*\})? (\S+)$",
    re.MULTILINE,
)
_KINDS = ("drafts", "draft_tokens", "accepted_tokens")


class Server:
    """A running server. Raises SharpDraftError if nothing answers there."""

    def __init__(self, url: str, model: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        models = [entry["id"] for entry in json.loads(self._get("/v1/models"))["data"]]
        if model is not None and model not in models:
            raise SharpDraftError(f"{self.url} serves {', '.join(models)}, not {model}")
        self.model = model or models[0]

    def answer(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, stop: Sequence[int] = ()
    ) -> dict[str, Any]:
        """Answer prompts at once, streamed, greedily.

        Returns tokens [prompts], here as text; first (mean seconds to a first token), seconds (from
        the start to the end of all), decoded (tokens written in those), and counts (drafts,
        drafted, accepted), None where the server tells none.
        """
        before = self.counts()
        began = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            streams = list(pool.map(lambda prompt: self._stream(prompt, max_tokens), prompts))
        seconds = time.perf_counter() - began
        after = self.counts()
        counts = (
            None
            if after is None or before is None
            else [a - b for a, b in zip(after, before, strict=True)]
        )
        return {
            "tokens": [text for text, _, _ in streams],
            "decoded": sum(count for _, count, _ in streams),
            "first": sum(first for _, _, first in streams) / len(streams),
            "seconds": seconds,
            "counts": counts,
        }

    def counts(self) -> list[int] | None:
        """Drafts, drafted and accepted tokens so far; None where the server counts none."""
        try:
            found = _METRIC.findall(self._get("/metrics"))
        except SharpDraftError:
            return None
        return (
            [int(sum(float(n) for k, n in found if k == kind)) for kind in _KINDS]
            if found
            else None
        )

    def _stream(self, prompt: Sequence[int], max_tokens: int) -> tuple[str, int, float]:
        """Text, tokens, seconds to the first one."""
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        text, count, first = "", 0, 0.0
        began = time.perf_counter()
        try:
            with self._open("/v1/completions", body) as response:
                for line in response:
                    data = line.decode().removeprefix("data:").strip()
                    if not data or data == "[DONE]":
                        continue
                    event = json.loads(data)
                    if "error" in event:
                        raise SharpDraftError(f"{self.url} refused a prompt: {event['error']}")
                    first = first or time.perf_counter() - began
                    text += "".join(choice["text"] for choice in event["choices"])
                    count = (event.get("usage") or {}).get("completion_tokens", count)
        except (urllib.error.URLError, OSError, ValueError, KeyError) as error:
            raise SharpDraftError(
                f"{self.url} did not answer a prompt of {len(prompt)} tokens: {error}"
            ) from error
        return text, count, first

    def _get(self, path: str) -> str:
        try:
            with self._open(path, None) as response:
                return str(response.read().decode())
        except (urllib.error.URLError, OSError, ValueError) as error:
            raise SharpDraftError(
                f"no OpenAI-compatible server answers at {self.url}{path}: {error}"
            ) from error

    def _open(self, path: str, body: dict[str, Any] | None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"}
        )
        return urllib.request.urlopen(request, timeout=_TIMEOUT)
