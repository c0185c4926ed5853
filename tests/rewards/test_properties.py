"""Properties that hold for any input the wire lets through."""

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ingest.events import Consent, Feedback, Inference, Interaction, Tokens, decode, encode
from rewards.ledger import count, why
from rewards.reward import Vote, reduce_votes, score
from rewards.signals import Signal, comment, correction, denoise, read
from rewards.spec import Metric
from tests.rewards.interactions import DEFAULT_SPEC, feedback, inference, interaction, spec_of
from tests.rewards.room import Room
from tests.test_contracts_round_trip import anything, strategy_of

ANY_FEEDBACK = strategy_of(Feedback)
REDUCERS = ["latest", "earliest", "mean", "sum", "min", "max"]
metrics = st.sampled_from(sorted(DEFAULT_SPEC.metrics))


def with_metric(item: Feedback, name: str) -> Feedback:
    return Feedback(**{field: getattr(item, field) for field in item.__struct_fields__} | {"metric": name})


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(ANY_FEEDBACK, metrics, st.text(max_size=40))
def test_any_feedback_is_a_bounded_signal_or_nothing_or_a_clear_refusal(item: Feedback, name: str, answer: str) -> None:
    try:
        signal = read(DEFAULT_SPEC.metrics[name], item, answer)
    except ValueError as error:
        assert "send" in str(error)
        return
    if signal is not None:
        assert -1.0 <= signal.value <= 1.0
        assert 0.0 < signal.confidence <= 1.0


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(strategy_of(Interaction), metrics), max_size=4))
def test_any_interaction_gets_a_verdict_or_a_place_in_quarantine(tmp_path_factory, drawn) -> None:
    events = []
    for event, name in drawn:
        fields = {field: getattr(event, field) for field in event.__struct_fields__}
        fields["feedback"] = [with_metric(item, name) for item in event.feedback]
        events.append(Interaction(**fields))
    wire = [encode(event) for event in events]
    room = Room(tmp_path_factory.mktemp("room"))
    room.give(*wire)
    room.give(*wire)
    totals = count(room.state_dir)
    assert totals["interactions"] == len({event.interaction_id for event in events})
    num_explained = totals["samples_full"] + totals["masked"] + totals["waiting"] + sum(totals["untrainable"].values())
    assert num_explained == totals["interactions"]
    for sample in room.samples():
        assert math.isfinite(sample.reward)
        assert abs(sample.reward) <= (1.0 if sample.kind == "full" else 2.0)
        assert 0.0 < sample.confidence <= 1.0
        assert sample.consent_training
        assert sample.logprobs is None or len(sample.logprobs) == len(sample.completion_ids)
    assert len({sample.sample_id for sample in room.samples()}) == len(room.sent())


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(["messages", "prompt", "tools"]), anything))
def test_any_request_can_be_scored(tmp_path_factory, request_body: dict[str, Any]) -> None:
    room = Room(tmp_path_factory.mktemp("room"))
    room.give(interaction(feedback(), request=request_body))
    assert len(room.samples()) == 1


votes = st.lists(
    st.builds(
        Vote,
        st.floats(0, 10),
        st.uuids().map(str),
        st.just("user"),
        st.builds(Signal, st.floats(-1, 1), st.floats(0.01, 1)),
    ),
    min_size=1,
    max_size=8,
)


@given(votes, st.sampled_from(REDUCERS))
def test_a_reduced_value_lies_between_its_votes_and_a_sum_in_bounds(cast: list[Vote], reducer: str) -> None:
    metric = Metric.model_validate({"kind": "boolean", "weight": 1.0, "reducer": reducer})
    signal = reduce_votes(cast, metric)
    values = [vote.signal.value for vote in cast]
    if reducer == "sum":
        assert signal.value == pytest.approx(min(max(sum(values), -1.0), 1.0))
    else:
        assert min(values) - 1e-12 <= signal.value <= max(values) + 1e-12
    confidences = [vote.signal.confidence for vote in cast]
    assert min(confidences) - 1e-12 <= signal.confidence <= max(confidences) + 1e-12


@given(st.lists(st.tuples(metrics, st.booleans()), min_size=1, max_size=6), st.data(), st.sampled_from(REDUCERS))
def test_turning_one_vote_from_bad_to_good_never_lowers_the_reward(cast, data, reducer: str) -> None:
    declared = {name: {"kind": "boolean", "weight": 0.5, "reducer": reducer} for name in DEFAULT_SPEC.metrics}
    spec = spec_of(declared)
    turned = data.draw(st.integers(0, len(cast) - 1))

    def reward(value_of_turned: bool) -> float:
        items = [
            feedback(f"fb-{i}", value_of_turned if i == turned else value, name, actor=f"user-{i}", at=1000.0 + i)
            for i, (name, value) in enumerate(cast)
        ]
        value = score(inference(), items, spec).value
        assert value is not None
        return value

    assert reward(True) >= reward(False)


@given(st.text(max_size=60), st.text(max_size=60))
def test_a_correction_is_symmetric_and_best_for_an_untouched_answer(answer: str, corrected: str) -> None:
    signal = correction(answer, corrected)
    assert signal == correction(corrected, answer)
    assert signal.value <= correction(answer, answer).value == 1.0


@given(st.text(max_size=200))
def test_any_comment_is_nothing_or_bounded(text: str) -> None:
    signal = comment(text)
    assert signal is None or (-1.0 <= signal.value <= 1.0 and 0.0 < signal.confidence <= 0.4)


@given(st.floats(0, 0.45), st.floats(0, 0.45), st.floats(0, 1))
def test_denoising_recovers_any_mean(to_positive: float, to_negative: float, share_good: float) -> None:
    seen_good = share_good * (1 - to_negative) + (1 - share_good) * to_positive
    recovered = seen_good * denoise(1.0, to_positive, to_negative) + (1 - seen_good) * denoise(
        -1.0, to_positive, to_negative
    )
    assert recovered == pytest.approx(2 * share_good - 1, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(
    st.booleans(),
    st.sampled_from(["shown", "unknown", "not_shown"]),
    st.none() | st.just("cancelled"),
    st.none() | st.integers(0, 3),
)
def test_only_what_may_train_becomes_a_sample(tmp_path_factory, consents, exposure, untrainable, num_logprobs) -> None:
    tokens = None
    if num_logprobs is not None:
        tokens = Tokens(prompt_ids=[1], completion_ids=[2, 3], logprobs=[-0.1] * num_logprobs)
    room = Room(tmp_path_factory.mktemp("room"))
    changes: dict[str, Any] = {"exposure": exposure, "untrainable": untrainable, "tokens": tokens}
    room.give(interaction(feedback(), consent=Consent(training=consents), **changes))
    may_train = consents and exposure != "not_shown" and untrainable is None and num_logprobs == 2
    assert len(room.samples()) == may_train
    [row] = why(room.state_dir, "inf_0000_a")
    assert row["reward"] == 0.6
    assert (row["verdict"] == "sample") == may_train


@given(strategy_of(Inference))
def test_scoring_is_pure(answer: Inference) -> None:
    before = encode(answer)
    assert score(answer, [feedback()], DEFAULT_SPEC) == score(decode(before, Inference), [feedback()], DEFAULT_SPEC)
    assert encode(answer) == before
