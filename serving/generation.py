"""One request for generation: who asks, in which episode, and the Inference events that tell of it.

Takes: headers and body of a request. Emits: Inference, one per choice (one in all when nothing was generated).
"""

import hashlib
from dataclasses import dataclass
from typing import Any, NamedTuple

from starlette.datastructures import Headers

from ingest import ids
from ingest.events import Assignment, Consent, Inference, Policy, Timing, Usage
from serving import sampling
from serving.capture import Capture, Choice
from serving.router import Pick
from serving.routes import Route

NAME_CHARS = 256
KEPT = ("messages", "prompt", "tools", "tool_choice", "response_format")


class Outcome(NamedTuple):
    """How a generation ended."""

    finish_reason: str = ""  # of every choice that has none of its own
    error_type: str | None = None
    untrainable: str | None = None
    shown: bool = True


@dataclass(frozen=True)
class Generation:
    """What is known before the engine is asked."""

    api: sampling.Api
    body: dict[str, Any]
    tenant: str
    app: str
    function: str
    episode_id: str
    user_ref: str
    consent: bool
    uuid_hex: str
    received_at: float
    num_choices: int
    config_hash: str

    @property
    def route_key(self) -> str:
        return ids.route_of(self.episode_id)

    @property
    def response_id(self) -> str:
        return ids.response_id(self.route_key, self.uuid_hex)

    @property
    def inference_ids(self) -> list[str]:
        return [ids.inference_id(self.route_key, self.uuid_hex, choice) for choice in range(self.num_choices)]

    @property
    def unit(self) -> str:
        """Return what is assigned to an arm: the user's pseudonym, else the hashed episode."""
        return self.user_ref or hashlib.blake2b(f"{self.tenant}/{self.episode_id}".encode(), digest_size=16).hexdigest()

    def headers(self, route: Route, arm: str) -> dict[str, str]:
        """Return the x-headrace headers of the answer."""
        return {
            "x-headrace-inference-id": ",".join(self.inference_ids),
            "x-headrace-episode-id": self.episode_id,
            "x-headrace-version": route.version,
            "x-headrace-arm": arm,
        }

    def inferences(
        self, pick: Pick, route: Route, arm: str, capture: Capture | None, outcome: Outcome, timing: Timing
    ) -> list[Inference]:
        """Return the events of this generation; without a capture it is one failure."""
        untrainable = outcome.untrainable or sampling.untrainable_reason(self.api, self.body)
        choices = capture.choices if capture else [Choice()]
        known = self._known(pick, route, arm, timing)
        return [
            self._inference(known, index, choice, route, outcome, untrainable) for index, choice in enumerate(choices)
        ]

    def _known(self, pick: Pick, route: Route, arm: str, timing: Timing) -> dict[str, Any]:
        """Return the fields that all choices share."""
        messages = self.body.get("messages")
        turns = messages if isinstance(messages, list) else []
        return {
            "response_id": self.response_id,
            "episode_id": self.episode_id,
            "tenant": self.tenant,
            "timing": timing,
            "policy": Policy(model=route.served_model, version=route.version, weights_digest=route.weights_digest),
            "app": self.app,
            "function": self.function,
            "step_index": sum(isinstance(turn, dict) and turn.get("role") == "assistant" for turn in turns),
            "num_choices": self.num_choices,
            "user_ref": self.user_ref,
            "consent": Consent(training=self.consent),
            "api": self.api,
            "request": {key: self.body[key] for key in KEPT if self.body.get(key) is not None},
            "sampling": sampling.resolved(self.body),
            "assignment": Assignment(
                rollout_id=pick.rollout_id,
                arm="canary" if arm == "canary" else "champion",
                propensity=pick.propensity,
                unit=self.unit,
                assigned_arm=pick.arm if pick.arm != arm else "",
            ),
            "config_hash": self.config_hash,
        }

    def _inference(
        self, known: dict[str, Any], index: int, choice: Choice, route: Route, outcome: Outcome, untrainable: str | None
    ) -> Inference:
        tokens, token_problem = choice.tokens(route.version)
        return Inference(
            inference_id=ids.inference_id(self.route_key, self.uuid_hex, index),
            choice_index=index,
            response_text="".join(choice.text),
            finish_reason=choice.finish_reason or outcome.finish_reason,
            error_type=outcome.error_type,
            tool_calls=choice.tool_calls(),
            usage=Usage(prompt_tokens=len(choice.prompt_ids), completion_tokens=len(choice.completion_ids)),
            tokens=tokens,
            untrainable=untrainable or token_problem,
            exposure="shown" if outcome.shown else "not_shown",
            **known,
        )


def name_of(headers: Headers, field: str, default: str) -> str:
    """Return a short name from a header, or the default; ValueError when it is no such name."""
    value = headers.get(field, "").strip() or default
    if len(value) > NAME_CHARS or not (value.isascii() and value.isprintable()):
        raise ValueError(f"{field} must be at most {NAME_CHARS} printable ASCII characters")
    return value


def episode_of(headers: Headers, body: dict[str, Any], uuid_hex: str) -> str:
    """Return the episode a request belongs to: its header, its metadata's episode_id, or a new one."""
    metadata = body.get("metadata")
    named = metadata.get("episode_id") if isinstance(metadata, dict) else None
    if named is not None and not isinstance(named, str):
        raise ValueError("metadata.episode_id must be a string")
    return name_of(headers, "x-headrace-episode", named or ids.episode_id(uuid_hex))
