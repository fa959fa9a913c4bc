"""An OpenAI-compatible server as an arm of a bench: streamed completions, and what its metrics say
of drafts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ...errors import SharpDraftError, one_line

try:
    import httpx
    from httpx_sse import connect_sse
    from prometheus_client.parser import text_string_to_metric_families
except ImportError as error:
    raise SharpDraftError(
        f'a library that talks to servers is missing ({error}): pip install "sharpdraft[lab]"'
    ) from error

_TIMEOUT = 600.0
_KINDS = ("drafts", "draft_tokens", "accepted_tokens")
_COUNTERS = {f"vllm:spec_decode_num_{kind}_total": at for at, kind in enumerate(_KINDS)}
_BROKEN = (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, IndexError, TypeError)


class Server:
    """A running server. Raises SharpDraftError if nothing answers there, or not with `model`."""

    def __init__(self, url: str, model: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        # As many connections as there are prompts at once.
        self.client = httpx.Client(timeout=_TIMEOUT, limits=httpx.Limits())
        try:
            models = [entry["id"] for entry in self._get("/v1/models").json()["data"]]
            self.model = model or models[0]
        except _BROKEN as error:
            raise SharpDraftError(
                f"no OpenAI-compatible server answers at {self.url}/v1/models: {one_line(error)}"
            ) from error
        if model is not None and model not in models:
            raise SharpDraftError(f"{self.url} serves {', '.join(models)}, not {model}")

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
        counts = None
        if before is not None and after is not None:
            counts = [a - b for a, b in zip(after, before, strict=True)]
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
            families = list(text_string_to_metric_families(self._get("/metrics").text))
        except (httpx.HTTPError, ValueError):
            return None
        found, known = [0.0] * len(_KINDS), False
        for sample in (sample for family in families for sample in family.samples):
            if (at := _COUNTERS.get(sample.name)) is not None:
                found[at], known = found[at] + sample.value, True
        return [int(value) for value in found] if known else None

    def close(self) -> None:
        """End the connections."""
        self.client.close()

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
        url = f"{self.url}/v1/completions"
        try:
            with connect_sse(self.client, "POST", url, json=body) as source:
                self._check(source.response)
                for event in source.iter_sse():
                    if event.data == "[DONE]":
                        break
                    said = event.json()
                    if "error" in said:
                        raise SharpDraftError(f"{self.url} refused a prompt: {said['error']}")
                    first = first or time.perf_counter() - began
                    text += "".join(choice["text"] for choice in said["choices"])
                    count = (said.get("usage") or {}).get("completion_tokens", count)
        except _BROKEN as error:
            raise SharpDraftError(
                f"{self.url} did not answer a prompt of {len(prompt)} tokens: {one_line(error)}"
            ) from error
        return text, count, first

    def _get(self, path: str) -> httpx.Response:
        response = self.client.get(self.url + path)
        self._check(response)
        return response

    def _check(self, response: httpx.Response) -> None:
        """Refuse an error, with what the server says of it."""
        if response.is_error:
            said = f"{response.status_code} {response.reason_phrase} {response.read().decode()}"
            raise httpx.HTTPError(said)
