"""What Headrace needs of a broker, on the bundled one and on Apache Kafka; what only a durable one gives; wipes."""

import os
import threading
import time
from collections import Counter

import pytest

from deploy.broker import check_port_free, choose_broker
from ingest.config import KafkaConfig
from ingest.producer import Publisher
from ingest.stage import StageStore, open_reader
from ingest.stream import LogWiped, Reader, Record, ensure_topics, read_latest, read_log_ids, trusts_idempotence
from ingest.topics import topics
from tests.brokers import Broker, find_jars

pytestmark = pytest.mark.kafka


def drain(reader: Reader, timeout_s: float = 20.0) -> list[Record]:
    records, deadline = [], time.monotonic() + timeout_s
    while not reader.caught_up():
        assert time.monotonic() < deadline, f"not caught up: {reader.positions()}"
        records += reader.poll(0.1)
    return records


def publish(kafka: KafkaConfig, topic: str, events: list[tuple[str, bytes]], event_headers=()) -> None:
    publisher = Publisher(kafka, "test")
    for key, value in events:
        publisher.publish(topic, key, value, list(event_headers))
    assert publisher.flush(20)
    publisher.close()


def test_records_come_back_with_keys_headers_and_offsets(broker: Broker) -> None:
    kafka = broker.config()
    ensure_topics(kafka)
    ensure_topics(kafka)  # again: a no-op
    publish(kafka, topics(kafka).inference, [("00aa", b"1"), ("00aa", b"2")], [("ce_id", "ü".encode()), ("empty", b"")])
    reader = Reader(kafka, [topics(kafka).inference], {}, "test")
    records = drain(reader)
    assert [(r.key, r.value, r.offset, r.headers) for r in records] == [
        ("00aa", b"1", 0, {"ce_id": "ü", "empty": ""}),
        ("00aa", b"2", 1, {"ce_id": "ü", "empty": ""}),
    ]
    assert abs(records[0].timestamp_s - time.time()) < 60
    assert (reader.lag(), len(reader.caught_up_partitions())) == (0, kafka.partitions)
    reader.seek(records[1].topic, records[1].partition, 1)
    assert [r.value for r in reader.poll(5.0)] == [b"2"]
    reader.close()


def test_reader_starts_at_the_stored_offsets(broker: Broker) -> None:
    kafka = broker.config(partitions=1)
    ensure_topics(kafka)
    publish(kafka, topics(kafka).feedback, [("k", b"%d" % n) for n in range(10)])
    reader = Reader(kafka, [topics(kafka).feedback], {(topics(kafka).feedback, 0): 7}, "test")
    assert [r.value for r in drain(reader)] == [b"7", b"8", b"9"]
    reader.close()


def test_events_of_one_key_share_a_partition_and_keys_spread(broker: Broker) -> None:
    kafka = broker.config()
    ensure_topics(kafka)
    publish(kafka, topics(kafka).inference, [(f"{n % 64:04x}", b"x") for n in range(640)])
    reader = Reader(kafka, [topics(kafka).inference], {}, "test")
    partitions = {}
    for record in drain(reader):
        assert partitions.setdefault(record.key, record.partition) == record.partition
    assert set(partitions.values()) == set(range(kafka.partitions))
    reader.close()


def test_large_and_binary_events_survive(broker: Broker) -> None:
    kafka = broker.config()
    ensure_topics(kafka)
    value = os.urandom(3 << 20)
    publish(kafka, topics(kafka).inference, [("00aa", value), ("00aa", b"\xff\x00")])
    reader = Reader(kafka, [topics(kafka).inference], {}, "test")
    assert [r.value for r in drain(reader)] == [value, b"\xff\x00"]
    reader.close()


def test_control_topic_is_read_in_full_and_the_last_entry_of_a_key_wins(broker: Broker) -> None:
    kafka = broker.config()
    ensure_topics(kafka)
    assert read_latest(kafka, topics(kafka).control) == {}
    publish(kafka, topics(kafka).control, [("routes", b"1"), ("candidate/v000001", b"a"), ("routes", b"2")])
    latest = read_latest(kafka, topics(kafka).control)
    assert {key: record.value for key, record in latest.items()} == {"routes": b"2", "candidate/v000001": b"a"}


def test_another_partition_count_is_refused_with_what_to_do(apache_broker: Broker) -> None:
    kafka = apache_broker.config(partitions=2)
    ensure_topics(kafka)
    with pytest.raises(ValueError, match=r"has 2 partitions, the configuration says 3.*topic_prefix"):
        ensure_topics(kafka.model_copy(update={"partitions": 3}))


