"""Sequential counts against numeric integration and simulated streams."""

import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import beta

from serving.gates import counts


@pytest.mark.parametrize(("s", "n", "w"), [(3, 5, 0.5), (1, 9, 0.2), (10, 10, 0.5), (0, 6, 0.05)])
def test_the_truncated_e_value_is_the_integral_it_claims(s, n, w):
    mass = 1 - beta.cdf(w, 1.0, 0.5)
    value, _ = quad(lambda q: q**s * (1 - q) ** (n - s) * beta.pdf(q, 1.0, 0.5) / mass, w, 1, limit=200)
    assert counts.log_e_excess(s, n, w) == pytest.approx(math.log(value / (w**s * (1 - w) ** (n - s))), abs=1e-5)


def test_ten_canary_errors_beside_a_clean_champion_are_enough():
    assert counts.log_e_excess(10, 10, 0.5) >= -math.log(0.01 * 0.3)
    assert counts.log_e_excess(3, 3, 0.05) >= -math.log(0.01 * 0.3)


def test_errors_in_proportion_are_no_evidence():
    assert counts.log_e_excess(50, 100, 0.5) < 1.0
    assert counts.log_e_excess(5, 100, 0.05) < 1.0


def test_many_events_do_not_overflow():
    assert math.isfinite(counts.log_e_excess(100_000, 200_000, 0.5))
    assert math.isfinite(counts.log_e_excess(0, 200_000, 0.5))


def test_a_fair_split_is_hardly_ever_called_a_mismatch():
    random = np.random.default_rng(0)
    alarms = 0
    for _ in range(300):
        canary = np.cumsum(random.random(500) < 0.2)
        alarms += any(counts.log_e_mismatch(int(canary[n]), n + 1, 0.2) >= math.log(1000) for n in range(0, 500, 10))
    assert alarms <= 2


def test_a_split_of_thirty_instead_of_twenty_percent_is_found():
    assert counts.log_e_mismatch(150, 500, 0.2) >= math.log(1000)
