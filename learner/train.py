"""The learner process: `python -m learner.train CONFIG.toml`.

Samples and candidates' fates in from Kafka, candidates out. Reads top to bottom in numbered steps; what they do is in
session.py. Promises: SIGTERM in the middle of a step applies nothing and loses nothing; restarted from any point it
goes on with the same lineage, and no sample counts in two of its steps.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from ingest.config import KafkaConfig, MlflowConfig, RunConfig, config_hash, load_table
from ingest.events import decode, encode
from ingest.producer import Publisher
from ingest.status import write_status
from ingest.stream import Reader, Record, ensure_topics
from ingest.topics import headers, topics
from learner import lifecycle
from learner.candidate import CANDIDATE_KEY, CANDIDATE_TYPE, CandidateEvent
from learner.config import LearnerConfig
from learner.tracking import Tracker
from rewards.samples import Sample

logger = logging.getLogger("learner.train")

SOURCE = "headrace/learner"


class Status:
    """Writes the status file each second, also while a step runs."""

    def __init__(self, state_dir: Path) -> None:
        self._state_dir = state_dir
        self._values: dict[str, Any] = {"phase": "starting", "step": 0}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)
        self._thread.start()

    def set(self, **values: Any) -> None:
        self._values = self._values | values

    def _run(self) -> None:
        while True:
            write_status(self._state_dir, "learner", self._values | {"at": time.time(), "pid": os.getpid()})
            if self._stop.wait(1.0):
                return

    def close(self) -> None:
        self.set(phase="stopped")
        self._stop.set()
        self._thread.join(2.0)
        write_status(self._state_dir, "learner", self._values | {"at": time.time()})


def read_samples(records: list[Record]) -> tuple[list[Sample], dict[str, int]]:
    """Decode sample records; a broken one is named, passed and never blocks its partition."""
    samples, offsets = [], {}
    for record in records:
        offsets[str(record.partition)] = record.offset + 1
        try:
            samples.append(decode(record.value, Sample))
        except ValueError as error:
            logger.error("sample_unreadable at=%s[%d]@%d error=%s", *record[:3], error)
    return samples, offsets


def read_events(records: list[Record]) -> list[CandidateEvent]:
    """Decode candidates' events from the control topic; other keys are not ours."""
    events = []
    for record in records:
        if record.key.startswith(CANDIDATE_KEY) and record.value:
            try:
                events.append(decode(record.value, CandidateEvent))
            except ValueError as error:
                logger.error("candidate_unreadable at=%s[%d]@%d error=%s", *record[:3], error)
    return events


def code_commit() -> str:
    """Return the commit of this code, or nothing outside a repository."""
    folder = Path(__file__).parent
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout.strip()


