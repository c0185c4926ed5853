"""Engines that go away, clients that leave, tables that change: no request is lost, and every one leaves its events."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse, Response, StreamingResponse

from serving.config import ServingConfig
from tests.serving.stand import ANSWERS, Stand, StubEngine, stand

CHAT = ANSWERS["chat"]["body"]
STREAM = ANSWERS["chat_stream"]["body"]


@pytest.fixture
def opened() -> Iterator[Stand]:
    with stand() as one:
        yield one


def chat(stand: Stand, **body: Any) -> httpx.Response:
    return stand.client.post("/v1/chat/completions", json={**CHAT, **body})


def breaks(status: int) -> Any:
    async def script(body: dict[str, Any]) -> Response:
        return JSONResponse({"error": {"message": "boom", "type": "InternalServerError", "code": status}}, status)

    return script


def slow(engine: StubEngine, name: str, wait_s: float) -> Any:
    async def script(body: dict[str, Any]) -> Response | None:
        if name.endswith("stream"):
            return engine.replay(ANSWERS[name]["captured"], wait_s=wait_s)
        try:
            await asyncio.sleep(wait_s)
        except asyncio.CancelledError:
            engine.num_cancelled += 1
            raise
        return engine.replay(ANSWERS[name]["captured"])

    return script


def dies_after(num_events: int) -> Any:
    """A stream that breaks off without [DONE]."""
    events = ANSWERS["chat_stream"]["captured"]["text"].encode().split(b"\n\n")[:num_events]

    async def stream() -> Any:
        for event in events:
            yield event + b"\n\n"
            await asyncio.sleep(0.02)
        raise ConnectionError("the engine died")

    async def script(body: dict[str, Any]) -> Response:
        return StreamingResponse(stream(), media_type="text/event-stream")

    return script


@pytest.mark.parametrize("how", ["another incarnation", "connection refused", "500"])
def test_a_lost_canary_is_answered_by_the_champion_and_recorded_so(opened: Stand, how: str) -> None:
    canary = opened.route(opened.green, "v000001", "canary")
    if how == "another incarnation":
        opened.green.served_model = "tiny-green-2"
    elif how == "connection refused":
        canary = type(canary)(
            **{**{f: getattr(canary, f) for f in canary.__struct_fields__}, "url": "http://127.0.0.1:9"}
        )
    else:
        opened.green.script = breaks(500)
    opened.apply(canary=canary, canary_weight=1.0, rollout_id="r1")
    answer = chat(opened)
    assert (answer.status_code, answer.headers["x-headrace-version"]) == (200, "v000000")
    assert answer.headers["x-headrace-arm"] == "champion"
    (inference,) = opened.publisher.inferences()
    assignment = inference.assignment
    assert (assignment.arm, assignment.assigned_arm, assignment.rollout_id) == ("champion", "canary", "r1")
    assert (inference.policy.version, inference.error_type) == ("v000000", None)
    assert inference.tokens is not None
    expected = {
        "champion": {"requests": 1, "errors": 0, "failures_in_a_row": 0},
        "canary": {"requests": 1, "errors": 1, "failures_in_a_row": 1},
    }
    opened.wait_for(lambda: expected.items() <= opened.admin.get("/internal/routes").json()["arms"].items())


def test_a_canary_answers_its_share_and_is_named(opened: Stand) -> None:
    opened.apply(canary=opened.route(opened.green, "v000001", "canary"), canary_weight=1.0, rollout_id="r1")
    answer = chat(opened)
    assert (answer.headers["x-headrace-version"], answer.headers["x-headrace-arm"]) == ("v000001", "canary")
    (inference,) = opened.publisher.inferences()
    assert inference.tokens is not None
    assert inference.tokens.weight_spans[0].version == inference.policy.version == "v000001"
    assert (inference.assignment.propensity, inference.assignment.assigned_arm) == (1.0, "")


def test_a_lost_champion_is_answered_by_the_standby(opened: Stand) -> None:
    opened.blue.script = breaks(500)
    opened.apply(standby=opened.route(opened.green, "v000009", "standby"))
    answer = chat(opened)
    assert (answer.status_code, answer.headers["x-headrace-version"]) == (200, "v000009")


def test_a_lost_champion_waits_for_a_newer_table() -> None:
    with stand(ServingConfig(reroute_wait_s=5.0)) as opened:
        opened.blue.script = breaks(503)
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(chat(opened)))
        thread.start()
        opened.wait_for(lambda: opened.blue.bodies)
        opened.apply(champion=opened.route(opened.green, "v000001"))
        thread.join(5)
        assert [(a.status_code, a.headers["x-headrace-version"]) for a in answers] == [(200, "v000001")]


def test_without_any_engine_the_client_is_told_to_come_back(opened: Stand) -> None:
    opened.blue.script = breaks(500)
    answer = chat(opened, n=1)
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "service_unavailable")
    assert int(answer.headers["retry-after"]) > 0
    (inference,) = opened.publisher.inferences()
    assert (inference.error_type, inference.tokens, inference.finish_reason) == ("engine_lost", None, "error")
    opened.apply(champion=None)
    assert chat(opened).status_code == 503
    assert opened.client.get("/health").status_code == 503


def test_a_slow_engine_is_a_timeout() -> None:
    with stand(ServingConfig(request_timeout_s=0.2)) as opened:
        opened.blue.script = slow(opened.blue, "chat", 1.0)
        answer = chat(opened)
        assert (answer.status_code, answer.json()["error"]["type"]) == (504, "timeout")
        assert [one.error_type for one in opened.publisher.inferences()] == ["timeout"]
        opened.wait_for(lambda: opened.switchboard.inflight["blue"] == 0)


def test_an_engine_that_dies_before_its_first_token_is_replaced_unseen(opened: Stand) -> None:
    opened.green.script = dies_after(0)
    opened.apply(canary=opened.route(opened.green, "v000001", "canary"), canary_weight=1.0)
    with opened.client.stream("POST", "/v1/chat/completions", json=STREAM) as answer:
        text = answer.read().decode()
    assert answer.headers["x-headrace-version"] == "v000000"
    assert text.endswith("data: [DONE]\n\n") and "error" not in text


def test_an_engine_that_dies_in_a_stream_leaves_an_error_and_its_tokens(opened: Stand) -> None:
    opened.blue.script = dies_after(4)
    text = opened.client.post("/v1/chat/completions", json=STREAM).text
    events = text.split("\n\n")
    assert json.loads(events[-3].removeprefix("data: "))["error"]["type"] == "engine_lost"
    assert events[-2] == "data: [DONE]"
    (inference,) = opened.publisher.inferences()
    assert (inference.error_type, inference.untrainable) == ("engine_lost", "engine_lost")
    assert inference.tokens is not None and len(inference.tokens.completion_ids) >= 1
    opened.wait_for(lambda: opened.switchboard.inflight["blue"] == 0)


def test_a_client_that_leaves_a_stream_stops_the_engine(opened: Stand) -> None:
    opened.blue.script = slow(opened.blue, "chat_stream", 0.1)
    with opened.client.stream("POST", "/v1/chat/completions", json=STREAM) as answer:
        received = answer.iter_lines()
        while "content" not in (line := next(received)) or '"content":""' in line:
            pass
    opened.wait_for(lambda: opened.blue.num_cancelled and opened.publisher.events)
    (inference,) = opened.publisher.inferences()
    assert (inference.finish_reason, inference.untrainable, inference.exposure) == ("cancelled", "cancelled", "shown")
    assert inference.tokens is not None and 1 <= len(inference.tokens.completion_ids) < 12
    assert inference.error_type is None
    opened.wait_for(lambda: opened.switchboard.inflight["blue"] == 0)


def test_a_client_that_leaves_before_the_answer_has_seen_none(opened: Stand) -> None:
    opened.blue.script = slow(opened.blue, "chat", 1.0)
    with pytest.raises(httpx.ReadTimeout):
        opened.client.post("/v1/chat/completions", json={**CHAT, "n": 2}, timeout=0.2)
    opened.wait_for(lambda: opened.publisher.events)
    inferences = opened.publisher.inferences()
    assert [(one.finish_reason, one.exposure, one.tokens) for one in inferences] == [
        ("cancelled", "not_shown", None)
    ] * 2
    opened.wait_for(lambda: opened.switchboard.inflight["blue"] == 0)


def test_a_cordoned_engine_is_drained_when_nothing_is_in_flight(opened: Stand) -> None:
    opened.blue.script = slow(opened.blue, "chat", 0.4)
    thread = threading.Thread(target=chat, args=(opened,))
    thread.start()
    opened.wait_for(lambda: opened.blue.bodies)
    table = opened.apply(champion=opened.route(opened.green, "v000001"))
    during = opened.admin.get("/internal/routes").json()
    assert during["revision"] == table.revision
    assert during["inflight"]["blue"] == 1
    thread.join(5)
    opened.wait_for(lambda: opened.admin.get("/internal/routes").json()["inflight"]["blue"] == 0)


def test_a_lower_revision_never_replaces_a_higher_one(opened: Stand) -> None:
    opened.revision = 10
    opened.apply(champion=opened.route(opened.green, "v000002"))
    opened.revision = 4
    opened.apply()
    assert opened.admin.get("/internal/routes").json()["revision"] == 11
    assert chat(opened).headers["x-headrace-version"] == "v000002"


def test_switching_tables_under_load_fails_no_request(opened: Stand) -> None:
    routes = [opened.route(opened.blue, "v000000"), opened.route(opened.green, "v000001")]
    for engine in (opened.blue, opened.green):
        engine.script = slow(engine, "chat", 0.005)
    end = time.monotonic() + 2.0
    statuses: list[int] = []

    def ask() -> None:
        with httpx.Client(base_url=opened.url, trust_env=False, timeout=20) as client:
            while time.monotonic() < end:
                statuses.append(client.post("/v1/chat/completions", json=CHAT).status_code)

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    swap = 0
    while time.monotonic() < end:
        champion, other = routes[swap % 2], routes[(swap + 1) % 2]
        opened.apply(champion=champion, canary=other if swap % 3 else None, canary_weight=0.5)
        swap += 1
        time.sleep(0.01)
    for thread in threads:
        thread.join(10)
    assert set(statuses) == {200}
    assert len(statuses) == len(opened.publisher.inferences()) > 100
    assert {one.policy.version for one in opened.publisher.inferences()} == {"v000000", "v000001"}
    assert all(
        one.tokens and one.tokens.weight_spans[0].version == one.policy.version for one in opened.publisher.inferences()
    )
    opened.wait_for(lambda: sum(opened.switchboard.inflight.values()) == 0)


def test_the_counters_of_an_arm_start_anew_with_its_next_engine(opened: Stand) -> None:
    opened.green.script = breaks(500)
    opened.apply(canary=opened.route(opened.green, "v000001", "canary"), canary_weight=1.0)
    for _ in range(3):
        chat(opened)
    opened.wait_for(lambda: opened.admin.get("/internal/routes").json()["arms"]["canary"]["failures_in_a_row"] == 3)
    opened.green.served_model = "tiny-green-2"
    opened.apply(canary=opened.route(opened.green, "v000002", "canary"), canary_weight=0.5)
    assert opened.admin.get("/internal/routes").json()["arms"]["canary"]["failures_in_a_row"] == 0
