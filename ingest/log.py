"""Reads of what ingest keeps (contract): the Parquet archive through DuckDB, and the joiner's feedback dispositions.

query() sees the views inference, feedback, interaction, sample, dlq: one row per event, however often it was sent or
archived; and all_<name>, a row per Kafka record. Columns of the struct, and topic, partition, "offset", event_key, raw.
sample and dlq keep the value as text in the column value (JSON functions work on it).
"""

import sqlite3
import time
from pathlib import Path
from typing import Any

import duckdb

from ingest.segments import KINDS, segment_schema

# What makes two archived records the same event.
_IDENTITY = {
    "inference": "inference_id",
    "feedback": "tenant, feedback_id, revision, op",
    "interaction": "inference.inference_id, revision",
    "sample": "coalesce(sample_id, event_key)",
    "dlq": "event_key",
}
_COLUMNS = {
    "sample": "decode(raw) AS value, decode(raw)->>'$.sample_id' AS sample_id, "
    "decode(raw)->>'$.inference_id' AS inference_id, CAST(decode(raw)->>'$.reward' AS DOUBLE) AS reward, "
    "decode(raw)->>'$.policy_version' AS policy_version",
    "dlq": "decode(raw) AS value, headers->>'$.headrace_place' AS place, headers->>'$.headrace_reason' AS reason",
}


def _connect(state_dir: Path) -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    for name, kind in KINDS.items():
        pattern = str(state_dir / "archive" / f"*{name}.v1" / "*" / "*" / "*.parquet")
        if any((state_dir / "archive").glob(f"*{name}.v1/*/*/*.parquet")):
            quoted = pattern.replace("'", "''")
            source = f"read_parquet('{quoted}', union_by_name=true)"
        else:
            connection.register(f"empty_{name}", segment_schema(kind).empty_table())
            source = f"empty_{name}"
        typed = f"*, {_COLUMNS[name]}" if name in _COLUMNS else "*"
        connection.execute(f"CREATE VIEW all_{name} AS SELECT {typed} FROM {source}")
        decoded = "raw IS NULL" if kind else "true"
        connection.execute(
            f"CREATE VIEW {name} AS SELECT * FROM all_{name} WHERE {decoded} "
            f'QUALIFY row_number() OVER (PARTITION BY {_IDENTITY[name]} ORDER BY timestamp_s, partition, "offset") = 1'
        )
    return connection


def archived(state_dir: Path, topic_kind: str) -> duckdb.DuckDBPyRelation:
    """Return one view of the archive as a relation: inference, feedback, interaction, sample or dlq."""
    if topic_kind not in KINDS:
        raise ValueError(f"no archive of {topic_kind!r}; there is {', '.join(KINDS)}")
    return _connect(state_dir).table(topic_kind)


def query(state_dir: Path, sql: str, parameters: list[Any] | None = None) -> list[dict[str, Any]]:
    """Run a query over the archive's views and return its rows."""
    for last_try in (False, True):
        with _connect(state_dir) as connection:
            try:
                cursor = connection.execute(sql, parameters or [])
                names = [column[0] for column in cursor.description or []]
                return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]
            except duckdb.IOException:
                if last_try:
                    raise
                time.sleep(0.1)  # segments were merged between our listing and our reading
    raise AssertionError("unreachable")


def feedback_dispositions(state_dir: Path) -> dict[str, str]:
    """Return feedback id -> applied | quarantined | expired | pending | retracted, as the joiner has it now."""
    path = state_dir / "ingest" / "joiner.sqlite"
    if not path.exists():
        return {}
    connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10.0)
    try:
        return dict(connection.execute("SELECT feedback_id, disposition FROM dispositions").fetchall())
    finally:
        connection.close()
