"""What one interaction revision comes to: a sample, or the reason why there is none.

Owns the rules of what may be trained and the arithmetic of late corrections. Pure. Takes a scored interaction, the
verdict on its last revision and what the tracker expected. Emits Verdict and Sample.
Promises: the rewards of all samples of one interaction add up to the reward of its newest revision.
"""

import math
from typing import Literal, NamedTuple

from ingest.events import Inference, Interaction
from rewards.baseline import Expectation, charge
from rewards.ledger import Verdict
from rewards.reward import Reward
from rewards.samples import Sample
from rewards.spec import TOKEN_COST, RewardSpec

NO_CHANGE = 1e-9  # a smaller difference of rewards is rounding, not a correction


class Scored(NamedTuple):
    """An interaction, its reward, and what we said about its last revision."""

    interaction: Interaction
    reward: Reward
    untrainable: str | None  # why this answer must never be trained on
    previous: Verdict | None
    previous_hindsight: str | None = None

    @property
    def is_first_sample(self) -> bool:
        """Tell whether this revision makes the full sample, and so reads and updates the tracker."""
        was_emitted = self.previous is not None and self.previous.emitted is not None
        return not (was_emitted or self.reward.value is None or self.waits or self.untrainable)

    @property
    def waits(self) -> bool:
        """Before the window closes there is no verdict: praise and blame wait the same time."""
        return self.interaction.state == "provisional"


def never_trains(inference: Inference) -> str | None:
    """Return why this answer must never be trained on, one word to count by; None if it may."""
    tokens = inference.tokens
    if not inference.consent.training:
        return "no_consent"
    if inference.untrainable:
        return inference.untrainable
    if inference.exposure == "not_shown":
        return "not_shown"
    if tokens is None or not tokens.completion_ids or not tokens.prompt_ids:
        return "no_tokens"
    if any(span.version != inference.policy.version for span in tokens.weight_spans):
        return "mixed_versions"
    if tokens.logprob_mode == "none" and not tokens.logprobs:
        return None  # an imported answer without log-probs: the learner's KTO term needs none
    if len(tokens.logprobs) != len(tokens.completion_ids):
        return "length_mismatch"
    if tokens.logprob_mode != "processed":
        return "raw_logprobs"
    return None if math.isfinite(sum(tokens.logprobs)) else "bad_logprobs"


def cost_of(inference: Inference, spec: RewardSpec) -> float:
    """Return lambda * tokens / max_tokens, the cost before it is scaled by the expected success."""
    num_tokens = len(inference.tokens.completion_ids) if inference.tokens else 0
    return spec.token_cost.weight * num_tokens / spec.token_cost.max_tokens


def judge(
    scored: Scored, expected: Expectation | None, spec: RewardSpec, now_s: float, config_hash: str = ""
) -> tuple[Verdict, Sample | None]:
    """Return the verdict and its sample. expected: for first samples only, read at this very revision."""
    verdict = _priced(scored, expected, spec, now_s)
    value, emitted = verdict.reward, verdict.emitted
    if scored.untrainable:
        return verdict._replace(verdict="untrainable", reason=scored.untrainable), None
    if scored.waits:
        return verdict._replace(verdict="waiting", reason="window still open"), None
    if emitted is not None:
        # Withdrawn feedback must leave no gradient behind: the sum of samples returns to the baseline, where A = 0.
        target = value if value is not None else verdict.baseline or 0.0
        if abs(target - emitted) <= NO_CHANGE:
            return verdict._replace(verdict="unchanged", reason="same reward"), None
        sample = _sample(scored, verdict, target - emitted, "delta", config_hash)
        reason = "delta" if value is not None else "delta: feedback withdrawn"
        return verdict._replace(reason=reason, sample_id=sample.sample_id, emitted=target), sample
    if value is None:
        return verdict._replace(verdict="masked", reason="no feedback"), None
    sample = _sample(scored, verdict, value, "full", config_hash)
    return verdict._replace(reason="full", sample_id=sample.sample_id, emitted=value), sample


def _priced(scored: Scored, expected: Expectation | None, spec: RewardSpec, now_s: float) -> Verdict:
    """Return the reward after its token cost, not judged yet; every revision pays by the first one's expectation."""
    interaction, reward, previous = scored.interaction, scored.reward, scored.previous
    baseline = expected.baseline if expected else previous.baseline if previous else None
    success = expected.expected_success if expected else previous.expected_success if previous else None
    value, components = reward.value, dict(reward.components)
    if value is not None and success is not None:
        charged = charge(value, cost_of(interaction.inference, spec), success)
        if charged != value:
            components[TOKEN_COST] = charged - value
        value = charged
    return Verdict(
        inference_id=interaction.interaction_id,
        revision=interaction.revision,
        state=interaction.state,
        verdict="sample",
        reason="",
        reward=value,
        confidence=reward.confidence,
        baseline=baseline,
        expected_success=success,
        emitted=previous.emitted if previous else None,
        components=components,
        feedback=reward.used,
        ignored=reward.ignored,
        sample_id=None,
        spec_version=spec.version,
        created_at=now_s,
    )


def _sample(
    scored: Scored, verdict: Verdict, reward: float, kind: Literal["full", "delta"], config_hash: str
) -> Sample:
    inference, tokens = scored.interaction.inference, scored.interaction.inference.tokens
    assert tokens is not None, "a sample needs tokens; never_trains has said no"
    hindsight = scored.reward.hindsight
    confidence = verdict.confidence or (scored.previous.confidence if scored.previous else 0.0) or 1.0
    return Sample(
        sample_id=f"{verdict.inference_id}@{verdict.revision}",
        inference_id=verdict.inference_id,
        revision=verdict.revision,
        kind=kind,
        tenant=inference.tenant,
        app=inference.app,
        function=inference.function,
        episode_id=inference.episode_id,
        actor=scored.reward.actor,
        policy_version=inference.policy.version,
        arm=inference.assignment.arm,
        prompt_ids=tokens.prompt_ids,
        completion_ids=tokens.completion_ids,
        logprobs=tokens.logprobs or None,
        temperature=_number(inference.sampling.get("temperature"), 1.0),
        top_p=_number(inference.sampling.get("top_p"), 1.0),
        finish_reason=inference.finish_reason,
        reward=reward,
        confidence=confidence,
        baseline=(verdict.baseline or 0.0) if kind == "full" else 0.0,
        expected_success=verdict.expected_success or 0.0,
        components=verdict.components,
        spec_version=verdict.spec_version,
        served_at=inference.timing.completed_at,
        created_at=verdict.created_at,
        consent_training=inference.consent.training,
        hindsight=hindsight if hindsight != scored.previous_hindsight else None,
        prompt_text=prompt_text(inference),
        response_text=inference.response_text,
        source_offsets=scored.interaction.source_offsets,
        config_hash=config_hash,
    )


def prompt_text(inference: Inference) -> str:
    """Return the prompt for people and judges, one "role: content" line per message; training uses the tokens."""
    messages = inference.request.get("messages")
    if not isinstance(messages, list):
        prompt = inference.request.get("prompt")
        return prompt if isinstance(prompt, str) else ""
    turns = [message for message in messages if isinstance(message, dict) and isinstance(message.get("content"), str)]
    return "\n".join(f"{turn.get('role', 'user')}: {turn['content']}" for turn in turns)


def _number(value: object, default: float) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else default
