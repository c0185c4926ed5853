"""The joiner's tables: open and closed windows, feedback revisions, links, dispositions, dedup keys, counts.

Owns the SQL of the join; no rule lives here. The tables share one database with StageStore, so whatever the join
writes commits together with the offsets and the outbox.
"""

import sqlite3
from collections import Counter
from typing import NamedTuple

SCHEMA = """
CREATE TABLE IF NOT EXISTS seen (event_key TEXT PRIMARY KEY, at REAL NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS seen_at ON seen (at);
CREATE TABLE IF NOT EXISTS inferences (inference_id TEXT PRIMARY KEY, response_id TEXT NOT NULL,
    episode_id TEXT NOT NULL, tenant TEXT NOT NULL, exposed_at REAL NOT NULL, revision INTEGER NOT NULL,
    source TEXT NOT NULL, source_partition INTEGER NOT NULL, source_offset INTEGER NOT NULL, key TEXT NOT NULL,
    value BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS inferences_response ON inferences (response_id);
CREATE INDEX IF NOT EXISTS inferences_episode ON inferences (tenant, episode_id, exposed_at, inference_id);
CREATE INDEX IF NOT EXISTS inferences_open ON inferences (source_partition, exposed_at) WHERE revision < 0;
CREATE INDEX IF NOT EXISTS inferences_closed ON inferences (source_partition, exposed_at) WHERE revision >= 0;
CREATE TABLE IF NOT EXISTS revisions (tenant TEXT, feedback_id TEXT, rank INTEGER, field TEXT NOT NULL,
    target_id TEXT NOT NULL, received_at REAL NOT NULL, status TEXT NOT NULL, resolved TEXT NOT NULL,
    source_partition INTEGER NOT NULL, place TEXT NOT NULL, key TEXT NOT NULL, value BLOB NOT NULL,
    PRIMARY KEY (tenant, feedback_id, rank)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS revisions_target ON revisions (target_id);
CREATE INDEX IF NOT EXISTS revisions_pending ON revisions (source_partition, received_at) WHERE status = 'pending';
CREATE INDEX IF NOT EXISTS revisions_age ON revisions (source_partition, received_at);
CREATE TABLE IF NOT EXISTS links (inference_id TEXT, tenant TEXT, feedback_id TEXT, rank INTEGER NOT NULL,
    PRIMARY KEY (inference_id, tenant, feedback_id)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS links_feedback ON links (tenant, feedback_id);
CREATE TABLE IF NOT EXISTS dispositions (tenant TEXT, feedback_id TEXT, disposition TEXT NOT NULL, reason TEXT NOT NULL,
    at REAL NOT NULL, PRIMARY KEY (tenant, feedback_id)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS dispositions_at ON dispositions (at);
CREATE TABLE IF NOT EXISTS counts (name TEXT PRIMARY KEY, n INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS watermarks (topic TEXT, source_partition INTEGER, at REAL NOT NULL,
    PRIMARY KEY (topic, source_partition)) WITHOUT ROWID;
"""
_DISPOSITION_S = 30 * 86400.0  # dispositions are kept this long for reconciliation


class InferenceRow(NamedTuple):
    """A window. revision -1: open, not yet emitted."""

    inference_id: str
    response_id: str
    episode_id: str
    tenant: str
    exposed_at: float
    revision: int
    source: str  # topic[partition]
    source_partition: int
    source_offset: int
    key: str
    value: bytes


class RevisionRow(NamedTuple):
    """One revision of one feedback. rank = 2 * revision + (op is retract); the highest live one counts.

    status: pending (target unknown) | live | late | orphaned | quarantined.
    resolved: the inference that an episode stood for.
    """

    tenant: str
    feedback_id: str
    rank: int
    field: str
    target_id: str
    received_at: float
    status: str
    resolved: str
    source_partition: int
    place: str  # topic[partition]@offset
    key: str
    value: bytes

    @property
    def retracts(self) -> bool:
        return self.rank % 2 == 1


