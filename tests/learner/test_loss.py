"""The objective against a plain double-precision reference and finite differences on a tiny model."""

import math
import random

import pytest
import torch

from learner.loss import Sums, Terms, TokenBatch, corrected_loss, effective_share, kto_loss

GRID = [
    (objective, beta, hindsight)
    for objective in ("icepop", "tis")
    for beta, hindsight in ((0.0, 0.0), (0.02, 0.0), (0.02, 0.3))
]


def make_tokens(seed: int = 0, num_rows: int = 5) -> dict[str, list]:
    """Return plain lists: some ratios inside the masks, some outside, one row with a vetoed token."""
    rng = random.Random(seed)
    tokens = {name: [] for name in ("theta", "behaviour", "champion", "teacher", "advantage", "gamma", "fresh", "row")}
    for row in range(num_rows):
        advantage, staleness = rng.choice([-1.5, 0.7, 2.0]), rng.choice([0, 0, 1, 3])
        for at in range(rng.randrange(2, 7)):
            theta = -rng.random() * 3 - 0.02
            tokens["theta"].append(theta)
            tokens["behaviour"].append(theta - (12.0 if row == 2 and at == 1 else rng.uniform(-1.9, 1.9)))
            if row == 3 and at == 0:
                tokens["behaviour"][-1] = theta + 11.0  # ratio e^-11 < 1e-4: vetoes row 3
            tokens["champion"].append(theta + rng.uniform(-0.5, 0.5) if rng.random() < 0.8 else math.nan)
            tokens["teacher"].append(theta + rng.uniform(-2, 2) if row % 2 else math.nan)
            tokens["advantage"].append(advantage)
            tokens["gamma"].append(1 / (1 + staleness))
            tokens["fresh"].append(staleness == 0)
            tokens["row"].append(row)
    return tokens


def as_batch(tokens: dict[str, list]) -> TokenBatch:
    def double(name: str) -> torch.Tensor:
        return torch.tensor(tokens[name], dtype=torch.float64)

    return TokenBatch(
        behaviour_N=double("behaviour"),
        champion_N=double("champion"),
        teacher_N=double("teacher"),
        advantage_N=double("advantage"),
        gamma_N=double("gamma"),
        is_fresh_N=torch.tensor(tokens["fresh"]),
        row_N=torch.tensor(tokens["row"]),
        num_rows=max(tokens["row"]) + 1,
    )


def reference(terms: Terms, tokens: dict[str, list], theta: list[float]) -> float:
    """The formula of METHODS.md, written token by token; weights come from tokens["theta"], the fixed point."""
    vetoed = {
        row
        for row, now, mu in zip(tokens["row"], tokens["theta"], tokens["behaviour"], strict=True)
        if math.exp(max(-20, min(20, now - mu))) < terms.veto_ratio
    }
    total = 0.0
    for i, now in enumerate(tokens["theta"]):
        if tokens["row"][i] in vetoed:
            continue
        mu, advantage = tokens["behaviour"][i], tokens["advantage"][i]
        ratio = math.exp(max(-20, min(20, now - mu)))
        if terms.objective == "tis":
            weight = min(ratio, terms.tis_cap)
        else:
            low, high = (0.5, 5.0) if tokens["fresh"][i] else (0.2, 4.0)
            weight = ratio if low < ratio < high else 0.0
        move = math.exp(now) - math.exp(mu)
        in_region = not (advantage > 0 and move > 0.2) and not (advantage < 0 and move < -0.2)
        total -= tokens["gamma"][i] * weight * advantage * theta[i] * in_region
        if not math.isnan(tokens["champion"][i]):
            total += terms.beta * weight * 0.5 * (theta[i] - tokens["champion"][i]) ** 2
        if not math.isnan(tokens["teacher"][i]):
            gain = max(-1.0, min(1.0, tokens["teacher"][i] - now))
            total -= terms.hindsight_weight * tokens["gamma"][i] * weight * gain * theta[i]
    return total / (terms.num_samples * terms.max_tokens)


@pytest.mark.parametrize(("objective", "beta", "hindsight"), GRID)
def test_loss_and_gradient_equal_the_plain_reference(objective, beta, hindsight):
    terms = Terms(objective=objective, num_samples=7, max_tokens=16, beta=beta, hindsight_weight=hindsight)
    for seed in range(5):
        tokens = make_tokens(seed)
        theta_N = torch.tensor(tokens["theta"], dtype=torch.float64, requires_grad=True)
        loss, _ = corrected_loss(terms, theta_N, as_batch(tokens))
        assert float(loss.detach()) == pytest.approx(reference(terms, tokens, tokens["theta"]), abs=1e-12)
        loss.backward()
        for i in range(len(tokens["theta"])):
            step = [0.0] * len(tokens["theta"])
            step[i] = 1e-6
            up = [now + move for now, move in zip(tokens["theta"], step, strict=True)]
            down = [now - move for now, move in zip(tokens["theta"], step, strict=True)]
            slope = (reference(terms, tokens, up) - reference(terms, tokens, down)) / 2e-6
            assert theta_N.grad is not None
            assert float(theta_N.grad[i]) == pytest.approx(slope, abs=1e-7)


