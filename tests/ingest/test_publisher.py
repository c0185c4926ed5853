"""The publisher with the broker there, away and back; its spool across crashes."""

import time

import pytest

from ingest.config import KafkaConfig
from ingest.producer import Publisher, SpoolFull
from ingest.spool import Spool
from ingest.stream import Reader, ensure_topics
from ingest.topics import topics
from tests.brokers import Broker

AWAY = KafkaConfig(bootstrap_servers="127.0.0.1:1", max_buffered_bytes=1 << 16, linger_ms=0)


def read_all(kafka: KafkaConfig, topic: str, timeout_s: float = 10.0) -> list[bytes]:
    reader = Reader(kafka, [topic], {}, "test")
    values, deadline = [], time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        records = reader.poll(0.1)
        values += [record.value for record in records]
        if not records and reader.caught_up():
            break
    reader.close()
    return values


@pytest.mark.kafka
def test_what_is_published_arrives_in_order_per_key(kafka) -> None:
    ensure_topics(kafka)
    publisher = Publisher(kafka, "test")
    for number in range(3000):
        publisher.publish(topics(kafka).inference, f"{number % 2:04x}", b"%d" % number, [("ce_id", b"%d" % number)])
    assert publisher.flush(10)
    assert publisher.stats()["num_acked"] == 3000
    publisher.close()
    values = [int(value) for value in read_all(kafka, topics(kafka).inference)]
    for parity in (0, 1):
        assert [v for v in values if v % 2 == parity] == list(range(parity, 3000, 2))


@pytest.mark.kafka
def test_durable_publish_returns_after_the_acknowledgement(kafka) -> None:
    ensure_topics(kafka)
    publisher = Publisher(kafka, "test")
    publisher.publish_durably(topics(kafka).feedback, "00aa", b"one", [])
    assert publisher.stats()["num_acked"] == 1
    assert read_all(kafka, topics(kafka).feedback) == [b"one"]
    publisher.close()


def test_broker_away_events_go_to_the_spool_and_serving_never_waits(tmp_path) -> None:
    publisher = Publisher(AWAY, "test", tmp_path)
    began = time.monotonic()
    for _ in range(2000):
        publisher.publish("topic", "00aa", b"x" * 100, [])
    assert time.monotonic() - began < 1.0
    publisher.publish_durably("topic", "00aa", b"y", [], timeout_s=0.5)
    stats = publisher.stats()
    assert (stats["num_dropped"], stats["num_acked"]) == (0, 0)
    assert stats["buffered_bytes"] <= AWAY.max_buffered_bytes
    publisher.close(0.1)
    spool = Spool(tmp_path, 1 << 30)
    values = []
    while events := spool.read(500, 1 << 20):
        values += [event[2] for event in events]
        spool.confirm()
    assert sorted(values) == [b"x" * 100] * 2000 + [b"y"]


def test_without_a_spool_the_excess_is_dropped_and_counted() -> None:
    publisher = Publisher(AWAY, "test")
    for _ in range(1000):
        publisher.publish("topic", "00aa", b"x" * 100, [])
    stats = publisher.stats()
    assert stats["num_dropped"] == 1000 - AWAY.max_buffered_bytes // 300
    with pytest.raises(SpoolFull, match=r"127\.0\.0\.1:1"):
        publisher.publish_durably("topic", "00aa", b"x" * 100, [], timeout_s=0.1)
    publisher.close(0.1)
    assert publisher.stats()["num_dropped"] == 1001


def test_full_spool_refuses_durable_events(tmp_path) -> None:
    publisher = Publisher(AWAY.model_copy(update={"max_spool_bytes": 500}), "test", tmp_path)
    accepted = 0
    with pytest.raises(SpoolFull):
        for _ in range(20):
            publisher.publish_durably("topic", "00aa", b"x" * 100, [], timeout_s=0.05)
            accepted += 1
    assert accepted == 4
    publisher.close(0.1)


def test_torn_tail_of_a_crash_is_left_out_and_the_rest_is_read_again(tmp_path) -> None:
    spool = Spool(tmp_path, 1 << 20)
    for number in range(3):
        assert spool.append(("t", "k", b"%d" % number, [("h", b"1")]))
    spool.sync()
    spool.close()
    (segment,) = tmp_path.glob("*.spool")
    segment.write_bytes(segment.read_bytes()[:-1])
    again = Spool(tmp_path, 1 << 20)
    assert again.append(("t", "k", b"3", []))
    values = []
    while events := again.read(10, 1 << 20):
        values += [event[2] for event in events]
        again.confirm()
    assert values == [b"0", b"1", b"3"]
    assert (again.num_bytes, list(tmp_path.glob("*.spool"))) == (0, [])


def test_two_publishers_cannot_share_a_spool_folder(tmp_path) -> None:
    first = Spool(tmp_path, 1)
    with pytest.raises(ValueError, match="in use by another process"):
        Spool(tmp_path, 1)
    first.close()


@pytest.mark.kafka
def test_spool_is_sent_in_order_when_the_broker_comes(own_bundled_broker: Broker, tmp_path) -> None:
    broker = own_bundled_broker
    kafka = broker.config(partitions=1)
    publisher = Publisher(kafka, "test", tmp_path / "spool")
    for number in range(500):
        publisher.publish_durably(topics(kafka).feedback, "00aa", b"%d" % number, [], timeout_s=0.01)
    assert publisher.stats()["num_spooled"] >= 490
    broker.start()
    ensure_topics(kafka)
    assert publisher.flush(15)
    publisher.close()
    values = [int(value) for value in read_all(kafka, topics(kafka).feedback)]
    assert list(dict.fromkeys(values)) == list(range(500))
