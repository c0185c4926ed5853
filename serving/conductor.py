"""The controller's pass: what is heard, decided, said and started, in one transaction each time.

Promises: evidence, verdicts, offsets and what goes out are committed together, so kill -9 at any step resumes; an
engine is in no table and counts as holding nothing before a job touches it.
    1. keep final interactions as evidence; hear of candidates and of an operator's tables
    2. apply what the job beside the loop has finished
    3. judge the canary; a verdict is recorded before any route changes
    4. publish the route table if it should differ
    5. start the planned job, after the commit that took its engine out of the table
"""

import logging
import secrets
import sqlite3
import time
from pathlib import Path

import msgspec

from ingest.config import KafkaConfig
from ingest.events import Interaction, decode, encode
from ingest.stage import StageStore
from ingest.stream import Record
from ingest.topics import headers, topics
from learner.candidate import BASE_VERSION, CANDIDATE_KEY, CANDIDATE_TYPE, CandidateEvent
from serving import audit, evidence, jobs, life, trial, weights
from serving.canary import Verdict, decide
from serving.engine import kill_incarnation, read_incarnation
from serving.gate_config import GateConfig
from serving.gates.offline import Check
from serving.plan import Engine, Job, Known, State, desired_table, find_holder, is_fresh, needs_publishing, next_job
from serving.routes import ROUTES_KEY, ROUTES_TYPE, RouteTable
from serving.watch import Watch
from serving.worker import Order, Worker

logger = logging.getLogger("serving.controller")

SCHEMA = audit.SCHEMA + evidence.SCHEMA + "CREATE TABLE IF NOT EXISTS state (id INTEGER PRIMARY KEY, value BLOB);"
_RETRY_S = 3.0
_JUDGE_S = 1.0


