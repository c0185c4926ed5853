"""One optimisation step on one batch: advantages, anchors, forward and backward, step guard.

Takes a planned batch, emits metrics and whether the weights moved. Promises: a step that the guard refuses, or that was
told to stop, leaves weights and optimiser as they were.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from learner.anchors import Known, prepare
from learner.batches import Plan
from learner.config import LearnerConfig
from learner.engine import Engine
from learner.logprobs import micro_batches
from learner.loss import Sums, Terms, TokenBatch, corrected_loss, effective_share, kto_loss


class Stopped(Exception):
    """The process was told to stop in the middle of a step; nothing was applied."""


@dataclass
class StepResult:
    """What one step did. skipped: why the guard refused it, or empty."""

    skipped: str
    metrics: dict[str, float]


def run_step(
    engine: Engine,
    plan: Plan,
    config: LearnerConfig,
    champion: str,
    beta: float,
    encode: Callable[[str], list[int]],
    number: int = 0,
    check_stop: Callable[[], None] = lambda: None,
) -> StepResult:
    """Take step `number` on the batch. Each sample counts in this one step, however many passes and minibatches."""
    rng = np.random.default_rng([config.seed, number])
    known = prepare(engine, plan, config, champion, encode, rng, check_stop)
    metrics = batch_metrics(plan, known)
    if len(plan.samples) < config.min_batch_samples:
        return StepResult("too_few_samples", metrics)
    if known.std == 0:
        return StepResult("equal_rewards", metrics)
    if not any(sample.logprobs is not None for sample in plan.samples) and config.kto_weight == 0:
        return StepResult("no_logprobs", metrics)
    terms = terms_of(config, len(plan.samples), len(known.chosen), beta)
    total, num_updates, norms = Sums(), 0, []
    for _ in range(config.passes):
        for indices in _minibatches(known, config.minibatches):
            sums = _accumulate(engine, plan, config, terms, known, indices, check_stop)
            norm = engine.gradient_norm()
            refused = _refusal(config, sums, norm)
            if refused:
                engine.discard()
                if num_updates == 0:
                    return StepResult(refused, metrics | step_metrics(sums, beta, norm))
                continue  # a later minibatch went too far from its behaviour; what was applied stays
            engine.step()
            num_updates += 1
            norms.append(norm)
            if num_updates <= config.minibatches:
                total.add(sums)  # metrics are those of the first pass
    metrics |= step_metrics(total, beta, max(norms)) | {"num_updates": float(num_updates)}
    return StepResult("", metrics)


def terms_of(config: LearnerConfig, num_samples: int, num_chosen: int, beta: float) -> Terms:
    """Return the step's constants; terms without an advantage are made up for samples left out."""
    factor = num_samples / num_chosen
    return Terms(
        objective=config.objective,
        num_samples=num_samples,
        max_tokens=config.max_completion_tokens,
        beta=beta * factor,
        mask_low=config.mask_low,
        mask_high=config.mask_high,
        fresh_mask_low=config.fresh_mask_low,
        fresh_mask_high=config.fresh_mask_high,
        tis_cap=config.tis_cap,
        veto_ratio=config.veto_ratio,
        trust_region=config.trust_region,
        hindsight_weight=config.hindsight_weight * factor,
    )


def _minibatches(known: Known, num_parts: int) -> list[list[int]]:
    """Deal samples out by their advantage, so that each part has good and bad ones."""
    order = sorted(known.chosen, key=lambda index: (known.advantages_B[index], index))
    return [order[start::num_parts] for start in range(min(num_parts, len(order)))]


