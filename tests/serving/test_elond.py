"""e-LOND against the package, with our own gamma sequence put into it."""

import numpy as np
import pytest
from online_fdr.e_values import ELond

from serving.gates import elond


class OurGamma:
    def calc_gamma(self, index: int, **_: float) -> float:
        return elond.gamma(index)


def test_thresholds_and_decisions_equal_the_package():
    random = np.random.default_rng(1)
    reference = ELond(0.1, gamma_seq=OurGamma())  # type: ignore[arg-type]
    num_promoted = 0
    for index in range(1, 40):
        e_value = float(np.exp(random.normal(3, 2)))
        needed = elond.threshold(index, num_promoted, 0.1)
        assert reference.test_one(e_value) == (e_value >= needed)
        assert reference.current_level == pytest.approx(1 / needed)
        num_promoted += e_value >= needed


def test_shares_sum_to_at_most_one():
    total = sum(elond.gamma(index) for index in range(1, 200_000))
    assert 0.99 < total <= 1.0


def test_the_first_candidate_needs_twenty_six_and_the_count_starts_at_one():
    assert elond.threshold(1, 0, 0.1) == pytest.approx(26.12, abs=0.01)
    with pytest.raises(ValueError, match="counted from 1"):
        elond.gamma(0)
