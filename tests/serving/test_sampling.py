"""What we add to a request, and which sampling the learner cannot correct for."""

from typing import Any

import pytest

from serving.sampling import instrument, num_choices, resolved, untrainable_reason


def test_chat_gets_token_ids_and_logprobs() -> None:
    assert instrument("chat.completions", {"messages": []}) == {
        "messages": [],
        "return_token_ids": True,
        "logprobs": True,
    }


def test_completions_ask_for_the_sampled_tokens_logprob_only() -> None:
    assert instrument("completions", {"prompt": "x"}) == {"prompt": "x", "return_token_ids": True, "logprobs": 0}


def test_what_the_client_asked_for_is_left_as_it_is() -> None:
    assert instrument("completions", {"logprobs": 3})["logprobs"] == 3
    assert instrument("chat.completions", {"logprobs": True, "top_logprobs": 4})["top_logprobs"] == 4


def test_a_request_that_the_engine_refuses_stays_refused() -> None:
    assert "logprobs" not in instrument("chat.completions", {"top_logprobs": 4})


@pytest.mark.parametrize("field", ["echo", "use_beam_search", "prompt_embeds", "logprob_token_ids"])
def test_nothing_is_added_where_it_would_change_the_answer(field: str) -> None:
    assert instrument("completions", {field: True}) == {field: True}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, None),
        ({"temperature": 0.7, "top_p": 0.9, "stop": ["."], "seed": 1, "n": 3}, None),
        ({"frequency_penalty": 0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "top_k": -1, "min_p": 0}, None),
        ({"response_format": {"type": "text"}, "tools": [{}], "tool_choice": "auto"}, None),
        ({"temperature": 0}, "greedy"),
        ({"frequency_penalty": 0.5}, "penalties"),
        ({"presence_penalty": -0.5}, "penalties"),
        ({"repetition_penalty": 1.1}, "penalties"),
        ({"min_p": 0.1}, "min_p"),
        ({"top_k": 40}, "top_k"),
        ({"top_k": "forty"}, "top_k"),
        ({"best_of": 4}, "best_of"),
        ({"min_tokens": 4}, "min_tokens"),
        ({"logit_bias": {"1": 3}}, "logit_bias"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"echo": True}, "echo"),
        ({"guided_json": {"type": "object"}}, "guided_decoding"),
        ({"structured_outputs": {"choice": ["a"]}}, "guided_decoding"),
        ({"response_format": {"type": "json_object"}}, "guided_decoding"),
        ({"tools": [{}], "tool_choice": "required"}, "guided_decoding"),
        ({"tools": [{}], "tool_choice": {"type": "function"}}, "guided_decoding"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "multimodal"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, None),
        ({"messages": "no list"}, None),
    ],
)
def test_sampling_that_the_learner_cannot_correct_is_named(body: dict[str, Any], reason: str | None) -> None:
    assert untrainable_reason("chat.completions", body) == reason


def test_defaults_are_openais() -> None:
    assert resolved({}) == {"temperature": 1.0, "top_p": 1.0, "n": 1}


def test_a_temperature_that_the_engine_raises_is_recorded_as_raised() -> None:
    assert resolved({"temperature": 0.003, "max_tokens": 5})["temperature"] == 0.01


@pytest.mark.parametrize(
    ("body", "num"),
    [
        ({"prompt": "a"}, 1),
        ({"prompt": ["a", "b"], "n": 3}, 6),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [[1], [2]]}, 2),
        ({"n": 0}, 1),
        ({"n": "many"}, 1),
        ({"n": True}, 1),
    ],
)
def test_choices_are_n_for_each_prompt(body: dict[str, Any], num: int) -> None:
    assert num_choices("completions", body) == num
