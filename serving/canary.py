"""The canary's decision: a pure function of the evidence so far. Same inputs, same verdict, on any machine, any order.

Owns Unit, Evidence, Verdict and decide(). A unit is a user (else an episode); its first mature outcome is frozen.
Errors, refusals, timeouts and slow answers are counted per unit: the requests of one user are not independent.
Promises: rollback checks come first and stay armed in every state; NaN or missing is never zero; weights only grow.
"""

import math
from typing import Literal

import msgspec
import numpy as np

from serving.gate_config import GateConfig
from serving.gates import counts, eprocess

Kind = Literal["PROMOTE", "ROLLBACK", "HOLD", "ADVANCE", "INCONCLUSIVE", "INVALID", "AWAIT_APPROVAL"]
# Shares of rollback_alpha; they sum to 1.
SHARES = {"outcome": 0.4, "errors": 0.3, "timeouts": 0.1, "refusals": 0.1, "latency": 0.1}


class Unit(msgspec.Struct, frozen=True, array_like=True):
    """One user or episode of this rollout."""

    unit: str
    arm: str  # canary | champion
    weight: float  # canary share at its first answer: its stage
    at: float  # first answer
    outcome: float | None = None  # frozen, in [0, 1]
    outcome_at: float = 0.0
    errors: int = 0
    timeouts: int = 0
    refusals: int = 0
    slow: int = 0


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decide() looks at."""

    version: str
    now_s: float
    started_at: float
    stage: int
    stage_started_at: float
    last_interaction_at: float  # the latest of this rollout, else its start
    units: list[Unit]
    threshold: float  # E that e-LOND asks of this candidate
    breaker: str = ""  # why the canary must end at once: five failures in a row, a failed verification
    engine_lost: str = ""  # the canary's engine is gone
    frozen: str = ""  # why promotions are frozen
    newer: str = ""  # a newer candidate that waits


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What to do, why, and the figures."""

    kind: Kind
    reason: str
    figures: dict[str, float] = {}


def decide(evidence: Evidence, gate: GateConfig) -> Verdict:
    """Return the verdict on a canary; the order of units and their duplicates do not matter."""
    units = mature(evidence.units, evidence.now_s, gate.maturity_s)
    figures = measure(units, evidence, gate)
    age_s = evidence.now_s - evidence.started_at

    def verdict(kind: Kind, reason: str) -> Verdict:
        return Verdict(kind=kind, reason=reason, figures=figures)

    if evidence.breaker:
        return verdict("ROLLBACK", evidence.breaker)
    for metric, share in SHARES.items():
        log_limit = -math.log(gate.rollback_alpha * share)
        if not math.isfinite(figures[f"log_e_{metric}"]):
            return verdict("INVALID", f"the evidence on {metric} is not a number")
        if figures[f"log_e_{metric}"] >= log_limit:
            return verdict("ROLLBACK", f"the canary is worse in {metric}: log E {figures[f'log_e_{metric}']:.2f}")
    if figures["log_e_mismatch"] >= -math.log(gate.mismatch_alpha):
        return verdict("INVALID", f"sample-ratio mismatch: {figures['units_canary']:.0f} canary units of "
                       f"{figures['units_canary'] + figures['units_champion']:.0f}")  # fmt: skip
    if evidence.engine_lost:
        return verdict("INVALID", evidence.engine_lost)
    silent_s = evidence.now_s - evidence.last_interaction_at
    if silent_s > gate.stale_s:
        return verdict("INVALID", f"no interaction for {silent_s:.0f} s")
    last_stage = evidence.stage == len(gate.weights) - 1
    enough = figures["outcomes_canary"] >= gate.n_min and age_s >= gate.soak_s
    if last_stage and enough and figures["log_e_promote"] >= math.log(evidence.threshold):
        if evidence.frozen:
            return verdict("AWAIT_APPROVAL", f"passed, but promotions are frozen: {evidence.frozen}")
        if not gate.auto_promote:
            return verdict("AWAIT_APPROVAL", "passed; auto_promote is off")
        return verdict("PROMOTE", f"E {math.exp(min(figures['log_e_promote'], 700)):.3g} >= {evidence.threshold:.3g}")
    # Ending early without promoting costs no error rate, and the next candidate has learned more.
    is_halfway = figures["log_e_promote"] >= math.log(evidence.threshold) / 2
    if gate.yield_to_newer and evidence.newer and enough and not is_halfway:
        return verdict("INCONCLUSIVE", f"{evidence.newer} waits, and the evidence is not halfway")
    if age_s >= gate.t_max_s:
        return verdict("INCONCLUSIVE", f"not enough evidence in {age_s:.0f} s")
    if not last_stage and figures["stage_outcomes"] >= gate.stage_units[evidence.stage]:
        return verdict("ADVANCE", f"stage {evidence.stage} has {figures['stage_outcomes']:.0f} outcomes")
    return verdict("HOLD", "gathering evidence")


