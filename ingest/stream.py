"""The door to Kafka's reading side (contract): topics made, records polled from offsets that the caller keeps.

Owns Reader and reading the control topic in full; names what of ingest.admin other rooms use.
Takes offsets from the caller's own store: assign() and seek, no consumer groups, no commits to the broker.
Promises: keys and headers are decoded here, so a bad one never wedges poll; a log that was wiped or cut (a memory-only
broker restarted) raises LogWiped instead of sitting silently at a position that no longer exists; a broker that
goes away and comes back is resumed from the same positions.
"""

import logging
import time
import uuid
from typing import Any, NamedTuple

from kafka import KafkaConsumer
from kafka.errors import KafkaError, OffsetOutOfRangeError
from kafka.structs import TopicPartition

from ingest.admin import (
    MAX_RECORD_BYTES,
    LogWiped,
    connection_options,
    ensure_topics,
    is_complete,
    log_ids_of,
    open_admin,
    read_log_ids,
    trusts_idempotence,
)
from ingest.config import KafkaConfig
from ingest.topics import num_partitions

__all__ = [
    "MAX_RECORD_BYTES",
    "LogWiped",
    "Reader",
    "Record",
    "connection_options",
    "ensure_topics",
    "read_latest",
    "read_log_ids",
    "trusts_idempotence",
]

logger = logging.getLogger("ingest.stream")

_LOG_CHECK_S = 2.0


class Record(NamedTuple):
    """One Kafka record."""

    topic: str
    partition: int
    offset: int
    key: str
    value: bytes
    headers: dict[str, str]
    timestamp_s: float

    @property
    def where(self) -> str:
        return f"{self.topic}[{self.partition}]@{self.offset}"


def _decode_headers(headers: Any) -> dict[str, str]:
    return {key: (value or b"").decode("utf-8", "replace") for key, value in headers or ()}


class Reader:
    """All partitions of some topics, from given offsets; one thread only."""

    def __init__(
        self, kafka: KafkaConfig, topics: list[str], offsets: dict[tuple[str, int], int], client_id: str
    ) -> None:
        self._kafka = kafka
        self._topics = topics
        self._admin = open_admin(kafka, 30.0)
        self._log_ids = log_ids_of(self._admin, topics)
        self._consumer: Any = KafkaConsumer(
            **connection_options(kafka, client_id, auto_offset_reset="none", bootstrap_timeout_ms=10000),
            enable_auto_commit=False,
            allow_auto_create_topics=False,
            fetch_max_wait_ms=250,
            request_timeout_ms=10000,
            max_partition_fetch_bytes=2 << 20,
            metadata_max_age_ms=5000,
        )
        self._partitions = [TopicPartition(name, p) for name in topics for p in range(num_partitions(kafka, name))]
        self._consumer.assign(self._partitions)
        for tp in self._partitions:
            self._consumer.seek(tp, offsets.get((tp.topic, tp.partition), 0))
        self._tells_ends = is_complete(self._admin)
        self._ends: dict[TopicPartition, int] = {}
        self._last_check = time.monotonic()
        self._reachable = True

    def poll(self, timeout_s: float, max_records: int = 500) -> list[Record]:
        """Return the next records, in offset order per partition; an empty list after the timeout."""
        self._check_log()
        try:
            polled = self._consumer.poll(timeout_ms=int(timeout_s * 1000), max_records=max_records)
        except OffsetOutOfRangeError as error:
            self._reposition(error)
            return []
        return [
            Record(
                record.topic,
                record.partition,
                record.offset,
                (record.key or b"").decode("utf-8", "replace"),
                record.value or b"",
                _decode_headers(record.headers),
                record.timestamp / 1000,
            )
            for records in polled.values()
            for record in records
        ]

    def _check_log(self) -> None:
        """Compare the log's identity every few seconds: a memory-only broker that restarted keeps silent about it."""
        if time.monotonic() - self._last_check < _LOG_CHECK_S:
            return
        try:
            current = log_ids_of(self._admin, self._topics)
            if self._tells_ends:
                self._ends = self._consumer.end_offsets(self._partitions, timeout_ms=2000)
        except (KafkaError, OSError) as error:
            if self._reachable:
                logger.warning("broker_unreachable servers=%s error=%r", self._kafka.bootstrap_servers, error)
            self._reachable = False
        else:
            if current != self._log_ids:
                changed = ", ".join(name for name in current if current[name] != self._log_ids[name])
                raise LogWiped(f"the log of {changed} was replaced while we read it; reopen from durable state")
            if not self._reachable:
                logger.info("broker_back servers=%s", self._kafka.bootstrap_servers)
            self._reachable = True
        self._last_check = time.monotonic()

    def _reposition(self, error: OffsetOutOfRangeError) -> None:
        """Move to the first record that exists: retention passed our position, or the log's end was cut (alarm)."""
        for tp, position in dict(error.args[0]).items():
            first = self._consumer.beginning_offsets([tp])[tp]
            cause = "retention_passed_us" if position < first else "log_was_cut"
            logger.error("offset_lost cause=%s record=%s[%d]@%d restart_at=%d", cause, *tp, position, first)
            self._consumer.seek(tp, first)

    def positions(self) -> dict[str, list[int]]:
        """Return topic[partition] -> [next offset, end of the log as of the last fetch] for the status file."""
        return {f"{tp.topic}[{tp.partition}]": [self._position(tp), self._highwater(tp)] for tp in self._partitions}

    def _position(self, tp: TopicPartition) -> int:
        return self._consumer.position(tp) or 0

    def _highwater(self, tp: TopicPartition) -> int:
        """Return the log's end as the last fetch told it, or -1; asked for too, where end_offsets is right.

        The last fetch may be old: after an outage it still says what it said before.
        """
        highwater = self._consumer.highwater(tp)
        return max(-1 if highwater is None else highwater, self._ends.get(tp, -1))

    def caught_up(self) -> bool:
        """Tell whether every position has reached the end of its log, as of polls of the last seconds."""
        return len(self.caught_up_partitions()) == len(self._partitions)

    def caught_up_partitions(self) -> set[tuple[str, int]]:
        """Return the (topic, partition) read to their end; none while the broker is away or not asked lately."""
        if not self._reachable or time.monotonic() - self._last_check > 2 * _LOG_CHECK_S:
            return set()
        return {(tp.topic, tp.partition) for tp in self._partitions if 0 <= self._highwater(tp) <= self._position(tp)}

    def lag(self) -> int:
        """Return how many records are still to be read, as of the last fetch."""
        return sum(max(0, self._highwater(tp) - self._position(tp)) for tp in self._partitions)

    def log_ids(self) -> dict[str, str]:
        return dict(self._log_ids)

    def seek(self, topic: str, partition: int, offset: int) -> None:
        self._consumer.seek(TopicPartition(topic, partition), offset)

    def close(self) -> None:
        self._consumer.close()
        self._admin.close()


def read_latest(kafka: KafkaConfig, topic: str, timeout_s: float = 10.0) -> dict[str, Record]:
    """Return the last record per key of a topic, up to its end now; ValueError if the timeout passes first."""
    deadline = time.monotonic() + timeout_s
    reader = Reader(kafka, [topic], {}, f"headrace-latest-{uuid.uuid4().hex[:8]}")
    try:
        latest: dict[str, Record] = {}
        while True:
            records = reader.poll(0.2)
            latest |= {record.key: record for record in records}
            if not records and reader.caught_up():
                return latest
            if time.monotonic() >= deadline:
                raise ValueError(f"topic {topic} could not be read to its end in {timeout_s:.0f} s")
    finally:
        reader.close()
