"""The gateway's HTTP surface: public (generation, models, health, feedback) and admin (routes, metrics).

Promises: a bad request is answered in OpenAI's error form with how to fix it, and never reaches an engine.
"""

import asyncio
import os
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from ingest import ids
from ingest.events import FEEDBACK_TYPE, Feedback, encode
from ingest.producer import SpoolFull
from ingest.topics import headers
from serving import sampling
from serving.auth import Caller, Keys, Refused, pseudonym
from serving.feedback import BadFeedback, to_event
from serving.generation import Generation, episode_of, name_of
from serving.relay import Means, Relay, error_body

DURABLE_THREADS = 32  # each waits for one acknowledgement; a batch shares the producer's linger


class DurablePublisher(Protocol):
    """What feedback needs of ingest's Publisher."""

    def publish_durably(
        self, topic: str, key: str, value: bytes, headers: list[tuple[str, bytes]], timeout_s: float = 5.0
    ) -> None: ...


class BadRequest(Exception):
    """A request that is refused before any engine sees it."""

    def __init__(self, status: int, message: str, how_to_fix: str, kind: str = "invalid_request_error"):
        super().__init__(message)
        self.status, self.body = status, error_body(message, kind, how_to_fix)


class Gateway:
    """What the endpoints share."""

    def __init__(
        self, means: Means, keys: Keys, secret: bytes, publisher: DurablePublisher, topic: str, config_hash: str
    ):
        self.means = means
        self.counts: Counter[str] = Counter()
        self._keys, self._secret, self._config_hash = keys, secret, config_hash
        self._publisher, self._topic = publisher, topic
        self._metrics = frozenset(means.config.metrics)
        self._threads = ThreadPoolExecutor(DURABLE_THREADS, thread_name_prefix="feedback")

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, "chat.completions")

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, "completions")

    async def _generate(self, request: Request, api: sampling.Api) -> Response:
        received_at = time.time()
        caller = self._keys.check(request.headers.get("authorization"), "infer")
        body = await self._read_object(request)
        model = body.get("model")
        if model not in (None, "", self.means.model_name):
            raise BadRequest(
                404, f"the model {model!r} does not exist", f"ask for {self.means.model_name!r}", "model_not_found"
            )
        num_choices = sampling.num_choices(api, body)
        if num_choices > self.means.config.max_choices:
            raise BadRequest(400, f"{num_choices} choices asked for", f"at most {self.means.config.max_choices}")
        try:
            generation = self._generation(request, api, body, caller, received_at, num_choices)
        except ValueError as error:
            raise BadRequest(400, str(error), "shorten or fix it, or leave it out") from error
        return Relay(self.means, generation)

    def _generation(
        self, request: Request, api: sampling.Api, body: dict[str, Any], caller: Caller, at: float, num_choices: int
    ) -> Generation:
        uuid_hex = ids.uuid7_hex(int(at * 1000), os.urandom(10))
        named = body.pop("user", None)  # the raw id goes no further than this
        user = request.headers.get("x-headrace-user") or (named if isinstance(named, str) else "")
        return Generation(
            api=api,
            body=body,
            tenant=caller.tenant,
            app=name_of(request.headers, "x-headrace-app", "default"),
            function=name_of(request.headers, "x-headrace-function", "default"),
            episode_id=episode_of(request.headers, body, uuid_hex),
            user_ref=pseudonym(self._secret, caller.tenant, user) if user else "",
            consent=request.headers.get("x-headrace-consent", "").strip().lower() != "none",
            uuid_hex=uuid_hex,
            received_at=at,
            num_choices=num_choices,
            config_hash=self._config_hash,
        )

    async def feedback(self, request: Request) -> Response:
        """Take one item or {"feedback": [...]}: 202 if any is durable, 400 if all are bad, 503 if none was kept."""
        caller = self._keys.check(request.headers.get("authorization"), "feedback")
        body = await self._read_object(request)
        items = body.get("feedback", [body])
        limit = self.means.config.max_feedback_items
        if not isinstance(items, list) or not 1 <= len(items) <= limit:
            raise BadRequest(400, "feedback must be a list", f"send 1 to {limit} items")
        key = request.headers.get("idempotency-key")
        keys = [f"{key}/{index}" if key and len(items) > 1 else key for index in range(len(items))]
        user = request.headers.get("x-headrace-user")
        results = await asyncio.gather(
            *(self._accept(item, caller.tenant, user, one) for item, one in zip(items, keys, strict=True))
        )
        accepted = [result for status, result in results if status == 202]
        refused = [{"index": i, "status": s, "error": r} for i, (s, r) in enumerate(results) if s != 202]
        self.counts["feedback_accepted"] += len(accepted)
        self.counts["feedback_refused"] += len(refused)
        if accepted:
            return reply(202, {"accepted": accepted, **({"refused": refused} if refused else {})})
        status = max(item["status"] for item in refused)
        content = {"error": refused[0]["error"], **({"refused": refused} if len(items) > 1 else {})}
        return reply(status, content, {"retry-after": "5"} if status == 503 else {})

    async def _accept(
        self, raw: Any, tenant: str, user: str | None, idempotency_key: str | None
    ) -> tuple[int, dict[str, Any]]:
        """Return 202 with the id once the event is durable, else 400 or 503 with the error."""

        def source_id_of(own: str | None) -> str:
            return pseudonym(self._secret, tenant, own or user or "") if own or user else ""

        try:
            event, key = to_event(raw, tenant, source_id_of, self._metrics, time.time(), idempotency_key)
            await asyncio.get_running_loop().run_in_executor(self._threads, self._publish_durably, event, key)
        except BadFeedback as error:
            return 400, error.body()
        except SpoolFull as error:
            return 503, error_body(f"not kept: {error}", "service_unavailable", "send it again later")["error"]
        return 202, {"feedback_id": event.feedback_id, "status": "accepted"}

    def _publish_durably(self, event: Feedback, key: str) -> None:
        """The dedup key must not depend on the gateway that took the item, and ids of two tenants must not meet."""
        source = f"headrace/feedback/{event.tenant}"
        about = headers(FEEDBACK_TYPE, f"{event.feedback_id}:{event.revision}", source, event.received_at)
        self._publisher.publish_durably(
            self._topic, key, encode(event), about, timeout_s=self.means.config.feedback_timeout_s
        )

    async def models(self, request: Request) -> Response:
        self._keys.check(request.headers.get("authorization"), "infer")
        model = {"id": self.means.model_name, "object": "model", "created": 0, "owned_by": "headrace"}
        return reply(200, {"object": "list", "data": [model]})

    async def health(self, request: Request) -> Response:
        table = self.means.switchboard.table
        if table is None or table.champion is None:
            return reply(503, {"status": "no champion is being served yet"}, {"retry-after": "2"})
        return reply(200, {"status": "ok", "version": table.champion.version, "revision": table.revision})

    async def routes(self, request: Request) -> Response:
        return reply(200, self.means.switchboard.describe())

    async def _read_object(self, request: Request) -> dict[str, Any]:
        """Return the JSON object of a body within the size limit."""
        limit = self.means.config.max_body_bytes
        too_large = BadRequest(
            413, f"the body is larger than {limit} bytes", "send less, or raise serving.max_body_bytes"
        )
        if int(request.headers.get("content-length") or 0) > limit:
            raise too_large
        data = bytearray()
        async for part in request.stream():
            data += part
            if len(data) > limit:
                raise too_large
        try:
            body = msgspec.json.decode(bytes(data))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadRequest(400, f"the body is not valid JSON: {error}", "send a JSON object") from error
        if not isinstance(body, dict):
            raise BadRequest(400, "the body is no JSON object", "send a JSON object")
        return body


