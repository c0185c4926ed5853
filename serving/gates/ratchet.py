"""Ratchet guard: promotions that each may lose a little must not add up (METHODS section 4).

With two engines there is no anchor arm. Each promotion has a lower confidence bound of its effect; what it may have
lost, max(0, -bound), is charged to a budget that only a human refills (docs/decisions/0014-ratchet-without-anchor.md).
"""

from collections.abc import Sequence


def deficit(lower_bound: float) -> float:
    """Return what one promotion may have lost; a proven gain earns no credit."""
    return max(0.0, -lower_bound)


def is_breached(deficits: Sequence[float], budget: float) -> bool:
    """Tell whether the promotions since the last human approval may have lost more than the budget together."""
    return sum(deficits) > budget
