"""Interactions go in, each revision gets one verdict, samples come out once and add up."""

import sqlite3
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.config import KafkaConfig
from ingest.events import Consent, Interaction, Policy, Tokens, WeightSpan, decode, encode
from ingest.stage import StageStore
from ingest.stream import Record
from rewards.config import RewardsConfig
from rewards.ledger import count, samples_of, why
from rewards.samples import Sample
from rewards.spec import RewardSpec
from rewards.stage import SCHEMA, RewardStage, main
from rewards.verdict import never_trains
from tests.rewards.interactions import ANSWERED_AT, DEFAULT_SPEC, feedback, inference, interaction, spec_of

ID = "inf_0000_a"
NOW_S = 5000.0


class Room:
    """The stage over a real store, without Kafka: records in, outbox out."""

    def __init__(self, state_dir: Path, spec: RewardSpec = DEFAULT_SPEC) -> None:
        self.state_dir = state_dir
        self.store = StageStore(state_dir / "rewards" / "ledger.sqlite", SCHEMA)
        self.stage = RewardStage(self.store, KafkaConfig(), spec, RewardsConfig(), "cafe", lambda: NOW_S)
        self.offset = 0

    def give(self, *values: Interaction | bytes) -> None:
        """Handle these interactions as one batch."""
        records = []
        for value in values:
            raw = value if isinstance(value, bytes) else encode(value)
            records.append(Record("interaction.v1", 0, self.offset, "0000", raw, {}, NOW_S))
            self.offset += 1
        with self.store.transaction() as connection:
            self.stage.handle(connection, records)

    def sent(self, topic: str = "sample.v1") -> list[bytes]:
        return [
            row[0] for row in self.store.read("SELECT value FROM stage_outbox WHERE topic = ? ORDER BY id", (topic,))
        ]

    def samples(self) -> list[Sample]:
        return [decode(value, Sample) for value in self.sent()]


@pytest.fixture
def room(tmp_path: Path) -> Room:
    return Room(tmp_path)


def test_a_thumb_makes_one_full_sample_with_all_its_provenance(room: Room) -> None:
    room.give(interaction(feedback()))
    [sample] = room.samples()
    assert sample.sample_id == f"{ID}@0"
    assert (sample.kind, sample.reward, sample.confidence) == ("full", 0.6, 1.0)
    assert (sample.baseline, sample.expected_success) == (0.0, 0.5)
    assert sample.components == {"thumbs": 0.6}
    assert (sample.prompt_ids, sample.completion_ids, sample.logprobs) == ([1, 2, 3], [4, 5], [-0.1, -0.2])
    assert (sample.temperature, sample.top_p, sample.policy_version) == (0.7, 0.9, "v000003")
    assert (sample.actor, sample.episode_id, sample.arm) == ("user-1", "episode-1", "champion")
    assert (sample.spec_version, sample.config_hash) == (DEFAULT_SPEC.version, "cafe")
    assert (sample.served_at, sample.created_at) == (ANSWERED_AT, NOW_S)
    assert sample.prompt_text == "user: What is the capital of France?"
    assert samples_of(room.state_dir, ID) == [sample]


def test_a_replay_of_the_same_interactions_emits_no_second_sample(room: Room) -> None:
    batch = [interaction(feedback()), interaction(feedback(value=False), revision=1, state="correction")]
    room.give(*batch)
    tracker = room.store.read("SELECT * FROM tracker ORDER BY key")
    room.give(*batch)
    again = Room(room.state_dir)  # after a crash and a restart
    again.give(*batch)
    assert [sample.sample_id for sample in again.samples()] == [f"{ID}@0", f"{ID}@1"]
    assert again.store.read("SELECT * FROM tracker ORDER BY key") == tracker
    assert (room.stage.num_replayed, again.stage.num_replayed) == (2, 2)


