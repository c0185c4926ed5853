"""The door to Kafka's reading side (contract): topics made, records polled from offsets that the caller keeps.

Owns connection options, the capability probe, topic creation, Reader, and reading the control topic in full.
Takes offsets from the caller's own store: assign() and seek, no consumer groups, no commits to the broker.
Promises: keys and headers are decoded here, so a bad one never wedges poll; a log that was wiped or cut (a memory-only
broker restarted) raises LogWiped instead of sitting silently at a position that no longer exists; a broker that
goes away and comes back is resumed from the same positions.
"""

import logging
import time
import uuid
from typing import Any, NamedTuple

from kafka import KafkaAdminClient, KafkaConsumer
from kafka.admin import NewTopic
from kafka.errors import KafkaError, OffsetOutOfRangeError, TopicAlreadyExistsError
from kafka.structs import TopicPartition

from ingest.config import KafkaConfig
from ingest.topics import num_partitions, topics

logger = logging.getLogger("ingest.stream")
logging.getLogger("kafka").setLevel(logging.CRITICAL)  # it logs every reconnect; we say once what matters

MAX_RECORD_BYTES = 8 << 20
_LOG_CHECK_S = 2.0
_OFFSET_FOR_LEADER_EPOCH = 23  # an api key that a broker with real replicated logs answers and the bundled one does not


class LogWiped(Exception):
    """The log behind our positions was replaced; reopen from durable state, which starts it at 0."""


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


def connection_options(kafka: KafkaConfig, client_id: str, **more: Any) -> dict[str, Any]:
    """Return the options shared by every client of this deployment."""
    options: dict[str, Any] = {
        "bootstrap_servers": kafka.bootstrap_servers.split(","),
        "client_id": client_id,
        "security_protocol": kafka.security_protocol,
        "reconnect_backoff_max_ms": 1000,
        "bootstrap_timeout_ms": 1000,
        **more,
    }
    if kafka.sasl_mechanism:
        options |= {
            "sasl_mechanism": kafka.sasl_mechanism,
            "sasl_plain_username": kafka.sasl_username,
            "sasl_plain_password": kafka.sasl_password,
        }
    if kafka.ssl_cafile:
        options["ssl_cafile"] = kafka.ssl_cafile
    return options


def _open_admin(kafka: KafkaConfig, timeout_s: float) -> Any:
    """Connect, trying until the deadline; ValueError names the broker and what to do."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return KafkaAdminClient(**connection_options(kafka, "headrace-admin", request_timeout_ms=5000))
        except (KafkaError, OSError) as error:
            if time.monotonic() >= deadline:
                raise ValueError(
                    f"no Kafka broker answers at {kafka.bootstrap_servers} ({type(error).__name__}); start one "
                    "(`headrace up` starts a local one) or set bootstrap_servers in [kafka]"
                ) from error
            time.sleep(0.2)


def trusts_idempotence(kafka: KafkaConfig, timeout_s: float = 10.0) -> bool:
    """Tell whether the broker's idempotence can be trusted: the bundled one lost acknowledged events with it."""
    admin = _open_admin(kafka, timeout_s)
    try:
        return any(int(key) == _OFFSET_FOR_LEADER_EPOCH for key in admin.api_versions())
    finally:
        admin.close()


def ensure_topics(kafka: KafkaConfig, timeout_s: float = 30.0) -> None:
    """Create the missing topics, wait for their leaders; ValueError: no broker, or another partition count."""
    admin = _open_admin(kafka, timeout_s)
    try:
        known = {topic["name"]: topic for topic in admin.describe_topics() if not topic["error_code"]}
        for name in topics(kafka):
            if name not in known:
                _create_topic(admin, kafka, name)
            elif len(known[name]["partitions"]) != num_partitions(kafka, name):
                raise ValueError(
                    f"topic {name} has {len(known[name]['partitions'])} partitions, the configuration says "
                    f"{num_partitions(kafka, name)}: it is fixed once a topic exists; set [kafka] partitions to it, "
                    "or use another topic_prefix"
                )
        _await_leaders(admin, list(topics(kafka)), timeout_s)
    except KafkaError as error:
        raise ValueError(f"cannot create topics at {kafka.bootstrap_servers}: {error!r}") from error
    finally:
        admin.close()


