"""Interactions go in, each revision gets one verdict, samples come out once and add up."""

from pathlib import Path

import msgspec
import pytest

from ingest.events import Consent, Policy, Tokens, WeightSpan, encode
from ingest.stream import Record
from rewards.ledger import count, samples_of, why
from rewards.stage import main
from rewards.verdict import never_trains
from tests.rewards.interactions import ANSWERED_AT, DEFAULT_SPEC, feedback, inference, interaction, spec_of
from tests.rewards.room import NOW_S, Room

ID = "inf_0000_a"


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
    tracker = room.store.connection.execute("SELECT * FROM tracker ORDER BY key").fetchall()
    room.give(*batch)
    again = Room(room.state_dir)  # after a crash and a restart
    again.give(*batch)
    assert [sample.sample_id for sample in again.samples()] == [f"{ID}@0", f"{ID}@1"]
    assert again.store.connection.execute("SELECT * FROM tracker ORDER BY key").fetchall() == tracker
    assert (room.stage.num_replayed, again.stage.num_replayed) == (2, 2)


def test_a_crash_before_the_commit_leaves_nothing(room: Room) -> None:
    record = Record("interaction.v1", 0, 0, "0000", encode(interaction(feedback())), {}, NOW_S)
    with pytest.raises(KeyboardInterrupt), room.store.transaction() as connection:
        room.stage.handle(connection, [record])
        raise KeyboardInterrupt
    assert count(room.state_dir)["interactions"] == 0
    assert room.store.connection.execute("SELECT count(*) FROM tracker").fetchall() == [(0,)]
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
    assert room.store.connection.execute("SELECT count(*) FROM tracker").fetchall() == [(0,)]


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
    [(raw,)] = room.store.connection.execute(
        "SELECT headers FROM stage_outbox WHERE topic = 'dlq.v1' LIMIT 1"
    ).fetchall()
    about = dict(msgspec.msgpack.decode(raw))
    assert about["headrace_place"] == b"interaction.v1[0]@0"
    assert b"not a valid Interaction: Expected `object`, got `int`" in about["headrace_reason"]


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
