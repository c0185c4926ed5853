"""The way of one generation: engine asked, answer passed on, events published.

Order: 1 a route and a place in flight are taken together; 2 the engine is asked; 3 a lost engine is replaced at most
twice; 4 the answer goes to the client as it comes; 5 events are published before the client holds the whole answer.
Promises: every request that reached step 1 leaves Inference events, whatever happens to engine or client.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import aiohttp
import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ingest.events import Inference, Timing
from serving import sampling
from serving.capture import Capture, Choice
from serving.config import ServingConfig
from serving.generation import Generation, Outcome
from serving.router import Pick
from serving.routes import Route
from serving.switchboard import Incarnation, Switchboard, incarnation

log = logging.getLogger("headrace.gateway")
PATHS = {"chat.completions": "/v1/chat/completions", "completions": "/v1/completions"}
Publish = Callable[[list[Inference]], None]


class EngineLost(Exception):
    """The engine is away, broken, or another incarnation than the route names."""


class Means(NamedTuple):
    """What every relay needs."""

    session: aiohttp.ClientSession
    switchboard: Switchboard
    config: ServingConfig
    model_name: str
    publish: Publish


def error_body(message: str, kind: str, how_to_fix: str, param: str | None = None) -> dict[str, Any]:
    """Return an OpenAI-style error with how to fix it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": None, "how_to_fix": how_to_fix}}


