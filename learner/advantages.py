"""From rewards to advantages, one batch at a time (pure numpy; METHODS.md, section 1).

A = clip((conf * (R - b) - mean_B) / std_B, +-5), times the sample's weights. Deltas (late feedback on an answer that
was already emitted) are differences: no baseline, no mean taken off, the batch's scale. Shapes: B samples.
"""

import numpy as np

from rewards.samples import Sample


def token_cost(sample: Sample, cost: float, max_tokens: int) -> float:
    """Return what a positive sample pays for its length: easy tasks (high expected success) pay more."""
    if cost == 0 or sample.reward <= 0:
        return 0.0
    return cost * len(sample.completion_ids) / max_tokens * sample.expected_success


def batch_advantages(samples: list[Sample], cost: float, max_tokens: int, clip: float) -> tuple[np.ndarray, float]:
    """Return advantages (B,) and the batch's standard deviation; with std 0 all are 0 and the step must be skipped."""
    is_full_B = np.array([sample.kind == "full" for sample in samples])
    weight_B = np.array([sample.actor_weight * sample.tenant_weight for sample in samples], dtype=np.float64)
    raw_B = np.array(
        [
            sample.confidence
            * (
                sample.reward - token_cost(sample, cost, max_tokens) - sample.baseline
                if sample.kind == "full"
                else sample.reward
            )
            for sample in samples
        ],
        dtype=np.float64,
    )
    full_weight = weight_B[is_full_B].sum()
    if full_weight <= 0:
        return np.zeros(len(samples)), 0.0
    mean = float((weight_B * raw_B)[is_full_B].sum() / full_weight)
    variance = float((weight_B * (raw_B - mean) ** 2)[is_full_B].sum() / full_weight)
    std = variance**0.5
    if std < 1e-8:
        return np.zeros(len(samples)), 0.0
    centred_B = np.where(is_full_B, raw_B - mean, raw_B) / std
    return np.clip(centred_B, -clip, clip) * weight_B, std


def thin(advantages_B: np.ndarray, share: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices to compute gradients for, and the factors that make up for those left out.

    A sample stays with probability p = min(1, c |A|), c such that share of them stay, and its advantage becomes A / p:
    the expected gradient is that of the whole batch, at the least variance for its cost. Most answers are mediocre
    alike; the few that were liked or disliked clearly always stay. Drawn systematically: the number hardly varies.
    """
    num = max(1, round(share * len(advantages_B)))
    size_B = np.abs(advantages_B) + 1e-3
    if num >= len(advantages_B):
        return np.arange(len(advantages_B)), np.ones(len(advantages_B))
    keep_B = np.zeros(len(advantages_B))
    for _ in range(len(advantages_B)):  # those that reach 1 stay for sure; the others share what is left
        sure = keep_B >= 1
        keep_B = np.where(sure, 1.0, size_B * (num - sure.sum()) / size_B[~sure].sum() if not sure.all() else 1.0)
        if (keep_B[~sure] <= 1).all():
            break
    ends_B = np.cumsum(np.minimum(keep_B, 1.0))
    marks = rng.random() + np.arange(len(advantages_B))
    chosen = np.unique(np.searchsorted(ends_B, marks[marks < ends_B[-1]], side="right"))
    return chosen, 1.0 / np.minimum(keep_B[chosen], 1.0)
