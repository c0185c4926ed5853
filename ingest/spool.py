"""The disk spool of a Publisher: an append-only queue of records in segment files, read again after a crash.

A segment holds records: length (u32), crc32 (u32), msgpack [topic, key, value, headers]. A torn tail ends its segment.
A segment is deleted once all its records are confirmed; after a crash the ones not deleted are sent again under the
same event ids. One process per folder, held by a file lock.
"""

import fcntl
import os
import struct
import threading
import zlib
from pathlib import Path
from typing import BinaryIO

import msgspec

_HEAD = struct.Struct("<II")
_SEGMENT_BYTES = 4 << 20
_OVERHEAD_BYTES = 200  # of one event in memory, beside its payload

Event = tuple[str, str, bytes, list[tuple[str, bytes]]]  # topic, key, value, headers


class Item:
    """One event in memory. done: it is acknowledged, or synced in the spool, or dropped."""

    __slots__ = ("done", "event", "num_bytes", "place")

    def __init__(self, event: Event, durable: bool) -> None:
        self.event = event
        self.num_bytes = len(event[2]) + sum(len(value) for _, value in event[3]) + _OVERHEAD_BYTES
        self.place = "memory"  # memory | spool | broker | dropped
        self.done = threading.Event() if durable else None


class Spool:
    """A bounded queue of events on disk. Not thread-safe: its Publisher holds a lock."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._max_bytes = max_bytes
        self._lock = (folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(
                f"spool {folder} is in use by another process; give each publisher its own folder"
            ) from error
        self._segments: list[tuple[Path, int]] = [
            (path, path.stat().st_size) for path in sorted(folder.glob("*.spool"))
        ]
        self._next_name = int(self._segments[-1][0].stem) + 1 if self._segments else 1
        self._writer: BinaryIO | None = None
        self._read_at = 0  # byte position in the first segment
        self._unconfirmed_at = 0  # where the batch last read ends

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self._segments) - self._read_at

    def append(self, event: Event) -> bool:
        """Append one event, not yet synced; False when the spool is full."""
        payload = msgspec.msgpack.encode(event)
        size = _HEAD.size + len(payload)
        if self.num_bytes + size > self._max_bytes:
            return False
        if self._writer is None or self._segments[-1][1] + size > _SEGMENT_BYTES:
            self._open_segment()
        assert self._writer is not None
        self._writer.write(_HEAD.pack(len(payload), zlib.crc32(payload)) + payload)
        path, old_size = self._segments[-1]
        self._segments[-1] = (path, old_size + size)
        return True

    def sync(self) -> None:
        """Make everything appended durable (older segments were synced when they were closed)."""
        if self._writer is not None:
            os.fsync(self._writer.fileno())

    def _open_segment(self) -> None:
        self._close_writer()
        path = self._folder / f"{self._next_name:012d}.spool"
        self._next_name += 1
        self._writer = path.open("ab", buffering=0)
        self._segments.append((path, 0))
        folder_fd = os.open(self._folder, os.O_RDONLY)
        os.fsync(folder_fd)
        os.close(folder_fd)

    def _close_writer(self) -> None:
        if self._writer is not None:
            os.fsync(self._writer.fileno())
            self._writer.close()
            self._writer = None

    def read(self, max_events: int, max_bytes: int) -> list[Event]:
        """Return the oldest unconfirmed events; the same ones again until confirm() is called."""
        events: list[Event] = []
        while self._segments and not events:
            path, size = self._segments[0]
            events, end = _read_segment(path, self._read_at, size, max_events, max_bytes)
            self._unconfirmed_at = end
            if not events:
                self._drop_segment()
        return events

    def confirm(self) -> None:
        """The events last read are at the broker."""
        self._read_at = self._unconfirmed_at
        if self._segments and self._read_at >= self._segments[0][1]:
            self._drop_segment()

    def _drop_segment(self) -> None:
        path, _ = self._segments.pop(0)
        if not self._segments:
            self._close_writer()
        path.unlink(missing_ok=True)
        self._read_at = self._unconfirmed_at = 0

    def close(self) -> None:
        self._close_writer()
        self._lock.close()


def _read_segment(path: Path, start: int, end: int, max_events: int, max_bytes: int) -> tuple[list[Event], int]:
    """Read whole records of [start, end); a torn or corrupt record ends the segment."""
    events: list[Event] = []
    at = start
    with path.open("rb") as file:
        file.seek(start)
        while at < end and len(events) < max_events and at - start < max_bytes:
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size:
                return events, end
            length, checksum = _HEAD.unpack(head)
            payload = file.read(length)
            if len(payload) < length or zlib.crc32(payload) != checksum:
                return events, end
            events.append(msgspec.msgpack.decode(payload, type=Event))
            at += _HEAD.size + length
    return events, at
