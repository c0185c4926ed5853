"""Answers through the gateway equal the engine's own, apart from ids and model name; the events hold what it served."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from ingest import ids
from serving.auth import Caller, Keys
from serving.config import ServingConfig
from tests.serving.stand import ANSWERS, Stand, stand

CHAT = ANSWERS["chat"]["body"]
ANSWERED = [name for name, case in ANSWERS.items() if case["plain"]["status"] == 200]


@pytest.fixture(scope="module")
def shared() -> Iterator[Stand]:
    with stand() as opened:
        yield opened


@pytest.fixture
def fresh(shared: Stand) -> Stand:
    """The shared stand without its past."""
    shared.publisher.events.clear()
    shared.blue.script = shared.green.script = None
    shared.apply()
    return shared


def ask(stand: Stand, name: str, **headers: str) -> Any:
    case = ANSWERS[name]
    return stand.client.post(f"/v1/{case['path']}", json=case["body"], headers=headers)


def without_ids(text: str) -> list[Any]:
    """Return all JSON documents of an answer, whole or streamed, without what differs between two runs of an engine.

    How the chunks of several choices interleave is chance, so they are put in the order of their choices.
    """
    if text.startswith("data: "):
        lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    else:
        lines = [text]
    documents = [line if line == "[DONE]" else json.loads(line) for line in lines]
    for document in documents:
        if isinstance(document, dict):
            for key in ("id", "created", "model"):
                document.pop(key, None)
            for choice in document.get("choices", []):
                for call in (choice.get("message") or choice.get("delta") or {}).get("tool_calls") or []:
                    call.pop("id", None)
    return sorted(documents, key=lambda one: choice_of(one, len(documents)))


def choice_of(document: Any, last: int) -> int:
    choices = document.get("choices") if isinstance(document, dict) else None
    return choices[0]["index"] if choices else last


@pytest.mark.parametrize("name", ANSWERED)
def test_the_answer_is_the_engines_own_apart_from_ids(fresh: Stand, name: str) -> None:
    answer = ask(fresh, name)
    assert answer.status_code == 200, answer.text
    assert without_ids(answer.text) == without_ids(ANSWERS[name]["plain"]["text"])
    assert answer.headers["content-type"].split(";")[0] == ANSWERS[name]["plain"]["type"].split(";")[0]


@pytest.mark.parametrize("name", ANSWERED)
def test_every_choice_leaves_one_event_with_the_engines_tokens(fresh: Stand, name: str) -> None:
    answer = ask(fresh, name)
    inferences = fresh.publisher.inferences()
    assert answer.headers["x-headrace-inference-id"].split(",") == [one.inference_id for one in inferences]
    expected = tokens_of(ANSWERS[name]["captured"]["text"])
    for inference in inferences:
        prompt, completion, logprobs = expected[inference.choice_index]
        if name == "text_echo":  # token ids would change an echoed answer, so they are not asked for
            assert (inference.tokens, inference.untrainable) == (None, "echo")
            continue
        assert inference.tokens is not None
        assert inference.tokens.prompt_ids == prompt
        assert inference.tokens.completion_ids == completion
        assert inference.tokens.logprobs == logprobs
        assert len(logprobs) == len(completion) == inference.usage.completion_tokens
        assert inference.tokens.weight_spans[0].end == len(completion)
        assert inference.untrainable == ("guided_decoding" if "tool" in name else None)
        assert inference.finish_reason in ("length", "stop")
        assert (inference.policy.version, inference.assignment.arm, inference.exposure) == (
            "v000000",
            "champion",
            "shown",
        )
        assert inference.timing.received_at <= inference.timing.first_token_at <= inference.timing.completed_at


def tokens_of(text: str) -> dict[int, tuple[list[int], list[int], list[float]]]:
    """Return choice -> prompt ids, completion ids, log-probs , read in another way than ours."""
    found: dict[int, tuple[list[int], list[int], list[float]]] = {}
    for line in text.removeprefix("data: ").split("\n\ndata: "):
        document = json.loads(line) if line.startswith("{") else {}
        for choice in document.get("choices", []):
            prompt, completion, logprobs = found.setdefault(choice["index"], ([], [], []))
            if not prompt:
                prompt += document.get("prompt_token_ids") or choice.get("prompt_token_ids") or []
            completion += choice.get("token_ids") or []
            held = choice.get("logprobs") or {}
            logprobs += held.get("token_logprobs") or [entry["logprob"] for entry in held.get("content") or []]
    return found


@pytest.mark.parametrize("cut", [1, 7, 1000])
def test_a_stream_cut_anywhere_is_the_same_stream(fresh: Stand, cut: int) -> None:
    async def in_pieces(body: dict[str, Any]) -> Any:
        return fresh.blue.replay(ANSWERS["chat_n3_stream"]["captured"], cut=cut)

    fresh.blue.script = in_pieces
    answer = ask(fresh, "chat_n3_stream")
    assert without_ids(answer.text) == without_ids(ANSWERS["chat_n3_stream"]["plain"]["text"])
    assert len(fresh.publisher.inferences()) == 3


@pytest.mark.parametrize("name", ["chat_bad", "chat_top_logprobs_alone"])
def test_the_engines_refusal_reaches_the_client_and_the_record(fresh: Stand, name: str) -> None:
    answer = ask(fresh, name)
    assert answer.status_code == ANSWERS[name]["plain"]["status"] == 400
    assert answer.json() == json.loads(ANSWERS[name]["plain"]["text"])
    (inference,) = fresh.publisher.inferences()
    assert (inference.error_type, inference.tokens) == ("refused:BadRequestError", None)
    assert fresh.admin.get("/internal/routes").json()["arms"]["champion"]["failures_in_a_row"] == 0


def test_the_tools_of_a_forced_call_are_recorded(fresh: Stand) -> None:
    for name in ("chat_tool", "chat_tool_stream"):
        ask(fresh, name)
    whole, streamed = fresh.publisher.inferences()
    assert [call.name for call in whole.tool_calls] == ["add"]
    assert whole.tool_calls == streamed.tool_calls
    assert whole.request["tools"][0]["function"]["name"] == "add"


def test_ids_carry_the_episodes_route(fresh: Stand) -> None:
    answer = ask(fresh, "chat_n2", **{"x-headrace-episode": "talk-1"})
    assert answer.headers["x-headrace-episode-id"] == "talk-1"
    assert ids.parse(answer.json()["id"]).route == ids.route_of("talk-1")
    assert answer.json()["model"] == "headrace"
    assert ids.inference_ids_of(answer.json()["id"], 2) == answer.headers["x-headrace-inference-id"].split(",")
    event = fresh.publisher.events[1]
    assert event.key == ids.route_of("talk-1")
    assert event.headers["ce_type"] == "llm.inference.v1"
    assert event.headers["ce_id"] == ids.inference_ids_of(answer.json()["id"], 2)[1]


def test_the_raw_user_id_goes_nowhere(fresh: Stand) -> None:
    fresh.client.post("/v1/chat/completions", json={**CHAT, "user": "alice@example.org"})
    ask(fresh, "chat", **{"x-headrace-user": "alice@example.org"})
    first, second = fresh.publisher.inferences()
    assert first.user_ref == second.user_ref == first.assignment.unit
    assert len(first.user_ref) == 32
    assert not any(b"alice" in event.value for event in fresh.publisher.events)
    assert "alice" not in json.dumps(fresh.blue.bodies)


def test_headers_name_app_function_and_consent(fresh: Stand) -> None:
    ask(fresh, "chat", **{"x-headrace-app": "shop", "x-headrace-function": "search", "x-headrace-consent": "none"})
    (inference,) = fresh.publisher.inferences()
    assert (inference.app, inference.function, inference.consent.training) == ("shop", "search", False)
    assert inference.config_hash == "cafe"
    assert inference.sampling["temperature"] == 0.8


def test_metadata_may_name_the_episode(fresh: Stand) -> None:
    async def any_answer(body: dict[str, Any]) -> Any:
        return fresh.blue.replay(ANSWERS["chat"]["captured"])

    fresh.blue.script = any_answer
    body = {**CHAT, "metadata": {"episode_id": "talk-2"}, "future_field": {"kept": True}}
    answer = fresh.client.post("/v1/chat/completions", json=body)
    assert answer.headers["x-headrace-episode-id"] == "talk-2"
    assert fresh.blue.bodies[-1]["future_field"] == {"kept": True}


@pytest.mark.parametrize(
    ("content", "status", "kind"),
    [
        (b"{not json", 400, "invalid_request_error"),
        (b"[1, 2]", 400, "invalid_request_error"),
        (b"\xff\xfe", 400, "invalid_request_error"),
        (b'{"model": "gpt-none", "messages": []}', 404, "model_not_found"),
        (b'{"n": 1000, "messages": []}', 400, "invalid_request_error"),
        (b'{"messages": [], "metadata": {"episode_id": 3}}', 400, "invalid_request_error"),
    ],
)
def test_a_bad_request_is_told_how_to_be_fixed(fresh: Stand, content: bytes, status: int, kind: str) -> None:
    answer = fresh.client.post("/v1/chat/completions", content=content)
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
    assert answer.json()["error"]["how_to_fix"]
    assert fresh.publisher.events == []


def test_a_huge_body_is_refused() -> None:
    with stand(ServingConfig(max_body_bytes=2048)) as small:
        for headers in ({}, {"transfer-encoding": "chunked"}):
            content: Any = iter([b"x" * 1500] * 4) if headers else b"x" * 5000
            answer = small.client.post("/v1/chat/completions", content=content)
            assert (answer.status_code, answer.json()["error"]["type"]) == (413, "invalid_request_error")
        assert small.client.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_keys_scopes_and_tenants() -> None:
    import hashlib

    callers = {
        hashlib.sha256(b"all").hexdigest(): Caller("acme", frozenset(("infer", "feedback"))),
        hashlib.sha256(b"fb").hexdigest(): Caller("acme", frozenset(("feedback",))),
    }
    with stand(keys=Keys(callers)) as guarded:
        results = {}
        for key in ("", "Bearer wrong", "Bearer fb", "Basic all", "bearer all"):
            answer = guarded.client.post("/v1/chat/completions", json=CHAT, headers={"authorization": key})
            results[key] = (answer.status_code, answer.json().get("error", {}).get("type"))
        assert results == {
            "": (401, "authentication_error"),
            "Bearer wrong": (401, "authentication_error"),
            "Bearer fb": (403, "permission_error"),
            "Basic all": (401, "authentication_error"),
            "bearer all": (200, None),
        }
        assert [one.tenant for one in guarded.publisher.inferences()] == ["acme"]
        assert guarded.client.get("/health").status_code == 200


def test_models_lists_the_public_name_and_admin_is_not_public(fresh: Stand) -> None:
    assert [model["id"] for model in fresh.client.get("/v1/models").json()["data"]] == ["headrace"]
    hidden = fresh.client.get("/internal/routes")
    assert (hidden.status_code, hidden.json()["error"]["type"]) == (404, "invalid_request_error")
    assert fresh.client.get("/v1/chat/completions").status_code == 405
