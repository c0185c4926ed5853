"""The only producer of events (contract): bounded memory, then a disk spool, then a counted drop; never blocks serving.

Order of an event: memory queue -> broker (acks=all). When the broker is away, or memory is full, what waits in memory
moves to the spool and new events follow it there, so order holds; a crash loses neither. The spool is sent when the
broker is back. A timeout is ambiguous, so the same event goes out again, same event id: readers drop the second.
Idempotence is used only where the capability probe trusts the broker: the bundled one lost acknowledged events with it.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from kafka import KafkaProducer
from kafka.errors import KafkaError, KafkaTimeoutError, MessageSizeTooLargeError, RecordListTooLargeError

from ingest.admin import MAX_RECORD_BYTES, connection_options, trusts_idempotence
from ingest.config import KafkaConfig
from ingest.spool import Item, Spool

logger = logging.getLogger("ingest.producer")

_BATCH_EVENTS = 2000
_BATCH_BYTES = 4 << 20
_SILENT_S = 1.0  # no acknowledgement for so long: the broker counts as away and new events go to the spool
_DELIVERY_S = 8.0  # then the batch is taken back and sent again
_RETRY_S = 0.2


class SpoolFull(Exception):
    """Neither the broker nor the spool can take the event."""


class Publisher:
    """Publishes from any thread; one background thread talks to the broker."""

    def __init__(self, kafka: KafkaConfig, source: str, spool_dir: Path | None = None) -> None:
        self._kafka = kafka
        self._source = source
        self._spool = Spool(spool_dir, kafka.max_spool_bytes) if spool_dir else None
        self._changed = threading.Condition()  # guards everything below but the producer
        self._queue: deque[Item] = deque()
        self._in_flight: list[Item] = []
        self._buffered_bytes = 0
        self._away = False
        self._hurry = False
        self._stopping = False  # no new events
        self._abandon = False  # stop sending what the broker does not take
        self._counts = {"num_published": 0, "num_acked": 0, "num_spooled": 0, "num_dropped": 0}
        self._producer: Any = None
        self._thread = threading.Thread(target=self._work, name=f"publisher-{source}", daemon=True)
        self._thread.start()

    def publish(self, topic: str, key: str, value: bytes, headers: list[tuple[str, bytes]]) -> None:
        """Hand an event over; never waits for the broker. It may be dropped, counted in stats()."""
        with self._changed:
            self._accept(Item((topic, key, value, headers), durable=False))

    def publish_durably(
        self, topic: str, key: str, value: bytes, headers: list[tuple[str, bytes]], timeout_s: float = 5.0
    ) -> None:
        """Return once the broker acknowledged the event or it is fsynced in the spool; SpoolFull if neither can be."""
        if len(value) > MAX_RECORD_BYTES:
            raise ValueError(f"an event of {len(value)} bytes for {topic} is above the limit, {MAX_RECORD_BYTES}")
        item = Item((topic, key, value, headers), durable=True)
        assert item.done is not None
        with self._changed:
            self._accept(item)
        if item.place == "memory" and not item.done.wait(timeout_s):
            with self._changed:
                if item.place == "memory":
                    self._append_to_spool(item)
        with self._changed:
            if item.place == "spool" and self._spool is not None:
                self._spool.sync()
            if item.place not in ("spool", "broker"):
                raise SpoolFull(f"no answer from the broker at {self._kafka.bootstrap_servers}, and no room in a spool")

    def _accept(self, item: Item) -> None:
        """Put an event in memory, else in the spool, else drop it."""
        self._counts["num_published"] += 1
        if len(item.event[2]) > MAX_RECORD_BYTES or self._stopping:
            return self._drop(item, "too_large" if not self._stopping else "closed")
        full = self._buffered_bytes + item.num_bytes > self._kafka.max_buffered_bytes
        if self._spool is not None and (full or self._away or self._spool.num_bytes):
            self._move_queue_to_spool()
            if self._append_to_spool(item):
                return None
        if full:
            return self._drop(item, "no_room")
        self._queue.append(item)
        self._buffered_bytes += item.num_bytes
        self._changed.notify_all()

    def _append_to_spool(self, item: Item) -> bool:
        if self._spool is None or not self._spool.append(item.event):
            return False
        item.place = "spool"
        self._counts["num_spooled"] += 1
        self._changed.notify_all()
        return True

    def _move_queue_to_spool(self) -> None:
        """What waits in memory is older: it goes to the spool before newer events do."""
        if not self._queue or self._spool is None:
            return
        moved = []
        while self._queue and (self._queue[0].place == "spool" or self._append_to_spool(self._queue[0])):
            moved.append(self._queue.popleft())
            self._buffered_bytes -= moved[-1].num_bytes
        if any(item.done for item in moved):
            self._spool.sync()
        for item in moved:
            if item.done:
                item.done.set()

    def _drop(self, item: Item, reason: str) -> None:
        item.place = "dropped"
        if item.done:
            item.done.set()
        self._counts["num_dropped"] += 1
        total = self._counts["num_dropped"]
        if total in (1, 10, 100) or total % 1000 == 0:
            logger.error(
                "event_dropped reason=%s source=%s topic=%s total=%d", reason, self._source, item.event[0], total
            )

    # The background thread.

    def _work(self) -> None:
        while True:
            self._await_work()
            with self._changed:
                if self._stopping:
                    return
                batch, from_spool = self._take_batch()
            while batch := self._send(batch, from_spool):
                if self._abandon:
                    return
                time.sleep(_RETRY_S)
            with self._changed:
                if from_spool and self._spool is not None:
                    self._spool.confirm()
                self._in_flight = []
                self._away = False
                self._changed.notify_all()

    def _await_work(self) -> None:
        """Wait for an event, then linger for more of them, so that batches are not tiny."""
        with self._changed:
            while not (self._queue or self._spool_bytes() or self._stopping):
                self._changed.wait()
            deadline = time.monotonic() + self._kafka.linger_ms / 1000
            while not self._hurry and not self._stopping and len(self._queue) < _BATCH_EVENTS:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    break
                self._changed.wait(remaining)

    def _take_batch(self) -> tuple[list[Item], bool]:
        """Take the oldest events: memory first, which is older than the spool's; then the spool."""
        num_bytes = 0
        while self._queue and len(self._in_flight) < _BATCH_EVENTS and num_bytes < _BATCH_BYTES:
            item = self._queue.popleft()
            if item.place == "memory":
                self._in_flight.append(item)
                num_bytes += item.num_bytes
            else:  # its publisher gave up waiting and put it in the spool
                self._buffered_bytes -= item.num_bytes
        if self._in_flight or self._spool is None:
            return self._in_flight, False
        return [Item(event, durable=False) for event in self._spool.read(_BATCH_EVENTS, _BATCH_BYTES)], True

    def _send(self, batch: list[Item], from_spool: bool) -> list[Item]:
        """Send a batch and wait for it; returns what is still to be sent."""
        try:
            if self._producer is None:
                self._producer = self._connect()
            futures = []
            for item in batch:
                topic, key, value, headers = item.event
                futures.append(self._producer.send(topic, key=key.encode(), value=value, headers=headers))
            self._flush_producer(self._producer)
        except (KafkaError, OSError, ValueError) as error:
            self._set_away(error)
            self._close_producer()
            return batch
        remaining = []
        error: BaseException | None = None
        with self._changed:
            for item, future in zip(batch, futures, strict=True):
                refused = isinstance(future.exception, MessageSizeTooLargeError | RecordListTooLargeError)
                if future.succeeded() or refused:
                    self._settle(item, from_spool, "refused_by_broker" if refused else "")
                else:
                    remaining.append(item)
                    error = future.exception or error
        if remaining:
            self._set_away(error)
            self._close_producer()
        return remaining

    def _settle(self, item: Item, from_spool: bool, refused: str) -> None:
        """Account for an event that needs no further sending."""
        if not from_spool:
            self._buffered_bytes -= item.num_bytes
        if refused:
            return self._drop(item, refused)
        self._counts["num_acked"] += 1
        if item.place == "memory":
            item.place = "broker"
        if item.done:
            item.done.set()

    def _connect(self) -> Any:
        return KafkaProducer(
            **connection_options(self._kafka, f"headrace-{self._source}"),
            acks="all",
            enable_idempotence=trusts_idempotence(self._kafka, timeout_s=1.0),
            allow_auto_create_topics=False,
            batch_size=1 << 18,
            linger_ms=1000,  # a batch is cut by our flush, not by the clock
            max_request_size=MAX_RECORD_BYTES + (1 << 16),
            max_block_ms=1000,
            request_timeout_ms=4000,
            delivery_timeout_ms=int(_DELIVERY_S * 1000),
        )

    def _flush_producer(self, producer: Any) -> None:
        """Wait for the batch; after a second of silence the broker counts as away."""
        try:
            producer.flush(_SILENT_S)
        except KafkaTimeoutError as error:
            self._set_away(error)
            with contextlib.suppress(KafkaTimeoutError):
                producer.flush(_DELIVERY_S + 1.0)

    def _set_away(self, error: BaseException | None) -> None:
        with self._changed:
            if not self._away:
                logger.warning(
                    "broker_away source=%s servers=%s error=%r", self._source, self._kafka.bootstrap_servers, error
                )
            self._away = True
            self._move_queue_to_spool()

    def _close_producer(self) -> None:
        if self._producer is not None:
            # close() alone raises before it closes anything when records are pending, and they would still be sent.
            self._producer._sender.force_close()
            with contextlib.suppress(KafkaError, OSError):
                self._producer.close(timeout=1.0)
            self._producer = None

    # Seen from outside.

    def _spool_bytes(self) -> int:
        return self._spool.num_bytes if self._spool is not None else 0

    def flush(self, timeout_s: float) -> bool:
        """Wait until all handed-over events are at the broker; False if some are still in memory or in the spool."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._hurry = True
            self._changed.notify_all()
            try:
                while self._queue or self._in_flight or self._spool_bytes():
                    if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                        return False
                return True
            finally:
                self._hurry = False

    def stats(self) -> dict[str, int]:
        with self._changed:
            return {**self._counts, "buffered_bytes": self._buffered_bytes, "spool_bytes": self._spool_bytes()}

    def close(self, timeout_s: float = 5.0) -> None:
        """Flush; what the broker did not take in time goes to the spool, synced, or is dropped and counted."""
        self.flush(timeout_s)
        with self._changed:
            self._stopping = True
            self._abandon = True
            left = [item for item in (*self._in_flight, *self._queue) if item.place == "memory"]
            self._queue.clear()
            self._changed.notify_all()
        self._thread.join(timeout=max(2.0, timeout_s))  # it may be waiting for a broker that is away
        with self._changed:
            for item in left:
                if item.place == "memory" and not self._append_to_spool(item):
                    self._drop(item, "closed")
            if self._spool is not None:
                self._spool.sync()
                self._spool.close()
        self._close_producer()