class Loop:
    """The learner between Kafka, MLflow and its session."""

    def __init__(self, config_path: Path, stop: threading.Event) -> None:
        self._stop = stop
        self._config = load_table(config_path, "learner", LearnerConfig)
        self._run = load_table(config_path, "run", RunConfig)
        self._kafka = load_table(config_path, "kafka", KafkaConfig)
        mlflow = load_table(config_path, "mlflow", MlflowConfig)
        hash_ = config_hash(config_path)
        logger.info("configuration hash=%s learner=%s", hash_, self._config.model_dump())
        self._status = Status(self._run.state_dir)
        ensure_topics(self._kafka)
        self._session = self._open_session(hash_)
        self._control = Reader(self._kafka, [topics(self._kafka).control], {}, "headrace-learner-control")
        self._samples = self._open_samples()
        self._publisher = Publisher(self._kafka, SOURCE)
        self._tracker = Tracker(mlflow, self._run.state_dir, "learner")
        self._commit = code_commit()
        self._run_id = self._tracker.start_run(
            f"learner {time.strftime('%Y-%m-%d %H:%M:%S')}",
            {**self._config.model_dump(), "model": self._run.model},
            {"config_hash": hash_, "code_commit": self._commit, "lineage": self._session.state.lineage},
        )
        self._announced: set[str] = set()
        self._last_step_at = time.monotonic()

    def _open_session(self, hash_: str):
        from transformers import AutoTokenizer

        from learner.engine import Engine
        from learner.export import check_model_folder, resolve_model
        from learner.session import Session

        base = resolve_model(self._run.model)
        check_model_folder(base)
        if self._config.nice:
            os.nice(self._config.nice)
        engine = Engine(self._config, str(base))
        tokenizer = AutoTokenizer.from_pretrained(base)

        def encode(text: str) -> list[int]:
            return tokenizer(text, add_special_tokens=False).input_ids

        return Session(self._config, engine, self._run.state_dir, base, hash_, encode)

    def _open_samples(self) -> Reader:
        """Open the sample topic at the session's offsets; a log that was made anew is read from its start."""
        topic = topics(self._kafka).sample
        state = self._session.state
        reader = Reader(self._kafka, [topic], self._offsets(), "headrace-learner")
        log_id = reader.log_ids()[topic]
        if state.log_id and state.log_id != log_id:
            logger.error("log_wiped topic=%s was=%s is=%s restart_at=0", topic, state.log_id, log_id)
            state.offsets = {}
            self._seek(reader)
        state.log_id = log_id
        return reader

    def _offsets(self) -> dict[tuple[str, int], int]:
        topic = topics(self._kafka).sample
        return {(topic, int(partition)): offset for partition, offset in self._session.state.offsets.items()}

    def _seek(self, reader: Reader) -> None:
        topic = topics(self._kafka).sample
        for partition in range(self._kafka.partitions):
            reader.seek(topic, partition, self._session.state.offsets.get(str(partition), 0))

    def run(self) -> None:
        """Loop until told to stop."""
        from learner.step import Stopped

        def check_stop() -> None:
            if self._stop.is_set():
                raise Stopped

        self._read_control_in_full()
        while not self._stop.is_set():
            # 1. the fate of candidates
            self._follow(self._control.poll(0.0))
            # 2. samples into the buffer, up to its bound
            if len(self._session.state.pending) < self._config.max_pending_samples:
                samples, offsets = read_samples(self._samples.poll(0.2))
                self._session.take(samples, offsets)
            else:
                self._stop.wait(0.2)
            # 3. a batch
            waited_s = time.monotonic() - self._last_step_at
            plan = self._session.plan(is_overdue=waited_s > self._config.max_wait_s)
            self._report("stepping" if plan else "ahead" if self._session.is_ahead() else "waiting")
            if plan is not None:
                # 4. a step: weights, checkpoint, record
                try:
                    result = self._session.step(plan, check_stop)
                except Stopped:
                    logger.info("step_abandoned samples=%d", len(plan.samples))
                    break
                self._last_step_at = time.monotonic()
                self._log_step(result)
                self._follow(self._control.poll(0.0))
            # 5. a candidate, and its announcement
            if self._session.is_export_due():
                self._report("exporting")
                self._session.export(self._run_id, self._commit)
            self._announce()

    def _read_control_in_full(self) -> None:
        """Know every candidate's fate before the first step, or a stale one might be acted on."""
        events: dict[str, CandidateEvent] = {}
        while not self._stop.is_set():
            records = self._control.poll(0.2)
            events |= {event.version: event for event in read_events(records)}
            if not records and self._control.caught_up():
                break
        self._act_on(list(events.values()))

    def _follow(self, records: list[Record]) -> None:
        events = read_events(records)
        if events:
            self._act_on(events)

    def _act_on(self, events: list[CandidateEvent]) -> None:
        decision = self._session.follow(events)
        if decision.action == "return":
            self._seek(self._samples)
        if decision.action != "keep":
            self._tracker.set_alias("champion", decision.champion)

    def _announce(self) -> None:
        for event in self._session.unannounced():
            if event.version in self._announced:
                continue
            topic = topics(self._kafka).control
            head = headers(CANDIDATE_TYPE, f"{event.version}/proposed", SOURCE, event.at)
            self._publisher.publish_durably(topic, CANDIDATE_KEY + event.version, encode(event), head)
            self._announced.add(event.version)
            metrics = self._session.last_metrics
            tags = {"step": str(self._session.state.head_step), "kl": f"{metrics.get('kl_champion', 0):.4f}"}
            self._tracker.register_version(event.version, Path(event.folder), tags)
            self._tracker.set_alias("candidate", event.version)
            logger.info("candidate_proposed version=%s folder=%s", event.version, event.folder)

    def _log_step(self, result) -> None:
        step = self._session.state.step
        if not result.skipped:
            self._tracker.log_metrics(result.metrics, step)
        shown = " ".join(f"{name}={value:.4g}" for name, value in result.metrics.items())
        logger.info("step number=%d skipped=%s %s", step, result.skipped or "no", shown)

    def _report(self, phase: str) -> None:
        state = self._session.state
        metrics = self._session.last_metrics
        self._status.set(
            phase=phase,
            step=state.step,
            head_step=state.head_step,
            lineage=state.lineage,
            champion=state.champion,
            version=state.versions[-1],
            num_consumed=state.num_consumed,
            num_pending=len(state.pending),
            num_dropped=state.num_dropped,
            num_skipped=state.num_skipped,
            num_undecided=len(lifecycle.undecided(self._session.events, state.versions)),
            beta=state.beta,
            lag=self._samples.lag(),
            mlflow_queued=self._tracker.num_queued(),
            metrics=metrics,
            step_s=metrics.get("step_s", 0.0),
            reward_mean=metrics.get("reward_mean"),
            kl_champion=metrics.get("kl_champion"),
        )

    def close(self, status: str) -> None:
        self._tracker.close(status)
        self._publisher.close()
        self._samples.close()
        self._control.close()
        self._status.close()


def main(argv: list[str] | None = None) -> int:
    """Run the learner; 2 for bad configuration or an unreachable broker."""
    arguments = sys.argv[1:] if argv is None else argv
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if len(arguments) != 1:
        print("usage: python -m learner.train CONFIG.toml", file=sys.stderr)
        return 2
    # before torch is loaded: waiting threads sleep instead of spinning, for the engines need the same cores
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        loop = Loop(Path(arguments[0]), stop)
    except ValueError as error:
        print(f"learner: {error}", file=sys.stderr)
        return 2
    status = "FAILED"
    try:
        loop.run()
        status = "FINISHED"
    finally:
        loop.close(status)
    return 0


if __name__ == "__main__":
    sys.exit(main())