def test_a_crash_before_the_commit_leaves_nothing(room: Room) -> None:
    record = Record("interaction.v1", 0, 0, "0000", encode(interaction(feedback())), {}, NOW_S)
    with pytest.raises(KeyboardInterrupt), room.store.transaction() as connection:
        room.stage.handle(connection, [record])
        raise KeyboardInterrupt
    assert count(room.state_dir)["interactions"] == 0
    assert room.store.read("SELECT count(*) FROM tracker") == [(0,)]
    room.give(interaction(feedback()))
    assert len(room.samples()) == 1


def test_an_interaction_without_feedback_is_masked_and_counted(room: Room) -> None:
    room.give(interaction())
    assert room.samples() == []
    assert count(room.state_dir) == {
        "interactions": 1,
        "samples_full": 0,
        "samples_delta": 0,
        "masked": 1,
        "waiting": 0,
        "untrainable": {},
    }


def test_late_feedback_on_a_masked_interaction_makes_a_full_sample(room: Room) -> None:
    room.give(interaction())
    room.give(interaction(feedback(), revision=1, state="correction"))
    [sample] = room.samples()
    assert (sample.kind, sample.revision, sample.reward) == ("full", 1, 0.6)
    assert count(room.state_dir)["masked"] == 0


def test_late_feedback_on_a_sample_emits_the_difference(room: Room) -> None:
    first = feedback("a", True)
    room.give(interaction(first))
    room.give(interaction(first, feedback("b", False, "task_completion"), revision=1, state="correction"))
    full, delta = room.samples()
    assert (delta.kind, delta.sample_id, delta.baseline) == ("delta", f"{ID}@1", 0.0)
    assert delta.reward == pytest.approx(-0.4 - 0.6)
    assert full.reward + delta.reward == pytest.approx(-0.4)
    assert delta.components == {"thumbs": 0.6, "task_completion": -1.0}
    assert count(room.state_dir)["samples_full"] == count(room.state_dir)["samples_delta"] == 1


def test_a_correction_that_changes_nothing_emits_nothing(room: Room) -> None:
    room.give(interaction(feedback()), interaction(feedback(), feedback("b"), revision=1, state="correction"))
    assert len(room.samples()) == 1
    assert [row["verdict"] for row in why(room.state_dir, ID)] == ["sample", "unchanged"]


def test_withdrawn_feedback_returns_the_sum_to_the_baseline(room: Room) -> None:
    room.give(*(interaction(feedback(), inference_id=f"inf_0000_{i}") for i in range(20)))
    room.give(interaction(feedback()))
    room.give(interaction(revision=1, state="correction"))
    full, delta = room.samples()[-2:]
    assert full.baseline > 0.1
    assert full.reward + delta.reward == pytest.approx(full.baseline)
    assert why(room.state_dir, ID)[1]["reason"] == "delta: feedback withdrawn"
    room.give(interaction(feedback(value=False), revision=2, state="correction"))
    assert sum(sample.reward for sample in room.samples() if sample.inference_id == ID) == pytest.approx(-0.6)


def test_a_provisional_interaction_waits(room: Room) -> None:
    room.give(interaction(feedback(), state="provisional"))
    assert room.samples() == []
    assert count(room.state_dir)["waiting"] == 1
    room.give(interaction(feedback(), revision=1))
    assert [sample.kind for sample in room.samples()] == ["full"]
    assert count(room.state_dir)["waiting"] == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"consent": Consent(training=False)}, "no_consent"),
        ({"untrainable": "prompt_truncated"}, "prompt_truncated"),
        ({"exposure": "not_shown"}, "not_shown"),
        ({"tokens": None}, "no_tokens"),
        ({"tokens": Tokens(prompt_ids=[1], completion_ids=[], logprobs=[])}, "no_tokens"),
        ({"tokens": Tokens(prompt_ids=[1], completion_ids=[4, 5], logprobs=[-0.1])}, "length_mismatch"),
        ({"tokens": Tokens(prompt_ids=[1], completion_ids=[4], logprobs=[-0.1], logprob_mode="raw")}, "raw_logprobs"),
        (
            {
                "tokens": Tokens(
                    prompt_ids=[1],
                    completion_ids=[4],
                    logprobs=[-0.1],
                    weight_spans=[WeightSpan(start=0, end=1, version="v000009")],
                )
            },
            "mixed_versions",
        ),
    ],
)
def test_what_must_never_train_is_counted_and_stays_in_the_ledger(room: Room, changes: dict, reason: str) -> None:
    room.give(interaction(feedback(), **changes))
    room.give(interaction(feedback(value=False), revision=1, state="correction", **changes))
    assert room.samples() == []
    assert count(room.state_dir)["untrainable"] == {reason: 1}
    rows = why(room.state_dir, ID)
    assert [row["reward"] for row in rows] == [0.6, -0.6]
    assert [row["reason"] for row in rows] == [reason, reason]
    assert room.store.read("SELECT count(*) FROM tracker") == [(0,)]


