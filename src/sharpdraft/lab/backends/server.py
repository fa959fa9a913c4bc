"""An OpenAI-compatible server as an arm of a bench: streamed answers, and what its metrics say of
drafts."""

from __future__ import annotations

import asyncio
from asyncio import sleep
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from email.utils import parsedate_to_datetime
from functools import partial
from time import perf_counter, time
from typing import Any, TypeVar

from ...errors import SharpDraftError, note, one_line
from .stream import Streamed, StreamError, message_of, shortened

try:
    import httpx
    from httpx_sse import aconnect_sse
    from prometheus_client.parser import text_string_to_metric_families
except ImportError as error:
    raise SharpDraftError(
        f'a library that talks to servers is missing ({error}): pip install "sharpdraft[lab]"'
    ) from error

_TIMEOUT = 600.0
"""Seconds of silence after which a server is given up."""
_CONNECT = 30.0
_LAST_PORT = 65535
_BUSY = (429, 503)
_NOT_THERE = (404, 405, 501)
_TRIES = 7
_LONGEST = 300.0
"""Seconds that a busy server may ask to be left alone."""
_KINDS = ("drafts", "draft_tokens", "accepted_tokens")
_COUNTERS = {f"vllm:spec_decode_num_{kind}_total": at for at, kind in enumerate(_KINDS)}
_BROKEN = (httpx.HTTPError, httpx.InvalidURL, StreamError, ValueError)
_COUNTED = {
    "tokenizer": "by the target's tokenizer",
    "events": "by the events that brought text, of which each may hold several",
}

Messages = Sequence[Mapping[str, str]]
_Asked = TypeVar("_Asked")


