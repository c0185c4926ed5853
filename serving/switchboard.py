"""Which table is in force, and what is in flight on which engine.

Lives in the event loop: a request takes its route and its place in flight in one step, so an engine that is in no table
and has nothing in flight is idle for good. Promises: a lower revision never replaces a higher one.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from typing import Any

from serving.router import Pick, pick
from serving.routes import Route, RouteTable

log = logging.getLogger("headrace.gateway")


Incarnation = tuple[str, str]


def incarnation(route: Route | None) -> Incarnation | None:
    """Return what identifies one life of an engine: its URL and the name it was started under."""
    return (route.url, route.served_model) if route else None


class Switchboard:
    """The route table and the counters around it; used from the event loop's thread only."""

    def __init__(self) -> None:
        self.table: RouteTable | None = None
        self.inflight: Counter[str] = Counter()
        self._arms: dict[str, dict[str, int]] = {}
        self._incarnations: dict[str, Incarnation | None] = {}
        self._changed = asyncio.Event()

    def apply(self, table: RouteTable) -> bool:
        """Put a table in force unless one as high already is; an arm with another engine starts to count anew."""
        if self.table is not None and table.revision <= self.table.revision:
            return False
        self.table = table
        for arm, route in (("champion", table.champion), ("canary", table.canary), ("standby", table.standby)):
            if arm not in self._arms or self._incarnations.get(arm) != incarnation(route):
                self._incarnations[arm] = incarnation(route)
                self._arms[arm] = {"requests": 0, "errors": 0, "failures_in_a_row": 0}
        log.info("routes=applied revision=%d author=%s champion=%s canary=%s weight=%g reason=%r", table.revision,
                 table.author, name(table.champion), name(table.canary), table.canary_weight, table.reason)  # fmt: skip
        self._changed.set()
        self._changed = asyncio.Event()
        return True

    def take(self, unit: str) -> Pick | None:
        """Return a unit's route with one more in flight on its engine; release() it in the end."""
        if self.table is None:
            return None
        chosen = pick(self.table, unit)
        if chosen is not None:
            self.inflight[chosen.route.engine] += 1
        return chosen

    async def take_other(self, tried: set[Incarnation | None], wait_s: float, use_standby: bool) -> Route | None:
        """Return a route that was not tried, with one more in flight: a newer champion, else the standby, else None."""
        route = self._untried(tried, use_standby=False)
        if route is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), wait_s)
            route = self._untried(tried, use_standby)
        if route is not None:
            self.inflight[route.engine] += 1
        return route

    def _untried(self, tried: set[Incarnation | None], use_standby: bool) -> Route | None:
        if self.table is None:
            return None
        routes = (self.table.champion, self.table.standby if use_standby else None)
        return next((route for route in routes if route and incarnation(route) not in tried), None)

    def release(self, route: Route) -> None:
        """Take a request out of flight."""
        self.inflight[route.engine] -= 1
        assert self.inflight[route.engine] >= 0, f"engine {route.engine} has a negative count in flight"

    def count(self, route: Route, failed: bool) -> None:
        """Count one request of an arm; one of an engine that has left the arm meanwhile is not counted."""
        for arm, held in self._incarnations.items():
            if held == incarnation(route):
                counts = self._arms[arm]
                counts["requests"] += 1
                counts["errors"] += failed
                counts["failures_in_a_row"] = counts["failures_in_a_row"] + 1 if failed else 0

    def describe(self) -> dict[str, Any]:
        """Return what /internal/routes answers: the revision that every new request takes, and what is in flight."""
        return {
            "revision": self.table.revision if self.table else -1,
            "inflight": {engine: count for engine, count in self.inflight.items()},
            "arms": {arm: dict(counts) for arm, counts in self._arms.items()},
        }


def name(route: Route | None) -> str:
    """Return version@engine for the log."""
    return f"{route.version}@{route.engine}" if route else "none"
