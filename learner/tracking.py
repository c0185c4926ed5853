"""The only door to MLflow (contract): a disk queue and a thread, so that MLflow being away blocks nothing.

Order: 1. a call is a row in <state>/mlflow-queue/<process>.sqlite; 2. a daemon thread sends rows in order; 3. a row is
deleted once MLflow has it. Rows wait through restarts and are back-filled. A row sent twice (a crash between 2 and 3)
changes nothing: metrics carry their own time and step, runs and versions are looked up by tag first.
"""

import json
import logging
import sqlite3
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from ingest.config import MlflowConfig

logger = logging.getLogger("learner.tracking")

_RUN_TAG = "headrace.run"
_VERSION_TAG = "headrace.version"
_RETRY_S = 5.0
_MAX_REFUSALS = 3


class Tracker:
    """One process's window to MLflow. An empty tracking_uri turns it off."""

    def __init__(self, config: MlflowConfig, state_dir: Path, process: str) -> None:
        self._config = config
        self._process = process
        self._run = ""
        self._is_on = bool(config.tracking_uri)
        if not self._is_on:
            return
        folder = state_dir / "mlflow-queue"
        (folder / "figures").mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._path = folder / f"{process}.sqlite"
        self._lock = threading.Lock()
        self._queue = _open(self._path)
        self._changed = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._send_all, name="mlflow", daemon=True)
        self._thread.start()

    def start_run(self, name: str, params: dict[str, Any], tags: dict[str, str]) -> str:
        """Start a run; the id returned is ours (tag headrace.run), for MLflow may be away."""
        self._run = uuid.uuid4().hex
        self._enqueue("start_run", name=name, params={k: str(v)[:500] for k, v in params.items()}, tags=tags)
        return self._run

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self._enqueue("log_metrics", metrics=metrics, step=step)

    def log_figure(self, path_in_run: str, png: bytes) -> None:
        if self._is_on:
            path = self._folder / "figures" / f"{uuid.uuid4().hex}.png"
            path.write_bytes(png)
            self._enqueue("log_figure", path_in_run=path_in_run, file=str(path))

    def register_version(self, version: str, folder: Path, tags: dict[str, str]) -> None:
        """Register a candidate: its manifest is uploaded, its weights stay in their folder (tag folder)."""
        self._enqueue("register_version", version=version, folder=str(folder.resolve()), tags=tags)

    def set_alias(self, alias: str, version: str) -> None:
        """Point an alias (champion | candidate) to a registered candidate."""
        self._enqueue("set_alias", alias=alias, version=version)

    def num_queued(self) -> int:
        """Return how many calls MLflow has not got yet."""
        if not self._is_on:
            return 0
        with self._lock:
            return self._queue.execute("SELECT COUNT(*) FROM queue").fetchone()[0]

    def end_run(self, status: str = "FINISHED") -> None:
        """End the run that is open; the next one may be started."""
        if self._run:
            self._enqueue("end_run", status=status)
            self._run = ""

    def close(self, status: str = "FINISHED", timeout_s: float = 3.0) -> None:
        """End the run; wait a moment for what is queued. The rest stays on disk for the next start."""
        if not self._is_on:
            return
        self.end_run(status)
        self._closing.set()
        self._changed.set()
        self._thread.join(timeout_s)

    def _enqueue(self, call: str, **arguments: Any) -> None:
        if not self._is_on:
            return
        row = json.dumps({"call": call, "run": self._run, "at": time.time(), **arguments})
        with self._lock:
            self._queue.execute("INSERT INTO queue (row) VALUES (?)", (row,))  # 1
            self._queue.commit()
        self._changed.set()

    def _send_all(self) -> None:
        """The thread: send in order; wait when MLflow is away; drop a row that MLflow refuses again and again."""
        queue = _open(self._path)
        sender: _Sender | None = None
        refusals, was_away = 0, False
        while True:
            row = queue.execute("SELECT id, row FROM queue ORDER BY id LIMIT 1").fetchone()
            if row is None:
                if self._closing.is_set():
                    return
                self._changed.wait(0.5)
                self._changed.clear()
                continue
            try:
                sender = sender or _Sender(self._config)
                sender.send(json.loads(row[1]))  # 2
                refusals, was_away = 0, False
            except Exception as error:  # policy: tracking never stops learning
                refusals += _is_refusal(error)
                if refusals < _MAX_REFUSALS:
                    if not was_away:
                        logger.warning("mlflow_away uri=%s error=%s", self._config.tracking_uri, str(error)[:200])
                    was_away = True
                    if self._closing.wait(_RETRY_S if not _is_refusal(error) else 0.2):
                        return
                    continue
                logger.error("mlflow_refused row=%s error=%s", row[1][:200], str(error)[:200])
                refusals = 0
            queue.execute("DELETE FROM queue WHERE id = ?", (row[0],))  # 3
            queue.commit()


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=10, check_same_thread=False)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("CREATE TABLE IF NOT EXISTS queue (id INTEGER PRIMARY KEY AUTOINCREMENT, row TEXT NOT NULL)")
    return connection


