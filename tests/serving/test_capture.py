"""Tokens and log-probs are the engine's own, or the record says why it cannot be trained on."""

import json
from typing import Any

import pytest

from serving.capture import Capture, Choice


def chat_chunk(**choice: Any) -> dict[str, Any]:
    return {"id": "x", "model": "m", "choices": [{"index": 0, "delta": {}, "logprobs": None, **choice}]}


def entry(logprob: float | None) -> dict[str, Any]:
    return {"token": "t", "logprob": logprob, "bytes": None, "top_logprobs": []}


def test_chunks_add_up_to_one_choice() -> None:
    capture = Capture("chat.completions", 1, keep_logprobs=False, keep_token_ids=False)
    first = {**chat_chunk(delta={"role": "assistant", "content": ""}), "prompt_token_ids": [1, 2]}
    capture.pass_answer(first)
    capture.pass_answer(chat_chunk(delta={"content": "He"}, token_ids=[5], logprobs={"content": [entry(-0.5)]}))
    capture.pass_answer(
        chat_chunk(delta={"content": "llo"}, token_ids=[6, 7], logprobs={"content": [entry(-1.0), entry(-2.0)]},
                   finish_reason="stop")
    )  # fmt: skip
    (choice,) = capture.choices
    tokens, reason = choice.tokens("v000004")
    assert reason is None and tokens is not None
    assert (tokens.prompt_ids, tokens.completion_ids, tokens.logprobs) == ([1, 2], [5, 6, 7], [-0.5, -1.0, -2.0])
    assert [(span.start, span.end, span.version) for span in tokens.weight_spans] == [(0, 3, "v000004")]
    assert ("".join(choice.text), choice.finish_reason) == ("Hello", "stop")


def test_what_only_we_asked_for_becomes_null() -> None:
    capture = Capture("chat.completions", 1, keep_logprobs=False, keep_token_ids=False)
    chunk = {**chat_chunk(token_ids=[5], logprobs={"content": [entry(-0.5)]}), "prompt_token_ids": [1]}
    assert capture.pass_answer(chunk) == {
        "id": "x",
        "model": "m",
        "prompt_token_ids": None,
        "choices": [{"index": 0, "delta": {}, "logprobs": None, "token_ids": None}],
    }


def test_what_the_client_asked_for_stays() -> None:
    capture = Capture("chat.completions", 1, keep_logprobs=True, keep_token_ids=True)
    chunk = {**chat_chunk(token_ids=[5], logprobs={"content": [entry(-0.5)]}), "prompt_token_ids": [1]}
    assert capture.pass_answer(json.loads(json.dumps(chunk))) == chunk


@pytest.mark.parametrize(
    ("logprobs", "reason"),
    [
        ([-0.1, -0.2], None),
        ([-0.1], "length_mismatch"),
        ([-0.1, -0.2, -0.3], "length_mismatch"),
        ([-0.1, None], "impossible_logprob"),
        ([-0.1, -9999.0], "impossible_logprob"),
        ([-0.1, float("nan")], "impossible_logprob"),
        ([-0.1, 0.5], "impossible_logprob"),
    ],
)
def test_log_probs_that_do_not_fit_make_a_choice_untrainable(logprobs: list[float | None], reason: str | None) -> None:
    tokens, found = Choice(prompt_ids=[1], completion_ids=[2, 3], logprobs=logprobs).tokens("v000000")
    assert found == reason
    assert tokens is not None and tokens.completion_ids == [2, 3]


def test_a_choice_without_tokens_has_none_made_up() -> None:
    assert Choice(prompt_ids=[1]).tokens("v000000") == (None, "no_tokens")


def test_streamed_tool_calls_are_put_together_and_checked() -> None:
    capture = Capture("chat.completions", 1, False, False)
    for call in (
        {"index": 0, "id": "c1", "function": {"name": "add", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"a":'}},
        {"index": 1, "id": "c2", "function": {"name": "sub", "arguments": "{broken"}},
        {"index": 0, "function": {"arguments": " 1}"}},
    ):
        capture.pass_answer(chat_chunk(delta={"tool_calls": [call]}))
    calls = [(call.name, call.arguments, call.parsed) for call in capture.choices[0].tool_calls()]
    assert calls == [("add", '{"a": 1}', True), ("sub", "{broken", False)]


def test_an_error_in_the_stream_is_noted_and_passed() -> None:
    capture = Capture("chat.completions", 1, False, False)
    error = {"error": {"message": "boom", "type": "InternalServerError", "code": 500}}
    assert capture.pass_answer(error) == {"error": {"message": "boom", "type": "InternalServerError", "code": 500}}
    assert capture.error_type == "InternalServerError"
