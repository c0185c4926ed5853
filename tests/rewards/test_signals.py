"""Each kind of feedback maps to [-1, 1]; each failure of an answer is found."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingest.events import ToolCall
from rewards import signals
from rewards.signals import Failure, Signal, common_words, denoise, failure_of, read
from rewards.spec import Metric
from tests.rewards.interactions import feedback, inference


def metric(kind: str, **changes) -> Metric:
    return Metric.model_validate({"kind": kind, "weight": 1.0} | changes)


@pytest.mark.parametrize(
    ("value", "said"), [(True, 1.0), (False, -1.0), (1, 1.0), (0.0, -1.0), ("TRUE", 1.0), ("false", -1.0)]
)
def test_thumbs_are_plus_or_minus_one(value, said: float) -> None:
    assert read(metric("boolean"), feedback(value=value), "") == Signal(said, 1.0)


def test_direction_turns_a_signal_and_confidence_comes_from_the_metric() -> None:
    declared = metric("boolean", direction="lower_is_better", confidence=0.5)
    assert read(declared, feedback(value=True), "") == Signal(-1.0, 0.5)


def test_boolean_values_may_be_mapped() -> None:
    assert read(metric("boolean", values={"true": 0.2, "false": -0.7}), feedback(value=False), "") == Signal(-0.7, 1.0)


@pytest.mark.parametrize(("value", "said"), [(1, -1.0), (3, 0.0), (5, 1.0), (9, 1.0), (-9, -1.0)])
def test_numbers_map_linearly_and_clip(value: float, said: float) -> None:
    assert read(metric("numeric", low=1, high=5), feedback(value=value), "") == Signal(said, 1.0)


@pytest.mark.parametrize(
    ("value", "said"), [("success", 1.0), ("partial", 0.0), ("failure", -1.0), (True, 1.0), (False, -1.0), (0.75, 0.5)]
)
def test_outcomes_of_tools_and_tasks(value, said: float) -> None:
    assert read(metric("outcome"), feedback(value=value, kind="outcome"), "") == Signal(said, 1.0)


def test_an_outcome_that_names_a_failure_is_no_vote() -> None:
    assert read(metric("outcome"), feedback(value="refusal", kind="outcome"), "") is None


def test_labels_are_looked_up_in_label_or_value() -> None:
    declared = metric("categorical", values={"copied": 0.5, "left": -0.5})
    assert read(declared, feedback(value=None, label="copied"), "") == Signal(0.5, 1.0)
    assert read(declared, feedback(value="left"), "") == Signal(-0.5, 1.0)


@pytest.mark.parametrize(
    ("answer", "corrected", "said"),
    [("a b c d", "a b c d", 1.0), ("a b", "x y", -1.0), ("a b c d", "a b x d", 0.5), ("a b", "a b c d", 1 / 3)],
)
def test_a_correction_says_how_much_was_kept(answer: str, corrected: str, said: float) -> None:
    signal = read(metric("demonstration"), feedback(value=None, correction=corrected), answer)
    assert signal is not None
    assert signal.value == pytest.approx(said)


@pytest.mark.parametrize(
    ("text", "sign"),
    [
        ("Great answer, thanks!", 1),
        ("This is wrong and misleading", -1),
        ("not helpful", -1),
        ("That isn\u2019t bad", 1),
        ("good start but wrong ending", 0),
    ],
)
def test_a_comment_has_a_sign_and_low_confidence(text: str, sign: int) -> None:
    signal = read(metric("comment"), feedback(value=None, comment=text), "")
    assert signal is not None
    assert signal.value == sign
    assert 0 < signal.confidence <= 0.4


def test_a_comment_without_sentiment_says_nothing_rather_than_zero() -> None:
    assert read(metric("comment"), feedback(value=None, comment="Where do I find the invoice?"), "") is None


@pytest.mark.parametrize(
    ("kind", "changes", "item", "said"),
    [
        ("boolean", {}, {"value": "maybe"}, "'maybe' is not boolean; send true or false"),
        ("boolean", {}, {"value": None}, "None is not boolean"),
        ("numeric", {"low": 0, "high": 10}, {"value": True}, "True is not a number; send one between 0 and 10"),
        ("categorical", {"values": {"a": 1}}, {"value": "b"}, "label 'b' is not declared; send one of a"),
        ("categorical", {"values": {"a": 1}}, {"value": 3}, "3 is not a label"),
        ("outcome", {}, {"value": 3}, r"send a share of success in \[0, 1\]"),
        ("outcome", {}, {"value": "done"}, "'done' is not declared; send one of failure, partial, success"),
        ("demonstration", {}, {"value": None, "correction": "  "}, "no correction"),
        ("comment", {}, {"value": True}, "no comment"),
    ],
)
def test_feedback_of_another_kind_is_refused_with_a_fix(kind: str, changes: dict, item: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read(metric(kind, **changes), feedback(**item), "answer")


@given(st.lists(st.sampled_from("abc"), max_size=12), st.lists(st.sampled_from("abc"), max_size=12))
def test_common_words_equal_the_textbook_table(first: list[str], second: list[str]) -> None:
    table = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, one in enumerate(first):
        for j, other in enumerate(second):
            table[i + 1][j + 1] = table[i][j] + 1 if one == other else max(table[i][j + 1], table[i + 1][j])
    assert common_words(first, second) == table[-1][-1] == common_words(second, first)


def test_denoising_is_unbiased_at_the_declared_flip_rates() -> None:
    to_positive, to_negative = 0.2, 0.05
    for truth, share_positive in ((1.0, 1 - to_negative), (-1.0, to_positive)):
        mean = share_positive * denoise(1.0, to_positive, to_negative) + (1 - share_positive) * denoise(
            -1.0, to_positive, to_negative
        )
        assert mean == pytest.approx(truth)
    assert denoise(0.3, 0.0, 0.0) == 0.3


def test_denoising_applies_to_a_declared_metric() -> None:
    signal = read(metric("boolean", flip_to_positive=0.1, flip_to_negative=0.1), feedback(value=False), "")
    assert signal is not None
    assert signal.value == pytest.approx(-1.25)


TOOLS = {"tools": [{"type": "function", "function": {"name": "search"}}]}


@pytest.mark.parametrize(
    ("changes", "failure"),
    [
        ({"error_type": "timeout"}, Failure("error", 1.0)),
        ({"finish_reason": "error"}, Failure("error", 1.0)),
        ({"tool_calls": [ToolCall(name="search", arguments="{", parsed=False)]}, Failure("invalid_tool_call", 1.0)),
        (
            {"request": TOOLS, "tool_calls": [ToolCall(name="invented", arguments="{}", parsed=True)]},
            Failure("invalid_tool_call", 1.0),
        ),
        ({"response_text": "  \n"}, Failure("empty", 1.0)),
        ({"finish_reason": "length"}, Failure("truncated", 1.0)),
        ({"finish_reason": "content_filter"}, Failure("refusal", 1.0)),
        ({"response_text": "I'm sorry, but I can\u2019t help with that."}, Failure("refusal", 0.6)),
        ({"response_text": "As an AI language model, I cannot give advice."}, Failure("refusal", 0.6)),
        ({"response_text": "I cannot provide that information."}, Failure("refusal", 0.6)),
        ({"response_text": "Could you please clarify which account you mean?"}, Failure("clarification", 0.6)),
        ({"response_text": "What do you mean by that?"}, Failure("clarification", 0.6)),
        ({"error_type": "timeout", "finish_reason": "length", "response_text": ""}, Failure("error", 1.0)),
        ({"response_text": "", "finish_reason": "length"}, Failure("empty", 1.0)),
        ({}, None),
        ({"response_text": "I'm sorry for the delay. Paris."}, None),
        ({"response_text": "Plants cannot help you sleep."}, None),
        ({"response_text": "What is the capital? Paris."}, None),
        (
            {
                "request": TOOLS,
                "response_text": "",
                "tool_calls": [ToolCall(name="search", arguments="{}", parsed=True)],
            },
            None,
        ),
        ({"request": {"tools": 3, "messages": 4}}, None),
    ],
)
def test_every_way_to_fail_is_found(changes: dict, failure: Failure | None) -> None:
    assert failure_of(inference(**changes), set()) == failure


def test_a_declared_failure_is_certain() -> None:
    assert failure_of(inference(), {"clarification"}) == Failure("clarification", 1.0)


def test_precedence_names_every_outcome_once() -> None:
    assert sorted(signals.PRECEDENCE) == sorted(
        ("error", "invalid_tool_call", "empty", "truncated", "refusal", "clarification")
    )


def test_a_long_correction_is_bounded_in_time() -> None:
    words = [random.Random(1).choice("abcd") for _ in range(100_000)]
    signal = signals.correction(" ".join(words), " ".join(reversed(words)))
    assert -1.0 <= signal.value <= 1.0