class Conductor:
    """The loop's state; handle() and tick() run inside run_stage's transactions, jobs in one thread beside it."""

    def __init__(
        self, store: StageStore, kafka: KafkaConfig, gate: GateConfig, watch: Watch, base: Path, state_dir: Path
    ) -> None:
        self.store, self.watch, self.gate, self.state_dir = store, watch, gate, state_dir
        self._topics = topics(kafka)
        self.worker = Worker(gate, watch.gateway_urls)
        self.job: Job | None = None  # planned or running; its engine is in no table
        self._not_before = 0.0
        self._judged_at = 0.0
        self._held_at = 0.0  # when an engine was last loaded
        self._prompts_trimmed_at = 0.0
        self.verdict: Verdict | None = None
        self.checks: dict[str, tuple[Check, ...]] = {}  # version -> offline checks not yet reported
        self.state = self._load(base)
        self._saved = b""
        self._is_current = False
        self._must_publish = True  # at each start: the broker may have lost the last table

    def _load(self, base: Path) -> State:
        rows = self.store.connection.execute("SELECT value FROM state").fetchall()
        state = msgspec.json.decode(rows[0][0], type=State) if rows else State()
        known = state.versions.get(BASE_VERSION)
        if known is not None and known.folder == str(base):
            return state
        digest = weights.digest(jobs.base_manifest(base))
        known = Known(version=BASE_VERSION, folder=str(base), state="promoted", digest=digest)
        return msgspec.structs.replace(state, versions={**state.versions, BASE_VERSION: known})

    # 1. What the topics say.

    def handle(self, connection: sqlite3.Connection, records: list[Record]) -> None:
        for record in records:
            try:
                self._hear(connection, record)
            except ValueError as error:
                logger.warning("record=bad at=%s[%d]@%d error=%s", record.topic, record.partition, record.offset, error)

    def _hear(self, connection: sqlite3.Connection, record: Record) -> None:
        if record.topic == self._topics.interaction:
            evidence.record_interaction(connection, decode(record.value, Interaction), self.gate)
        elif record.key == ROUTES_KEY:
            self._hear_table(connection, decode(record.value, RouteTable))
        elif record.key.startswith(CANDIDATE_KEY):
            event = decode(record.value, CandidateEvent)
            if event.version not in self.state.versions:
                logger.info("candidate=heard version=%s state=%s folder=%s", event.version, event.state, event.folder)
            self.state = life.hear(self.state, event)

    def _hear_table(self, connection: sqlite3.Connection, table: RouteTable) -> None:
        held = self.state.table.revision if self.state.table else -1
        if table.revision < held + (table.author != "operator"):
            return
        if table.author == "operator":  # also one that crossed ours under the same revision
            known = not table.champion or table.champion.version in self.state.versions
            if known:
                audit.record_event(connection, table.at, table.champion.version if table.champion else "", "operator",
                                   "ADOPT", table.reason, self.gate)  # fmt: skip
                self._apply(connection, life.adopt(self.state, table), table.at)
                self._must_publish = True
                return
            logger.error("operator_table=unknown_version version=%s", table.champion and table.champion.version)
        # A table of an earlier life of ours, or one we cannot follow: ours must be higher to be heard.
        self.state = msgspec.structs.replace(self.state, table=table)
        self._must_publish = True

    # The pass.

    def tick(self, connection: sqlite3.Connection, now_s: float, caught_up: bool) -> None:
        # Before that, an operator's table may still be unread, and ours would bring back what it ended.
        self._is_current |= caught_up
        engines = self._engines()
        if self.job is not None and not self.worker.is_running:
            self.worker.start(self._order(connection, self.job, engines))  # 5, after the commit that cordons its engine
        if (result := self.worker.take()) is not None:
            self._finish(connection, result, now_s)  # 2
        if self.state.rollout is not None and self._is_current and now_s - self._judged_at >= _JUDGE_S:
            self._judged_at = now_s
            self._judge(connection, engines, now_s)  # 3
        if self._is_current:
            if self.job is None and now_s >= self._not_before:
                self._plan(connection, engines, now_s)
            self._publish_table(connection, engines, now_s)  # 4
        if now_s - self._prompts_trimmed_at > 10:
            self._prompts_trimmed_at = now_s
            evidence.trim_prompts(connection, self.gate)
        self._save(connection)

    def _engines(self) -> list[Engine]:
        """Return the engines; an attached one that was restarted behind our back holds nothing we know."""
        engines = self.watch.engines()
        for engine in engines:
            holding = self.state.holdings.get(engine.name)
            if engine.is_attached and holding and holding.version:
                digest = self.state.versions[holding.version].digest
                if self.watch.label(engine.name, self._held_at) not in (None, f"{holding.version}:{digest}"):
                    self.state = life.hold(self.state, engine, "")
        return engines

    def _save(self, connection: sqlite3.Connection) -> None:
        value = msgspec.json.encode(self.state)
        if value != self._saved:
            connection.execute("INSERT OR REPLACE INTO state VALUES (1, ?)", (value,))
            self._saved = value

    def _apply(self, connection: sqlite3.Connection, change: life.Change, now_s: float) -> None:
        """Take a transition over and queue its words."""
        self.state = change.state
        for word in change.words:
            known = self.state.versions[word.version]
            event = CandidateEvent(
                version=word.version, state=word.state, at=now_s, folder=known.folder, parent=known.parent,
                manifest_sha256=known.manifest_sha256, reason=word.reason, evidence=dict(word.figures),
                author=word.author,
            )  # fmt: skip
            logger.info("candidate=%s version=%s reason=%r", word.state, word.version, word.reason)
            event_id = f"{word.version}-{word.state}-{now_s:.6f}"
            self.store.enqueue(connection, self._topics.control, CANDIDATE_KEY + word.version, encode(event),
                               headers(CANDIDATE_TYPE, event_id, "controller", now_s))  # fmt: skip

    # 3. The canary.

    def _judge(self, connection: sqlite3.Connection, engines: list[Engine], now_s: float) -> None:
        failures = self.watch.canary_failures(self.state.table.revision if self.state.table else 0)
        seen = trial.gather(connection, self.state, engines, failures, now_s, self.gate)
        verdict = decide(seen, self.gate)
        self.verdict = verdict
        rollout = self.state.rollout
        assert rollout is not None, "judged without a canary"
        if verdict.kind == rollout.verdict:
            return
        audit.record_canary(connection, seen, verdict, self.gate)
        logger.info("verdict=%s version=%s reason=%r", verdict.kind, rollout.version, verdict.reason)
        self._apply(connection, trial.follow(self.state, verdict, seen, self.gate), now_s)
        if self.state.rollout is None:
            evidence.drop_rollouts_but(connection, [])

    # 5 and 2. Jobs.

    def _plan(self, connection: sqlite3.Connection, engines: list[Engine], now_s: float) -> None:
        """Choose the next job; its engine leaves the table and counts as holding nothing, in this transaction."""
        can_probe = evidence.num_prompts(connection) >= self.gate.probe_min_prompts
        job = next_job(self.state, engines, can_probe)
        if job is None:
            return
        if job.kind in ("inspect", "prepare"):
            self._apply(connection, life.shelve_older(self.state), now_s)
        if job.kind == "prepare":
            self._apply(connection, life.Change(self.state, [life.Word(job.version, "shadow", "offline gates")]), now_s)
        self.job = job

    def _order(self, connection: sqlite3.Connection, job: Job, engines: list[Engine]) -> Order:
        engine = next((engine for engine in engines if engine.name == job.engine), None)
        reload, is_drained = True, False
        if engine is not None:
            is_drained = is_fresh(self.state, engine)  # never in a table, so nothing can be in flight
            reload = job.version != BASE_VERSION or not is_drained
            self.state = life.hold(self.state, engine, "")
        known = self.state.versions[job.version]
        parent = self.state.versions.get(known.parent or "")
        return Order(
            job, known, self.state.versions[self.state.champion], parent.digest if parent else "", engine,
            find_holder(self.state, engines, self.state.champion), reload,
            -1 if is_drained or self.state.table is None else self.state.table.revision,
            evidence.probe_prompts(connection, self.gate.probe_prompts),
        )  # fmt: skip

    def _finish(self, connection: sqlite3.Connection, result: jobs.Result, now_s: float) -> None:
        job, self.job = result.job, None
        engine = next((engine for engine in self.watch.engines() if engine.name == job.engine), None)
        if result.quarantine and engine is not None:
            self._quarantine(engine, result)
        is_same = engine is not None and engine.served_model == result.served_model
        if result.is_loaded and engine is not None and is_same:
            self.state = life.hold(self.state, engine, job.version)
            self._held_at = time.monotonic()
            if result.figures.get("reloaded"):
                num_swaps, last_swap_s = self.state.num_swaps + 1, result.figures["swap_s"]
                self.state = msgspec.structs.replace(self.state, num_swaps=num_swaps, last_swap_s=last_swap_s)
        if result.failed or (result.refused and job.kind in ("champion", "standby")):
            self._not_before = now_s + _RETRY_S
        if result.checks:
            audit.record_offline(connection, now_s, job.version, result.checks, self.gate)
            if result.refused or job.kind == "prepare":
                self.checks[job.version] = result.checks
        if job.kind in ("inspect", "prepare"):
            self._finish_candidate(connection, result, engine if is_same else None, now_s)
        elif job.kind == "champion" and result.is_loaded:
            self.state = msgspec.structs.replace(self.state, champion_engine=job.engine)
        elif result.refused:
            logger.error("load=refused kind=%s version=%s reason=%r", job.kind, job.version, result.refused)
            if job.kind == "standby" and self.state.previous == job.version:
                self.state = msgspec.structs.replace(self.state, previous=None)

    def _finish_candidate(
        self, connection: sqlite3.Connection, result: jobs.Result, engine: Engine | None, now_s: float
    ) -> None:
        version, figures = result.job.version, {**jobs.describe(result.checks), **result.figures}
        if result.refused:
            change = life.refuse(self.state, version, result.refused, figures)
        elif result.job.kind == "inspect":
            change = life.Change(life.set_known(self.state, version, digest=result.digest))
        elif result.failed or engine is None:
            change = life.fail_attempt(self.state, version, result.failed or "its engine was restarted", self.gate)
        elif self.gate.observe:
            change = life.set_aside(
                self.state, version, "passed the offline gates; observe mode exposes nothing", figures
            )
        else:
            self.verdict = None
            change = life.start_canary(self.state, version, engine, secrets.token_hex(4), now_s, self.gate)
        self._apply(connection, change, now_s)

    def _quarantine(self, engine: Engine, result: jobs.Result) -> None:
        """Kill an engine that a swap has left in doubt; the supervisor starts it with the base model."""
        incarnation = read_incarnation(self.state_dir, engine.name)
        is_killed = incarnation is not None and incarnation.served_model == result.served_model
        is_killed = bool(is_killed and incarnation and kill_incarnation(incarnation))
        logger.error("engine=quarantined name=%s served_model=%s killed=%s reason=%r", engine.name,
                     result.served_model, is_killed, result.failed or result.refused)  # fmt: skip

    # 4. The route table.

    def _publish_table(self, connection: sqlite3.Connection, engines: list[Engine], now_s: float) -> None:
        busy = self.job.engine if self.job else ""
        table = desired_table(self.state, engines, busy, now_s)
        if not engines or not (self._must_publish or needs_publishing(self.state.table, table)):
            return
        self._must_publish = False
        table = msgspec.structs.replace(table, revision=table.revision + 1)
        self.state = msgspec.structs.replace(self.state, table=table)
        logger.info("routes=published revision=%d champion=%s canary=%s weight=%g reason=%r", table.revision,
                    table.champion and table.champion.version, table.canary and table.canary.version,
                    table.canary_weight, table.reason)  # fmt: skip
        self.store.enqueue(connection, self._topics.control, ROUTES_KEY, encode(table),
                           headers(ROUTES_TYPE, f"routes-{table.revision}", "controller", now_s))  # fmt: skip
