"""Sample: what the learner trains on (contract)."""

from typing import Literal

import msgspec

SAMPLE_TYPE = "llm.sample.v1"


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One rewarded answer, with the token ids and log-probs as served.

    kind "full": reward is R in [-1, 1], to be used with its baseline.
    kind "delta": late feedback changed R of an answer already emitted; reward is the difference and needs no baseline.
    """

    sample_id: str  # <inference id>@<interaction revision>
    inference_id: str
    revision: int
    kind: Literal["full", "delta"]
    tenant: str
    app: str
    function: str
    episode_id: str
    actor: str  # pseudonym of the user whose feedback it is; caps influence
    policy_version: str  # v000000, the version that served every token
    arm: str
    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float] | None  # behaviour log-probs, nats; None: KTO only
    temperature: float
    top_p: float
    finish_reason: str
    reward: float  # [-1, 1] full, [-2, 2] delta
    confidence: float  # (0, 1]
    baseline: float  # tracker value read before this sample's update
    expected_success: float  # tracker's probability of a positive reward, for the token-cost term
    components: dict[str, float]  # metric -> weighted contribution
    spec_version: str
    served_at: float
    created_at: float
    consent_training: bool = True
    actor_weight: float = 1.0
    tenant_weight: float = 1.0
    hindsight: str | None = None
    prompt_text: str = ""
    response_text: str = ""
    source_offsets: dict[str, int] = {}
    config_hash: str = ""
    schema_version: int = 1
