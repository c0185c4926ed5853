"""A thread that follows the control topic and keeps the highest route table.

Promises: a broker that is away or was emptied never removes the table that is held; it is read again from the start.
"""

import logging
import threading
from collections.abc import Callable

from ingest.config import KafkaConfig
from ingest.events import decode
from ingest.stream import Reader, Record
from ingest.topics import topics
from serving.routes import ROUTES_KEY, RouteTable

log = logging.getLogger("headrace.gateway")


def newest_table(records: list[Record], held: int) -> RouteTable | None:
    """Return the table of the highest revision above `held`, or None; a bad record is skipped and said."""
    newest = None
    for record in records:
        if record.key != ROUTES_KEY:
            continue
        try:
            table = decode(record.value, RouteTable)
        except ValueError as error:
            log.warning("routes=bad at=%s[%d]@%d error=%s", record.topic, record.partition, record.offset, error)
            continue
        if table.revision > held:
            newest, held = table, table.revision
    return newest


def follow_routes(
    kafka: KafkaConfig, apply: Callable[[RouteTable], object], stop: threading.Event, poll_s: float = 0.2
) -> threading.Thread:
    """Start the follower; `apply` is called in its thread for each table that is higher than the one before."""
    thread = threading.Thread(target=_follow, args=(kafka, apply, stop, poll_s), name="follow-routes", daemon=True)
    thread.start()
    return thread


def _follow(kafka: KafkaConfig, apply: Callable[[RouteTable], object], stop: threading.Event, poll_s: float) -> None:
    held = -1
    while not stop.is_set():
        try:
            reader = Reader(kafka, [topics(kafka).control], {}, "gateway-routes")
            try:
                while not stop.is_set():
                    table = newest_table(reader.poll(poll_s), held)
                    if table is not None:
                        held = table.revision
                        apply(table)
            finally:
                reader.close()
        except Exception as error:  # policy: whatever Kafka does, keep the last table and read again from the start
            log.warning("routes=unreadable error=%r held_revision=%d retry_s=1", error, held)
            stop.wait(1.0)
