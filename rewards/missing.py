"""What the absence of feedback means.

Owns the missing-feedback policies of a metric. Takes a metric and whether the answer was shown. Emits Signal or None.
Promises: missing is never silently zero; the value of no vote is declared, or there is none.
"""

from typing import Literal

from rewards.signals import Signal
from rewards.spec import Metric


def without_vote(metric: Metric, exposure: Literal["shown", "unknown", "not_shown"]) -> Signal | None:
    """Return what no vote says about an answer whose window has closed.

    mask     nothing: no gradient comes from this metric
    default  the declared value, and only for an answer that was surely shown: no user could vote on another one
    """
    if metric.missing == "mask" or metric.default_value is None or exposure != "shown":
        return None
    return Signal(metric.default_value, metric.default_confidence)
