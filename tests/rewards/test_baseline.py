"""The tracker expects what it has seen, reads before it updates, and equals its plain twin."""

import sqlite3

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rewards.baseline import SCHEMA, charge, expect, intent_of, keys_of, track
from rewards.config import RewardsConfig
from tests.rewards.interactions import inference

CONFIG = RewardsConfig()


def track_twin(state, rows_NL, rewards_N, costs_N, decay, prior_weight, prior, prior_success):
    """Plain lists and dicts, straight from METHODS.md section 2."""
    out = []
    for rows, raw, cost in zip(rows_NL, rewards_N, costs_N, strict=True):
        value, success = prior, prior_success
        for row in rows:
            num, reward_sum, success_sum = state[row]
            value = (reward_sum + prior_weight * value) / (num + prior_weight)
            success = (success_sum + prior_weight * success) / (num + prior_weight)
        reward = raw if raw <= 0 else max(raw - cost * success, 0.0)
        for row in rows:
            num, reward_sum, success_sum = state[row]
            state[row] = [decay * num + 1, decay * reward_sum + reward, decay * success_sum + (1 if raw > 0 else 0)]
        out.append([value, success, reward])
    return out


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.floats(0.5, 0.999), st.floats(0.1, 50))
def test_the_kernel_equals_its_plain_twin(seed: int, num_samples: int, decay: float, prior_weight: float) -> None:
    rng = np.random.default_rng(seed)
    rows_NL = rng.integers(0, 6, size=(num_samples, 3))
    rewards_N, costs_N = rng.uniform(-1, 1, num_samples), rng.uniform(0, 0.5, num_samples)
    state_K3, state = np.zeros((6, 3)), [[0.0, 0.0, 0.0] for _ in range(6)]
    ours = track(state_K3, rows_NL, rewards_N, costs_N, decay, prior_weight, 0.1, 0.5)
    theirs = track_twin(state, rows_NL.tolist(), rewards_N, costs_N, decay, prior_weight, 0.1, 0.5)
    assert np.abs(ours - np.array(theirs)).max() <= 1e-12
    assert np.abs(state_K3 - np.array(state)).max() <= 1e-12
    assert np.abs(ours).max() <= 1.0
    assert ((ours[:, 1] >= 0) & (ours[:, 1] <= 1)).all()


@pytest.fixture
def connection() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:")
    connection.executescript(SCHEMA)
    return connection


def test_the_baseline_is_read_before_its_own_update(connection: sqlite3.Connection) -> None:
    keys = ("t:a", "f:a/b", "i:a/b/1")
    first, second = expect(connection, [keys, keys], [1.0, 1.0], [0.0, 0.0], CONFIG)
    assert (first.baseline, first.expected_success) == (0.0, 0.5)
    tenant = (1 + 8 * 0.0) / 9
    function = (1 + 8 * tenant) / 9
    assert second.baseline == pytest.approx((1 + 8 * function) / 9, abs=1e-15)


def test_a_new_intent_starts_at_its_function_and_a_known_one_leaves_it(connection: sqlite3.Connection) -> None:
    good, bad, new = (("t:a", "f:a/b", f"i:a/b/{name}") for name in ("good", "bad", "new"))
    expect(connection, [good, bad] * 100, [1.0, -1.0] * 100, [0.0] * 200, CONFIG)
    known_good, known_bad, unknown = expect(connection, [good, bad, new], [0.0] * 3, [0.0] * 3, CONFIG)
    assert known_good.baseline > 0.75
    assert known_bad.baseline < -0.75
    assert abs(unknown.baseline) < 0.05
    assert known_good.expected_success > 0.85 > 0.15 > known_bad.expected_success


def test_the_tracker_forgets(connection: sqlite3.Connection) -> None:
    keys = ("t:a", "f:a/b", "i:a/b/1")
    expect(connection, [keys] * 200, [-1.0] * 200, [0.0] * 200, CONFIG)
    expect(connection, [keys] * 200, [1.0] * 200, [0.0] * 200, CONFIG)
    assert expect(connection, [keys], [0.0], [0.0], CONFIG)[0].baseline > 0.9


def test_batches_do_not_change_the_numbers(connection: sqlite3.Connection) -> None:
    rng = np.random.default_rng(5)
    keys = [("t:a", "f:a/b", f"i:a/b/{rng.integers(3)}") for _ in range(40)]
    rewards = rng.uniform(-1, 1, 40).tolist()
    whole = expect(connection, keys, rewards, [0.1] * 40, CONFIG)
    other = sqlite3.connect(":memory:")
    other.executescript(SCHEMA)
    single = [expect(other, [key], [reward], [0.1], CONFIG)[0] for key, reward in zip(keys, rewards, strict=True)]
    assert single == whole
    dump = "SELECT * FROM tracker ORDER BY key"
    assert other.execute(dump).fetchall() == connection.execute(dump).fetchall()


def test_nothing_to_expect_is_fine(connection: sqlite3.Connection) -> None:
    assert expect(connection, [], [], [], CONFIG) == []


@pytest.mark.parametrize(
    ("reward", "cost", "success", "left"),
    [(1.0, 0.2, 0.5, 0.9), (1.0, 0.2, 0.0, 1.0), (0.05, 0.2, 1.0, 0.0), (0.0, 0.2, 1.0, 0.0), (-0.5, 0.2, 1.0, -0.5)],
)
def test_only_positive_rewards_pay_for_length(reward: float, cost: float, success: float, left: float) -> None:
    assert charge(reward, cost, success) == pytest.approx(left)


def test_requests_of_one_template_share_an_intent() -> None:
    def asked(text: object) -> str:
        return intent_of({"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": text}]})

    assert asked("What is the capital of France?") == asked("what is the 3 largest cities") != asked("Who painted it?")
    assert asked([{"type": "text", "text": "What is the time"}]) == asked("What is the capital")
    assert intent_of({"prompt": "What is the tide?"}) == asked("What is the capital")
    assert intent_of({}) == intent_of({"messages": "broken"}) == intent_of({"prompt": 3})


def test_keys_go_from_tenant_to_intent() -> None:
    tenant, function, intent = keys_of(inference(function="geography"))
    assert (tenant, function) == ("t:acme", "f:acme/geography")
    assert intent.startswith("i:acme/geography/")
    assert keys_of(inference(tenant="other", function="geography"))[2] != intent
