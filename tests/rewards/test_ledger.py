"""The ledger tells why, counts once, adds up, and can be read while it is written."""

import sqlite3
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewards.ledger import count, samples_of, why
from tests.rewards.interactions import ANSWERED_AT, DEFAULT_SPEC, feedback, interaction, spec_of
from tests.rewards.room import Room

ID = "inf_0000_a"


@pytest.fixture
def room(tmp_path: Path) -> Room:
    return Room(tmp_path)


def test_why_tells_the_whole_story(room: Room) -> None:
    room.give(interaction(feedback(), feedback("b", metric="applause")))
    [row] = why(room.state_dir, ID)
    assert row["revision"] == 0
    assert row["feedback"] == [
        {
            "feedback_id": "fb-1",
            "metric": "thumbs",
            "said": True,
            "occurred_at": ANSWERED_AT + 5,
            "value": 1.0,
            "confidence": 1.0,
            "actor": "user-1",
        }
    ]
    assert row["ignored"] == {"b": "metric 'applause' is not declared"}
    assert (row["sample_id"], row["reason"], row["baseline"], row["reward"]) == (f"{ID}@0", "full", 0.0, 0.6)


def test_reads_work_while_the_stage_writes_and_before_it_starts(tmp_path: Path) -> None:
    assert samples_of(tmp_path, ID) == why(tmp_path, ID) == []
    assert count(tmp_path)["interactions"] == 0
    room = Room(tmp_path)
    room.give(interaction(feedback()))
    with room.store.transaction() as connection:
        connection.execute("DELETE FROM samples")
        assert len(samples_of(tmp_path, ID)) == 1
        connection.execute("ROLLBACK")
        connection.execute("BEGIN")
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        path = tmp_path / "rewards" / "ledger.sqlite"
        sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True).execute("DELETE FROM samples")


revisions = st.lists(
    st.lists(
        st.builds(
            feedback,
            st.sampled_from("abc"),
            st.booleans(),
            st.sampled_from(["thumbs", "task_completion", "tool_outcome"]),
            actor=st.sampled_from(["user-1", "user-2"]),
        ),
        max_size=4,
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["x", "y"]), revisions), min_size=1, max_size=3),
    st.integers(1, 5),
    st.booleans(),
)
def test_samples_add_up_to_the_reward_of_the_final_state(tmp_path_factory, histories, batch_size, has_cost) -> None:
    cost = {"lambda": 0.3, "max_tokens": 4} if has_cost else {}
    metrics = {name: metric.model_dump() for name, metric in DEFAULT_SPEC.metrics.items()}
    room = Room(tmp_path_factory.mktemp("room"), spec_of(metrics, token_cost=cost))
    events = []
    for number, (name, history) in enumerate(histories):
        for revision, items in enumerate(history):
            state = "correction" if revision else "final"
            events.append(interaction(*items, inference_id=f"inf_0000_{name}{number}", revision=revision, state=state))
    for start in range(0, len(events), batch_size):
        room.give(*events[start : start + batch_size])
    samples = room.samples()
    assert len({sample.sample_id for sample in samples}) == len(samples)
    for inference_id in {event.interaction_id for event in events}:
        rows, made = why(room.state_dir, inference_id), samples_of(room.state_dir, inference_id)
        assert made == [sample for sample in samples if sample.inference_id == inference_id]
        assert [sample.kind for sample in made] == ["full", "delta", "delta", "delta", "delta", "delta"][: len(made)]
        assert all(-1 <= s.reward <= 1 if s.kind == "full" else -2 <= s.reward <= 2 for s in made)
        if made:
            final = rows[-1]["reward"] if rows[-1]["reward"] is not None else rows[-1]["baseline"]
            assert sum(sample.reward for sample in made) == pytest.approx(final, abs=1e-8)
        else:
            assert all(row["reward"] is None for row in rows)
    totals = count(room.state_dir)
    assert totals["interactions"] == totals["samples_full"] + totals["masked"] == len(histories)