def test_topic_that_the_bundled_broker_made_by_itself_is_made_anew(bundled_broker: Broker) -> None:
    kafka = bundled_broker.config(partitions=2)
    ensure_topics(kafka)
    more = kafka.model_copy(update={"partitions": 3})
    ensure_topics(more)
    reader = Reader(more, [topics(more).feedback], {}, "test")
    drain(reader)
    assert set(reader.positions()) == {f"{topics(more).feedback}[{p}]" for p in range(3)}
    reader.close()


def test_probe_trusts_idempotence_of_apache_kafka_only(broker: Broker) -> None:
    assert trusts_idempotence(broker.config()) == broker.choice.durable


def test_position_beyond_the_end_starts_again_instead_of_silence(apache_broker: Broker, caplog) -> None:
    kafka = apache_broker.config(partitions=1)
    ensure_topics(kafka)
    publish(kafka, topics(kafka).feedback, [("k", b"1"), ("k", b"2")])
    reader = Reader(kafka, [topics(kafka).feedback], {(topics(kafka).feedback, 0): 1000}, "test")
    assert [r.value for r in drain(reader)] == [b"1", b"2"]
    assert "offset_lost cause=log_was_cut" in caplog.text
    reader.close()


def test_broker_killed_under_load_loses_nothing_acknowledged_and_reader_resumes(
    apache_broker: Broker, tmp_path
) -> None:
    kafka = apache_broker.config(linger_ms=2)
    ensure_topics(kafka)
    publisher = Publisher(kafka, "test", tmp_path)
    reader = Reader(kafka, [topics(kafka).feedback], {}, "test")
    stop, num_sent = threading.Event(), 0

    def restart() -> None:
        time.sleep(1.0)
        apache_broker.kill()
        time.sleep(1.0)
        apache_broker.start()
        time.sleep(1.0)
        stop.set()

    killer = threading.Thread(target=restart)
    killer.start()
    seen: Counter[bytes] = Counter()
    while not stop.is_set():
        began = time.monotonic()
        publisher.publish(topics(kafka).feedback, f"{num_sent:04x}", b"%d" % num_sent, [])
        assert time.monotonic() - began < 0.5  # never waits for the broker
        num_sent += 1
        time.sleep(0.001)
        if num_sent % 20 == 0:
            seen.update(r.value for r in reader.poll(0.0))
    killer.join()
    assert publisher.flush(30)
    assert publisher.stats()["num_dropped"] == 0
    seen.update(r.value for r in drain(reader, 30.0))
    publisher.close()
    reader.close()
    assert seen.keys() == {b"%d" % n for n in range(num_sent)}
    check = Reader(kafka, [topics(kafka).feedback], {}, "check")
    assert Counter(r.value for r in drain(check)) == seen  # the reader went on exactly where it was
    check.close()


def test_log_of_a_restarted_memory_only_broker_is_found_wiped(own_bundled_broker: Broker, tmp_path) -> None:
    broker = own_bundled_broker
    broker.start()
    kafka = broker.config(partitions=1)
    name = topics(kafka).feedback
    ensure_topics(kafka)
    publish(kafka, name, [("k", b"%d" % n) for n in range(5)])
    store = StageStore(tmp_path / "s.sqlite", "")
    reader = open_reader(kafka, store, [name], "test")
    with store.transaction() as connection:
        store.save_offsets(connection, drain(reader))
    broker.kill()
    broker.start()
    with pytest.raises(LogWiped, match=r"does not exist|replaced"):
        for _ in range(60):
            reader.poll(0.2)
    reader.close()
    ensure_topics(kafka)
    publish(kafka, name, [("k", b"new")])
    again = open_reader(kafka, store, [name], "test")
    assert store.offsets() == {}
    assert [r.value for r in drain(again)] == [b"new"]
    assert again.log_ids() == read_log_ids(kafka, [name])
    again.close()


def test_choice_of_broker_says_what_it_means(tmp_path) -> None:
    bundled = choose_broker(find_jars(), "bundled")
    assert not bundled.durable
    assert "MEMORY ONLY" in bundled.meaning
    with pytest.raises(ValueError, match=r"no Apache Kafka jars in .*make kafka"):
        choose_broker(tmp_path)


def test_taken_port_is_a_clear_error(bundled_broker: Broker) -> None:
    with pytest.raises(ValueError, match=rf"port {bundled_broker.port} is taken on 127\.0\.0\.1"):
        check_port_free(bundled_broker.port)
