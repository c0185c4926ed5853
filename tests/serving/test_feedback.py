"""Feedback over HTTP: durable before accepted, idempotent, refused with a reason."""

from collections.abc import Iterator
from typing import Any

import pytest

from ingest import ids
from ingest.producer import SpoolFull
from serving.config import ServingConfig
from tests.serving.stand import ANSWERS, Stand, stand

HEX = "0198c0ffee007000800000000000abcd"
INFERENCE = f"inf_00ff_{HEX}"
RESPONSE = f"resp_00ff_{HEX}"


@pytest.fixture(scope="module")
def shared() -> Iterator[Stand]:
    with stand(ServingConfig(metrics=["thumb", "rating", "comment"], max_feedback_items=5)) as opened:
        yield opened


@pytest.fixture
def fresh(shared: Stand) -> Stand:
    shared.publisher.events.clear()
    shared.publisher.refuse = None
    return shared


def send(stand: Stand, *items: dict[str, Any], **headers: str) -> Any:
    body = items[0] if len(items) == 1 else {"feedback": list(items)}
    return stand.client.post("/v1/feedback", json=body, headers=headers)


def thumb(**fields: Any) -> dict[str, Any]:
    return {"inference_id": INFERENCE, "metric": "thumb", "value": True, **fields}


def test_one_thumb_becomes_one_event(fresh: Stand) -> None:
    answer = send(fresh, thumb(feedback_id="f1", occurred_at=1000.5), **{"x-headrace-user": "bob"})
    assert answer.status_code == 202
    assert answer.json() == {"accepted": [{"feedback_id": "f1", "status": "accepted"}]}
    (event,) = fresh.publisher.events
    assert (event.topic, event.key) == ("feedback", "00ff")
    assert (event.headers["ce_id"], event.headers["ce_source"]) == ("f1:0", "headrace/feedback/default")
    (feedback,) = fresh.publisher.feedback()
    assert (feedback.kind, feedback.value, feedback.occurred_at, feedback.op) == ("boolean", True, 1000.5, "upsert")
    assert feedback.target() == ("inference_id", INFERENCE)
    assert len(feedback.source.id) == 32 and "bob" not in feedback.source.id


def test_a_repeated_item_gets_the_same_id_and_another_value_does_not(fresh: Stand) -> None:
    first, again, other = (
        send(fresh, thumb(value=value), **{"x-headrace-user": "bob"}).json()["accepted"][0]["feedback_id"]
        for value in (True, True, False)
    )
    assert first == again != other


def test_the_idempotency_key_names_the_feedback(fresh: Stand) -> None:
    keyed = [send(fresh, thumb(value=value), **{"idempotency-key": "k"}).json() for value in (True, False)]
    assert keyed[0] == keyed[1]
    batch = send(fresh, thumb(), thumb(), **{"idempotency-key": "k"}).json()["accepted"]
    assert len({item["feedback_id"] for item in batch}) == 2


