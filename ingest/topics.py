"""Topic names, keys and headers (contract). Keys are routes; every event of one episode shares a partition."""

from typing import NamedTuple

from ingest.config import KafkaConfig


class Topics(NamedTuple):
    """The topics of one deployment."""

    inference: str
    feedback: str
    interaction: str
    sample: str
    control: str  # one partition, read in full, last entry per key wins
    dlq: str


def topics(kafka: KafkaConfig) -> Topics:
    """Return the topic names under the configured prefix."""
    prefix = kafka.topic_prefix
    return Topics(*(f"{prefix}{name}.v1" for name in Topics._fields))


def num_partitions(kafka: KafkaConfig, topic: str) -> int:
    """Return how many partitions a topic has: one for control, else the configured count."""
    return 1 if topic == topics(kafka).control else kafka.partitions


def headers(event_type: str, event_id: str, source: str, unix_s: float) -> list[tuple[str, bytes]]:
    """Return CloudEvents 1.0 attributes for Kafka's binary mode; (ce_source, ce_id) is the dedup key."""
    return [
        ("ce_specversion", b"1.0"),
        ("ce_id", event_id.encode()),
        ("ce_source", source.encode()),
        ("ce_type", event_type.encode()),
        ("ce_time", f"{unix_s:.6f}".encode()),
        ("content-type", b"application/json"),
    ]