def _create_topic(admin: Any, kafka: KafkaConfig, name: str) -> None:
    configs = {"max.message.bytes": str(MAX_RECORD_BYTES)}
    if name == topics(kafka).control:
        configs["cleanup.policy"] = "compact"
    try:
        admin.create_topics(
            [NewTopic(name, num_partitions(kafka, name), kafka.replication_factor, topic_configs=configs)]
        )
    except TopicAlreadyExistsError:
        return  # another process was first
    logger.info("topic_created topic=%s partitions=%d", name, num_partitions(kafka, name))


def _await_leaders(admin: Any, names: list[str], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        described = admin.describe_topics(names)
        waiting = [
            topic["name"]
            for topic in described
            if topic["error_code"] or not topic["partitions"] or any(p["leader_id"] < 0 for p in topic["partitions"])
        ]
        if not waiting:
            return
        if time.monotonic() >= deadline:
            raise ValueError(
                f"topics {', '.join(waiting)} have no leader after {timeout_s:.0f} s; look at the broker's log"
            )
        time.sleep(0.1)


def read_log_ids(kafka: KafkaConfig, names: list[str], timeout_s: float = 30.0) -> dict[str, str]:
    """Return topic -> cluster id/topic id; a log that was made anew has another one."""
    admin = _open_admin(kafka, timeout_s)
    try:
        return _log_ids(admin, names)
    finally:
        admin.close()


def _log_ids(admin: Any, names: list[str]) -> dict[str, str]:
    cluster = admin.describe_cluster()["cluster_id"]
    described = {topic["name"]: topic for topic in admin.describe_topics(names)}
    for name in names:
        if name not in described or described[name]["error_code"]:
            raise LogWiped(f"topic {name} does not exist on the broker (it did not survive a restart, or was deleted)")
    return {name: f"{cluster}/{described[name]['topic_id']}" for name in names}


def _decode_headers(headers: Any) -> dict[str, str]:
    return {key: (value or b"").decode("utf-8", "replace") for key, value in headers or ()}


class Reader:
    """All partitions of some topics, from given offsets; one thread only."""

    def __init__(
        self, kafka: KafkaConfig, topics: list[str], offsets: dict[tuple[str, int], int], client_id: str
    ) -> None:
        self._kafka = kafka
        self._topics = topics
        self._admin = _open_admin(kafka, 30.0)
        self._log_ids = _log_ids(self._admin, topics)
        self._consumer = KafkaConsumer(
            **connection_options(kafka, client_id, auto_offset_reset="none", bootstrap_timeout_ms=10000),
            enable_auto_commit=False,
            allow_auto_create_topics=False,
            fetch_max_wait_ms=100,
            request_timeout_ms=10000,
            max_partition_fetch_bytes=2 << 20,
            metadata_max_age_ms=5000,
        )
        self._partitions = [TopicPartition(name, p) for name in topics for p in range(num_partitions(kafka, name))]
        self._consumer.assign(self._partitions)
        for tp in self._partitions:
            self._consumer.seek(tp, offsets.get((tp.topic, tp.partition), 0))
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
            current = _log_ids(self._admin, self._topics)
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
        """Return the log's end as the last fetch told it (end_offsets is wrong on the bundled broker), or -1."""
        highwater = self._consumer.highwater(tp)
        return -1 if highwater is None else highwater

    def caught_up(self) -> bool:
        """Tell whether every position has reached the end of its log, and the broker still answers."""
        return self._reachable and all(0 <= self._highwater(tp) <= self._position(tp) for tp in self._partitions)

    def caught_up_partitions(self) -> set[tuple[str, int]]:
        """Return the (topic, partition) read to their end, as of the last fetch; none while the broker is away."""
        if not self._reachable:
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
