"""Metrics, figures and versions reach MLflow once, also when it was away."""

import time
from pathlib import Path

import pytest

from ingest.config import MlflowConfig
from learner.candidate import Manifest, list_files, write_manifest
from learner.tracking import Tracker


def make_candidate(folder: Path, version: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    manifest = Manifest(version=version, parent=None, kind="lora", files=list_files(folder), created_at=1.0)
    write_manifest(folder, manifest)
    return folder


def wait_until_sent(tracker: Tracker, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while tracker.num_queued():
        assert time.monotonic() < deadline, "the queue was not sent"
        time.sleep(0.05)


@pytest.mark.slow
def test_what_was_queued_while_mlflow_was_away_is_back_filled_once(tmp_path):
    away = MlflowConfig(tracking_uri="http://127.0.0.1:21299")
    tracker = Tracker(away, tmp_path, "learner")
    started = time.monotonic()
    run = tracker.start_run("life", {"learning_rate": 1e-3}, {"lineage": "l0001"})
    for step in range(3):
        tracker.log_metrics({"kl_champion": 0.1 * step, "loss": 1.0}, step)
    tracker.register_version("v000001", make_candidate(tmp_path / "candidates" / "v000001", "v000001"), {"step": "3"})
    tracker.set_alias("champion", "v000001")
    tracker.log_figure("curves/kl.png", b"\x89PNG")
    assert time.monotonic() - started < 1.0
    tracker.close(timeout_s=0.2)
    assert tracker.num_queued() == 8

    from mlflow import MlflowClient

    back = MlflowConfig(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    MlflowClient(back.tracking_uri).create_experiment("headrace", f"file://{tmp_path}/artifacts")
    again = Tracker(back, tmp_path, "learner")
    wait_until_sent(again)
    again.register_version("v000001", tmp_path / "candidates" / "v000001", {})
    wait_until_sent(again)
    again.close()

    client = MlflowClient(back.tracking_uri)
    experiment = client.get_experiment_by_name("headrace")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id], f"tags.`headrace.run` = '{run}'")
    assert found.info.status == "FINISHED"
    assert found.data.params["learning_rate"] == "0.001"
    history = client.get_metric_history(found.info.run_id, "kl_champion")
    assert sorted((point.step, round(point.value, 6)) for point in history) == [(0, 0.0), (1, 0.1), (2, 0.2)]
    (version,) = client.search_model_versions("name = 'headrace'")
    assert version.tags["headrace.version"] == "v000001"
    assert version.tags["folder"] == str((tmp_path / "candidates" / "v000001").resolve())
    assert client.get_model_version_by_alias("headrace", "champion").version == version.version
    assert [item.path for item in client.list_artifacts(found.info.run_id, "curves")] == ["curves/kl.png"]


def test_an_empty_address_turns_tracking_off(tmp_path):
    tracker = Tracker(MlflowConfig(tracking_uri=""), tmp_path, "learner")
    tracker.start_run("life", {}, {})
    tracker.log_metrics({"loss": 1.0}, 1)
    tracker.close()
    assert not (tmp_path / "mlflow-queue").exists()
