"""A gateway on a stand: real sockets, stub engines that replay a real vLLM's answers, a publisher in memory."""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route as HttpRoute

from ingest.events import Feedback, Inference, decode
from serving.api import Gateway, admin_app, public_app
from serving.auth import Keys
from serving.config import ServingConfig
from serving.gateway import InferenceLog, engine_session, listen, make_server
from serving.relay import Means
from serving.routes import Route, RouteTable
from serving.sampling import instrument
from serving.switchboard import Switchboard

ANSWERS: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("vllm_answers.json").read_text())
SECRET = bytes(range(32))
Script = Callable[[dict[str, Any]], Awaitable[Response | None]]


class Published(NamedTuple):
    topic: str
    key: str
    value: bytes
    headers: dict[str, str]


class MemoryPublisher:
    """Keeps what is published; raises what `refuse` holds."""

    def __init__(self) -> None:
        self.events: list[Published] = []
        self.refuse: Exception | None = None

    def publish(self, topic: str, key: str, value: bytes, headers: list[tuple[str, bytes]]) -> None:
        self.events.append(Published(topic, key, value, {name: text.decode() for name, text in headers}))

    def publish_durably(
        self, topic: str, key: str, value: bytes, headers: list[tuple[str, bytes]], timeout_s: float = 5.0
    ) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.publish(topic, key, value, headers)

    def stats(self) -> dict[str, int]:
        return {"num_published": len(self.events)}

    def inferences(self) -> list[Inference]:
        return [decode(event.value, Inference) for event in self.events if event.topic == "inference"]

    def feedback(self) -> list[Feedback]:
        return [decode(event.value, Feedback) for event in self.events if event.topic == "feedback"]


class StubEngine:
    """Answers as the recorded vLLM did, under one served model name; `script` may answer instead."""

    def __init__(self, served_model: str):
        self.served_model = served_model
        self.script: Script | None = None
        self.bodies: list[dict[str, Any]] = []
        self.num_cancelled = 0
        self.port = 0
        paths = ("/v1/chat/completions", "/v1/completions")
        self.app = Starlette(routes=[HttpRoute(path, self.answer, methods=["POST"]) for path in paths])

    async def answer(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.bodies.append(body)
        if self.script is not None and (scripted := await self.script(body)) is not None:
            return scripted
        if body.pop("model") != self.served_model:
            return self.replay(ANSWERS["wrong_model"]["plain"])
        api = "completions" if request.url.path == "/v1/completions" else "chat.completions"
        for case in ANSWERS.values():
            if request.url.path == f"/v1/{case['path']}" and instrument(api, case["body"]) == body:
                return self.replay(case["captured"])
        return Response(f"no recorded answer for {body}", 400)

    def replay(self, answer: dict[str, Any], wait_s: float = 0.0, cut: int = 0) -> Response:
        """Return a recorded answer; a stream goes out in pieces of `cut` bytes, or event by event."""
        if not answer["type"].startswith("text/event-stream"):
            return Response(answer["text"], answer["status"], media_type="application/json")
        text = answer["text"].encode()
        events = [event + b"\n\n" for event in text.split(b"\n\n") if event]
        pieces = [text[at : at + cut] for at in range(0, len(text), cut)] if cut else events

        async def stream() -> Any:
            try:
                for piece in pieces:
                    yield piece
                    await asyncio.sleep(wait_s)
            except asyncio.CancelledError:
                self.num_cancelled += 1
                raise

        return StreamingResponse(stream(), media_type="text/event-stream")


class Stand:
    """One gateway, two stub engines (blue serves the champion), and clients for both listeners."""

    def __init__(self, config: ServingConfig, keys: Keys):
        self.config, self.keys = config, keys
        self.publisher = MemoryPublisher()
        self.blue, self.green = StubEngine("tiny-blue-1"), StubEngine("tiny-green-1")
        self.log = InferenceLog(self.publisher, "inference")  # pyright: ignore[reportArgumentType]
        self.revision = 0
        self.client: httpx.Client
        self.admin: httpx.Client
        self.switchboard: Switchboard
        self.loop = asyncio.new_event_loop()
        self.url = ""

    def route(self, engine: StubEngine, version: str, arm: Any = "champion") -> Route:
        name = "blue" if engine is self.blue else "green"
        url = f"http://127.0.0.1:{engine.port}"
        return Route(arm=arm, version=version, engine=name, url=url, served_model=engine.served_model)

    def apply(self, **fields: Any) -> RouteTable:
        """Put a table in force, of the next revision."""
        self.revision += 1
        champion = fields.pop("champion", self.route(self.blue, "v000000"))
        table = RouteTable(revision=self.revision, at=0.0, author="controller", champion=champion, salt="s", **fields)
        self.on_loop(self._apply(table))
        return table

    async def _apply(self, table: RouteTable) -> None:
        self.switchboard.apply(table)

    def on_loop(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(10)

    def wait_for(self, condition: Callable[[], Any], timeout_s: float = 5.0) -> None:
        """Wait until a condition holds; AssertionError after the timeout."""
        done = threading.Event()
        for _ in range(int(timeout_s / 0.01)):
            if condition():
                return
            done.wait(0.01)
        raise AssertionError(f"not true after {timeout_s} s")

    async def _run(self, ready: threading.Event, stop: asyncio.Event) -> None:
        async with engine_session(self.config) as session:
            self.switchboard = Switchboard()
            means = Means(session, self.switchboard, self.config, "headrace", self.log.publish)
            self.gateway = Gateway(means, self.keys, SECRET, self.publisher, "feedback", "cafe")
            apps = [self.blue.app, self.green.app, public_app(self.gateway), admin_app(self.gateway)]
            listeners = [listen("127.0.0.1", 0) for _ in apps]
            servers = [make_server(app, 1) for app in apps]
            running = [asyncio.create_task(s.serve([at])) for s, at in zip(servers, listeners, strict=True)]
            ports = [at.getsockname()[1] for at in listeners]
            self.blue.port, self.green.port = ports[:2]
            self.url = f"http://127.0.0.1:{ports[2]}"
            self.client = httpx.Client(base_url=self.url, timeout=20, trust_env=False)
            self.admin = httpx.Client(base_url=f"http://127.0.0.1:{ports[3]}", timeout=20, trust_env=False)
            while not all(server.started for server in servers):
                await asyncio.sleep(0.005)
            ready.set()
            await stop.wait()
            for server in servers:
                server.should_exit = True
            await asyncio.gather(*running)


@contextmanager
def stand(config: ServingConfig | None = None, keys: Keys | None = None) -> Iterator[Stand]:
    """Open a stand with the champion v000000 on blue in force."""
    result = Stand(config or ServingConfig(reroute_wait_s=0.2), keys or Keys(None))
    ready, stop = threading.Event(), asyncio.Event()
    thread = threading.Thread(target=lambda: result.loop.run_until_complete(result._run(ready, stop)))
    thread.start()
    assert ready.wait(10), "the stand did not start"
    try:
        result.apply()
        yield result
    finally:
        result.client.close()
        result.admin.close()
        result.loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        result.loop.close()
