"""What is fixed before a step: advantages, the champion's log-probs, the hindsight teacher's log-probs.

Promises: no gradient here; what the champion itself served needs no forward pass.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from learner.advantages import batch_advantages, thin
from learner.batches import Plan
from learner.config import LearnerConfig
from learner.engine import Engine
from learner.logprobs import Row, micro_batches
from rewards.samples import Sample


@dataclass
class Known:
    """What is fixed before the step for each sample of the batch; lists are by sample."""

    rows: list[Row]
    advantages_B: np.ndarray
    std: float
    chosen: list[int]  # samples that gradients are computed for
    champion: list[torch.Tensor | None]
    teacher: list[torch.Tensor | None]


def row_of(sample: Sample) -> Row:
    return Row(sample.prompt_ids, sample.completion_ids, sample.temperature)


def score(
    engine: Engine, rows: list[Row], config: LearnerConfig, forward: Callable, check_stop: Callable[[], None]
) -> list[torch.Tensor]:
    """Return the log-probs of each row's completion, without gradient."""
    scored: list[torch.Tensor] = [torch.empty(0)] * len(rows)
    lengths = [len(row.prompt_ids) + len(row.completion_ids) for row in rows]
    for group in micro_batches(lengths, config.micro_batch_tokens * 2):
        check_stop()
        parts = forward(engine.pack([rows[i] for i in group])).cpu()
        sizes = [len(rows[i].completion_ids) for i in group]
        for i, part in zip(group, torch.split(parts, sizes), strict=True):
            scored[i] = part
    return scored


def prepare(
    engine: Engine,
    plan: Plan,
    config: LearnerConfig,
    champion: str,
    encode: Callable[[str], list[int]],
    rng: np.random.Generator,
    check_stop: Callable[[], None],
) -> Known:
    """Compute advantages, the champion's log-probs and the hindsight teacher's.

    What the champion itself served needs no forward: its behaviour log-probs are the champion's (decision 0010).
    """
    rows = [row_of(sample) for sample in plan.samples]
    advantages_B, std = batch_advantages(
        plan.samples, config.token_cost, config.max_completion_tokens, config.advantage_clip
    )
    chosen, factors = thin(advantages_B, config.compute_share, rng)
    advantages_B[chosen] *= factors
    known = Known(rows, advantages_B, std, chosen.tolist(), [None] * len(rows), [None] * len(rows))
    if std == 0:
        return known
    others = []
    for index in known.chosen:
        sample = plan.samples[index]
        if sample.policy_version == champion and sample.logprobs is not None:
            known.champion[index] = torch.tensor(sample.logprobs)
        else:
            others.append(index)
    scored = score(engine, [rows[i] for i in others], config, engine.champion_logprobs, check_stop) if others else []
    for index, logprobs in zip(others, scored, strict=True):
        known.champion[index] = logprobs
    _add_teacher(engine, plan, config, known, encode, check_stop)
    return known


def _add_teacher(engine, plan: Plan, config: LearnerConfig, known: Known, encode, check_stop) -> None:
    """Score answers with the user's own words before the prompt: one sample per actor, a capped share of the batch."""
    if config.hindsight_weight == 0:
        return
    seen: set[str] = set()
    chosen: list[int] = []
    for index in known.chosen:
        sample = plan.samples[index]
        if sample.hindsight and sample.logprobs is not None and sample.actor not in seen:
            seen.add(sample.actor)
            chosen.append(index)
    chosen = chosen[: math.ceil(config.hindsight_share * len(plan.samples))]
    if not chosen:
        return
    rows = []
    for index in chosen:
        hint = encode(f"What the user says about the answer: {plan.samples[index].hindsight}\n")
        row = known.rows[index]
        rows.append(Row(hint[: config.hindsight_tokens] + row.prompt_ids, row.completion_ids, row.temperature))
    for index, logprobs in zip(chosen, score(engine, rows, config, engine.logprobs, check_stop), strict=True):
        known.teacher[index] = logprobs
