"""Which samples make a batch: consent, staleness, one spec version, a cap per actor (pure).

Owns the buffer's rules. Promises: the same buffer gives the same batch; a sample that may never be used is dropped with
a reason, one that has to wait stays.
"""

from typing import NamedTuple

from learner.config import LearnerConfig
from rewards.samples import Sample


class Plan(NamedTuple):
    """One batch, and what has to leave the buffer."""

    samples: list[Sample]
    staleness: list[int]
    dropped: dict[str, str]  # sample id -> reason


def staleness_of(sample: Sample, promoted: list[str]) -> int:
    """Return how many versions became champion after the one that served this sample."""
    return sum(1 for version in promoted if version > sample.policy_version)


def refusal(sample: Sample, config: LearnerConfig) -> str | None:
    """Return why a sample can never be trained on, or None."""
    if not sample.consent_training:
        return "no_consent"
    if not sample.prompt_ids or not sample.completion_ids:
        return "no_tokens"
    if sample.logprobs is not None and len(sample.logprobs) != len(sample.completion_ids):
        return "logprobs_length"
    if sample.temperature <= 0:
        return "greedy"  # no sampling distribution to correct for
    if sample.top_p < 1 and sample.logprobs is not None:
        return "top_p"  # log-probs of a truncated distribution; the learner's are not truncated
    if len(sample.completion_ids) > config.max_completion_tokens:
        return "too_long"
    return None


def plan_batch(
    pending: list[Sample], config: LearnerConfig, promoted: list[str], m2: float, min_samples: int
) -> Plan | None:
    """Return the next batch, newest answers first; None while fewer than min_samples are usable and none is stale."""
    bound = config.max_staleness_calm if m2 <= config.calm_m2 else config.max_staleness
    dropped: dict[str, str] = {}
    usable: list[tuple[Sample, int]] = []
    for sample in pending:
        staleness = staleness_of(sample, promoted)
        if staleness > bound:
            dropped[sample.sample_id] = "stale"
        else:
            usable.append((sample, staleness))
    usable.sort(key=lambda pair: (pair[0].served_at, pair[0].sample_id), reverse=True)
    for spec in dict.fromkeys(sample.spec_version for sample, _ in usable):
        chosen = _cap_actors([pair for pair in usable if pair[0].spec_version == spec], config)
        if len(chosen) >= min_samples:
            return Plan([sample for sample, _ in chosen], [stale for _, stale in chosen], dropped)
    return Plan([], [], dropped) if dropped else None


def _cap_actors(usable: list[tuple[Sample, int]], config: LearnerConfig) -> list[tuple[Sample, int]]:
    """Take the first batch_samples, at most max_actor_share of them from one actor."""
    most = max(1, int(config.max_actor_share * config.batch_samples))
    num_by_actor: dict[str, int] = {}
    chosen = []
    for sample, staleness in usable:
        num = num_by_actor.get(sample.actor, 0)
        if sample.actor and num >= most:
            continue
        num_by_actor[sample.actor] = num + 1
        chosen.append((sample, staleness))
        if len(chosen) == config.batch_samples:
            break
    return chosen


def adapt_beta(beta: float, kl: float, config: LearnerConfig) -> float:
    """Return the next weight of the KL term: doubled above the budget, halved well below it."""
    if kl > config.kl_budget * 1.25:
        return min(config.beta_max, max(beta, config.beta_min) * 2)
    if kl < config.kl_budget / 2:
        return max(config.beta_min, beta / 2)
    return beta
