"""Beats, the live view and the curves, on fabricated status files and control events."""

import io

from rich.console import Console

from deploy.demo_client import Answer, SentVote
from deploy.demo_plot import Mark, by_version, draw
from deploy.demo_pulse import Beat, ControlWatch, Timeline, backlog_of, take_beat
from deploy.demo_view import View, panel, plain_line, sparkline
from ingest.config import KafkaConfig
from ingest.events import encode
from ingest.status import read_statuses, write_status
from learner.candidate import CandidateEvent
from serving.routes import Route, RouteTable

NOW = 1_000_000.0


def route(arm, version, engine):
    return Route(arm=arm, version=version, engine=engine, url="http://127.0.0.1:1", served_model="m")


def watch():
    followed = ControlWatch(KafkaConfig())
    for revision, champion in enumerate(("v000000", "v000000", "v000003")):
        table = RouteTable(revision=revision, at=NOW, author="controller", champion=route("champion", champion, "blue"))
        followed._take("routes", encode(table))
    table = RouteTable(
        revision=9,
        at=NOW,
        author="controller",
        champion=route("champion", "v000003", "blue"),
        canary=route("canary", "v000005", "green"),
        canary_weight=0.5,
    )
    followed._take("routes", encode(table))
    for version, state in (
        ("v000003", "proposed"),
        ("v000003", "promoted"),
        ("v000004", "rejected"),
        ("v000003", "promoted"),
    ):
        followed._take(f"candidate/{version}", encode(CandidateEvent(version=version, state=state, at=NOW)))
    return followed


def answers(num=100, satisfied=lambda number: number % 2 == 0):
    return [
        Answer(
            question="q",
            purpose="traffic",
            user="ann",
            streamed=False,
            started_at=NOW - 20,
            completed_at=NOW - 20 + number / 5,
            inference_id=f"i{number}",
            version="v000003" if number > num // 2 else "v000000",
            satisfied=satisfied(number),
        )
        for number in range(num)
    ]


def votes():
    return [
        SentVote(
            feedback_id=f"f{number}",
            inference_id=f"i{number}",
            user="ann",
            version="v000000",
            habit="normal",
            op="upsert",
            value=number < 15,
            revision=0,
            sent_at=NOW,
            num_accepted=1,
        )
        for number in range(20)
    ]


def beat(tmp_path):
    write_status(tmp_path, "learner", {"at": NOW, "step": 7, "kl": 0.12, "lag": 30, "num_pending": 12})
    write_status(tmp_path, "joiner", {"at": NOW, "lag": 4})
    write_status(
        tmp_path,
        "controller",
        {
            "at": NOW - 60,
            "canary": {"e_promote": 3.5, "outcomes": 21, "threshold": 20.0},
            "swaps": {"count": 4},
        },
    )
    return take_beat(65.0, NOW, "learning", read_statuses(tmp_path), watch(), answers(), votes(), open_requests=9)


def test_a_beat_reads_statuses_the_control_topic_and_the_clients(tmp_path):
    taken = beat(tmp_path)
    assert (taken.champion, taken.canary, taken.canary_weight) == ("v000003", "v000005", 0.5)
    assert (taken.true_share, taken.observed_share) == (0.5, 0.75)
    assert (taken.step, taken.kl, taken.backlog, taken.lags["joiner"]) == (7, 0.12, 42, 4)
    assert (taken.evidence, taken.threshold, taken.num_units) == (3.5, 20.0, 21)
    assert (taken.num_promotions, taken.num_rejected, taken.num_swaps) == (1, 1, 4)
    assert taken.requests_per_s == 5.0
    assert taken.down == ["archiver", "controller", "rewards"]


def test_missing_status_files_leave_fields_empty():
    taken = take_beat(1.0, NOW, "starting", {}, ControlWatch(KafkaConfig()), [], [], 0)
    assert (taken.champion, taken.true_share, taken.kl, taken.backlog) == ("", None, None, 0)
    assert "satisfied -" in plain_line(taken)


def test_backlog_counts_buffered_and_unread_samples():
    assert backlog_of({"learner": {"num_pending": 10, "lag": 5}}) == 15
    assert backlog_of({}) == 0


def test_the_plain_line_and_the_panel_show_what_matters(tmp_path):
    taken = beat(tmp_path)
    line = plain_line(taken)
    for part in (
        "01:05",
        "serving v000003",
        "satisfied 50 % (votes 75 %)",
        "v000005 at 50 %, E 3.5 of 20, 21 units",
        "silent",
    ):
        assert part in line
    out = io.StringIO()
    Console(file=out, width=120).print(panel([taken], ["v000003 promoted"]))
    for part in ("v000003", "KL to champion 0.120", "joiner 4", "v000003 promoted"):
        assert part in out.getvalue()


def test_plain_lines_come_every_five_seconds(capsys):
    with View(live=False) as view:
        for second in range(11):
            view.show([Beat(elapsed_s=float(second), phase="learning")])
    assert capsys.readouterr().out.count("learning") == 3


def test_the_sparkline_keeps_the_latest_value():
    assert sparkline([0.0, 0.5, 1.0]) == " ▄█"
    assert sparkline([None]) == ""
    assert len(sparkline([number / 500 for number in range(500)])) <= 60
    assert sparkline([0.0] * 200 + [1.0])[-1] == "█"


def test_the_curves_are_a_png(tmp_path):
    png = draw([beat(tmp_path)], [Mark(30.0, "v000003", "promoted"), Mark(50.0, "v000004", "rejected")], answers())
    assert png.startswith(b"\x89PNG")
    assert draw([], [], []).startswith(b"\x89PNG")


def test_shares_by_version_leave_out_tiny_groups():
    assert by_version(answers()) == [("v000000", 26 / 51, 51), ("v000003", 24 / 49, 49)]
    assert by_version(answers(9)) == []


def test_the_timeline_is_kept_in_a_file(tmp_path):
    timeline = Timeline(tmp_path / "demo" / "timeline.jsonl")
    timeline.add(Beat(elapsed_s=1.0, phase="base"))
    timeline.close()
    assert b'"phase":"base"' in (tmp_path / "demo" / "timeline.jsonl").read_bytes()