def _is_refusal(error: Exception) -> bool:
    """Tell a request that MLflow answered with an error of ours from one that did not arrive."""
    return getattr(error, "error_code", "") in ("INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "BAD_REQUEST")


class _Sender:
    """Sends queued calls with MLflow's client; every call may be repeated."""

    def __init__(self, config: MlflowConfig) -> None:
        import os

        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
        from mlflow import MlflowClient

        self._config = config
        self._client = MlflowClient(config.tracking_uri, config.tracking_uri)
        experiment = self._client.get_experiment_by_name(config.experiment)
        self._experiment = experiment.experiment_id if experiment else self._client.create_experiment(config.experiment)
        self._runs: dict[str, str] = {}

    def send(self, row: dict[str, Any]) -> None:
        getattr(self, f"_{row['call']}")(row)

    def _run_id(self, row: dict[str, Any]) -> str:
        """Return MLflow's id of our run; a process that began no run logs to one named after the experiment."""
        run = row["run"]
        if run not in self._runs:
            filter_string = f"tags.`{_RUN_TAG}` = '{run}'"
            found = self._client.search_runs([self._experiment], filter_string, max_results=1)
            if not found:
                name = row.get("name", self._config.experiment)
                tags = {**row.get("tags", {}), _RUN_TAG: run}
                found = [self._client.create_run(self._experiment, int(row["at"] * 1000), tags, name)]
            self._runs[run] = found[0].info.run_id
        return self._runs[run]

    def _start_run(self, row: dict[str, Any]) -> None:
        from mlflow.entities import Param

        self._client.log_batch(self._run_id(row), params=[Param(k, v) for k, v in row["params"].items()])

    def _log_metrics(self, row: dict[str, Any]) -> None:
        from mlflow.entities import Metric

        at_ms = int(row["at"] * 1000)
        metrics = [Metric(name, float(value), at_ms, row["step"]) for name, value in row["metrics"].items()]
        self._client.log_batch(self._run_id(row), metrics=metrics)

    def _log_figure(self, row: dict[str, Any]) -> None:
        path = Path(row["file"])
        if path.exists():
            import tempfile

            target = Path(row["path_in_run"])
            with tempfile.TemporaryDirectory() as folder:
                named = Path(folder) / target.name
                named.write_bytes(path.read_bytes())
                self._client.log_artifact(
                    self._run_id(row), str(named), str(target.parent) if target.parent.name else None
                )
            path.unlink()

    def _find_version(self, version: str) -> str | None:
        filter_string = f"name = '{self._config.registered_model}'"
        for found in self._client.search_model_versions(filter_string):
            if found.tags.get(_VERSION_TAG) == version:
                return str(found.version)
        return None

    def _register_version(self, row: dict[str, Any]) -> None:
        from mlflow.exceptions import MlflowException

        name = self._config.registered_model
        try:
            self._client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        if self._find_version(row["version"]):
            return
        run_id = self._run_id(row)
        place = f"candidates/{row['version']}"
        manifest = Path(row["folder"]) / "manifest.json"
        if manifest.exists():
            self._client.log_artifact(run_id, str(manifest), place)
        source = f"{self._client.get_run(run_id).info.artifact_uri}/{place}"
        tags = {**row["tags"], _VERSION_TAG: row["version"], "folder": row["folder"]}
        self._client.create_model_version(name, source, run_id, {key: str(value) for key, value in tags.items()})

    def _set_alias(self, row: dict[str, Any]) -> None:
        number = self._find_version(row["version"])
        if number:
            self._client.set_registered_model_alias(self._config.registered_model, row["alias"], number)

    def _end_run(self, row: dict[str, Any]) -> None:
        self._client.set_terminated(self._run_id(row), row["status"], int(row["at"] * 1000))
