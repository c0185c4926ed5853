"""The joiner process: inference and feedback in, interactions and dead letters out. `python -m ingest.joiner CONFIG`

Owns <state>/ingest/joiner.sqlite. Decodes records, feeds the join, queues its results in the outbox, in the one
transaction per poll of ingest.stage. An interaction's event id is <inference id>@<revision>: a replay repeats it.
"""

import argparse
import logging
import signal
import sqlite3
import sys
import threading
from pathlib import Path
from typing import Any

from ingest.config import IngestConfig, KafkaConfig, RunConfig, load_table
from ingest.events import FEEDBACK_TYPE, INFERENCE_TYPE, INTERACTION_TYPE, Feedback, Inference, decode
from ingest.join import Arrival, Join, Windows
from ingest.producer import Publisher
from ingest.quarantine import dead_letter_headers, identity_of
from ingest.stage import StageStore, open_reader, run_stage
from ingest.state import SCHEMA, JoinState, read_counts
from ingest.status import write_status
from ingest.stream import LogWiped, Record
from ingest.topics import headers, topics

logger = logging.getLogger("ingest.joiner")

SOURCE = "headrace/joiner"
_EVICT_INTERVAL_S = 30.0


class Joiner:
    """Glue between run_stage and the join; holds nothing that must survive."""

    def __init__(self, kafka: KafkaConfig, ingest: IngestConfig, store: StageStore) -> None:
        self._store = store
        self._topics = topics(kafka)
        self._partitions = kafka.partitions
        self._windows = Windows(
            ingest.observation_window_s, ingest.late_window_s, ingest.orphan_window_s, ingest.max_future_s
        )
        self._evicted_at = 0.0

    def step(
        self, connection: sqlite3.Connection, records: list[Record], caught_up: set[tuple[str, int]], now_s: float
    ) -> None:
        """Feed one poll's records to the join, advance event time, queue what the join emits; one transaction."""
        join = Join(JoinState(connection), self._windows, (self._topics.inference, self._topics.feedback))
        for record in records:
            event_id = record.headers.get("ce_id", "")
            event_key = f"{record.headers.get('ce_source', '')}/{event_id}" if event_id else ""
            arrival = Arrival(record.topic, record.partition, record.offset, record.key, event_key, record.value)
            feed = self._feed_inference if record.topic == self._topics.inference else self._feed_feedback
            feed(join, arrival, record, now_s)
        join.advance(caught_up, self._partitions, now_s)
        if now_s - self._evicted_at >= _EVICT_INTERVAL_S:
            join.evict(self._partitions, now_s)
            self._evicted_at = now_s
        self._queue(connection, join, now_s)

    def _feed_inference(self, join: Join, arrival: Arrival, record: Record, now_s: float) -> None:
        try:
            _check_type(record, INFERENCE_TYPE)
            join.on_inference(arrival, decode(record.value, Inference), now_s)
        except (ValueError, OverflowError) as error:
            join.quarantine(arrival, f"malformed: {error}")

    def _feed_feedback(self, join: Join, arrival: Arrival, record: Record, now_s: float) -> None:
        try:
            _check_type(record, FEEDBACK_TYPE)
            join.on_feedback(arrival, decode(record.value, Feedback), now_s)
        except (ValueError, OverflowError) as error:
            join.malformed_feedback(arrival, *identity_of(record.value), f"malformed: {error}", now_s)

    def _queue(self, connection: sqlite3.Connection, join: Join, now_s: float) -> None:
        emissions, quarantined = join.take()
        for emission in emissions:
            event_id = f"{emission.inference_id}@{emission.revision}"
            event_headers = headers(INTERACTION_TYPE, event_id, SOURCE, now_s)
            self._store.enqueue(connection, self._topics.interaction, emission.key, emission.value, event_headers)
        for letter in quarantined:
            logger.warning("quarantined record=%s reason=%r", letter.place, letter.reason[:300])
            event_headers = dead_letter_headers(letter.place, letter.reason, letter.value, now_s)
            self._store.enqueue(connection, self._topics.dlq, letter.key, letter.value, event_headers)

    def status(self) -> dict[str, Any]:
        """Return counts for the status file and the reconciliation."""
        counts = read_counts(self._store.connection)
        feedback = {name.removeprefix("feedback_"): n for name, n in counts.items() if name.startswith("feedback_")}
        names = ("inferences", "joined", "corrections", "duplicates", "quarantined", "open_windows")
        return {**{name: counts.get(name, 0) for name in names}, "feedback": feedback}


def _check_type(record: Record, expected: str) -> None:
    told = record.headers.get("ce_type", expected)
    if told != expected:
        raise ValueError(f"ce_type is {told!r}, this topic holds {expected!r}")


def run(config: Path, stop: threading.Event) -> None:
    """Join until stop is set; ValueError on bad configuration or without a broker."""
    run_config = load_table(config, "run", RunConfig)
    kafka = load_table(config, "kafka", KafkaConfig)
    ingest = load_table(config, "ingest", IngestConfig)
    store = StageStore(run_config.state_dir / "ingest" / "joiner.sqlite", SCHEMA)
    joiner = Joiner(kafka, ingest, store)
    names = topics(kafka)
    reader = open_reader(kafka, store, [names.inference, names.feedback], "headrace-joiner")
    publisher = Publisher(kafka, "joiner")

    def report(status: dict[str, Any]) -> None:
        write_status(run_config.state_dir, "joiner", {**status, **joiner.status(), "publisher": publisher.stats()})

    polled: list[Record] = []  # handle() and tick() are one step here, and only tick() knows the time

    def handle(_: sqlite3.Connection, records: list[Record]) -> None:
        polled.extend(records)

    def tick(connection: sqlite3.Connection, now_s: float, _: bool) -> None:
        joiner.step(connection, polled, reader.caught_up_partitions(), now_s)
        polled.clear()

    logger.info("joiner_started epoch=%d offsets=%d", store.epoch, len(store.offsets()))
    try:
        run_stage(
            reader,
            store,
            publisher,
            handle,
            tick,
            stop,
            report,
            ingest.poll_records,
        )
    finally:
        publisher.close(2.0)
        reader.close()
        store.close()
    logger.info("joiner_stopped")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ingest.joiner", description="Join feedback to inferences.")
    parser.add_argument("config", type=Path)
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        run(arguments.config, stop)
    except ValueError as error:
        print(f"joiner: {error}", file=sys.stderr)
        return 2
    except LogWiped as error:
        logger.error("log_wiped action=restart %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
