"""Parquet segments of the archive: <state>/archive/<topic>/<log>/<partition>/<first offset>-<last offset>.parquet

Owns the layout. <log> is 12 hex digits of the log's identity, so a log that was wiped starts a folder of its own and
names never collide. A segment is written as temporary, fsync, rename, fsync of the folder; what its name says is in it.
Rows: topic, partition, offset, timestamp_s, key, event_key, headers (JSON), raw (the value's bytes, where it has no
typed columns or cannot be decoded), then the columns of the topic's struct.
"""

import hashlib
import os
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from ingest.arrow import arrow_schema, to_row
from ingest.events import Feedback, Inference, Interaction, decode
from ingest.stream import Record

KINDS: dict[str, type[msgspec.Struct] | None] = {
    "inference": Inference,
    "feedback": Feedback,
    "interaction": Interaction,
    "sample": None,  # its struct belongs to rewards, downstream of here: kept as it came
    "dlq": None,
}
_RECORD_FIELDS = [
    pa.field("topic", pa.string()),
    pa.field("partition", pa.int32()),
    pa.field("offset", pa.int64()),
    pa.field("timestamp_s", pa.float64()),
    pa.field("key", pa.string()),
    pa.field("event_key", pa.string()),
    pa.field("headers", pa.string()),
    pa.field("raw", pa.binary()),
]


def segment_schema(kind: type[msgspec.Struct] | None) -> pa.Schema:
    """Return the columns of a topic's segments."""
    return pa.schema([*_RECORD_FIELDS, *(arrow_schema(kind) if kind else [])])


def log_folder(archive: Path, topic: str, log_id: str) -> Path:
    return archive / topic / hashlib.sha256(log_id.encode()).hexdigest()[:12]


def segment_row(record: Record, kind: type[msgspec.Struct] | None) -> dict[str, Any]:
    """Return a record as a row; one that its struct does not fit keeps its bytes."""
    source, event_id = record.headers.get("ce_source", ""), record.headers.get("ce_id", "")
    row: dict[str, Any] = {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp_s": record.timestamp_s,
        "key": record.key,
        "event_key": f"{source}/{event_id}" if event_id else "",
        "headers": msgspec.json.encode(record.headers).decode(),
        "raw": None,
    }
    if kind is not None:
        try:
            return row | to_row(decode(record.value, kind))
        except (ValueError, OverflowError):
            pass  # not decodable: archived as it came; the joiner quarantines it
    return row | {"raw": record.value}


def offsets_of(segment: Path) -> tuple[int, int]:
    """Return (first, last) offset of a segment."""
    first, last = segment.stem.split("-")
    return int(first), int(last)


def next_offset(folder: Path) -> int:
    """Return the offset after the last one in a partition's folder."""
    return max((offsets_of(segment)[1] + 1 for segment in folder.glob("*.parquet")), default=0)


def write_segment(folder: Path, table: pa.Table, first: int, last: int) -> Path:
    """Write one segment durably: temporary, fsync, rename, fsync of the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{first:012d}-{last:012d}.parquet"
    temporary = folder / f".{path.name}.tmp"
    with temporary.open("wb") as file:
        pq.write_table(table, file, compression="zstd")
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    folder_fd = os.open(folder, os.O_RDONLY)
    os.fsync(folder_fd)
    os.close(folder_fd)
    return path


def merge_segments(folder: Path, max_rows: int, num_small: int = 16) -> int:
    """Merge the newest small segments once there are num_small; returns how many files went.

    The merged segment is durable before its parts go. A crash between leaves rows twice, which clean_folder removes.
    """
    small: list[Path] = []
    num_rows = 0
    for segment in sorted(folder.glob("*.parquet"), reverse=True):
        first, last = offsets_of(segment)
        num_rows += last - first + 1
        if last - first + 1 >= max_rows // 2 or num_rows > max_rows:
            break
        small.insert(0, segment)
    if len(small) < num_small:
        return 0
    table = pa.concat_tables([pq.read_table(segment) for segment in small], promote_options="default")
    write_segment(folder, table, offsets_of(small[0])[0], offsets_of(small[-1])[1])
    for segment in small:
        segment.unlink()
    return len(small) - 1


def clean_folder(folder: Path) -> None:
    """Remove what a crash left: temporaries, and parts of a merged segment."""
    for temporary in folder.glob(".*.tmp"):
        temporary.unlink()
    reach = -1
    for segment in sorted(folder.glob("*.parquet"), key=lambda s: (offsets_of(s)[0], -offsets_of(s)[1])):
        _, last = offsets_of(segment)
        if last <= reach:
            segment.unlink()
        reach = max(reach, last)