@pytest.mark.parametrize("objective", ["icepop", "tis"])
def test_gradient_of_a_tiny_models_weights_equals_finite_differences(objective):
    torch.manual_seed(1)
    hidden_NH = torch.randn(6, 4, dtype=torch.float64)
    weight_VH = torch.randn(9, 4, dtype=torch.float64)
    target_N = torch.tensor([1, 4, 8, 0, 2, 2])
    start_N = torch.log_softmax(hidden_NH @ weight_VH.t(), -1).gather(1, target_N[:, None])[:, 0]
    batch = TokenBatch(
        behaviour_N=start_N + torch.tensor([0.1, -0.2, 0.3, 0.0, -0.1, 0.2], dtype=torch.float64),
        champion_N=start_N - 0.1,
        teacher_N=start_N + 0.2,
        advantage_N=torch.tensor([1.0, 1.0, 1.0, -0.5, -0.5, -0.5], dtype=torch.float64),
        gamma_N=torch.ones(6, dtype=torch.float64),
        is_fresh_N=torch.ones(6, dtype=torch.bool),
        row_N=torch.tensor([0, 0, 0, 1, 1, 1]),
        num_rows=2,
    )
    terms = Terms(objective=objective, num_samples=2, max_tokens=4, beta=0.02, hindsight_weight=0.1, trust_region=1.0)
    leaf_VH = weight_VH.clone().requires_grad_()
    logprob_N = torch.log_softmax(hidden_NH @ leaf_VH.t(), -1).gather(1, target_N[:, None])[:, 0]
    corrected_loss(terms, logprob_N, batch)[0].backward()

    ratio_N = (start_N - batch.behaviour_N).exp()
    weight_N = ratio_N.clamp(max=2.0) if objective == "tis" else ratio_N

    def fixed_weights_loss(matrix: torch.Tensor) -> float:
        now_N = torch.log_softmax(hidden_NH @ matrix.t(), -1).gather(1, target_N[:, None])[:, 0]
        value = -(weight_N * batch.advantage_N * now_N) + 0.02 * weight_N * 0.5 * (now_N - batch.champion_N) ** 2
        value = value - 0.1 * weight_N * 0.2 * now_N
        return float(value.sum() / 8)

    assert leaf_VH.grad is not None
    for row, column in ((0, 0), (1, 2), (4, 3), (8, 1)):
        up, down = weight_VH.clone(), weight_VH.clone()
        up[row, column] += 1e-6
        down[row, column] -= 1e-6
        slope = (fixed_weights_loss(up) - fixed_weights_loss(down)) / 2e-6
        assert float(leaf_VH.grad[row, column]) == pytest.approx(slope, abs=1e-8)


def test_kl_is_reported_with_k3_and_is_zero_at_the_champion():
    tokens = make_tokens(3)
    tokens["champion"] = list(tokens["theta"])
    batch = as_batch(tokens)
    terms = Terms(objective="tis", num_samples=5, max_tokens=8, beta=0.01, veto_ratio=0.0)
    assert corrected_loss(terms, torch.tensor(tokens["theta"], dtype=torch.float64), batch)[1].kl == 0.0
    moved = torch.tensor([now - 0.1 for now in tokens["theta"]], dtype=torch.float64)
    sums = corrected_loss(terms, moved, batch)[1]
    ratio_N = (moved - batch.behaviour_N).clamp(-20, 20).exp().clamp(max=10)
    assert sums.kl == pytest.approx(float((ratio_N * (math.exp(0.1) - 1 - 0.1)).sum()), abs=1e-9)


def test_masked_tokens_lower_the_effective_share():
    even = Sums(num_tokens=10, weight=10, weight_squared=10)
    assert effective_share(even) == pytest.approx(1.0)
    half_masked = Sums(num_tokens=10, weight=5, weight_squared=5)
    assert effective_share(half_masked) == pytest.approx(0.5)


def test_kto_equals_the_plain_formula_and_ignores_other_sequences():
    theta = torch.tensor([-1.0, -2.0, -0.5, -3.0], dtype=torch.float64, requires_grad=True)
    champion = torch.tensor([-1.5, -2.0, -0.2, -2.5], dtype=torch.float64)
    row = torch.tensor([0, 0, 1, 1])
    reward = torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64)
    weight = torch.tensor([1.2, 0.8, 0.0], dtype=torch.float64)  # row 2 is not a KTO sample
    loss = kto_loss(theta, champion, row, reward, weight, beta=0.1, num_samples=4)
    gaps = [0.5, -0.8]
    reference_point = max(0.0, sum(gaps) / 2)
    good = 1 / (1 + math.exp(-0.1 * (gaps[0] - reference_point)))
    bad = 1 / (1 + math.exp(0.1 * (gaps[1] - reference_point)))
    assert float(loss.detach()) == pytest.approx((1.2 * (1 - good) + 0.8 * (1 - bad)) / 4, abs=1e-12)
    loss.backward()
    assert theta.grad is not None and float(theta.grad[0]) < 0 < float(theta.grad[2])


def test_an_unknown_objective_is_refused_with_the_choices():
    with pytest.raises(ValueError, match=r"objective = 'gspo'.*icepop, tis"):
        Terms(objective="gspo", num_samples=1, max_tokens=1, beta=0.0)