def _accumulate(engine: Engine, plan: Plan, config, terms: Terms, known: Known, indices: list[int], check_stop) -> Sums:
    """Run forward and backward over the micro-batches of one update."""
    lengths = [len(known.rows[i].prompt_ids) + len(known.rows[i].completion_ids) for i in indices]
    groups = [[indices[at] for at in group] for group in micro_batches(lengths, config.micro_batch_tokens)]
    num_rounds = -(-len(groups) // engine.world_size)
    share = len(indices) / len(known.chosen)
    sums = Sums()
    for turn in range(num_rounds):
        at = turn * engine.world_size + engine.rank
        try:
            check_stop()
        except Stopped:
            engine.discard()
            raise
        # a rank without a micro-batch of its own repeats one with weight 0, so that all reduce together
        group = groups[at] if at < len(groups) else groups[0]
        loss, part = _micro_loss(engine, plan, config, terms, known, group)
        weight = engine.world_size / share if at < len(groups) else 0.0
        engine.backward(loss * weight, is_last=turn == num_rounds - 1)
        if at < len(groups):
            sums.add(part)
    return engine.add_over_ranks(sums)


def _micro_loss(engine: Engine, plan: Plan, config, terms: Terms, known: Known, group: list[int]):
    """Return the loss of one micro-batch: the corrected objective, and KTO for samples without log-probs."""
    logprob_N = engine.train_logprobs(engine.pack([known.rows[i] for i in group]))
    samples = [plan.samples[i] for i in group]
    sizes = [len(sample.completion_ids) for sample in samples]
    device = logprob_N.device
    row_N = torch.repeat_interleave(torch.arange(len(group)), torch.tensor(sizes)).to(device)

    def per_token(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device)[row_N]

    def joined(values: list[torch.Tensor | None]) -> torch.Tensor:
        filled = [torch.full((n,), torch.nan) if v is None else v for v, n in zip(values, sizes, strict=True)]
        return torch.cat(filled).to(device, torch.float32)

    has_logprobs_N = per_token([float(sample.logprobs is not None) for sample in samples]) > 0
    behaviour_N = joined([None if s.logprobs is None else torch.tensor(s.logprobs) for s in samples])
    champion_N = joined([known.champion[i] for i in group])
    batch = TokenBatch(
        behaviour_N=behaviour_N[has_logprobs_N],
        champion_N=champion_N[has_logprobs_N],
        teacher_N=joined([known.teacher[i] for i in group])[has_logprobs_N],
        advantage_N=per_token([float(known.advantages_B[i]) for i in group])[has_logprobs_N],
        gamma_N=per_token([1.0 / (1 + plan.staleness[i]) for i in group])[has_logprobs_N],
        is_fresh_N=(per_token([float(plan.staleness[i]) for i in group]) == 0)[has_logprobs_N],
        row_N=row_N[has_logprobs_N],
        num_rows=len(group),
    )
    loss, sums = corrected_loss(terms, logprob_N[has_logprobs_N], batch)
    weights = _kto_weights(plan, config)
    if any(sample.logprobs is None for sample in samples):
        keep = ~has_logprobs_N
        reward_S = torch.tensor([sample.reward for sample in samples], device=device)
        weight_S = torch.tensor([weights.get(i, 0.0) for i in group], device=device)
        loss = loss + kto_loss(
            logprob_N[keep], champion_N[keep], row_N[keep], reward_S, weight_S, config.kto_beta, len(plan.samples)
        )
    return loss, sums


def _kto_weights(plan: Plan, config: LearnerConfig) -> dict[int, float]:
    """Return index -> weight of the samples without log-probs; good and bad ones weigh the same together."""
    without = [i for i, sample in enumerate(plan.samples) if sample.logprobs is None]
    num_good = sum(1 for i in without if plan.samples[i].reward > 0)
    num_bad = len(without) - num_good
    weights = {}
    for i in without:
        num_same = num_good if plan.samples[i].reward > 0 else num_bad
        balance = len(without) / (2 * num_same) if num_good and num_bad else 1.0
        weights[i] = config.kto_weight * balance * plan.samples[i].confidence
    return weights


def _refusal(config: LearnerConfig, sums: Sums, norm: float) -> str:
    """The step guard: return why the accumulated gradients must not be applied, or empty."""
    if not math.isfinite(sums.loss) or not math.isfinite(norm):
        return "not_finite"
    if sums.num_tokens and effective_share(sums) < config.min_ess:
        return "low_ess"
    return ""


def batch_metrics(plan: Plan, known: Known) -> dict[str, float]:
    rewards = [sample.reward for sample in plan.samples if sample.kind == "full"]
    lengths = [len(sample.completion_ids) for sample in plan.samples]
    return {
        "num_samples": float(len(plan.samples)),
        "num_computed": float(len(known.chosen)),
        "reward_mean": float(np.mean(rewards)) if rewards else 0.0,
        "reward_positive_share": float(np.mean([reward > 0 for reward in rewards])) if rewards else 0.0,
        "advantage_std": known.std,
        "completion_tokens_mean": float(np.mean(lengths)) if lengths else 0.0,
        "staleness_mean": float(np.mean(plan.staleness)) if plan.staleness else 0.0,
        "staleness_max": float(max(plan.staleness, default=0)),
        "num_deltas": float(sum(sample.kind == "delta" for sample in plan.samples)),
        "num_without_logprobs": float(sum(sample.logprobs is None for sample in plan.samples)),
        "num_hindsight": float(sum(value is not None for value in known.teacher)),
    }


def step_metrics(sums: Sums, beta: float, norm: float) -> dict[str, float]:
    tokens = max(sums.num_tokens, 1.0)
    return {
        "loss": sums.loss,
        "loss_policy": sums.loss_policy,
        "loss_kl": sums.loss_kl,
        "loss_hindsight": sums.loss_hindsight,
        "kl_champion": sums.kl / max(sums.num_champion, 1.0),
        "beta": beta,
        "gradient_norm": norm,
        "ess": effective_share(sums),
        "num_tokens": sums.num_tokens,
        "masked_share": sums.num_masked / tokens,
        "trust_region_share": sums.num_trust_region / tokens,
        "num_vetoed": sums.num_vetoed,
        "log_ratio_mean": sums.log_ratio / tokens,
        "log_ratio_m2": sums.log_ratio_squared / tokens,
        "neg_logprob_mean": sums.neg_logprob / tokens,
    }
