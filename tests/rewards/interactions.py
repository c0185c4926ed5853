"""Interactions and feedback for the tests of the rewards room."""

from pathlib import Path
from typing import Any

from ingest.events import Consent, Feedback, Inference, Interaction, Policy, Source, Timing, Tokens
from rewards.spec import RewardSpec, load_spec

DEPLOYED_SPEC = load_spec(Path(__file__).parents[2] / "deploy" / "reward_spec.toml")
DEFAULT_SPEC = RewardSpec.model_validate(  # what is deployed, with weights that the tests can name
    DEPLOYED_SPEC.model_dump(by_alias=True)
    | {
        "metrics": DEPLOYED_SPEC.model_dump()["metrics"]
        | {"thumbs": DEPLOYED_SPEC.metrics["thumbs"].model_dump() | {"weight": 0.6}},
        "outcomes": DEPLOYED_SPEC.outcomes.model_dump() | {"truncated": -0.6},
    }
)
ANSWERED_AT = 1000.0
OUTCOMES = {
    "error": -1.0,
    "invalid_tool_call": -0.9,
    "empty": -0.8,
    "truncated": -0.6,
    "refusal": -0.4,
    "clarification": -0.1,
}


def spec_of(metrics: dict[str, dict[str, Any]], **tables: Any) -> RewardSpec:
    return RewardSpec.model_validate({"metrics": metrics, "outcomes": OUTCOMES, **tables})


def inference(inference_id: str = "inf_0000_a", **changes: Any) -> Inference:
    fields: dict[str, Any] = {
        "inference_id": inference_id,
        "response_id": "resp_0000_a",
        "episode_id": "episode-1",
        "tenant": "acme",
        "user_ref": "user-1",
        "timing": Timing(received_at=ANSWERED_AT - 1, completed_at=ANSWERED_AT),
        "policy": Policy(model="m", version="v000003"),
        "request": {"messages": [{"role": "user", "content": "What is the capital of France?"}]},
        "response_text": "Paris is the capital of France.",
        "sampling": {"temperature": 0.7, "top_p": 0.9},
        "finish_reason": "stop",
        "tokens": Tokens(prompt_ids=[1, 2, 3], completion_ids=[4, 5], logprobs=[-0.1, -0.2]),
        "consent": Consent(),
    }
    return Inference(**(fields | changes))


def feedback(feedback_id: str = "fb-1", value: Any = True, metric: str = "thumbs", **changes: Any) -> Feedback:
    at = changes.pop("at", ANSWERED_AT + 5)
    fields: dict[str, Any] = {
        "feedback_id": feedback_id,
        "tenant": "acme",
        "metric": metric,
        "kind": "boolean",
        "value": value,
        "occurred_at": at,
        "received_at": at,
        "inference_id": "inf_0000_a",
        "source": Source(id=changes.pop("actor", "user-1")),
    }
    return Feedback(**(fields | changes))


def interaction(*signals: Feedback, revision: int = 0, state: str = "final", **changes: Any) -> Interaction:
    return Interaction(
        inference=inference(**changes),
        feedback=list(signals),
        state=state,  # type: ignore[arg-type]
        revision=revision,
        watermark=ANSWERED_AT + 60,
    )
