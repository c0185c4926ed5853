"""What the canary knows, in controller.sqlite: one row per answer of a rollout, prompts to probe with.

Owns the tables exposures and prompts. Takes final interactions, in any order and any number of times. Emits units.
Promises: rows are keyed by inference id and units are folded in the order of time, so a replay changes nothing.
"""

import sqlite3

import msgspec

from ingest.events import Feedback, Interaction
from serving.canary import Unit
from serving.gate_config import GateConfig
from serving.gates.offline import is_refusal

SCHEMA = """
CREATE TABLE IF NOT EXISTS exposures (inference_id TEXT PRIMARY KEY, rollout_id TEXT NOT NULL, unit TEXT NOT NULL,
    arm TEXT NOT NULL, weight REAL NOT NULL, at REAL NOT NULL, outcome REAL, error INTEGER NOT NULL,
    timeout INTEGER NOT NULL, refusal INTEGER NOT NULL, latency_s REAL NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS exposures_rollout ON exposures (rollout_id);
CREATE TABLE IF NOT EXISTS prompts (prompt_ids BLOB PRIMARY KEY, at REAL NOT NULL) WITHOUT ROWID;
"""
_POSITIVE = {"up", "positive", "good", "yes", "true", "thumbs_up", "like", "1"}
_NEGATIVE = {"down", "negative", "bad", "no", "false", "thumbs_down", "dislike", "0"}
_WARM_UP_REQUESTS = 50  # cold caches: the first answers of a rollout do not count as slow


def outcome_of(feedback: list[Feedback], gate: GateConfig) -> float | None:
    """Return the primary metric's latest word mapped to [0, 1], or None when nothing was said."""
    said = [item for item in feedback if item.metric == gate.primary_metric and item.op == "upsert"]
    for item in sorted(said, key=lambda item: (item.occurred_at, item.feedback_id), reverse=True):
        value = item.value
        if isinstance(value, bool):
            return float(value)
        if isinstance(value, int | float):
            scaled = (value - gate.primary_low) / (gate.primary_high - gate.primary_low)
            return min(1.0, max(0.0, scaled)) if scaled == scaled else None
        word = str(value if value is not None else item.label).strip().lower()
        if word in _POSITIVE | _NEGATIVE:
            return float(word in _POSITIVE)
    return None


def is_service_error(error_type: str | None) -> bool:
    """Tell whether the service failed; a request that was refused as wrong, or left by its client, is no failure."""
    if not error_type:
        return False
    return "client" not in error_type and (not error_type.startswith("refused:") or "5" in error_type[8:9])


def record_interaction(connection: sqlite3.Connection, interaction: Interaction, gate: GateConfig) -> bool:
    """Keep a final interaction of any rollout; True if it was new. Provisional ones and corrections are left out."""
    inference = interaction.inference
    assignment = inference.assignment
    if interaction.state != "final":
        return False
    _keep_prompt(connection, interaction, gate)
    arm = assignment.assigned_arm or assignment.arm
    if not assignment.rollout_id or not assignment.unit or arm not in ("canary", "champion"):
        return False
    lost = bool(assignment.assigned_arm) and assignment.assigned_arm != assignment.arm
    # The propensity is that of the assigned arm; both give the stage's canary weight.
    weight = assignment.propensity if arm == "canary" else 1.0 - assignment.propensity
    error_type = inference.error_type or ""
    if not 0.0 < weight < 1.0:
        return False  # an operator has set the weight to 0: no second arm to compare with
    outcome = None if lost or error_type else outcome_of(interaction.feedback, gate)
    completed = inference.timing.completed_at or inference.timing.received_at
    row = (
        inference.inference_id, assignment.rollout_id, assignment.unit, arm, round(weight, 6),
        inference.timing.received_at, outcome, int(lost or is_service_error(error_type)), int("timeout" in error_type),
        int(is_refusal(inference.response_text) or inference.finish_reason == "content_filter"),
        completed - inference.timing.received_at,
    )  # fmt: skip
    cursor = connection.execute(f"INSERT OR IGNORE INTO exposures VALUES ({','.join('?' * len(row))})", row)
    return cursor.rowcount == 1