class JoinState:
    """Reads and writes of the join, inside the transaction that its connection has open."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._deltas: Counter[str] = Counter()

    def first_sight(self, event_key: str, at: float) -> bool:
        """Remember an event key; False if it was known."""
        return self._connection.execute("INSERT OR IGNORE INTO seen VALUES (?, ?)", (event_key, at)).rowcount == 1

    # Windows

    def add_inference(self, row: InferenceRow) -> None:
        self._connection.execute("INSERT INTO inferences VALUES (?,?,?,?,?,?,?,?,?,?,?)", row)

    def inference(self, inference_id: str) -> InferenceRow | None:
        rows = self._inferences("inference_id = ?", inference_id)
        return rows[0] if rows else None

    def inferences_of(self, response_id: str) -> list[InferenceRow]:
        return self._inferences("response_id = ?", response_id)

    def last_of_episode(self, tenant: str, episode_id: str) -> InferenceRow | None:
        rows = self._inferences(
            "tenant = ? AND episode_id = ? ORDER BY exposed_at DESC, inference_id DESC LIMIT 1", tenant, episode_id
        )
        return rows[0] if rows else None

    def due(self, partition: int, exposed_until: float, limit: int) -> list[InferenceRow]:
        """Return open windows of answers exposed until then."""
        return self._inferences(
            "revision < 0 AND source_partition = ? AND exposed_at <= ? ORDER BY exposed_at LIMIT ?",
            partition,
            exposed_until,
            limit,
        )

    def _inferences(self, condition: str, *parameters: object) -> list[InferenceRow]:
        rows = self._connection.execute(f"SELECT * FROM inferences WHERE {condition}", parameters)
        return [InferenceRow(*row) for row in rows]

    def set_revision(self, inference_id: str, revision: int) -> None:
        self._connection.execute("UPDATE inferences SET revision = ? WHERE inference_id = ?", (revision, inference_id))

    # Feedback

    def add_revision(self, row: RevisionRow) -> None:
        self._connection.execute("INSERT INTO revisions VALUES (?,?,?,?,?,?,?,?,?,?,?,?)", row)

    def update_revision(self, row: RevisionRow) -> None:
        self._connection.execute(
            "UPDATE revisions SET status = ?, resolved = ? WHERE tenant = ? AND feedback_id = ? AND rank = ?",
            (row.status, row.resolved, row.tenant, row.feedback_id, row.rank),
        )

    def revisions(self, tenant: str, feedback_id: str) -> list[RevisionRow]:
        """Return all revisions of one feedback, the highest first."""
        return self._revisions("tenant = ? AND feedback_id = ? ORDER BY rank DESC", tenant, feedback_id)

    def waiting_for(self, inference: InferenceRow) -> list[RevisionRow]:
        """Return revisions whose target this inference is: those without one, and those that take every choice."""
        return self._revisions(
            "target_id IN (?, ?, ?) AND (status = 'pending' OR (status IN ('live', 'late') AND field = 'response_id'))",
            inference.inference_id,
            inference.response_id,
            inference.episode_id,
        )

    def orphans(self, partition: int, received_until: float, limit: int) -> list[RevisionRow]:
        return self._revisions(
            "status = 'pending' AND source_partition = ? AND received_at <= ? LIMIT ?", partition, received_until, limit
        )

    def _revisions(self, condition: str, *parameters: object) -> list[RevisionRow]:
        rows = self._connection.execute(f"SELECT * FROM revisions WHERE {condition}", parameters)
        return [RevisionRow(*row) for row in rows]

    def linked(self, tenant: str, feedback_id: str) -> dict[str, int]:
        """Return inference id -> rank of the revision that it carries."""
        rows = self._connection.execute(
            "SELECT inference_id, rank FROM links WHERE tenant = ? AND feedback_id = ?", (tenant, feedback_id)
        )
        return dict(rows.fetchall())

    def link(self, inference_id: str, row: RevisionRow) -> None:
        self._connection.execute(
            "INSERT OR REPLACE INTO links VALUES (?, ?, ?, ?)", (inference_id, row.tenant, row.feedback_id, row.rank)
        )

    def unlink(self, inference_id: str, tenant: str, feedback_id: str) -> None:
        self._connection.execute(
            "DELETE FROM links WHERE inference_id = ? AND tenant = ? AND feedback_id = ?",
            (inference_id, tenant, feedback_id),
        )

    def feedback_on(self, inference_id: str) -> list[RevisionRow]:
        """Return the revisions that count for an inference, oldest first."""
        rows = self._connection.execute(
            "SELECT revisions.* FROM links JOIN revisions USING (tenant, feedback_id, rank) "
            "WHERE inference_id = ? ORDER BY received_at, feedback_id",
            (inference_id,),
        )
        return [RevisionRow(*row) for row in rows]

    def disposition(self, tenant: str, feedback_id: str) -> str | None:
        found = self._connection.execute(
            "SELECT disposition FROM dispositions WHERE tenant = ? AND feedback_id = ?", (tenant, feedback_id)
        ).fetchone()
        return found[0] if found else None

    def set_disposition(self, tenant: str, feedback_id: str, disposition: str, reason: str, at: float) -> None:
        before = self.disposition(tenant, feedback_id)
        if before == disposition:
            return
        if before:
            self._deltas[f"feedback_{before}"] -= 1
        self._deltas[f"feedback_{disposition}"] += 1
        self._connection.execute(
            "INSERT OR REPLACE INTO dispositions VALUES (?, ?, ?, ?, ?)", (tenant, feedback_id, disposition, reason, at)
        )

    # Time, counts, age

    def watermarks(self) -> dict[tuple[str, int], float]:
        rows = self._connection.execute("SELECT topic, source_partition, at FROM watermarks")
        return {(topic, partition): at for topic, partition, at in rows}

    def save_watermarks(self, marks: dict[tuple[str, int], float]) -> None:
        rows = [(topic, partition, at) for (topic, partition), at in marks.items()]
        self._connection.executemany("INSERT OR REPLACE INTO watermarks VALUES (?, ?, ?)", rows)

    def count(self, name: str) -> None:
        self._deltas[name] += 1

    def save_counts(self) -> None:
        self._connection.executemany(
            "INSERT INTO counts VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET n = n + excluded.n",
            list(self._deltas.items()),
        )
        self._deltas.clear()

    def evict(self, partition: int, before: float) -> None:
        """Forget closed windows exposed before then, with their links and the settled feedback as old."""
        self._connection.execute(
            "DELETE FROM links WHERE inference_id IN (SELECT inference_id FROM inferences "
            "WHERE revision >= 0 AND source_partition = ? AND exposed_at < ?)",
            (partition, before),
        )
        self._connection.execute(
            "DELETE FROM inferences WHERE revision >= 0 AND source_partition = ? AND exposed_at < ?",
            (partition, before),
        )
        self._connection.execute(
            "DELETE FROM revisions WHERE source_partition = ? AND received_at < ? AND status != 'pending' "
            "AND NOT EXISTS (SELECT 1 FROM links WHERE links.tenant = revisions.tenant "
            "AND links.feedback_id = revisions.feedback_id)",
            (partition, before),
        )

    def evict_seen(self, before: float) -> None:
        self._connection.execute("DELETE FROM seen WHERE at < ?", (before,))
        self._connection.execute("DELETE FROM dispositions WHERE at < ?", (before - _DISPOSITION_S,))


def read_counts(connection: sqlite3.Connection) -> dict[str, int]:
    """Return all counts, with the windows that are open now."""
    counts = dict(connection.execute("SELECT name, n FROM counts").fetchall())
    counts["open_windows"] = connection.execute("SELECT count(*) FROM inferences WHERE revision < 0").fetchone()[0]
    return counts