def test_an_episode_routes_by_its_own_id(fresh: Stand) -> None:
    send(fresh, {"episode_id": "talk-1", "metric": "rating", "value": 4})
    assert fresh.publisher.events[0].key == ids.route_of("talk-1")
    assert (fresh.publisher.feedback()[0].kind, fresh.publisher.feedback()[0].value) == ("numeric", 4.0)


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"value": False}, "boolean"),
        ({"value": 0.5}, "numeric"),
        ({"value": "good"}, "categorical"),
        ({"value": None, "comment": "nice"}, "comment"),
        ({"value": None, "correction": "better text"}, "demonstration"),
        ({"value": None, "preference": {"chosen": "a", "rejected": "b"}}, "preference"),
        ({"value": True, "kind": "outcome"}, "outcome"),
    ],
)
def test_the_kind_follows_from_the_value(fresh: Stand, fields: dict[str, Any], kind: str) -> None:
    assert send(fresh, thumb(**fields)).status_code == 202
    assert fresh.publisher.feedback()[0].kind == kind


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"inference_id": "inf_nonsense"}, "inference_id"),
        ({"inference_id": RESPONSE}, "inference_id"),
        ({"inference_id": None}, None),
        ({"response_id": RESPONSE}, None),
        ({"metric": "unheard_of"}, "metric"),
        ({"metric": ""}, "metric"),
        ({"metric": 3}, "metric"),
        ({"value": None}, "value"),
        ({"value": True, "kind": "numeric"}, "value"),
        ({"value": 1, "kind": "boolean"}, "value"),
        ({"value": [1]}, "value"),
        ({"kind": "applause"}, "kind"),
        ({"op": "retract"}, "feedback_id"),
        ({"occurred_at": -5}, "occurred_at"),
        ({"occurred_at": 9e12}, "occurred_at"),
        ({"revision": -1}, "revision"),
        ({"feedback_id": "x" * 200}, "feedback_id"),
        ({"comment": "x" * 20_000}, "comment"),
        ({"solicited_probability": 1.5}, "solicited_probability"),
        ({"tenant": "someone-else"}, None),
    ],
)
def test_a_bad_item_is_refused_with_its_parameter_and_a_remedy(
    fresh: Stand, fields: dict[str, Any], param: Any
) -> None:
    answer = send(fresh, thumb(**fields))
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert error["how_to_fix"] and error["type"] == "invalid_request_error"
    assert fresh.publisher.events == []


def test_a_number_too_large_for_a_float_is_refused(fresh: Stand) -> None:
    content = f'{{"inference_id": "{INFERENCE}", "metric": "rating", "value": 1e999}}'
    assert fresh.client.post("/v1/feedback", content=content).status_code == 400


def test_a_retraction_needs_no_value(fresh: Stand) -> None:
    answer = send(
        fresh, {"inference_id": INFERENCE, "metric": "thumb", "op": "retract", "feedback_id": "f1", "revision": 1}
    )
    assert answer.status_code == 202
    assert (fresh.publisher.feedback()[0].op, fresh.publisher.events[0].headers["ce_id"]) == ("retract", "f1:1")


def test_a_batch_is_judged_item_by_item(fresh: Stand) -> None:
    answer = send(fresh, thumb(), thumb(metric="unheard_of"), {"response_id": RESPONSE, "metric": "rating", "value": 3})
    assert answer.status_code == 202
    assert len(answer.json()["accepted"]) == 2
    assert [(item["index"], item["status"]) for item in answer.json()["refused"]] == [(1, 400)]
    assert len(fresh.publisher.events) == 2


def test_a_batch_without_one_good_item_is_a_bad_request(fresh: Stand) -> None:
    assert send(fresh, thumb(metric="a"), thumb(metric="b")).status_code == 400
    for items in ([], [thumb()] * 6, "no list"):
        assert fresh.client.post("/v1/feedback", json={"feedback": items}).status_code == 400
    assert fresh.publisher.events == []


def test_a_full_spool_asks_the_client_to_come_back(fresh: Stand) -> None:
    fresh.publisher.refuse = SpoolFull("the spool is full")
    answer = send(fresh, thumb())
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "service_unavailable")
    assert int(answer.headers["retry-after"]) > 0
    assert send(fresh, thumb(), thumb(metric="a")).status_code == 503


def test_each_of_three_choices_takes_its_own_feedback(fresh: Stand) -> None:
    answer = fresh.client.post("/v1/chat/completions", json=ANSWERS["chat_n3_stream"]["body"])
    choices = answer.headers["x-headrace-inference-id"].split(",")
    assert len(set(choices)) == 3
    sent = send(fresh, *({"inference_id": one, "metric": "rating", "value": i} for i, one in enumerate(choices)))
    assert sent.status_code == 202
    assert [(one.inference_id, one.value) for one in fresh.publisher.feedback()] == list(
        zip(choices, [0, 1, 2], strict=True)
    )
    assert len({event.key for event in fresh.publisher.events}) == 1
