"""The learner's objective, pure torch (METHODS.md, section 1).

Takes flat tensors of one micro-batch: theta's log-probs with gradient, everything else fixed before the step. Emits a
scalar whose sum over the micro-batches of a batch is the batch's loss, and sums for metrics and the step guard.
    policy     - sum gamma * sg(w) * A * log pi_theta / (B * L_max)
    KL         + beta * sum w * 0.5 * (log pi_theta - log pi_champion)^2 / (B * L_max)      k2; reported with k3
    hindsight  - w_h * sum gamma * w * clip(log pibar(y|x,o) - log pibar(y|x), +-1) * log pi_theta / (B * L_max)
    KTO        samples without log-probs, see kto_loss
Shapes: N completion tokens, S sequences of the micro-batch, B sequences of the batch. NaN: unknown for a token.
Departures: 1. the trust region and the veto hold for every objective, so that selecting one changes the weight only.
"""

from dataclasses import dataclass

import torch

from learner.config import check_objective

MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class Terms:
    """The constants of one step."""

    objective: str
    num_samples: int  # B
    max_tokens: int  # L_max
    beta: float
    mask_low: float = 0.2
    mask_high: float = 4.0
    fresh_mask_low: float = 0.5
    fresh_mask_high: float = 5.0
    tis_cap: float = 2.0
    veto_ratio: float = 1e-4
    trust_region: float = 0.2
    hindsight_weight: float = 0.0

    def __post_init__(self) -> None:
        check_objective(self.objective)


@dataclass(frozen=True)
class TokenBatch:
    """One micro-batch: what is known of each token and of the sequence that it belongs to."""

    behaviour_N: torch.Tensor  # log mu
    champion_N: torch.Tensor  # log pi_champion; NaN: unknown
    teacher_N: torch.Tensor  # log pibar(y|x,o); NaN: no hindsight
    advantage_N: torch.Tensor  # A of its sequence, weights and confidence in it
    gamma_N: torch.Tensor
    is_fresh_N: torch.Tensor  # s = 0
    row_N: torch.Tensor  # sequence in the micro-batch
    num_rows: int


@dataclass
class Sums:
    """Sums over tokens or sequences; adding two gives those of both."""

    num_tokens: float = 0.0
    num_masked: float = 0.0
    num_trust_region: float = 0.0
    num_vetoed: float = 0.0
    weight: float = 0.0
    weight_squared: float = 0.0
    log_ratio: float = 0.0
    log_ratio_squared: float = 0.0
    num_champion: float = 0.0
    kl: float = 0.0
    neg_logprob: float = 0.0
    loss: float = 0.0
    loss_policy: float = 0.0
    loss_kl: float = 0.0
    loss_hindsight: float = 0.0

    def add(self, other: "Sums") -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


