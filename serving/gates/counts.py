"""Sequential counts: did an event fall on the canary more often than its share of units? (METHODS section 4)

S of N events were the canary's, its share of units is w. The mixture likelihood ratio over q ~ Beta(a, b)
    E = B(a+S, b+N-S) / B(a, b) / (w^S (1-w)^(N-S))
is an e-value of H0: q = w; truncated to q > w it is one of H0: q <= w. Source: Lindon and Malek, 2022.
"""

import math

from scipy.special import betainc, betaln

_A, _B = 1.0, 0.5  # mass near 1: a canary that has all the errors is found early
_TINY = 1e-300


def log_e_excess(num_canary: int, num_total: int, weight: float) -> float:
    """Return log E against H0: the canary's share of these events is at most its share of units."""
    s, f = num_canary, num_total - num_canary
    kept_after = max(float(1.0 - betainc(_A + s, _B + f, weight)), _TINY)
    kept_before = float(1.0 - betainc(_A, _B, weight))
    return _log_ratio(s, f, weight, _A, _B) + math.log(kept_after) - math.log(kept_before)


def log_e_mismatch(num_canary: int, num_total: int, weight: float) -> float:
    """Return log E against H0: units fall on the canary with probability weight (sample-ratio mismatch)."""
    return _log_ratio(num_canary, num_total - num_canary, weight, 1.0, 1.0)


def _log_ratio(s: int, f: int, weight: float, a: float, b: float) -> float:
    assert 0.0 < weight < 1.0, f"a canary weight of {weight} has no two arms"
    null = s * math.log(weight) + f * math.log1p(-weight)
    return float(betaln(a + s, b + f) - betaln(a, b)) - null
