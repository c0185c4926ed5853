"""The ledger of rewards (contract): every interaction revision's verdict, why, and the sample it made.

Owns the tables of <state>/rewards/ledger.sqlite except the stage's own. Rows are only added. Reads open the database
read-only and work while the stage writes.
Promises: one verdict per interaction revision and one row per sample id, whatever is replayed.
"""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from rewards.samples import Sample

SCHEMA = """
CREATE TABLE IF NOT EXISTS verdicts (
    inference_id TEXT NOT NULL, revision INTEGER NOT NULL, state TEXT NOT NULL, verdict TEXT NOT NULL,
    reason TEXT NOT NULL, reward REAL, confidence REAL NOT NULL, baseline REAL, expected_success REAL,
    emitted REAL, components TEXT NOT NULL, feedback TEXT NOT NULL, ignored TEXT NOT NULL, sample_id TEXT,
    spec_version TEXT NOT NULL, created_at REAL NOT NULL, PRIMARY KEY (inference_id, revision)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS samples (
    sample_id TEXT PRIMARY KEY, inference_id TEXT NOT NULL, kind TEXT NOT NULL, sample BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS samples_of_inference ON samples (inference_id);
CREATE TABLE IF NOT EXISTS heads (
    inference_id TEXT PRIMARY KEY, revision INTEGER NOT NULL, outcome TEXT NOT NULL, reason TEXT NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS heads_by_outcome ON heads (outcome, reason);
CREATE INDEX IF NOT EXISTS samples_by_kind ON samples (kind);
"""
VerdictKind = Literal["sample", "unchanged", "masked", "untrainable", "waiting"]


class Verdict(NamedTuple):
    """What one interaction revision came to."""

    inference_id: str
    revision: int
    state: str  # provisional | final | correction
    verdict: VerdictKind
    reason: str  # why there is no sample, or what kind of sample it is
    reward: float | None  # R of this revision, after token cost
    confidence: float
    baseline: float | None  # read at the first sample of this interaction
    expected_success: float | None
    emitted: float | None  # sum of the rewards of all samples so far; None: no sample yet
    components: dict[str, float]
    feedback: list[dict]
    ignored: dict[str, str]
    sample_id: str | None
    spec_version: str
    created_at: float


def append(connection: sqlite3.Connection, verdict: Verdict, sample: Sample | None) -> None:
    """Add a verdict and its sample inside the caller's transaction; the same revision twice is our own error."""
    row = verdict._replace(
        components=json.dumps(verdict.components),  # type: ignore[arg-type]
        feedback=json.dumps(verdict.feedback),  # type: ignore[arg-type]
        ignored=json.dumps(verdict.ignored),  # type: ignore[arg-type]
    )
    connection.execute(f"INSERT INTO verdicts VALUES ({', '.join('?' * len(row))})", row)
    if sample:
        connection.execute(
            "INSERT INTO samples VALUES (?, ?, ?, ?)",
            (sample.sample_id, sample.inference_id, sample.kind, msgspec.json.encode(sample)),
        )
    outcome = "sample" if verdict.emitted is not None else verdict.verdict
    reason = "" if outcome == "sample" else verdict.reason
    connection.execute(
        "INSERT INTO heads VALUES (?, ?, ?, ?) ON CONFLICT (inference_id) DO UPDATE SET "
        "revision = excluded.revision, outcome = excluded.outcome, reason = excluded.reason",
        (verdict.inference_id, verdict.revision, outcome, reason),
    )


def last_verdict(connection: sqlite3.Connection, inference_id: str) -> Verdict | None:
    """Return the verdict on the newest revision seen."""
    row = connection.execute(
        "SELECT * FROM verdicts WHERE inference_id = ? ORDER BY revision DESC LIMIT 1", (inference_id,)
    ).fetchone()
    return _verdict(tuple(row)) if row else None


def last_hindsight(connection: sqlite3.Connection, inference_id: str) -> str | None:
    """Return the hindsight text that samples of this answer already carry, so that a correction does not repeat it."""
    rows = connection.execute("SELECT sample FROM samples WHERE inference_id = ?", (inference_id,)).fetchall()
    samples = sorted((msgspec.json.decode(row[0], type=Sample) for row in rows), key=lambda sample: sample.revision)
    return next((sample.hindsight for sample in reversed(samples) if sample.hindsight), None)


def samples_of(state_dir: Path, inference_id: str) -> list[Sample]:
    """Return the samples that an answer made, in order of revision."""
    with _reading(state_dir) as connection:
        rows = connection.execute("SELECT sample FROM samples WHERE inference_id = ?", (inference_id,)).fetchall()
    samples = [msgspec.json.decode(row[0], type=Sample) for row in rows]
    return sorted(samples, key=lambda sample: sample.revision)


def why(state_dir: Path, inference_id: str) -> list[dict]:
    """Return one dict per interaction revision: feedback used and ignored, components, reward, sample, reason."""
    with _reading(state_dir) as connection:
        rows = connection.execute(
            "SELECT * FROM verdicts WHERE inference_id = ? ORDER BY revision", (inference_id,)
        ).fetchall()
    return [_verdict(tuple(row))._asdict() for row in rows]


def count(state_dir: Path) -> dict:
    """Return totals by the newest verdict on each interaction; samples_delta counts samples, the rest interactions.

    interactions = samples_full + masked + waiting + the sum of untrainable.
    """
    with _reading(state_dir) as connection:
        rows = connection.execute("SELECT outcome, reason, COUNT(*) FROM heads GROUP BY outcome, reason").fetchall()
        num_delta = connection.execute("SELECT COUNT(*) FROM samples WHERE kind = 'delta'").fetchone()[0]
    totals = {"sample": 0, "masked": 0, "waiting": 0}
    untrainable: dict[str, int] = {}
    for outcome, reason, num in rows:
        if outcome == "untrainable":
            untrainable[reason] = untrainable.get(reason, 0) + num
        else:
            totals[outcome] += num
    return {
        "interactions": sum(num for *_, num in rows),
        "samples_full": totals["sample"],
        "samples_delta": num_delta,
        "masked": totals["masked"],
        "waiting": totals["waiting"],
        "untrainable": untrainable,
    }


def _verdict(row: tuple) -> Verdict:
    verdict = Verdict(*row)
    return verdict._replace(
        components=json.loads(row[Verdict._fields.index("components")]),
        feedback=json.loads(row[Verdict._fields.index("feedback")]),
        ignored=json.loads(row[Verdict._fields.index("ignored")]),
    )


@contextmanager
def _reading(state_dir: Path) -> Iterator[sqlite3.Connection]:
    """Open the ledger read-only; an empty one in memory where the stage has not made it yet."""
    path = state_dir / "rewards" / "ledger.sqlite"
    uri = f"{path.resolve().as_uri()}?mode=ro" if path.exists() else "file::memory:"
    connection = sqlite3.connect(uri, uri=True, timeout=5.0)
    try:
        if not connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'heads'").fetchone():
            connection.close()
            connection = sqlite3.connect(":memory:")
            connection.executescript(SCHEMA)
        yield connection
    finally:
        connection.close()
