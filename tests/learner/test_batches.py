"""Which samples make a batch, and their advantages."""

import numpy as np
import pytest

from learner.advantages import batch_advantages, thin
from learner.batches import adapt_beta, plan_batch, refusal, staleness_of
from tests.learner.examples import sample, tiny_config


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"consent_training": False}, "no_consent"),
        ({"completion_ids": []}, "no_tokens"),
        ({"logprobs": [-1.0]}, "logprobs_length"),
        ({"temperature": 0.0}, "greedy"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_p": 0.9, "logprobs": None}, None),
        ({"completion_ids": [1] * 17, "logprobs": [-1.0] * 17}, "too_long"),
    ],
)
def test_what_can_never_be_trained_on_is_refused_with_a_reason(changes, reason):
    assert refusal(sample(1, **changes), tiny_config()) == reason


def test_the_newest_answers_come_first_and_the_batch_is_full():
    plan = plan_batch([sample(i) for i in range(12)], tiny_config(), ["v000000"], 1.0, 8)
    assert plan is not None
    assert [s.served_at for s in plan.samples] == [11.0, 10.0, 9.0, 8.0, 7.0, 6.0, 5.0, 4.0]
    assert plan_batch([sample(i) for i in range(7)], tiny_config(), ["v000000"], 1.0, 8) is None


def test_staleness_counts_promotions_after_the_version_that_served():
    promoted = ["v000000", "v000002", "v000005"]
    assert staleness_of(sample(1), promoted) == 2
    assert staleness_of(sample(1, policy_version="v000003"), promoted) == 1
    assert staleness_of(sample(1, policy_version="v000005"), promoted) == 0


def test_samples_beyond_the_staleness_bound_leave_the_buffer():
    config = tiny_config(max_staleness=1, max_staleness_calm=2)
    pending = [sample(i) for i in range(3)]
    promoted = ["v000000", "v000001", "v000002"]
    plan = plan_batch(pending, config, promoted, 1.0, 2)
    assert plan is not None and plan.samples == []
    assert set(plan.dropped.values()) == {"stale"} and len(plan.dropped) == 3
    calm = plan_batch(pending, config, promoted, 0.01, 2)
    assert calm is not None and len(calm.samples) == 3 and calm.staleness == [2, 2, 2]


def test_one_actor_fills_no_more_than_its_share_and_the_rest_waits():
    config = tiny_config(max_actor_share=0.25)
    pending = [sample(i, actor="loud") for i in range(10)] + [sample(i) for i in range(10, 16)]
    plan = plan_batch(pending, config, ["v000000"], 1.0, 8)
    assert plan is not None
    assert sum(s.actor == "loud" for s in plan.samples) == 2
    assert plan.dropped == {}


def test_a_batch_holds_one_spec_version():
    pending = [sample(i, spec_version="old") for i in range(8)] + [sample(i, spec_version="new") for i in range(8, 13)]
    plan = plan_batch(pending, tiny_config(), ["v000000"], 1.0, 8)
    assert plan is not None and {s.spec_version for s in plan.samples} == {"old"}


def test_advantages_are_centred_scaled_weighted_and_clipped():
    samples = [
        sample(1, reward=1.0, baseline=0.5),
        sample(2, reward=-1.0, baseline=0.5, confidence=0.5),
        sample(3, reward=0.2, baseline=0.0, actor_weight=0.5),
    ]
    raw, weight = np.array([0.5, -0.75, 0.2]), np.array([1.0, 1.0, 0.5])
    mean = (raw * weight).sum() / 2.5
    std = ((raw - mean) ** 2 * weight).sum() / 2.5
    advantages, scale = batch_advantages(samples, 0.0, 16, 5.0)
    assert scale == pytest.approx(std**0.5)
    assert advantages == pytest.approx((raw - mean) / std**0.5 * weight)
    assert np.abs(batch_advantages(samples, 0.0, 16, 0.3)[0]).max() == pytest.approx(0.3)


def test_a_delta_has_no_baseline_and_no_mean_taken_off():
    samples = [sample(1, reward=1.0, baseline=0.2), sample(2, reward=-1.0, baseline=0.2)]
    delta = sample(3, kind="delta", reward=-1.6, baseline=0.2)
    advantages, std = batch_advantages([*samples, delta], 0.0, 16, 5.0)
    assert std == pytest.approx(1.0)
    assert advantages == pytest.approx([1.0, -1.0, -1.6])


def test_positive_samples_pay_for_length_where_success_is_expected():
    long = sample(1, reward=1.0, completion_ids=[1] * 16, logprobs=[-1.0] * 16, expected_success=1.0)
    hard = sample(2, reward=1.0, completion_ids=[1] * 16, logprobs=[-1.0] * 16, expected_success=0.0)
    bad = sample(3, reward=-1.0, completion_ids=[1] * 16, logprobs=[-1.0] * 16, expected_success=1.0)
    advantages, std = batch_advantages([long, hard, bad], 0.5, 16, 5.0)
    assert (advantages[1] - advantages[0]) * std == pytest.approx(0.5)
    assert (advantages[1] - advantages[2]) * std == pytest.approx(2.0)


def test_equal_rewards_give_no_advantage():
    advantages, std = batch_advantages([sample(1, reward=1.0), sample(2, reward=1.0)], 0.0, 16, 5.0)
    assert std == 0.0 and not advantages.any()


def test_beta_follows_the_kl_budget_within_its_bounds():
    config = tiny_config(kl_budget=0.1, beta_min=1e-3, beta_max=0.02)
    assert adapt_beta(0.005, 0.2, config) == 0.01
    assert adapt_beta(0.016, 0.2, config) == 0.02
    assert adapt_beta(0.005, 0.08, config) == 0.005
    assert adapt_beta(0.005, 0.01, config) == 0.0025
    assert adapt_beta(0.0015, 0.01, config) == 1e-3


def test_thinning_keeps_the_clear_samples_and_the_expected_gradient():
    advantages = np.array([3.0, -0.2, -0.3, -0.25, 2.5, -0.2, -0.3, -1.0, -0.2, -0.25])
    rng = np.random.default_rng(0)
    totals, sizes = np.zeros(10), set()
    for _ in range(20_000):
        chosen, factors = thin(advantages, 0.5, rng)
        sizes.add(len(chosen))
        assert {0, 4, 7} <= set(chosen.tolist())
        totals[chosen] += advantages[chosen] * factors
    assert totals / 20_000 == pytest.approx(advantages, abs=0.02)
    assert sizes == {5}
    assert thin(advantages, 1.0, rng)[1].tolist() == [1.0] * 10