class Relay(Response):
    """A response that asks the engine when it is sent."""

    def __init__(self, means: Means, generation: Generation):
        super().__init__()
        self._means, self._generation = means, generation
        self._asked = sampling.instrument(generation.api, generation.body)
        self._pick: Pick | None = None
        self._route: Route | None = None
        self._arm = "champion"
        self._capture: Capture | None = None
        self._started = False  # the client has the status line
        self._published = False
        self._first_token_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve, and cancel the engine's work when the client leaves."""
        work = asyncio.create_task(self._serve(send))
        left = asyncio.create_task(wait_until_left(receive))
        try:
            await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):  # OSError: the client left during a send
                await work
        finally:
            work.cancel()
            left.cancel()

    async def _serve(self, send: Send) -> None:
        pick = self._pick = self._means.switchboard.take(self._generation.unit)
        if pick is None:
            await self._send_unavailable(send, "no champion is being served yet")
            return
        self._route, self._arm = pick.route, pick.arm
        try:
            await self._attempt(send, pick.route)
        except (asyncio.CancelledError, OSError):  # the client left: seen by the watcher, or by a failing send
            shown = self._started and any(text for choice in self._choices() for text in choice.text)
            self._publish(Outcome("cancelled", untrainable="cancelled", shown=shown))
            raise
        except Exception:
            self._publish(Outcome("error", error_type="gateway_error", untrainable="gateway_error"))
            raise

    async def _attempt(self, send: Send, route: Route) -> None:
        """Try the assigned engine, then another one at most twice."""
        tried: set[Incarnation | None] = set()
        config, board = self._means.config, self._means.switchboard
        while True:
            tried.add(incarnation(route))
            self._route = route
            try:
                board.count(route, failed=await self._ask(send, route))
                return
            except EngineLost as error:
                problem = str(error)
                board.count(route, failed=True)
                log.warning(
                    "engine=lost name=%s version=%s arm=%s cause=%r", route.engine, route.version, self._arm, problem
                )
            finally:
                board.release(route)
            if self._started:
                await self._break_off(send, "engine_lost", f"the engine was lost while it answered: {problem}")
                return
            other = (
                await board.take_other(tried, config.reroute_wait_s, config.standby_fallback)
                if len(tried) < 3
                else None
            )
            if other is None:
                break
            route, self._arm = other, "champion"
        self._publish(Outcome("error", error_type="engine_lost"))
        await self._send_unavailable(send, f"no engine could answer ({problem})")

    async def _ask(self, send: Send, route: Route) -> bool:
        """Ask one engine and pass its answer on; return whether it failed in a way that no other engine would mend."""
        try:
            try:
                return await self._ask_once(send, route)
            except aiohttp.ServerDisconnectedError:  # perhaps a kept connection that the engine had just closed
                if self._started:
                    raise
                return await self._ask_once(send, route)
        except aiohttp.ClientError as error:  # before TimeoutError: a connect timeout is both
            raise EngineLost(repr(error)) from error
        except TimeoutError:
            message = f"the engine did not answer within {self._means.config.request_timeout_s:g} s"
            if self._started:
                await self._break_off(send, "timeout", message)
            else:
                self._publish(Outcome("error", error_type="timeout"))
                await self._send_json(send, 504, error_body(message, "timeout", "ask for fewer tokens, or try again"))
            return True

    async def _ask_once(self, send: Send, route: Route) -> bool:
        generation = self._generation
        self._capture = Capture(
            generation.api, generation.num_choices, *sampling.wants(generation.api, generation.body)
        )
        body = msgspec.json.encode({**self._asked, "model": route.served_model})
        url = route.url + PATHS[generation.api]
        async with self._means.session.post(url, data=body, headers={"content-type": "application/json"}) as answer:
            if answer.status >= 500 or answer.status == 404:  # 404: another incarnation, which does not know the name
                raise EngineLost(f"HTTP {answer.status}: {(await answer.text())[:200]}")
            if answer.content_type == "text/event-stream":
                return await self._pass_stream(send, answer, route)
            await self._pass_whole(send, answer, route)
            return False

    async def _pass_whole(self, send: Send, answer: aiohttp.ClientResponse, route: Route) -> None:
        """Pass a complete answer, or the engine's refusal of the request."""
        capture = self._capture
        assert capture is not None
        try:
            content = capture.pass_answer(msgspec.json.decode(await answer.read()))
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
            raise EngineLost(f"HTTP {answer.status} with a body that is no answer: {error!r}") from error
        if answer.status != 200:
            self._publish(Outcome("error", error_type=f"refused:{capture.error_type or answer.status}"))
            await self._send_json(send, answer.status, content)
            return
        self._first_token_at = time.time()
        self._rename(content)
        self._publish(Outcome())
        await self._send_json(send, 200, content, self._generation.headers(route, self._arm))

    async def _pass_stream(self, send: Send, answer: aiohttp.ClientResponse, route: Route) -> bool:
        """Pass server-sent events as they come, and publish before [DONE] goes out; return whether one was an error."""
        rest, error_type, finished = b"", None, False
        async for data in answer.content.iter_any():
            rest += data
            if b"\n\n" not in rest:
                continue
            *events, rest = rest.split(b"\n\n")
            out = b"".join(self._pass_event(event) for event in events)
            if not self._started:
                headers = self._generation.headers(route, self._arm) | {"cache-control": "no-cache"}
                await self._start(send, 200, "text/event-stream; charset=utf-8", headers)
            if any(event == b"data: [DONE]" for event in events):
                finished = True
                error_type = self._capture.error_type if self._capture else None
                self._publish(Outcome("error" if error_type else "", error_type=error_type, untrainable=error_type))
            await send({"type": "http.response.body", "body": out, "more_body": True})
        if not finished:
            raise EngineLost("the stream ended before [DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return error_type is not None

    def _pass_event(self, event: bytes) -> bytes:
        """Read one server-sent event and return it as the client asked for it; comments and [DONE] pass as they are."""
        if not event.startswith(b"data: {"):
            return event + b"\n\n"
        assert self._capture is not None
        try:
            chunk = self._capture.pass_answer(msgspec.json.decode(event[6:]))
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
            raise EngineLost(f"a chunk that is none: {error!r}") from error
        if not self._first_token_at and any(choice.completion_ids for choice in self._choices()):
            self._first_token_at = time.time()
        if self._capture.is_only_ours(chunk):
            return b""
        self._rename(chunk)
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"

    def _choices(self) -> list[Choice]:
        return self._capture.choices if self._capture else []

    def _rename(self, answer: dict[str, Any]) -> None:
        """Put our response id and the public model name in place of the engine's."""
        for key, value in (("id", self._generation.response_id), ("model", self._means.model_name)):
            if key in answer:
                answer[key] = value

    def _publish(self, outcome: Outcome) -> None:
        """Publish this generation's events, once. A failure that generated nothing is one event."""
        if self._published or self._pick is None or self._route is None:
            return
        self._published = True
        generated = any(choice.completion_ids for choice in self._choices())
        capture = self._capture if generated or outcome.error_type is None else None
        timing = Timing(
            received_at=self._generation.received_at, first_token_at=self._first_token_at, completed_at=time.time()
        )
        self._means.publish(self._generation.inferences(self._pick, self._route, self._arm, capture, outcome, timing))

    async def _start(self, send: Send, status: int, content_type: str, headers: dict[str, str]) -> None:
        self._started = True
        pairs = [
            (b"content-type", content_type.encode()),
            *((key.encode(), value.encode()) for key, value in headers.items()),
        ]
        await send({"type": "http.response.start", "status": status, "headers": pairs})

    async def _send_json(self, send: Send, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        body = msgspec.json.encode(content)
        await self._start(send, status, "application/json", {"content-length": str(len(body)), **(headers or {})})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    async def _send_unavailable(self, send: Send, message: str) -> None:
        content = error_body(message, "service_unavailable", "try again after the Retry-After header's seconds")
        await self._send_json(send, 503, content, {"retry-after": "2"})

    async def _break_off(self, send: Send, error_type: str, message: str) -> None:
        """End a stream that the client has already seen the start of, as vLLM does: an error event, then [DONE]."""
        self._publish(Outcome("error", error_type=error_type, untrainable=error_type))
        event = msgspec.json.encode(error_body(message, error_type, "ask again"))
        body = b"data: " + event + b"\n\ndata: [DONE]\n\n"
        await send({"type": "http.response.body", "body": body, "more_body": False})


async def wait_until_left(receive: Receive) -> None:
    """Return when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
