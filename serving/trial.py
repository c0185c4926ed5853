"""The canary under way: what is known about it, and what follows from a verdict."""

import sqlite3

import msgspec

from serving import evidence, life
from serving.canary import Evidence, Verdict, lower_bound
from serving.gate_config import GateConfig
from serving.plan import Engine, State, find_holder, queue


def gather(
    connection: sqlite3.Connection, state: State, engines: list[Engine], failures: int, now_s: float, gate: GateConfig
) -> Evidence:
    """Return everything that the verdict may depend on."""
    rollout = state.rollout
    assert rollout is not None, "no canary to gather evidence on"
    engine = next((engine for engine in engines if engine.name == rollout.engine), None)
    lost = ""
    if engine is None or not engine.is_alive or engine.served_model != rollout.served_model:
        lost = f"engine {rollout.engine} under the canary is gone"
    elif not any(find_holder(state, engines, version) for version in (state.champion, state.previous)):
        lost = f"the champion's engine is gone; engine {rollout.engine} is needed for it"
    tripped = failures >= gate.breaker_failures and not lost
    return Evidence(
        version=rollout.version,
        now_s=now_s,
        started_at=rollout.started_at,
        stage=rollout.stage,
        stage_started_at=rollout.stage_started_at,
        last_interaction_at=max(rollout.started_at, evidence.last_interaction_at(connection, rollout.id)),
        units=evidence.units_of(connection, rollout.id, gate),
        threshold=rollout.threshold,
        breaker=f"{failures} failures in a row on the canary" if tripped else "",
        engine_lost=lost,
        frozen=state.frozen,
        newer=next(iter(queue(state)), ""),
    )


def follow(state: State, verdict: Verdict, seen: Evidence, gate: GateConfig) -> life.Change:
    """Return what a verdict changes."""
    rollout = state.rollout
    assert rollout is not None, "a verdict without a canary"
    if verdict.kind == "PROMOTE":
        return life.promote(state, lower_bound(seen, gate), verdict.reason, verdict.figures, gate)
    if verdict.kind == "ROLLBACK":
        return life.end_canary(state, "rolled_back", verdict.reason, verdict.figures, "controller")
    if verdict.kind == "INCONCLUSIVE":
        return life.end_canary(state, "inconclusive", verdict.reason, verdict.figures, "controller")
    if verdict.kind == "INVALID":
        return life.invalidate(state, verdict.reason, gate)
    if verdict.kind == "ADVANCE":
        return life.advance(state, seen.now_s, gate)
    return life.Change(msgspec.structs.replace(state, rollout=msgspec.structs.replace(rollout, verdict=verdict.kind)))
