"""The archive: exact offsets over crashes, merged segments, views that count each event once."""

import signal
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ingest.archiver import Archiver
from ingest.config import IngestConfig, KafkaConfig
from ingest.events import FEEDBACK_TYPE, INFERENCE_TYPE, encode
from ingest.log import archived, query
from ingest.producer import Publisher
from ingest.segments import KINDS, clean_folder, merge_segments, next_offset, offsets_of
from ingest.stream import Record, ensure_topics
from ingest.topics import headers, topics
from tests.ingest.test_joiner import event_pair, start, wait_status, write_config

KAFKA = KafkaConfig(partitions=1)
NAMES = topics(KAFKA)
LOGS = {topic: f"cluster/{topic}" for topic in NAMES}


def inference_record(offset: int, number: int | None = None) -> Record:
    _, inference, _ = event_pair(offset if number is None else number, 100.0)
    return Record(
        NAMES.inference, 0, offset, "00aa", encode(inference), {"ce_id": f"i{number}", "ce_source": "t"}, 100.0
    )


def open_archiver(folder: Path, logs: dict[str, str] = LOGS, rows: int = 10) -> Archiver:
    return Archiver(folder / "archive", KAFKA, IngestConfig(archive_rows=rows, archive_interval_s=5.0), logs)


def segments(folder: Path) -> list[tuple[int, int]]:
    return sorted(offsets_of(path) for path in (folder / "archive").rglob("*.parquet"))


def test_segment_is_cut_by_rows_and_by_age_and_a_restart_goes_on_after_it(tmp_path) -> None:
    archiver = open_archiver(tmp_path)
    archiver.append([inference_record(offset) for offset in range(12)], now_s=0.0)
    archiver.cut(1.0)
    archiver.append([inference_record(12)], now_s=2.0)
    archiver.cut(6.9)
    assert segments(tmp_path) == [(0, 11)]
    assert archiver.num_buffered == 1
    archiver.cut(7.0)
    assert segments(tmp_path) == [(0, 11), (12, 12)]
    assert open_archiver(tmp_path).offsets[NAMES.inference, 0] == 13


def test_buffered_rows_are_not_claimed(tmp_path) -> None:
    archiver = open_archiver(tmp_path)
    archiver.append([inference_record(0)], now_s=0.0)
    archiver.cut(1.0)
    assert archiver.num_archived[NAMES.inference] == 0
    assert archiver.offsets[NAMES.inference, 0] == 0
    assert query(tmp_path, "SELECT count(*) AS n FROM inference") == [{"n": 0}]


def test_wiped_log_gets_a_folder_of_its_own_from_offset_0(tmp_path, caplog) -> None:
    archiver = open_archiver(tmp_path)
    archiver.append([inference_record(offset) for offset in range(3)], now_s=0.0)
    archiver.cut(0.0, everything=True)
    caplog.clear()
    again = open_archiver(tmp_path, LOGS | {NAMES.inference: "cluster/new"})
    assert again.offsets[NAMES.inference, 0] == 0
    assert "log_wiped topic=inference.v1" in caplog.text
    again.append([inference_record(offset) for offset in range(2)], now_s=0.0)
    again.cut(0.0, everything=True)
    assert segments(tmp_path) == [(0, 1), (0, 2)]
    assert archived(tmp_path, "inference").aggregate("count(*)").fetchall() == [(3,)]  # the same events, once


def test_small_segments_are_merged_and_a_crash_between_leaves_no_row_twice(tmp_path) -> None:
    archiver = open_archiver(tmp_path, rows=1000)
    for offset in range(15):
        archiver.append([inference_record(offset)], now_s=0.0)
        archiver.cut(0.0, everything=True)
    (folder,) = (tmp_path / "archive").glob("inference.v1/*/0")
    copies = {path: path.read_bytes() for path in folder.glob("*.parquet")}
    archiver.append([inference_record(15)], now_s=0.0)
    archiver.cut(0.0, everything=True)
    assert segments(tmp_path) == [(0, 15)]
    for path, content in copies.items():  # as if the parts had not been deleted yet
        path.write_bytes(content)
    (folder / ".x.tmp").write_bytes(b"half")
    clean_folder(folder)
    assert [path.name for path in folder.iterdir()] == ["000000000000-000000000015.parquet"]
    assert pq.read_table(next(folder.glob("*.parquet"))).column("offset").to_pylist() == list(range(16))
    assert (next_offset(folder), merge_segments(folder, 1000)) == (16, 0)