def reply(status: int, content: Any, extra: dict[str, str] | None = None) -> Response:
    """Return a JSON response."""
    return Response(msgspec.json.encode(content), status, extra, "application/json")


async def refuse(_: Request, error: Exception) -> Response:
    """Turn our refusals into OpenAI-style errors."""
    if isinstance(error, Refused):
        kind = "authentication_error" if error.status == 401 else "permission_error"
        extra = {"www-authenticate": "Bearer"} if error.status == 401 else {}
        return reply(error.status, error_body(error.message, kind, error.how_to_fix), extra)
    assert isinstance(error, BadRequest), f"no answer is known for {error!r}"
    return reply(error.status, error.body)


async def unknown(_: Request, error: Exception) -> Response:
    """Answer a path or method that does not exist."""
    assert isinstance(error, HTTPException), f"no answer is known for {error!r}"
    how = "POST /v1/chat/completions, /v1/completions or /v1/feedback; GET /v1/models or /health"
    return reply(error.status_code, error_body(str(error.detail), "invalid_request_error", how))


async def broken(_: Request, error: Exception) -> Response:
    """Answer for a fault of ours; Starlette logs it with its trace."""
    return reply(500, error_body(f"the gateway failed: {type(error).__name__}", "server_error", "tell its operator"))


async def leave(_: Request, error: Exception) -> Response:
    """The client left while it was sending: nobody reads this."""
    return Response(status_code=499)


def public_app(gateway: Gateway) -> Starlette:
    """Return what clients reach."""
    routes = [
        Route("/v1/chat/completions", gateway.chat, methods=["POST"]),
        Route("/v1/completions", gateway.completions, methods=["POST"]),
        Route("/v1/feedback", gateway.feedback, methods=["POST"]),
        Route("/v1/models", gateway.models),
        Route("/health", gateway.health),
    ]
    handlers: dict[Any, Any] = {Refused: refuse, BadRequest: refuse, ClientDisconnect: leave, HTTPException: unknown}
    handlers[Exception] = broken
    return Starlette(routes=routes, exception_handlers=handlers)


def admin_app(gateway: Gateway) -> Starlette:
    """Return what only this machine reaches."""
    return Starlette(routes=[Route("/internal/routes", gateway.routes), Route("/health", gateway.health)])
