"""E-processes: exact small cases, validity and power on simulated streams."""

import math

import numpy as np
import pytest

from serving.gates import eprocess


def test_no_evidence_is_an_e_value_of_one():
    assert eprocess.log_e_promote(np.zeros(0), 0.05) == pytest.approx(0.0)
    assert eprocess.log_e_rollback(np.zeros(0)) == pytest.approx(0.0)


def test_one_bet_equals_the_mixture_by_hand():
    bets = [0.75 * 0.5**j for j in range(8)]
    assert math.exp(eprocess.log_e_rollback(np.array([-1.0]))) == pytest.approx(sum(1 + bet for bet in bets) / 8)
    g = 1 - 0.05
    by_hand = sum(1 + bet / g * (1.0 + 0.05) for bet in bets) / 8
    assert math.exp(eprocess.log_e_promote(np.array([1.0]), 0.05)) == pytest.approx(by_hand)


def test_the_worst_contrast_never_ruins_the_capital():
    worst = np.full(1000, -1.0)
    assert np.all(np.isfinite(eprocess.log_capitals(worst + 0.05, 0.95)))


def test_contemporaries_follow_the_weight():
    assert [eprocess.num_contemporaries(w) for w in (0.01, 0.05, 0.1, 0.2, 0.3, 0.5)] == [9, 9, 9, 4, 2, 1]


def test_each_champion_unit_is_used_once_and_incomplete_blocks_wait():
    contrasts = eprocess.contrasts([1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0, 1.0], k=2)
    assert contrasts.tolist() == [0.5, 0.0]


def simulate(p_canary: float, p_champion: float, k: int, num: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    champion = random.random((num, k)) < p_champion
    return (random.random(num) < p_canary).astype(float) - champion.mean(axis=1)


def ever_over(contrasts: np.ndarray, log_limit: float) -> bool:
    return any(eprocess.log_e_rollback(contrasts[:n]) >= log_limit for n in range(5, len(contrasts) + 1, 5))


def test_equal_arms_peeked_at_all_the_time_are_rolled_back_in_under_two_percent():
    alarms = sum(ever_over(simulate(0.7, 0.7, 9, 400, seed), math.log(100)) for seed in range(200))
    assert alarms <= 4


def test_a_loss_of_twenty_points_is_found_in_about_eighty_units():
    needed = []
    for seed in range(40):
        contrasts = simulate(0.5, 0.7, 9, 400, seed)
        logs = [eprocess.log_e_rollback(contrasts[:n]) for n in range(1, 401)]
        needed.append(next((n for n, value in enumerate(logs, 1) if value >= math.log(100)), 400))
    assert 50 <= float(np.median(needed)) <= 110


def test_a_gain_of_thirty_points_is_promoted_within_a_hundred_pairs():
    values = [eprocess.log_e_promote(simulate(0.4, 0.1, 1, 100, seed), 0.05) for seed in range(40)]
    assert np.mean([value >= math.log(26.2) for value in values]) >= 0.9


def test_a_loss_of_delta_is_hardly_ever_promoted():
    def ever(seed: int) -> bool:
        contrasts = simulate(0.65, 0.7, 1, 300, seed)
        return any(eprocess.log_e_promote(contrasts[:n], 0.05) >= math.log(26.2) for n in range(40, 301, 5))

    assert sum(ever(seed) for seed in range(200)) <= 200 * (1 / 26.2) + 6


def test_the_lower_bound_lies_below_the_truth_and_comes_near_it():
    bounds = [eprocess.lower_bound(simulate(0.6, 0.3, 1, 300, seed), 0.05) for seed in range(20)]
    assert sum(bound > 0.3 for bound in bounds) <= 2
    assert float(np.median(bounds)) > 0.1
    assert eprocess.lower_bound(np.zeros(0), 0.05) == -1.0