def mature(units: list[Unit], now_s: float, maturity_s: float) -> list[Unit]:
    """Return units in their canonical order, once each, with outcomes that are not yet mature left open."""
    unique = {unit.unit: unit for unit in sorted(units, key=lambda unit: (-unit.at, unit.arm), reverse=False)}
    result = []
    for unit in sorted(unique.values(), key=lambda unit: (unit.outcome_at or unit.at, unit.unit)):
        is_open = unit.outcome is not None and unit.outcome_at + maturity_s > now_s
        result.append(msgspec.structs.replace(unit, outcome=None) if is_open else unit)
    return result


def stage_contrasts(units: list[Unit]) -> np.ndarray:
    """Return canary minus contemporaneous champion outcomes, paired within each stage."""
    parts = []
    for weight in sorted({unit.weight for unit in units}):
        outcomes: dict[str, list[float]] = {"canary": [], "champion": []}
        for unit in units:
            if unit.weight == weight and unit.outcome is not None:
                outcomes[unit.arm].append(unit.outcome)
        k = eprocess.num_contemporaries(weight)
        parts.append(eprocess.contrasts(outcomes["canary"], outcomes["champion"], k))
    return np.concatenate(parts) if parts else np.zeros(0)


def measure(units: list[Unit], evidence: Evidence, gate: GateConfig) -> dict[str, float]:
    """Return every figure of the decision; e-values as logarithms (they do not overflow)."""
    contrasts = stage_contrasts(units)
    canary = [unit for unit in units if unit.arm == "canary"]
    champion = [unit for unit in units if unit.arm == "champion"]
    scored = {arm: [u.outcome for u in side if u.outcome is not None] for arm, side in
              (("canary", canary), ("champion", champion))}  # fmt: skip
    stage_weight = gate.weights[evidence.stage]
    return {
        "units_canary": float(len(canary)),
        "units_champion": float(len(champion)),
        "outcomes_canary": float(len(scored["canary"])),
        "outcomes_champion": float(len(scored["champion"])),
        "mean_canary": float(np.mean(scored["canary"])) if scored["canary"] else -1.0,
        "mean_champion": float(np.mean(scored["champion"])) if scored["champion"] else -1.0,
        "pairs": float(len(contrasts)),
        "stage_outcomes": float(sum(u.outcome is not None and u.weight == stage_weight for u in canary)),
        "log_e_promote": eprocess.log_e_promote(contrasts, gate.delta),
        "log_e_outcome": eprocess.log_e_rollback(contrasts),
        "log_e_errors": log_e_events(units, "errors"),
        "log_e_timeouts": log_e_events(units, "timeouts"),
        "log_e_refusals": log_e_events(units, "refusals"),
        "log_e_latency": log_e_events(units, "slow"),
        "log_e_mismatch": log_e_assignments([u for u in units if u.at + gate.settle_s <= evidence.now_s]),
        "errors_canary": float(sum(u.errors > 0 for u in canary)),
        "errors_champion": float(sum(u.errors > 0 for u in champion)),
        "threshold": evidence.threshold,
        "age_s": evidence.now_s - evidence.started_at,
    }


def log_e_events(units: list[Unit], field: str) -> float:
    """Return log E that units with such an event are over-represented in the canary; stages multiply."""
    total = 0.0
    for weight in sorted({unit.weight for unit in units}):
        arms = [unit.arm for unit in units if unit.weight == weight and getattr(unit, field) > 0]
        total += counts.log_e_excess(arms.count("canary"), len(arms), weight) if arms else 0.0
    return total


def log_e_assignments(units: list[Unit]) -> float:
    """Return log E that units were not split by the stage's weight.

    Only settled units: an arm with shorter answers is heard of earlier, which is no mismatch.
    """
    total = 0.0
    for weight in sorted({unit.weight for unit in units}):
        arms = [unit.arm for unit in units if unit.weight == weight]
        total += counts.log_e_mismatch(arms.count("canary"), len(arms), weight)
    return total


def lower_bound(evidence: Evidence, gate: GateConfig) -> float:
    """Return the lower confidence bound of the effect that a promotion is charged for."""
    units = mature(evidence.units, evidence.now_s, gate.maturity_s)
    return eprocess.lower_bound(stage_contrasts(units), gate.ratchet_alpha)