def test_tokens_without_logprobs_may_train_when_they_say_so() -> None:
    tokens = Tokens(prompt_ids=[1], completion_ids=[4], logprobs=[], logprob_mode="none")
    assert never_trains(inference(tokens=tokens)) is None


def test_a_failed_request_is_in_the_ledger_with_its_reward(room: Room) -> None:
    room.give(interaction(error_type="engine_timeout", tokens=None, response_text=""))
    [row] = why(room.state_dir, ID)
    assert (row["reward"], row["components"]) == (-1.0, {"outcome.error": -1.0})
    assert count(room.state_dir)["untrainable"] == {"no_tokens": 1}


def test_a_failure_with_tokens_trains_without_any_feedback(room: Room) -> None:
    room.give(interaction(finish_reason="length"))
    [sample] = room.samples()
    assert (sample.reward, sample.components, sample.finish_reason) == (-0.6, {"outcome.truncated": -0.6}, "length")


def test_a_malformed_interaction_is_quarantined_and_blocks_nothing(room: Room) -> None:
    room.give(b'{"inference": 3}', interaction(feedback()), b"\xff")
    assert len(room.samples()) == 1
    assert room.sent("dlq.v1") == [b'{"inference": 3}', b"\xff"]
    assert room.stage.num_quarantined == 2


def test_token_cost_is_a_component_and_every_revision_pays_the_same(tmp_path: Path) -> None:
    metrics = {"thumbs": {"kind": "boolean", "weight": 1.0}, "rating": {"kind": "boolean", "weight": 0.5}}
    room = Room(tmp_path, spec_of(metrics, token_cost={"lambda": 0.4, "max_tokens": 4}))
    room.give(interaction(feedback("a", True)))
    room.give(interaction(feedback("a", True), feedback("b", False, "rating"), revision=1, state="correction"))
    full, delta = room.samples()
    cost = 0.4 * 2 / 4 * 0.5  # lambda * tokens / max_tokens * expected success
    assert full.reward == pytest.approx(1.0 - cost)
    assert full.components["token_cost"] == pytest.approx(-cost)
    assert full.reward + delta.reward == pytest.approx(0.5 - cost)


def test_hindsight_is_carried_once(room: Room) -> None:
    correction = feedback("c", None, "correction", kind="demonstration", correction="Paris.")
    room.give(interaction(correction))
    room.give(interaction(correction, feedback("a", False), revision=1, state="correction"))
    assert [sample.hindsight for sample in room.samples()] == ["Paris.", None]


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


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[run]\nmodel = 'm'\n[rewards]\nspce = 'x'\n", "unknown key rewards.spce"),
        ("[run]\nmodel = 'm'\n[rewards]\nspec = 'gone.toml'\n", "gone.toml does not exist"),
    ],
)
def test_a_bad_configuration_ends_with_2_and_one_clear_message(tmp_path: Path, capsys, text: str, said: str) -> None:
    path = tmp_path / "local.toml"
    path.write_text(text)
    assert main([str(path)]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / ".headrace").exists()


def test_the_policy_version_is_stamped_for_the_learner_to_judge(room: Room) -> None:
    room.give(interaction(feedback(), policy=Policy(model="m", version="v000042")))
    assert room.samples()[0].policy_version == "v000042"
