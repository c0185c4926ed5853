"""A stage that dies at any numbered step replays and doubles nothing; fencing; wiped logs."""

import threading
from collections import Counter

import pytest

from ingest.producer import Publisher
from ingest.stage import Fenced, StageStore, open_reader, run_stage
from ingest.stream import Reader, Record, ensure_topics
from ingest.topics import topics

NUM_EVENTS = 300
SCHEMA = """
CREATE TABLE IF NOT EXISTS total (only_row INTEGER PRIMARY KEY, n INTEGER);
INSERT OR IGNORE INTO total VALUES (1, 0);
"""


class Crash(Exception):
    """Stands for SIGKILL: nothing after it runs."""


class CrashingPublisher(Publisher):
    """Dies around the outbox, once armed."""

    step = ""

    def publish(self, topic, key, value, headers) -> None:
        if self.step == "3 outbox committed, not published":
            raise Crash
        super().publish(topic, key, value, headers)

    def flush(self, timeout_s: float) -> bool:
        done = super().flush(timeout_s)
        if self.step == "3 outbox published, not marked":
            raise Crash
        return done


def copy_stage(kafka, path, step: str = "", until: int = NUM_EVENTS) -> int:
    """Copy feedback to interaction, counting in the same transaction; returns the count, -1 after the crash."""
    store = StageStore(path, SCHEMA)
    names = topics(kafka)
    reader = open_reader(kafka, store, [names.feedback], "test-stage")
    publisher = CrashingPublisher(kafka, "test-stage")
    publisher.step = step
    stop = threading.Event()
    crossed = False

    def handle(connection, records: list[Record]) -> None:
        nonlocal crossed
        crossed = True
        connection.execute("UPDATE total SET n = n + ?", (len(records),))
        for record in records:
            store.enqueue(connection, names.interaction, record.key, record.value, [("ce_id", record.value)])

    def tick(connection, now_s: float, caught_up: bool) -> None:
        if step == "2 handled, not committed" and crossed:
            raise Crash
        if connection.execute("SELECT n FROM total").fetchone()[0] >= until and not store.outbox_size():
            stop.set()

    def on_status(status: dict) -> None:
        if step == "4 marked sent" and crossed:
            raise Crash

    try:
        run_stage(reader, store, publisher, handle, tick, stop, on_status, poll_records=50)
        return store.connection.execute("SELECT n FROM total").fetchone()[0]
    except Crash:
        return -1
    finally:
        publisher.step = ""
        publisher.close(1)
        reader.close()
        store.close()


def publish_feedback(kafka) -> None:
    ensure_topics(kafka)
    publisher = Publisher(kafka, "test")
    for number in range(NUM_EVENTS):
        publisher.publish(topics(kafka).feedback, f"{number:04x}", b"%d" % number, [])
    assert publisher.flush(10)
    publisher.close()


def read_all(kafka, topic: str) -> list[Record]:
    reader, records = Reader(kafka, [topic], {}, "test"), []
    while not reader.caught_up():
        records += reader.poll(0.1)
    reader.close()
    return records


@pytest.mark.kafka
@pytest.mark.parametrize(
    "step",
    [
        "2 handled, not committed",
        "3 outbox committed, not published",
        "3 outbox published, not marked",
        "4 marked sent",
    ],
)
def test_stage_killed_at_a_step_replays_and_doubles_nothing(kafka, tmp_path, step) -> None:
    publish_feedback(kafka)
    assert copy_stage(kafka, tmp_path / "stage.sqlite", step) == -1
    assert copy_stage(kafka, tmp_path / "stage.sqlite") == NUM_EVENTS
    values = Counter(record.headers["ce_id"] for record in read_all(kafka, topics(kafka).interaction))
    assert values.keys() == {str(number) for number in range(NUM_EVENTS)}
    doubled = sum(count - 1 for count in values.values())
    assert (doubled > 0) == (step == "3 outbox published, not marked")  # the same event ids again, which readers drop


def test_older_process_is_fenced_when_a_newer_one_opens(tmp_path) -> None:
    older = StageStore(tmp_path / "s.sqlite", SCHEMA)
    newer = StageStore(tmp_path / "s.sqlite", SCHEMA)
    with pytest.raises(Fenced, match="newer process"), older.transaction():
        pass
    with newer.transaction() as connection:
        connection.execute("UPDATE total SET n = 5")
    assert newer.connection.execute("SELECT n FROM total").fetchone() == (5,)


def test_offsets_and_state_commit_together_or_not_at_all(tmp_path) -> None:
    store = StageStore(tmp_path / "s.sqlite", SCHEMA)
    record = Record("t", 1, 41, "k", b"", {}, 0.0)
    with pytest.raises(ZeroDivisionError), store.transaction() as connection:
        store.save_offsets(connection, [record])
        raise ZeroDivisionError
    assert store.offsets() == {}
    with store.transaction() as connection:
        store.save_offsets(connection, [record])
    assert store.offsets() == {("t", 1): 42}


def test_replaced_log_loses_its_offsets_and_only_its(tmp_path) -> None:
    store = StageStore(tmp_path / "s.sqlite", SCHEMA)
    assert store.check_log_ids({"a": "c/1", "b": "c/2"}) == []
    with store.transaction() as connection:
        store.save_offsets(connection, [Record(topic, 0, 9, "", b"", {}, 0.0) for topic in "ab"])
    assert store.check_log_ids({"a": "c/1", "b": "d/2"}) == ["b"]
    assert store.offsets() == {("a", 0): 10}
    assert store.check_log_ids({"a": "c/1", "b": "d/2"}) == []