def token_weights(terms: Terms, ratio_N: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """Return w: icepop passes the ratio inside the double-sided mask and 0 outside; tis cuts it."""
    if terms.objective == "tis":
        return ratio_N.clamp(max=terms.tis_cap)
    low = torch.where(batch.is_fresh_N, terms.fresh_mask_low, terms.mask_low)
    high = torch.where(batch.is_fresh_N, terms.fresh_mask_high, terms.mask_high)
    return torch.where((ratio_N > low) & (ratio_N < high), ratio_N, torch.zeros_like(ratio_N))


def vetoed_tokens(terms: Terms, ratio_N: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """Return for each token whether its sequence has a ratio below the veto: wrong tokens or padded log-probs."""
    bad_S = torch.zeros(batch.num_rows, dtype=ratio_N.dtype, device=ratio_N.device)
    bad_S.index_add_(0, batch.row_N, (ratio_N < terms.veto_ratio).to(ratio_N.dtype))
    return bad_S[batch.row_N] > 0


def corrected_loss(terms: Terms, logprob_N: torch.Tensor, batch: TokenBatch) -> tuple[torch.Tensor, Sums]:
    """Return this micro-batch's part of the loss, and its sums."""
    now_N = logprob_N.detach()
    log_ratio_N = (now_N - batch.behaviour_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_N = log_ratio_N.exp()
    vetoed_N = vetoed_tokens(terms, ratio_N, batch)
    move_N = now_N.exp() - batch.behaviour_N.exp()
    too_far_N = (batch.advantage_N * move_N).sign().gt(0) & (move_N.abs() > terms.trust_region)
    kept_N = ~vetoed_N
    weight_N = torch.where(kept_N, token_weights(terms, ratio_N, batch), torch.zeros_like(ratio_N))
    policy_weight_N = torch.where(too_far_N, torch.zeros_like(weight_N), weight_N)

    scale = 1.0 / (terms.num_samples * terms.max_tokens)
    policy = -(batch.gamma_N * policy_weight_N * batch.advantage_N * logprob_N).sum() * scale
    known_N = ~batch.champion_N.isnan()
    champion_N = torch.where(known_N, batch.champion_N, now_N)
    k2 = terms.beta * (weight_N * 0.5 * (logprob_N - champion_N) ** 2).sum() * scale
    gain_N = torch.where(batch.teacher_N.isnan(), torch.zeros_like(now_N), (batch.teacher_N - now_N).clamp(-1, 1))
    hindsight = -terms.hindsight_weight * (batch.gamma_N * weight_N * gain_N * logprob_N).sum() * scale
    loss = policy + k2 + hindsight

    used = known_N & kept_N
    gap_N = (champion_N - now_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    k3_N = ratio_N.clamp(max=10.0) * (gap_N.exp() - 1 - gap_N)  # weighted: tokens come from mu, KL is under theta
    num = float(now_N.numel())
    return loss, Sums(
        num_tokens=num,
        num_masked=float(((weight_N == 0) & kept_N).sum()),
        num_trust_region=float((too_far_N & kept_N).sum()),
        num_vetoed=float(batch.row_N[vetoed_N].unique().numel()),
        weight=float(weight_N.sum()),
        weight_squared=float((weight_N**2).sum()),
        log_ratio=float(log_ratio_N[kept_N].sum()),
        log_ratio_squared=float((log_ratio_N[kept_N] ** 2).sum()),
        num_champion=float(used.sum()),
        kl=float(k3_N[used].sum()),
        neg_logprob=float(-now_N.sum()),
        loss=float(loss.detach()),
        loss_policy=float(policy.detach()),
        loss_kl=float(k2.detach()),
        loss_hindsight=float(hindsight.detach()),
    )


def kto_loss(
    logprob_N: torch.Tensor,
    champion_N: torch.Tensor,
    row_N: torch.Tensor,
    reward_S: torch.Tensor,
    weight_S: torch.Tensor,
    beta: float,
    num_samples: int,
) -> torch.Tensor:
    """Return the KTO term (arXiv 2402.01306) of samples without log-probs: reward > 0 is desirable, else undesirable.

    z_0 is the mean log-ratio of the micro-batch's KTO samples, 0 at least, without gradient. weight_S balances n_D and
    n_U, and is 0 for sequences that are not KTO samples.
    """
    gap_S = torch.zeros_like(reward_S).index_add(0, row_N, (logprob_N - champion_N).to(reward_S.dtype))
    reference = (gap_S.detach() * (weight_S > 0)).sum().div((weight_S > 0).sum().clamp(min=1)).clamp(min=0)
    sign_S = torch.where(reward_S > 0, 1.0, -1.0).to(gap_S.dtype)
    value_S = torch.sigmoid(sign_S * beta * (gap_S - reference))
    return (weight_S * (1 - value_S)).sum() / num_samples


def effective_share(sums: Sums) -> float:
    """Return ESS/N of the token weights: masked tokens count as zeros."""
    if not sums.num_tokens or not sums.weight_squared:
        return 0.0
    return sums.weight**2 / (sums.num_tokens * sums.weight_squared)