class Server:
    """A running server. It has an event loop of its own, so that it is not to be used in a running
    one.

    url: with or without /v1 at its end. model: what the server calls it; None for what it lists.
    key: the API key, sent as a bearer token and never shown. chat: each prompt, by its tokens, as
    the messages that /v1/chat/completions is asked with; None asks /v1/completions with the tokens.
    count: tokens of a text, for a server that does not count. say: is told of waiting.

    Raises SharpDraftError if nothing answers there, or not with `model`.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        key: str | None = None,
        chat: Mapping[tuple[int, ...], Messages] | None = None,
        count: Callable[[str], int] | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._base = url.rstrip("/").removesuffix("/v1")
        self.url = shown(self._base)
        self._key = (key or "").strip()
        self._chat, self._count, self._say = chat, count, say
        self._retries, self._noted = 0, False
        if not (self._key.isascii() and self._key.isprintable()):
            raise SharpDraftError("the API key has characters that no key has: copy it again")
        # As many connections as there are prompts at once.
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
            timeout=httpx.Timeout(_TIMEOUT, connect=_CONNECT),
            limits=httpx.Limits(),
        )
        self._runner = asyncio.Runner()
        try:
            self.model = self._runner.run(self._named(model))
        except BaseException:
            self.close()
            raise

    def answer(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, stop: Sequence[int] = ()
    ) -> dict[str, Any]:
        """Answer prompts at once, streamed, greedily.

        Returns tokens [prompts], here as text; reasoning [prompts], text as well, where there is
        any; first (mean seconds to a first token); seconds, in which one of the prompts or more
        was being answered; decoded (tokens written); counted (by whom, see `Streamed.count`);
        retries (how often a busy server was asked again); and counts (drafts, drafted, accepted),
        None where the server tells none.

        A busy server (429, 503) is asked again; that attempt and the waiting are in no time.
        Raises SharpDraftError for a prompt that is not answered; the others are given up then.
        """
        before = self.counts()
        self._retries = 0
        try:
            answers = self._runner.run(self._all(prompts, max_tokens))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
        after = self.counts()
        counts = None
        if before is not None and after is not None:
            counts = [a - b for a, b in zip(after, before, strict=True)]
            if min(counts) < 0:
                raise SharpDraftError(
                    f"{self.url}/metrics counts fewer drafts than before: the server was started "
                    "anew, or several answer there: ask one of them"
                )
        written, counters = zip(*(each.count(self._count) for each in answers), strict=True)
        counted = max(counters, key=("usage", "tokenizer", "events").index)
        if counted in _COUNTED and not self._noted:
            self._noted = True
            note(f"{self.url} does not count its tokens (usage): counted {_COUNTED[counted]}")
        firsts = [(each.first or each.ended) - each.began for each in answers]
        thoughts = [each.reasoning for each in answers]
        return {
            "tokens": [each.text for each in answers],
            "reasoning": thoughts if any(thoughts) else [],
            "decoded": sum(written),
            "counted": counted,
            "first": sum(firsts) / len(firsts),
            "seconds": _covered((each.began, each.ended) for each in answers),
            "retries": self._retries,
            "counts": counts,
        }

    def counts(self) -> list[int] | None:
        """Drafts, drafted and accepted tokens so far; None where the server counts none."""
        try:
            text = self._runner.run(self._get("/metrics")).text
            found, known = [0.0] * len(_KINDS), False
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if (at := _COUNTERS.get(sample.name)) is not None:
                        found[at], known = found[at] + sample.value, True
            return [int(value) for value in found] if known else None
        except (*_BROKEN, _StatusError, OverflowError):
            return None

    def close(self) -> None:
        """End the connections."""
        self._runner.run(self._client.aclose())
        self._runner.close()

    async def _named(self, wanted: str | None) -> str:
        """What to call the model, from what the server lists."""
        listed: list[str] = []
        try:
            if (httpx.URL(self._base).port or 0) > _LAST_PORT:
                raise httpx.InvalidURL(f"a port is at most {_LAST_PORT}")
            response = await self._patiently(partial(self._get, "/v1/models"))
            why = message_of(response.text) or "it says nothing"
            with suppress(ValueError, KeyError, TypeError, RecursionError):
                said = response.json()
                names = [each["id"] for each in (said["data"] if isinstance(said, dict) else said)]
                listed = [name for name in names if name and isinstance(name, str)]
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._error(
                f"no OpenAI-compatible server answers at {self.url}/v1/models: {_said(error)}"
            ) from None
        except _StatusError as refused:
            if refused.status not in _NOT_THERE:
                raise self._error(f"{self.url}/v1/models: {refused}{refused.remedy}") from None
            why = str(refused)
        if not listed and wanted is None:
            raise self._error(
                f"no OpenAI-compatible server answers at {self.url}/v1/models: {why}; if it is one "
                "that lists no models, name what it serves with --served-model"
            )
        if listed and wanted is not None and wanted not in listed:
            raise self._error(f"{self.url} serves {shortened(', '.join(listed))}, not {wanted}")
        if len(listed) > 1 and wanted is None:
            note(
                f"{self.url} serves {shortened(', '.join(listed))}: the first is asked; "
                "--served-model names another"
            )
        return wanted or listed[0]

    async def _all(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Streamed]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._one(prompt, max_tokens)) for prompt in prompts]
        return [task.result() for task in tasks]

    async def _one(self, prompt: Sequence[int], max_tokens: int) -> Streamed:
        asked: dict[str, Any] = {"prompt": list(prompt)}
        path = "/v1/completions"
        if self._chat is not None:
            asked, path = {"messages": self._chat[tuple(prompt)]}, "/v1/chat/completions"
        body = {
            "model": self.model,
            **asked,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            return await self._patiently(partial(self._attempt, path, body))
        except _StatusError as refused:
            why = f"{refused}{refused.remedy}"
            if refused.status in _NOT_THERE:
                how = "with --chat" if self._chat is None else "without --chat"
                why += f"; a server without {path} is asked {how}"
        except _BROKEN as error:
            why = _said(error)
        raise self._error(f"{self.url} did not answer a prompt of {len(prompt)} tokens: {why}")

    async def _attempt(self, path: str, body: Mapping[str, Any]) -> Streamed:
        answer = Streamed(perf_counter())
        try:
            async with aconnect_sse(self._client, "POST", self._base + path, json=body) as source:
                await _check(source.response)
                await _check_stream(source.response)
                async with aclosing(source.aiter_sse()) as events:
                    async for event in events:
                        if not answer.take(event, perf_counter()):
                            break
        except httpx.TransportError:
            # All of it is there: how the connection ends is no matter.
            if not answer.finished:
                raise
        answer.end()
        return answer

    async def _patiently(self, ask: Callable[[], Awaitable[_Asked]]) -> _Asked:
        """Ask again while the server is busy, each time after twice as long, or what it says."""
        tried = 0
        while True:
            try:
                return await ask()
            except _StatusError as refused:
                if refused.status not in _BUSY:
                    raise
                wait, tried = max(refused.wait, 2.0**tried), tried + 1
                if wait > _LONGEST:
                    refused.remedy = f"; it asks to wait for {wait:.0f} s: run this again then"
                    raise
                if tried == _TRIES:
                    refused.remedy = f"; it was asked {tried} times: fewer at once (--concurrency)?"
                    raise
                self._say(f"{self.url} is busy ({refused.status}): asked again in {wait:.0f} s")
            self._retries += 1
            await sleep(wait)

    async def _get(self, path: str) -> httpx.Response:
        response = await self._client.get(self._base + path)
        await _check(response)
        return response

    def _error(self, text: str) -> SharpDraftError:
        """Servers may repeat the key that they refuse."""
        return SharpDraftError(text.replace(self._key, "***") if len(self._key) > 7 else text)


class _StatusError(Exception):
    """An answer by a status. wait: seconds that the server asks to wait; 0 where it says none.
    remedy: what to do about it, or nothing."""

    def __init__(self, response: httpx.Response) -> None:
        said = message_of(response.text) or response.headers.get("location", "")
        super().__init__(
            f"{response.status_code} {response.reason_phrase}{said and ': '}{said}".strip()
        )
        self.status = response.status_code
        self.wait = _wait_of(response.headers.get("retry-after", ""))
        self.remedy = ""
        if self.status in (401, 403):
            self.remedy = "; give the key with --api-key or OPENAI_API_KEY"


def shown(url: str) -> str:
    """An address without the name and password that may be in it."""
    scheme, found, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{found}{host.rpartition('@')[2]}{slash}{path}"


async def _check(response: httpx.Response) -> None:
    """Refuse an error, with what the server says of it."""
    if not response.is_success:
        await response.aread()
        raise _StatusError(response)


async def _check_stream(response: httpx.Response) -> None:
    """Raises StreamError for an answer that is no stream."""
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "text/event-stream":
        await response.aread()
        raise StreamError(
            f"a stream (text/event-stream) was asked for, and {kind or 'no content type'} came: "
            f"{message_of(response.text)}"
        )
    # What reads the events minds the case. A stream is UTF-8 always, and may begin with its mark.
    response.headers["content-type"] = "text/event-stream; charset=utf-8-sig"


def _said(error: Exception) -> str:
    if isinstance(error, httpx.ReadTimeout):
        return f"it said nothing for {_TIMEOUT:g} s"
    return one_line(error)


def _wait_of(retry_after: str) -> float:
    """Seconds to wait, from seconds or a date; 0 where it is neither."""
    with suppress(ValueError):
        return max(0.0, float(retry_after))
    with suppress(ValueError, TypeError, OverflowError):
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time())
    return 0.0


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds that lie in one of the spans or more."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
