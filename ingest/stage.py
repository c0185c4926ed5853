"""A room's durable state (contract): offsets, outbox and fencing epoch in ONE SQLite database beside the room's tables.

Owns the exactly-once effect of every stage. One pass of run_stage:
    1. poll records
    2. one transaction: handle them, tick, save the next offsets, queue what is to be published in the outbox
    3. publish the outbox, wait for the broker, then mark it sent
    4. report
A crash between any two steps replays and never doubles: before the commit of 2 nothing happened; after it the outbox
sends the same records with the same event ids again, and readers drop what they have seen.
"""

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from ingest.config import KafkaConfig
from ingest.producer import Publisher
from ingest.stream import MAX_RECORD_BYTES, Reader, Record, ensure_topics, read_log_ids

logger = logging.getLogger("ingest.stage")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS stage_epoch (only_row INTEGER PRIMARY KEY CHECK (only_row = 1), epoch INTEGER NOT NULL);
INSERT OR IGNORE INTO stage_epoch VALUES (1, 0);
CREATE TABLE IF NOT EXISTS stage_offsets (topic TEXT, partition INTEGER, next_offset INTEGER NOT NULL,
    PRIMARY KEY (topic, partition)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS stage_logs (topic TEXT PRIMARY KEY, log_id TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS stage_outbox (id INTEGER PRIMARY KEY AUTOINCREMENT, topic TEXT NOT NULL, key TEXT NOT NULL,
    value BLOB NOT NULL, headers BLOB NOT NULL);
"""
_OUTBOX_ROWS = 1000
_IDLE_TICK_S = 0.5  # without records a stage looks at its clocks this often
_OUTBOX_BYTES = 16 << 20


class Fenced(Exception):
    """A newer process has opened this database; this one must stop."""


class StageStore:
    """One SQLite database (WAL); opening it bumps the epoch, so an older process can no longer commit."""

    def __init__(self, path: Path, schema: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._connection = sqlite3.connect(path, isolation_level=None, timeout=30.0)
        self._connection.execute("PRAGMA journal_mode=WAL")
        # NORMAL: after a power cut the last commits may be gone, state and offsets together; a replay makes them again.
        self._connection.execute("PRAGMA synchronous=NORMAL")
        self._connection.execute("PRAGMA cache_size=-32768")  # KiB
        self._connection.execute("PRAGMA wal_autocheckpoint=8000")  # pages
        self._connection.executescript(_SCHEMA + schema)
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.execute("UPDATE stage_epoch SET epoch = epoch + 1")
        self.epoch: int = self._read_epoch()
        self._connection.execute("COMMIT")
        self._unconfirmed: list[int] = []
        self._drops_before = 0

    def _read_epoch(self) -> int:
        return self._connection.execute("SELECT epoch FROM stage_epoch").fetchone()[0]

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Everything inside commits together or not at all; Fenced if a newer process took over."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            if self._read_epoch() != self.epoch:
                raise Fenced(f"{self.path} was opened by a newer process (our epoch {self.epoch}); this one stops")
            yield self._connection
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    def offsets(self) -> dict[tuple[str, int], int]:
        rows = self._connection.execute("SELECT topic, partition, next_offset FROM stage_offsets")
        return {(topic, partition): offset for topic, partition, offset in rows}

    def save_offsets(self, connection: sqlite3.Connection, records: list[Record]) -> None:
        """Save the next offset after these records, inside the caller's transaction."""
        ends = {}
        for record in records:
            ends[record.topic, record.partition] = record.offset + 1
        connection.executemany(
            "INSERT INTO stage_offsets VALUES (?, ?, ?) "
            "ON CONFLICT (topic, partition) DO UPDATE SET next_offset = excluded.next_offset",
            [(topic, partition, end) for (topic, partition), end in ends.items()],
        )

    def check_log_ids(self, log_ids: dict[str, str]) -> list[str]:
        """Remember the logs' identities; topics whose log was replaced lose their offsets and are returned."""
        with self.transaction() as connection:
            known = dict(connection.execute("SELECT topic, log_id FROM stage_logs").fetchall())
            wiped = [topic for topic, log_id in log_ids.items() if known.get(topic, log_id) != log_id]
            connection.executemany("DELETE FROM stage_offsets WHERE topic = ?", [(topic,) for topic in wiped])
            connection.executemany("INSERT OR REPLACE INTO stage_logs VALUES (?, ?)", log_ids.items())
        return wiped

    def enqueue(
        self, connection: sqlite3.Connection, topic: str, key: str, value: bytes, headers: list[tuple[str, bytes]]
    ) -> None:
        """Queue a record for publication, inside the caller's transaction."""
        connection.execute(
            "INSERT INTO stage_outbox (topic, key, value, headers) VALUES (?, ?, ?, ?)",
            (topic, key, value, msgspec.msgpack.encode(headers)),
        )

    def outbox_size(self) -> int:
        return self._connection.execute("SELECT count(*) FROM stage_outbox").fetchone()[0]

    def publish_outbox(self, publisher: Publisher, timeout_s: float = 10.0) -> int:
        """Publish, wait until the broker has it, then mark it sent; returns how many were. Call again for the rest."""
        if not self._unconfirmed:
            self._hand_over(publisher)
        if not self._unconfirmed or not publisher.flush(timeout_s):
            return 0  # the broker is away: the same records stay with the publisher, and in the outbox
        if publisher.stats()["num_dropped"] == self._drops_before:
            with self.transaction() as connection:
                connection.executemany("DELETE FROM stage_outbox WHERE id = ?", [(row,) for row in self._unconfirmed])
            num_sent = len(self._unconfirmed)
        else:
            num_sent = 0  # something was dropped; all of it goes out again under the same event ids
        self._unconfirmed = []
        return num_sent

    def _hand_over(self, publisher: Publisher) -> None:
        self._drops_before = publisher.stats()["num_dropped"]
        num_bytes = 0
        query = "SELECT id, topic, key, value, headers FROM stage_outbox ORDER BY id LIMIT ?"
        for row, topic, key, value, headers in self._connection.execute(query, (_OUTBOX_ROWS,)).fetchall():
            num_bytes += len(value)
            if self._unconfirmed and num_bytes > _OUTBOX_BYTES:
                break
            self._unconfirmed.append(row)
            if len(value) > MAX_RECORD_BYTES:
                logger.error("outbox_record_too_large topic=%s key=%s bytes=%d dropped=1", topic, key, len(value))
                continue
            publisher.publish(topic, key, value, msgspec.msgpack.decode(headers, type=list[tuple[str, bytes]]))

    @property
    def connection(self) -> sqlite3.Connection:
        """For reads outside a transaction."""
        return self._connection

    def close(self) -> None:
        self._connection.close()


def open_reader(kafka: KafkaConfig, store: StageStore, topics: list[str], client_id: str) -> Reader:
    """Open a Reader at the store's offsets; a topic whose log was wiped starts at 0, with an alarm."""
    ensure_topics(kafka)
    for topic in store.check_log_ids(read_log_ids(kafka, topics)):
        logger.error("log_wiped topic=%s action=restart_at_0 the broker lost its log since the last run", topic)
    return Reader(kafka, topics, store.offsets(), client_id)


def run_stage(
    reader: Reader,
    store: StageStore,
    publisher: Publisher,
    handle: Callable[[sqlite3.Connection, list[Record]], None],
    tick: Callable[[sqlite3.Connection, float, bool], None],
    stop: threading.Event,
    on_status: Callable[[dict[str, Any]], None],
    poll_records: int = 500,
) -> None:
    """Run a stage until stop is set; any exception leaves durable state from which a restart goes on.

    handle(connection, records) and tick(connection, now_s, caught_up) run inside one transaction per poll.
    on_status gets {at, lag, caught_up, positions, num_records, num_published, outbox} about once a second.
    """
    num_records = num_published = 0
    reported = ticked = 0.0
    while not stop.is_set():
        # 1. poll
        records = reader.poll(0.2, poll_records)
        now_s = time.time()
        if not records and now_s - ticked < _IDLE_TICK_S:
            continue
        ticked = now_s
        # 2. one transaction
        with store.transaction() as connection:
            if records:
                handle(connection, records)
            tick(connection, now_s, reader.caught_up())
            store.save_offsets(connection, records)
        num_records += len(records)
        # 3. outbox
        while not stop.is_set() and (num_sent := store.publish_outbox(publisher, timeout_s=2.0)):
            num_published += num_sent
        # 4. report
        if now_s - reported >= 1.0:
            reported = now_s
            on_status(
                {
                    "at": now_s,
                    "lag": reader.lag(),
                    "caught_up": reader.caught_up(),
                    "num_records": num_records,
                    "num_published": num_published,
                    "outbox": store.outbox_size(),
                    "positions": reader.positions(),
                }
            )
