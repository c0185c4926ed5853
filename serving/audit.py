"""The audit trail: every decision with its inputs, so that it can be replayed to the same verdict.

Owns the table decisions of controller.sqlite. A row is written in the transaction that changes the state, so a
verdict is on disk before any route changes.
"""

import sqlite3
from collections.abc import Sequence
from typing import Any

import msgspec

from serving.canary import Evidence, Verdict, decide
from serving.gate_config import GateConfig
from serving.gates.offline import Check, is_passed

SCHEMA = """
CREATE TABLE IF NOT EXISTS decisions (id INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, version TEXT NOT NULL,
    gate TEXT NOT NULL, verdict TEXT NOT NULL, reason TEXT NOT NULL, inputs BLOB NOT NULL, config BLOB NOT NULL);
"""


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """One row."""

    at: float
    version: str
    gate: str  # canary | offline | operator | swap
    verdict: str
    reason: str
    inputs: bytes
    config: bytes


def record_canary(connection: sqlite3.Connection, evidence: Evidence, verdict: Verdict, gate: GateConfig) -> None:
    """Append a canary verdict with the evidence that it was taken on."""
    _append(connection, evidence.now_s, evidence.version, "canary", verdict.kind, verdict.reason, evidence, gate)


def record_offline(
    connection: sqlite3.Connection, at: float, version: str, checks: Sequence[Check], gate: GateConfig
) -> None:
    """Append an offline verdict with its checks."""
    failed = [f"{check.name} {check.value:.4g} (limit {check.limit:.4g}) {check.detail}" for check in checks
              if check.outcome != "PASS"]  # fmt: skip
    verdict = "PASS" if is_passed(checks) else "FAIL"
    _append(connection, at, version, "offline", verdict, "; ".join(failed), checks, gate)


def record_event(
    connection: sqlite3.Connection, at: float, version: str, kind: str, verdict: str, reason: str, gate: GateConfig
) -> None:
    """Append what an operator or the machinery decided, which no statistics replay."""
    _append(connection, at, version, kind, verdict, reason, {}, gate)


def _append(
    connection: sqlite3.Connection, at: float, version: str, kind: str, verdict: str, reason: str, inputs: Any,
    gate: GateConfig,
) -> None:  # fmt: skip
    connection.execute(
        "INSERT INTO decisions (at, version, gate, verdict, reason, inputs, config) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (at, version, kind, verdict, reason, msgspec.json.encode(inputs), gate.model_dump_json().encode()),
    )


def read_decisions(connection: sqlite3.Connection, version: str | None = None) -> list[Decision]:
    """Return the decisions on one version, or all, oldest first."""
    query = "SELECT at, version, gate, verdict, reason, inputs, config FROM decisions"
    rows = connection.execute(
        f"{query} WHERE version = ? ORDER BY id" if version else f"{query} ORDER BY id", (version,) if version else ()
    )
    fields = Decision.__struct_fields__
    return [Decision(**dict(zip(fields, row, strict=True))) for row in rows]


def replay(row: Decision) -> str:
    """Return the verdict that the row's own inputs and configuration give now."""
    if row.gate == "canary":
        gate = GateConfig.model_validate_json(row.config)
        return decide(msgspec.json.decode(row.inputs, type=Evidence), gate).kind
    if row.gate == "offline":
        return "PASS" if is_passed(msgspec.json.decode(row.inputs, type=list[Check])) else "FAIL"
    return row.verdict
