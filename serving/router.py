"""Sticky split of units over arms: a pure hash.

Promises: a unit keeps its arm as long as salt and weight stay; raising the weight only moves champion units to the
canary, never one back.
"""

import hashlib
from typing import Literal, NamedTuple

from serving.routes import Route, RouteTable

SplitArm = Literal["champion", "canary"]


class Pick(NamedTuple):
    """Which route answers a request, and the assignment behind it."""

    route: Route
    arm: SplitArm  # as assigned, before any fall-back
    propensity: float
    rollout_id: str
    revision: int


def position(salt: str, unit: str) -> float:
    """Return where a unit lies in [0, 1), uniform over units and independent between salts."""
    digest = hashlib.blake2b(f"{salt}\x00{unit}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / float(1 << 53)  # 53 bits: exact in a float, never 1.0


def arm(salt: str, unit: str, weight: float) -> SplitArm:
    """Return the arm of a unit when a share `weight` of all units is in the canary."""
    return "canary" if position(salt, unit) < weight else "champion"


def pick(table: RouteTable, unit: str) -> Pick | None:
    """Return the route of a unit under a table; None when no champion is there to answer."""
    if table.canary is not None and arm(table.salt, unit, table.canary_weight) == "canary":
        return Pick(table.canary, "canary", table.canary_weight, table.rollout_id, table.revision)
    if table.champion is None:
        return None
    split = table.canary is not None
    propensity = 1.0 - table.canary_weight if split else 1.0
    return Pick(table.champion, "champion", propensity, table.rollout_id if split else "", table.revision)