def _keep_prompt(connection: sqlite3.Connection, interaction: Interaction, gate: GateConfig) -> None:
    inference = interaction.inference
    tokens = inference.tokens
    if not inference.consent.training or tokens is None or not tokens.prompt_ids or not tokens.completion_ids:
        return
    if len(tokens.prompt_ids) > gate.probe_prompt_tokens:
        return
    connection.execute(
        "INSERT INTO prompts VALUES (?, ?) ON CONFLICT (prompt_ids) DO UPDATE SET at = max(at, excluded.at)",
        (msgspec.msgpack.encode(tokens.prompt_ids), inference.timing.received_at),
    )


def trim_prompts(connection: sqlite3.Connection, gate: GateConfig) -> None:
    """Keep only the most recent prompts."""
    connection.execute(
        "DELETE FROM prompts WHERE prompt_ids NOT IN (SELECT prompt_ids FROM prompts ORDER BY at DESC LIMIT ?)",
        (gate.prompts_kept,),
    )


def probe_prompts(connection: sqlite3.Connection, num_prompts: int) -> list[list[int]]:
    """Return recent prompts spread evenly over the ones kept, so that they are not all of the last minute."""
    rows = connection.execute("SELECT prompt_ids FROM prompts ORDER BY at DESC, prompt_ids").fetchall()
    step = max(1, len(rows) // num_prompts)
    return [msgspec.msgpack.decode(row[0], type=list[int]) for row in rows[::step][:num_prompts]]


def num_prompts(connection: sqlite3.Connection) -> int:
    return connection.execute("SELECT count(*) FROM prompts").fetchone()[0]


def units_of(connection: sqlite3.Connection, rollout_id: str, gate: GateConfig) -> list[Unit]:
    """Fold a rollout's answers into units: arm and stage of the first one, the first outcome, events of all."""
    query = (
        "SELECT unit, arm, weight, at, outcome, error, timeout, refusal, latency_s FROM exposures "
        "WHERE rollout_id = ? ORDER BY at, inference_id"
    )
    units: dict[str, Unit] = {}
    num_by_arm = {"canary": 0, "champion": 0}
    for unit, arm, weight, at, outcome, error, timeout, refusal, latency_s in connection.execute(query, (rollout_id,)):
        num_by_arm[arm] += 1
        is_warm = num_by_arm[arm] > _WARM_UP_REQUESTS
        known = units.get(unit) or Unit(unit=unit, arm=arm, weight=weight, at=at)
        if known.arm != arm:
            continue  # the weight grew and the unit moved: what it does now belongs to neither arm
        is_first = known.outcome is None and outcome is not None
        units[unit] = msgspec.structs.replace(
            known,
            outcome=outcome if is_first else known.outcome,
            outcome_at=at if is_first else known.outcome_at,
            errors=known.errors + error,
            timeouts=known.timeouts + timeout,
            refusals=known.refusals + refusal,
            slow=known.slow + int(is_warm and 0 < gate.latency_s < latency_s),
        )
    return list(units.values())


def last_interaction_at(connection: sqlite3.Connection, rollout_id: str) -> float:
    """Return when the latest answer of a rollout was asked for; 0 when there is none."""
    row = connection.execute("SELECT max(at) FROM exposures WHERE rollout_id = ?", (rollout_id,)).fetchone()
    return row[0] or 0.0


def drop_rollouts_but(connection: sqlite3.Connection, rollout_ids: list[str]) -> None:
    """Forget the answers of rollouts that are decided; the decision's row holds its evidence."""
    marks = ",".join("?" * len(rollout_ids))
    connection.execute(f"DELETE FROM exposures WHERE rollout_id NOT IN ({marks})", rollout_ids)