def test_record_that_does_not_fit_is_kept_as_it_came(tmp_path) -> None:
    archiver = open_archiver(tmp_path)
    broken = inference_record(0)._replace(value=b"{broken \xff")
    letter = Record(
        NAMES.dlq, 0, 0, "", b"{broken", {"headrace_place": "inference.v1[0]@0", "headrace_reason": "r"}, 1.0
    )
    archiver.append([broken, inference_record(1), letter], now_s=0.0)
    archiver.cut(0.0, everything=True)
    assert query(tmp_path, 'SELECT raw, "offset" FROM all_inference ORDER BY "offset"') == [
        {"raw": b"{broken \xff", "offset": 0},
        {"raw": None, "offset": 1},
    ]
    assert query(tmp_path, "SELECT count(*) AS n FROM inference") == [{"n": 1}]
    assert query(tmp_path, "SELECT place, reason, value FROM dlq") == [
        {"place": "inference.v1[0]@0", "reason": "r", "value": "{broken"}
    ]


def test_views_count_an_event_once_however_often_it_was_sent(tmp_path) -> None:
    archiver = open_archiver(tmp_path)
    archiver.append([inference_record(0, 7), inference_record(1, 7), inference_record(2, 8)], now_s=0.0)
    archiver.cut(0.0, everything=True)
    assert archived(tmp_path, "inference").aggregate("count(*)").fetchall() == [(2,)]
    assert query(tmp_path, "SELECT count(*) AS n FROM all_inference") == [{"n": 3}]
    assert query(tmp_path, "SELECT DISTINCT policy.version AS v FROM inference") == [{"v": "v000000"}]


def test_sample_view_reads_its_json(tmp_path) -> None:
    archiver = open_archiver(tmp_path)
    value = b'{"sample_id": "inf_1@0", "inference_id": "inf_1", "reward": -0.5, "policy_version": "v000002"}'
    archiver.append([Record(NAMES.sample, 0, n, "", value, {}, 1.0) for n in range(2)], now_s=0.0)
    archiver.cut(0.0, everything=True)
    assert query(tmp_path, "SELECT sample_id, reward, policy_version FROM sample") == [
        {"sample_id": "inf_1@0", "reward": -0.5, "policy_version": "v000002"}
    ]


def test_every_view_is_there_before_the_first_event(tmp_path) -> None:
    for name in KINDS:
        assert query(tmp_path, f"SELECT count(*) AS n FROM {name}") == [{"n": 0}]
    with pytest.raises(ValueError, match="no archive of 'control'"):
        archived(tmp_path, "control")


@pytest.mark.kafka
def test_archiver_killed_under_load_archives_every_offset_once(kafka, tmp_path) -> None:
    config = write_config(tmp_path, kafka, "archive_rows = 100\narchive_interval_s = 0.3")
    ensure_topics(kafka)
    publisher, names = Publisher(kafka, "test"), topics(kafka)
    archiver = start("ingest.archiver", config)
    wait_status(tmp_path / "state", "archiver", lambda s: True)
    for number in range(1200):
        now_s = time.time()
        route, inference, feedback = event_pair(number, now_s)
        publisher.publish(names.inference, route, encode(inference), headers(INFERENCE_TYPE, f"i{number}", "t", now_s))
        publisher.publish(names.feedback, route, encode(feedback), headers(FEEDBACK_TYPE, f"f{number}", "t", now_s))
        time.sleep(0.002)
        if number in (400, 800):
            archiver.kill()
            archiver.wait()
            archiver = start("ingest.archiver", config)
    assert publisher.flush(10)
    publisher.close()
    caught_up = lambda s: s["caught_up"] and not s["buffered"] and s["at"] > now_s  # noqa: E731 (a condition)
    wait_status(tmp_path / "state", "archiver", caught_up)
    archiver.send_signal(signal.SIGTERM)
    assert archiver.wait(20) == 0
    rows = query(tmp_path / "state", "SELECT inference_id FROM all_inference")
    assert sorted(row["inference_id"] for row in rows) == sorted(
        event_pair(n, 0.0)[1].inference_id for n in range(1200)
    )
    assert query(tmp_path / "state", "SELECT count(*) AS n, count(DISTINCT feedback_id) AS d FROM all_feedback") == [
        {"n": 1200, "d": 1200}
    ]
