"""The archiver process: every record of every data topic into Parquet. `python -m ingest.archiver CONFIG`

Takes inference, feedback, interaction, sample and dead letters; emits segments (ingest.segments). Order per segment:
    1. poll and buffer   2. write the segment durably   3. only then count it archived, in memory
There is no other state: a restart goes on after the last offset that a segment's name tells, so nothing is lost, and
nothing is archived twice within one log.
"""

import argparse
import logging
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa

from ingest.config import IngestConfig, KafkaConfig, RunConfig, load_table
from ingest.segments import (
    KINDS,
    clean_folder,
    log_folder,
    merge_segments,
    next_offset,
    segment_row,
    segment_schema,
    write_segment,
)
from ingest.status import write_status
from ingest.stream import LogWiped, Reader, Record, ensure_topics, read_log_ids
from ingest.topics import num_partitions, topics

logger = logging.getLogger("ingest.archiver")

_MAX_BUFFERED_BYTES = 64 << 20


class Archiver:
    """Buffers of rows not yet durable, and the folders that they go to."""

    def __init__(self, archive: Path, kafka: KafkaConfig, ingest: IngestConfig, log_ids: dict[str, str]) -> None:
        self._ingest = ingest
        self._kinds = {getattr(topics(kafka), name): kind for name, kind in KINDS.items()}
        self._schemas = {topic: segment_schema(kind) for topic, kind in self._kinds.items()}
        self._folders = {topic: log_folder(archive, topic, log_ids[topic]) for topic in self._kinds}
        self._buffers: dict[tuple[str, int], list[Record]] = {}
        self._began: dict[tuple[str, int], float] = {}
        self._num_buffered_bytes = 0
        self.num_archived = dict.fromkeys(self._kinds, 0)  # rows since this process began
        self.offsets: dict[tuple[str, int], int] = {}
        for topic, folder in self._folders.items():
            others = [entry.name for entry in folder.parent.glob("*") if entry.name != folder.name]
            if others and not folder.exists():
                logger.error("log_wiped topic=%s action=new_folder folder=%s others=%s", topic, folder.name, others)
            for partition in range(num_partitions(kafka, topic)):
                clean_folder(folder / str(partition))
                self.offsets[topic, partition] = next_offset(folder / str(partition))

    @property
    def topics(self) -> list[str]:
        return list(self._kinds)

    @property
    def num_buffered(self) -> int:
        """Rows that are not durable yet."""
        return sum(map(len, self._buffers.values()))

    def append(self, records: list[Record], now_s: float) -> None:
        for record in records:
            tp = (record.topic, record.partition)
            self._buffers.setdefault(tp, []).append(record)
            self._began.setdefault(tp, now_s)
            self._num_buffered_bytes += len(record.value)

    def cut(self, now_s: float, everything: bool = False) -> None:
        """Write the buffers that are full or old enough, or all."""
        everything = everything or self._num_buffered_bytes > _MAX_BUFFERED_BYTES
        for tp, records in list(self._buffers.items()):
            old = now_s - self._began[tp] >= self._ingest.archive_interval_s
            if everything or old or len(records) >= self._ingest.archive_rows:
                self._write(tp, records)

    def _write(self, tp: tuple[str, int], records: list[Record]) -> None:
        topic, partition = tp
        folder = self._folders[topic] / str(partition)
        rows = [segment_row(record, self._kinds[topic]) for record in records]
        table = pa.Table.from_pylist(rows, schema=self._schemas[topic])
        path = write_segment(folder, table, records[0].offset, records[-1].offset)
        del self._buffers[tp], self._began[tp]
        self._num_buffered_bytes -= sum(len(record.value) for record in records)
        self.num_archived[topic] += len(records)
        self.offsets[tp] = records[-1].offset + 1
        merge_segments(folder, self._ingest.archive_rows)
        logger.info("segment_written topic=%s partition=%d rows=%d file=%s", topic, partition, len(rows), path.name)


def archive(reader: Reader, archiver: Archiver, stop: threading.Event, on_status: Any) -> None:
    """Archive until stop is set, then write what is buffered."""
    reported = 0.0
    while not stop.is_set():
        records = reader.poll(0.2, 2000)
        now_s = time.time()
        archiver.append(records, now_s)
        archiver.cut(now_s)
        if now_s - reported >= 1.0:
            reported = now_s
            on_status(now_s)
    archiver.cut(time.time(), everything=True)
    on_status(time.time())


def run(config: Path, stop: threading.Event) -> None:
    """Archive until stop is set; ValueError on bad configuration or without a broker."""
    state_dir = load_table(config, "run", RunConfig).state_dir
    kafka = load_table(config, "kafka", KafkaConfig)
    ingest = load_table(config, "ingest", IngestConfig)
    ensure_topics(kafka)
    names = [getattr(topics(kafka), name) for name in KINDS]
    archiver = Archiver(state_dir / "archive", kafka, ingest, read_log_ids(kafka, names))
    reader = Reader(kafka, names, archiver.offsets, "headrace-archiver")

    def report(now_s: float) -> None:
        status = {
            "at": now_s,
            "lag": reader.lag(),
            "caught_up": reader.caught_up(),
            "archived": archiver.num_archived,
            "buffered": archiver.num_buffered,
            "offsets": {f"{topic}[{partition}]": offset for (topic, partition), offset in archiver.offsets.items()},
            "positions": reader.positions(),
        }
        write_status(state_dir, "archiver", status)

    logger.info("archiver_started folder=%s", state_dir / "archive")
    try:
        archive(reader, archiver, stop, report)
    finally:
        reader.close()
    logger.info("archiver_stopped")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ingest.archiver", description="Archive all events as Parquet.")
    parser.add_argument("config", type=Path)
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        run(arguments.config, stop)
    except ValueError as error:
        print(f"archiver: {error}", file=sys.stderr)
        return 2
    except LogWiped as error:
        logger.error("log_wiped action=restart %s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
