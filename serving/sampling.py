"""What a request asks of the sampler: what we add to it, how it resolves, and whether it can be learned from.

Takes: the body of an OpenAI request, not yet checked by the engine, so every value may be of a wrong type.
Promises: the added fields never change the text that the engine generates, nor turn a refused request into a good one.
"""

from typing import Any, Literal

Api = Literal["chat.completions", "completions"]
Body = dict[str, Any]

RECORDED = ("max_tokens", "max_completion_tokens", "stop", "seed", "stop_token_ids", "ignore_eos")
NEUTRAL: dict[str, tuple[Any, ...]] = {  # values that leave the distribution alone
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_p": (None, 0),
    "top_k": (None, 0, -1),
    "best_of": (None, 1),
    "min_tokens": (None, 0),
}
SHAPING = (  # anything but an empty value changes the distribution, or what the engine returns
    "logit_bias",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "prompt_logprobs",
    "echo",
    "use_beam_search",
    "bad_words",
    "allowed_token_ids",
    "logprob_token_ids",
    "thinking_token_budget",
    "watermarking",
    "prompt_embeds",
    "vllm_xargs",
    "suffix",
)
UNINSTRUMENTED = ("echo", "use_beam_search", "logprob_token_ids", "prompt_embeds")  # our fields would change the answer


def instrument(api: Api, body: Body) -> Body:
    """Return the body with token ids and log-probs asked for, where that leaves the client's answer as it was."""
    if any(body.get(field) for field in UNINSTRUMENTED):
        return dict(body)
    added: Body = {"return_token_ids": True}
    if api == "completions" and body.get("logprobs") is None:
        added["logprobs"] = 0
    if api == "chat.completions" and not body.get("logprobs") and not body.get("top_logprobs"):
        added["logprobs"] = True
    return {**body, **added}


def wants(api: Api, body: Body) -> tuple[bool, bool]:
    """Return whether the client itself asked for log-probs, and for token ids."""
    logprobs = body.get("logprobs") is not None if api == "completions" else bool(body.get("logprobs"))
    return logprobs, bool(body.get("return_token_ids"))


def number(body: Body, field: str, default: float) -> float:
    """Return a number of the body, or the default when it is absent or no number."""
    value = body.get(field)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else default


def resolved(body: Body) -> dict[str, Any]:
    """Return the sampling parameters as the engine applies them (defaults are OpenAI's)."""
    sampling: dict[str, Any] = {
        "temperature": number(body, "temperature", 1.0),
        "top_p": number(body, "top_p", 1.0),
        "n": int(number(body, "n", 1)),
    }
    for field in (*RECORDED, *NEUTRAL):
        if body.get(field) is not None:
            sampling[field] = body[field]
    if 0 < sampling["temperature"] < 0.01:
        sampling["temperature"] = 0.01  # vLLM raises it, to avoid NaN
    return sampling


def untrainable_reason(api: Api, body: Body) -> str | None:
    """Return why the learner could not correct for this sampling, or None."""
    if number(body, "temperature", 1.0) < 0.01:
        return "greedy"  # the served distribution is a point; log-probs of another one would be learned from
    for field, neutral in NEUTRAL.items():
        if body.get(field) not in neutral:
            return "penalties" if field.endswith("penalty") else field
    for field in SHAPING:
        value = body.get(field)
        if value or (value is not None and field == "prompt_logprobs"):
            return "guided_decoding" if field.startswith(("guided", "structured")) else field
    if is_guided(body):
        return "guided_decoding"
    if api == "chat.completions" and is_multimodal(body):
        return "multimodal"
    return None


def is_guided(body: Body) -> bool:
    """Return whether a format or a forced tool masks tokens out."""
    form = body.get("response_format")
    choice = body.get("tool_choice")
    return (isinstance(form, dict) and form.get("type") not in (None, "text")) or (
        bool(body.get("tools")) and (choice == "required" or isinstance(choice, dict))
    )


def is_multimodal(body: Body) -> bool:
    """Return whether any message has a part that is no text."""
    messages = body.get("messages")
    contents = [message.get("content") for message in messages or [] if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(not isinstance(part, dict) or part.get("type") != "text" for part in parts)


def num_prompts(api: Api, body: Body) -> int:
    """Return how many prompts the request holds: a completions prompt may be a list of texts or of token lists."""
    prompt = body.get("prompt")
    if api == "completions" and isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        return len(prompt)
    return 1


def num_choices(api: Api, body: Body) -> int:
    """Return how many choices the answer will have; an n that the engine will refuse counts as one."""
    n = body.get("n")
    per_prompt = n if isinstance(n, int) and not isinstance(n, bool) and n >= 1 else 1
    return per_prompt * num_prompts(api, body)
