"""The rules of the join, one by one."""

import msgspec
import pytest

from ingest.events import Timing
from ingest.ids import inference_id, response_id
from ingest.join import Join
from ingest.state import JoinState, read_counts
from tests.ingest.join_harness import TOPICS, WINDOWS, Harness, answer, ids_of, vote


def test_window_closes_by_event_time_with_and_without_feedback() -> None:
    harness = Harness()
    first, second = answer(1, 100.0), answer(2, 101.0)
    assert harness.feed(first, second, vote("f1", 105.0, inference_id=first.inference_id)) == []
    assert harness.wait_until(109.9) == []
    closed = harness.wait_until(111.0)
    assert [(c.interaction_id, c.state, ids_of(c)) for c in closed] == [
        (first.inference_id, "final", ["f1"]),
        (second.inference_id, "final", []),
    ]
    assert closed[0].source_offsets == {"inference.v1[0]": 1}
    assert closed[0].inference == first


def test_topic_read_ahead_of_the_other_closes_no_window_early() -> None:
    harness = Harness()
    early, late = answer(1, 100.0), answer(2, 500.0)
    assert harness.feed(early, late) == []  # inference topic far ahead, feedback topic not read yet
    closed = harness.feed(vote("f1", 104.0, inference_id=early.inference_id), vote("f2", 300.0, episode_id="none"))
    assert [(c.interaction_id, ids_of(c)) for c in closed] == [(early.inference_id, ["f1"])]


def test_feedback_before_its_inference_waits_and_then_expires() -> None:
    harness = Harness()
    one = answer(1, 100.0)
    harness.feed(vote("f1", 100.5, inference_id=one.inference_id))
    assert harness.dispositions() == {"f1": "pending"}
    harness.feed(one)
    assert harness.dispositions() == {"f1": "applied"}
    harness.feed(vote("f2", 101.0, inference_id=inference_id("00aa", "f" * 32)))
    harness.wait_until(120.9)
    assert harness.dispositions()["f2"] == "pending"
    harness.wait_until(121.1)
    assert harness.dispositions()["f2"] == "expired"


def test_late_feedback_corrects_and_too_late_feedback_expires() -> None:
    harness = Harness()
    one = answer(1, 100.0)
    harness.feed(one)
    harness.wait_until(111.0)
    (correction,) = harness.feed(vote("f1", 199.0, inference_id=one.inference_id))
    assert (correction.state, correction.revision, ids_of(correction)) == ("correction", 1, ["f1"])
    assert harness.feed(vote("f2", 200.1, inference_id=one.inference_id)) == []
    assert harness.dispositions() == {"f1": "applied", "f2": "expired"}


def test_retraction_wins_over_its_upsert_in_either_order() -> None:
    one = answer(1, 100.0)
    upsert = vote("f1", 101.0, inference_id=one.inference_id)
    retract = vote("f1", 102.0, inference_id=one.inference_id, op="retract")
    for order in ([upsert, retract], [retract, upsert]):
        harness = Harness()
        harness.feed(one, *order)
        (final,) = harness.wait_until(111.0)
        assert (ids_of(final), final.retracted_ids) == ([], ["f1"])
        assert harness.dispositions() == {"f1": "retracted"}


def test_retraction_after_the_window_emits_a_correction_without_it() -> None:
    harness = Harness()
    one = answer(1, 100.0)
    harness.feed(one, vote("f1", 101.0, inference_id=one.inference_id))
    harness.wait_until(111.0)
    (correction,) = harness.feed(vote("f1", 150.0, inference_id=one.inference_id, op="retract", revision=1))
    assert (correction.revision, ids_of(correction), correction.retracted_ids) == (1, [], ["f1"])


def test_feedback_of_another_tenant_is_quarantined_and_never_shown() -> None:
    harness = Harness()
    one = answer(1, 100.0, tenant="a")
    harness.feed(one, vote("f1", 101.0, tenant="b", inference_id=one.inference_id))
    (final,) = harness.wait_until(111.0)
    assert final.feedback == []
    assert harness.dispositions() == {"f1": "quarantined"}
    assert "another tenant" in harness.letters[0]


def test_another_tenant_cannot_retract_a_feedback_by_its_id() -> None:
    harness = Harness()
    one = answer(1, 100.0, tenant="a")
    harness.feed(one, vote("f1", 101.0, tenant="a", inference_id=one.inference_id))
    harness.feed(vote("f1", 102.0, tenant="b", inference_id=one.inference_id, op="retract", revision=9))
    (final,) = harness.wait_until(111.0)
    assert ids_of(final) == ["f1"]


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ({"trace_id": "t"}, "cannot be routed"),
        ({"inference_id": "nonsense"}, "not a Headrace id"),
        ({"inference_id": response_id("00aa", "1" * 32)}, "not of the kind"),
        ({}, "exactly one"),
        ({"episode_id": "e", "trace_id": "t"}, "exactly one"),
        ({"episode_id": "e", "revision": -1}, "revision -1"),
    ],
)
def test_unroutable_feedback_is_quarantined_with_a_reason(target, reason) -> None:
    harness = Harness()
    harness.feed(vote("f1", 101.0, **target))
    assert harness.dispositions() == {"f1": "quarantined"}
    assert reason in harness.letters[0]


def test_event_dated_in_the_future_moves_no_watermark() -> None:
    harness = Harness()
    harness.feed(answer(1, 200.0), vote("f1", 106.0, episode_id="e"), now_s=100.0)
    assert len(harness.letters) == 2
    assert harness.dispositions() == {"f1": "quarantined"}
    assert Join(JoinState(harness.connection), WINDOWS, TOPICS).watermark(0) == 0.0


def test_same_event_twice_counts_once_also_under_another_event_id() -> None:
    harness = Harness()
    one = answer(1, 100.0)
    feedback = vote("f1", 101.0, inference_id=one.inference_id)
    harness.feed(one, one, feedback)
    harness.feed(one, key="other/1")
    harness.feed(feedback, key="other/2")
    (final,) = harness.wait_until(111.0)
    assert ids_of(final) == ["f1"]
    assert read_counts(harness.connection)["duplicates"] == 3


def test_failed_request_is_emitted_as_final_too() -> None:
    harness = Harness()
    failed = msgspec.structs.replace(answer(1, 100.0), error_type="timeout", timing=Timing(received_at=100.0))
    harness.feed(failed)
    (final,) = harness.wait_until(111.0)
    assert (final.inference.error_type, final.state) == ("timeout", "final")


def test_closed_windows_are_forgotten_after_the_late_window_and_dispositions_stay() -> None:
    harness = Harness()
    one = answer(1, 100.0)
    harness.feed(one, vote("f1", 101.0, inference_id=one.inference_id))
    harness.wait_until(300.0)
    join = Join(JoinState(harness.connection), WINDOWS, TOPICS)
    join.evict(1, 300.0)
    for table in ("inferences", "links", "revisions"):
        assert harness.connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)
    assert harness.dispositions() == {"f1": "applied"}
    harness.feed(vote("f1", 299.0, inference_id=one.inference_id, revision=1))
    harness.wait_until(400.0)
    assert harness.dispositions() == {"f1": "applied"}
