"""What MLflow is told of a candidate's gates: one run each, offline checks, e-values, a figure, aliases."""

import json
import sqlite3

from ingest.config import MlflowConfig, RunConfig
from serving.report import Report, draw
from tests.serving.controller_bench import Bench
from tests.serving.fake_engine import better


def queued(folder):
    rows = sqlite3.connect(folder / "mlflow-queue" / "controller.sqlite").execute("SELECT row FROM queue ORDER BY id")
    return [json.loads(row[0]) for row in rows]


def test_a_promotion_and_a_refusal_are_two_runs_with_their_evidence(tmp_path):
    bench = Bench(tmp_path)
    report = Report(MlflowConfig(tracking_uri="http://127.0.0.1:9"), RunConfig(model="m", state_dir=tmp_path))
    try:
        bench.serve_base()
        bench.reach_canary("v000001")
        for _ in range(25):
            bench.step(bench.ask(8, better))
            report.look(bench.conductor, bench.now_s)
        bench.propose("v000002", 2.0, "nonsense")
        bench.until(lambda: ("v000002", "rejected") in bench.said())
        report.look(bench.conductor, bench.now_s)
        report.look(bench.conductor, bench.now_s)
        rows = queued(tmp_path)
    finally:
        report.close()
        bench.close()
    assert [row["name"] for row in rows if row["call"] == "start_run"] == ["gate v000001", "gate v000002"]
    assert [row["call"] for row in rows].count("end_run") == 2
    assert [row["path_in_run"] for row in rows if row["call"] == "log_figure"] == ["canary-v000001.png"]
    aliases = [(row["alias"], row["version"]) for row in rows if row["call"] == "set_alias"]
    assert aliases == [("candidate", "v000001"), ("champion", "v000001"), ("candidate", "v000002")]
    metrics = [row["metrics"] for row in rows if row["call"] == "log_metrics"]
    assert metrics[0]["offline/kl"] == 0.0
    assert metrics[-2]["canary/log_e_promote"] > metrics[1]["canary/log_e_promote"]
    assert metrics[-1]["offline/topic"] < 0.1


def test_the_figure_is_a_png():
    point = {"age_s": 1.0, "log_e_promote": 2.0, "threshold": 26.0}
    assert draw([point, point | {"age_s": 2.0}], "v000001").startswith(b"\x89PNG")
