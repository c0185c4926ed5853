"""What feedback adds up to: reducers, one vote per actor, missing feedback, failures, bounds, order."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.events import Feedback, Inference, Source
from rewards.reward import MAX_HINDSIGHT_CHARS, Reward, Vote, reduce_votes, score
from rewards.signals import Signal
from rewards.spec import Metric, RewardSpec
from tests.rewards.interactions import (
    ANSWERED_AT,
    DEFAULT_SPEC,
    DEPLOYED_SPEC,
    OUTCOMES,
    feedback,
    inference,
    spec_of,
)

RATING = {"kind": "numeric", "weight": 1.0, "low": -10, "high": 10}


def reward_of(*items: Feedback, spec: RewardSpec = DEFAULT_SPEC, answer: Inference | None = None) -> Reward:
    return score(answer or inference(), list(items), spec)


@pytest.mark.parametrize(
    ("reducer", "expected"),
    [("latest", -0.2), ("earliest", -0.6), ("mean", -0.5), ("sum", -1.0), ("min", -0.7), ("max", -0.2)],
)
def test_reducers_are_right_on_all_negative_values(reducer: str, expected: float) -> None:
    spec = spec_of({"rating": RATING | {"reducer": reducer}})
    values = [-6.0, -7.0, -2.0]
    items = [
        feedback(f"fb-{i}", value, "rating", actor=f"user-{i}", at=ANSWERED_AT + i) for i, value in enumerate(values)
    ]
    reward = reward_of(*items, spec=spec)
    assert reward.value == pytest.approx(expected)
    assert reward.components == {"rating": pytest.approx(expected)}


@pytest.mark.parametrize("reducer", ["latest", "earliest", "mean", "sum", "min", "max"])
def test_one_negative_vote_passes_every_reducer_unchanged(reducer: str) -> None:
    metric = Metric.model_validate({"kind": "boolean", "weight": 1.0, "reducer": reducer})
    assert reduce_votes([Vote(1.0, "fb", "user", Signal(-0.3, 0.7))], metric) == Signal(-0.3, 0.7)


def test_one_actor_has_one_vote_and_the_last_one_counts() -> None:
    spec = spec_of({"thumbs": {"kind": "boolean", "weight": 1.0, "reducer": "mean"}})
    crowd = [feedback(f"fb-{i}", True, at=ANSWERED_AT + i) for i in range(9)]
    changed_mind = feedback("fb-last", False, at=ANSWERED_AT + 20)
    other = feedback("fb-other", False, actor="user-2")
    reward = reward_of(*crowd, changed_mind, other, spec=spec)
    assert reward.value == -1.0
    assert {row["feedback_id"] for row in reward.used} == {"fb-last", "fb-other"}
    assert reward.ignored["fb-0"] == "the same actor voted again"


def test_anonymous_end_user_votes_belong_to_the_user_of_the_answer() -> None:
    spec = spec_of({"thumbs": {"kind": "boolean", "weight": 1.0, "reducer": "sum"}})
    named, unnamed = feedback("a", True, at=1001.0), feedback("b", False, actor="", at=1002.0)
    assert reward_of(named, unnamed, spec=spec).value == -1.0
    judge = feedback("c", True, source=Source(type="llm_judge"))
    assert reward_of(unnamed, judge, spec=spec).value == 0.0  # another actor: both count


def test_a_late_outcome_outweighs_an_instant_thumb() -> None:
    reward = reward_of(feedback("a", True), feedback("b", False, "task_completion"))
    assert reward.value == pytest.approx(-0.4)
    assert reward.components == {"thumbs": 0.6, "task_completion": -1.0}


def test_the_sum_is_clipped_and_the_components_are_not() -> None:
    reward = reward_of(feedback("a", False), feedback("b", False, "task_completion"))
    assert reward.value == -1.0
    assert sum(reward.components.values()) == pytest.approx(-1.6)


def test_confidence_is_weighted_by_metric() -> None:
    reward = reward_of(feedback("a", True), feedback("b", None, "reaction", label="copied", kind="categorical"))
    assert reward.confidence == pytest.approx((0.6 * 1.0 + 0.4 * 0.5) / 1.0)


def test_missing_feedback_is_missing_and_not_zero() -> None:
    reward = reward_of()
    assert reward.value is None
    assert reward.components == {}
    assert set(reward.masked) == set(DEFAULT_SPEC.metrics)


@pytest.mark.parametrize(("exposure", "expected"), [("shown", -0.2), ("unknown", None), ("not_shown", None)])
def test_a_default_counts_only_for_a_shown_answer(exposure: str, expected: float | None) -> None:
    ignored_card = {"kind": "boolean", "weight": 0.5, "missing": "default", "default_value": -0.4}
    spec = spec_of({"clicked": ignored_card})
    reward = reward_of(spec=spec, answer=inference(exposure=exposure))
    assert reward.value == (None if expected is None else pytest.approx(expected))
    assert reward.confidence == (0.0 if expected is None else 0.3)


def test_a_vote_replaces_the_default() -> None:
    spec = spec_of({"thumbs": {"kind": "boolean", "weight": 0.5, "missing": "default", "default_value": -0.4}})
    assert reward_of(feedback(), spec=spec).value == 0.5


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({"error_type": "timeout", "tokens": None}, "error"),
        ({"finish_reason": "length"}, "truncated"),
        ({"response_text": ""}, "empty"),
        ({"response_text": "I cannot help with that."}, "refusal"),
        ({"response_text": "Could you clarify what you need?"}, "clarification"),
    ],
)
def test_a_failure_has_its_declared_reward_without_any_feedback(changes: dict, outcome: str) -> None:
    spec = spec_of({"thumbs": {"kind": "boolean", "weight": 1.0}})
    reward = reward_of(spec=spec, answer=inference(**changes))
    assert reward.value == OUTCOMES[outcome]
    assert reward.components == {f"outcome.{outcome}": OUTCOMES[outcome]}
    assert reward.actor == "user-1"


@pytest.mark.parametrize("outcome", ["invalid_tool_call", "refusal", "clarification"])
def test_a_failure_may_be_declared_by_feedback(outcome: str) -> None:
    spec = spec_of({"tool": {"kind": "outcome", "weight": 1.0}})
    reward = reward_of(feedback("fb", outcome, "tool", kind="outcome"), spec=spec)
    assert reward.components == {f"outcome.{outcome}": OUTCOMES[outcome]}
    assert reward.confidence == 1.0
    assert reward.used[0]["feedback_id"] == "fb"
    assert reward.ignored == {}


def test_feedback_adds_to_a_failure() -> None:
    assert reward_of(feedback(value=False), answer=inference(finish_reason="length")).value == -1.0
    assert reward_of(feedback(value=True), answer=inference(finish_reason="length")).value == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("item", "reason"),
    [
        (feedback(metric="applause"), "metric 'applause' is not declared"),
        (feedback(solicited=True, solicited_probability=0.01), "solicited: kept for the gates, never trained"),
        (feedback(op="retract"), "retracted"),
        (feedback(value="maybe"), "value 'maybe' is not boolean; send true or false"),
        (feedback(at=ANSWERED_AT + 61), "later than window_s = 60"),
        (feedback(metric="comment", kind="comment", comment="Hm."), "says nothing"),
    ],
)
def test_feedback_that_does_not_count_says_why(item: Feedback, reason: str) -> None:
    thumbs = {"kind": "boolean", "weight": 1.0, "window_s": 60}
    spec = spec_of({"thumbs": thumbs, "comment": {"kind": "comment", "weight": 1.0}})
    reward = reward_of(item, spec=spec)
    assert reward.value is None
    assert reward.ignored == {"fb-1": reason}


def test_the_newest_revision_of_a_feedback_counts() -> None:
    first, second = feedback(value=True), feedback(value=False, revision=1)
    assert reward_of(second, first).value == reward_of(first, second).value == -0.6
    withdrawn = feedback(value=True, revision=2, op="retract")
    assert reward_of(withdrawn, first, second).value is None


def test_the_last_correction_is_kept_for_hindsight_and_cut() -> None:
    first = feedback("a", None, "correction", kind="demonstration", correction="Paris.", at=1001.0)
    second = feedback("b", False, "thumbs", correction="x" * 9000, at=1002.0)
    assert reward_of(first).hindsight == "Paris."
    assert reward_of(second, first).hindsight == "x" * MAX_HINDSIGHT_CHARS
    assert reward_of(feedback()).hindsight is None


def test_the_actor_is_whose_votes_weigh_most() -> None:
    reward = reward_of(feedback("a", True, actor="user-9"), feedback("b", False, "task_completion", actor="user-7"))
    assert reward.actor == "user-7"


values = st.none() | st.booleans() | st.floats(-20, 20) | st.sampled_from(["success", "failure", "refusal", "copied"])
items = st.builds(
    feedback,
    st.sampled_from(["a", "b", "c", "d", "e"]),
    values,
    st.sampled_from([*DEFAULT_SPEC.metrics, "undeclared"]),
    actor=st.sampled_from(["user-1", "user-2", ""]),
    at=st.sampled_from([990.0, 1001.0, 1002.0, 2000.0]),
    comment=st.none() | st.sampled_from(["great", "not great", "hm"]),
    correction=st.none() | st.sampled_from(["Paris", "Lyon is it"]),
    op=st.sampled_from(["upsert", "upsert", "retract"]),
    revision=st.integers(0, 2),
)
answers = st.sampled_from(
    [inference(), inference(finish_reason="length"), inference(error_type="x"), inference(exposure="unknown")]
)
reducers = st.sampled_from(["latest", "earliest", "mean", "sum", "min", "max"])


@settings(max_examples=300, deadline=None)
@given(st.lists(items, max_size=8), answers, reducers, st.randoms(use_true_random=False), st.booleans())
def test_reward_is_bounded_and_neither_order_nor_doubling_matters(feedback_items, answer, reducer, rng, noisy) -> None:
    noise = {"flip_to_positive": 0.2, "flip_to_negative": 0.1} if noisy else {}
    changes = {"reducer": reducer, **noise}
    metrics = {name: metric.model_dump() | changes for name, metric in DEFAULT_SPEC.metrics.items()}
    spec = spec_of(metrics)
    reward = score(answer, feedback_items, spec)
    if reward.value is None:
        assert not reward.components
        assert answer.error_type is None
        assert answer.finish_reason != "length"
    else:
        assert -1.0 <= reward.value <= 1.0
        assert 0.0 < reward.confidence <= 1.0
        assert reward.value == pytest.approx(min(max(sum(reward.components.values()), -1.0), 1.0))
    doubled = feedback_items + rng.sample(feedback_items, len(feedback_items) // 2)
    rng.shuffle(doubled)
    assert score(answer, doubled, spec) == reward


def test_a_disliked_short_answer_is_not_worth_more_than_a_cut_one():
    """Else a model learns to be short and off topic: measured in the demo (decision 0016)."""
    disliked = score(inference(), [feedback(value=False)], DEPLOYED_SPEC).value
    cut = score(inference(finish_reason="length"), [], DEPLOYED_SPEC).value
    assert disliked is not None and cut is not None
    assert disliked <= cut < 0
