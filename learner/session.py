"""The learner at work: takes samples into its buffer, steps, saves, publishes, returns to the champion.

Owns LearnerState and the engine together: a checkpoint always holds both. Knows no Kafka: samples and events are
arguments, candidates are handed out to be announced. Order of a step: 1. weights move in memory; 2. the state counts
the batch as consumed; 3. checkpoint, CURRENT; 4. the line in steps.jsonl. A crash before 3 repeats the step from the
same samples, one after 3 appends the missing line at start: no sample counts twice, none is lost.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from learner import export, lifecycle
from learner.anchors import row_of
from learner.batches import Plan, adapt_beta, plan_batch, refusal
from learner.candidate import BASE_VERSION, CandidateEvent, StepRecord, version_name
from learner.checkpoints import Checkpoints, LearnerState, read_state
from learner.config import LearnerConfig
from learner.engine import TRAINABLE, Engine
from learner.lineage import append_step, candidates_folder, learner_folder, read_manifests
from learner.logprobs import Row
from learner.model import merge
from learner.publish import find_unsaved, make_manifest, make_proposal
from learner.step import StepResult, run_step
from rewards.samples import Sample

logger = logging.getLogger("learner.session")


class Session:
    """The learner's durable life. `point` is called with the name of each numbered point, for crash tests."""

    def __init__(
        self,
        config: LearnerConfig,
        engine: Engine,
        state_dir: Path,
        base: Path,
        config_hash: str,
        encode: Callable[[str], list[int]],
        point: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.config = config
        self._engine = engine
        self._state_dir = state_dir
        self._base = base
        self._config_hash = config_hash
        self._encode = encode
        self._point = point
        self._checkpoints = Checkpoints(learner_folder(state_dir) / "checkpoints", config.keep_checkpoints)
        self.events: dict[str, CandidateEvent] = {}
        self.last_metrics: dict[str, float] = {}
        self._retry_at = 0  # buffer size at which a refused batch may be formed again
        self._last_rows: list[Row] = []
        self.state = self._open()
        self._known = set(self.state.consumed) | {sample.sample_id for sample in self.state.pending}

    # opening

    def _open(self) -> LearnerState:
        """Resume from the newest sound checkpoint, or begin with the base model."""
        folder = self._checkpoints.newest_sound()
        if folder is None:
            state = LearnerState(beta=self.config.beta, exports={BASE_VERSION: 1})
            self.state = state
            self._save()
            logger.info("learner_started lineage=%s", state.lineage)
            return state
        state = read_state(folder)
        try:
            self._engine.load_trainable(load_file(folder / TRAINABLE))
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from error
        self._engine.load(folder)
        torch.set_rng_state(torch.from_numpy(np.frombuffer(state.rng, dtype=np.uint8).copy()))
        self._anchor_weights(state)
        if state.last_record is not None:
            append_step(self._state_dir, state.last_record)
        logger.info(
            "learner_resumed serial=%d step=%d lineage=%s champion=%s pending=%d",
            *(state.serial, state.head_step, state.lineage, state.champion, len(state.pending)),
        )
        return state

    def _anchor_weights(self, state: LearnerState) -> None:
        folder = self._checkpoints.path(state.exports[state.champion])
        self._engine.anchor_champion(load_file(folder / TRAINABLE))

    # samples

    def take(self, samples: list[Sample], offsets: dict[str, int]) -> None:
        """Put samples into the buffer and move the offsets; in memory until the next checkpoint."""
        for sample in samples:
            if sample.sample_id in self._known:
                self._count_drop(sample.sample_id, "duplicate")
                continue
            self._known.add(sample.sample_id)
            reason = refusal(sample, self.config)
            if reason:
                self.state.dropped[sample.sample_id] = reason
                self._count_drop(sample.sample_id, reason)
            else:
                self.state.pending.append(sample)
        self.state.offsets |= offsets

    def _count_drop(self, sample_id: str, reason: str) -> None:
        self.state.num_dropped[reason] = self.state.num_dropped.get(reason, 0) + 1
        logger.debug("sample_dropped id=%s reason=%s", sample_id, reason)

    def _drop_pending(self, dropped: dict[str, str]) -> None:
        for sample_id, reason in dropped.items():
            self._count_drop(sample_id, reason)
        self.state.dropped |= dropped
        self.state.pending = [sample for sample in self.state.pending if sample.sample_id not in dropped]

    def plan(self, is_overdue: bool) -> Plan | None:
        """Return the next batch, or None; stale samples leave the buffer."""
        if len(self.state.pending) < self._retry_at or self.is_ahead():
            return None
        least = self.config.min_batch_samples if is_overdue else self.config.batch_samples
        plan = plan_batch(self.state.pending, self.config, self.state.promoted, self.state.m2, least)
        if plan is None:
            return None
        self._drop_pending(plan.dropped)
        return plan if plan.samples else None

    def is_ahead(self) -> bool:
        """Tell whether the learner went as far beyond an undecided candidate as it may."""
        if not lifecycle.undecided(self.events, self.state.versions):
            return False
        return self.state.steps_since_export >= self.config.max_steps_ahead

    # steps

    def step(self, plan: Plan, check_stop: Callable[[], None] = lambda: None) -> StepResult:
        """Take one step, save it, record it. A refused step keeps its data."""
        started = time.monotonic()
        self._point("step_begin")
        plan = self._engine.broadcast(lambda: plan)  # rank 0 alone reads samples
        result = run_step(
            self._engine,
            plan,
            self.config,
            self.state.champion,
            self.state.beta,
            self._encode,
            self.state.step,
            check_stop,
        )  # 1
        result.metrics["step_s"] = time.monotonic() - started
        self.last_metrics = result.metrics
        self._point("weights_moved")
        if result.skipped:
            self._skip(plan, result)
            return result
        self._last_rows = [row_of(sample) for sample in plan.samples]
        record = self._count_step(plan, result.metrics)  # 2
        self._save()  # 3
        self._point("saved")
        append_step(self._state_dir, record)  # 4
        self._point("recorded")
        return result

    def _count_step(self, plan: Plan, metrics: dict[str, float]) -> StepRecord:
        state = self.state
        ids = [sample.sample_id for sample in plan.samples]
        state.step += 1
        record = StepRecord(
            step=state.step,
            lineage=state.lineage,
            based_on=state.based_on,
            next_version=version_name(state.next_version),
            sample_ids=ids,
            dropped=state.dropped,
            at=time.time(),
            metrics=metrics,
            parent_step=state.head_step,
        )
        state.head_step = state.step
        state.steps_since_export += 1
        state.dropped = {}
        used = set(ids)
        state.pending = [sample for sample in state.pending if sample.sample_id not in used]
        state.consumed = (state.consumed + ids)[-self.config.remember_samples :]
        state.num_consumed += len(ids)
        state.attempts = {key: value for key, value in state.attempts.items() if key not in used}
        state.m2 = metrics["log_ratio_m2"]
        state.beta = adapt_beta(state.beta, metrics["kl_champion"], self.config)
        state.last_record = record
        self._retry_at = 0
        return record

    def _skip(self, plan: Plan, result: StepResult) -> None:
        """Count a refused step; its samples stay, up to max_attempts, and wait for others to join them."""
        state = self.state
        state.num_skipped[result.skipped] = state.num_skipped.get(result.skipped, 0) + 1
        hopeless = {}
        for sample in plan.samples:
            state.attempts[sample.sample_id] = state.attempts.get(sample.sample_id, 0) + 1
            if state.attempts[sample.sample_id] >= self.config.max_attempts:
                hopeless[sample.sample_id] = f"skipped_{result.skipped}"
                del state.attempts[sample.sample_id]
        self._drop_pending(hopeless)
        self._retry_at = len(state.pending) + max(1, self.config.batch_samples // 4)
        logger.warning("step_skipped reason=%s samples=%d", result.skipped, len(plan.samples))

    def _save(self) -> None:
        """Checkpoint weights, optimiser and state together."""
        self.state.rng = torch.get_rng_state().numpy().tobytes()

        def write(folder: Path) -> None:
            save_file(self._engine.trainable_state(), folder / TRAINABLE)
            self._engine.save(folder)

        keep = lifecycle.serials_to_keep(self.events, self.state)
        self._checkpoints.save(self.state, write, keep)

    # candidates

    def follow(self, events: list[CandidateEvent]) -> lifecycle.Decision:
        """Learn the fate of candidates and act on it."""
        self.events |= {event.version: event for event in events}
        decision = lifecycle.decide(self.events, self.state)
        if decision.action == "anchor":
            lifecycle.anchor(self.state, decision.champion)
            self.state.beta = self.config.beta  # the distance to the new champion starts at zero
            self._anchor_weights(self.state)
            self._save()
            logger.info("champion_anchored version=%s step=%d", decision.champion, self.state.head_step)
        elif decision.action == "return":
            self._return_to(decision)
        return decision

    def _return_to(self, decision: lifecycle.Decision) -> None:
        """Start a new lineage from the champion's checkpoint: its weights, offsets and buffer, a fresh optimiser."""
        champion = decision.champion
        folder = self._checkpoints.path(self.state.exports[champion])
        weights = load_file(folder / TRAINABLE)
        self._engine.load_trainable(weights)
        self._engine.reset_optimizer()
        self.state = lifecycle.after_return(self.state, read_state(folder), champion)
        self.state.beta = self.config.beta
        self._engine.anchor_champion(weights)
        self._known = set(self.state.consumed) | {sample.sample_id for sample in self.state.pending}
        self._retry_at = 0
        self._save()
        logger.warning(
            "returned_to_champion version=%s lineage=%s reason=%s", champion, self.state.lineage, decision.reason
        )

    def is_export_due(self) -> bool:
        """Tell whether enough steps were taken, few enough candidates wait, and the model is near its champion."""
        if self.state.steps_since_export < self.config.publish_every_steps:
            return False
        if len(lifecycle.undecided(self.events, self.state.versions)) >= self.config.max_pending_candidates:
            return False
        record = self.state.last_record
        return record is not None and record.metrics["kl_champion"] <= self.config.publish_max_kl

    def export(self, mlflow_run_id: str = "", code_commit: str = "") -> str:
        """Write a candidate: 1. its folder, 2. a checkpoint that knows it. Return its version."""
        state = self.state
        folder = candidates_folder(self._state_dir)
        version = find_unsaved(self._state_dir, state, self.events)
        if version is None:
            number = lifecycle.next_version_number(
                self.events, [m.version for m in read_manifests(self._state_dir)], state
            )
            version = version_name(number)
            weights = merge(self._engine.policy.model, self.config.kind)
            manifest = make_manifest(version, state, self.config.kind, self._config_hash, code_commit, mlflow_run_id)
            dtype = getattr(torch, self.config.export_dtype)
            export.write_candidate(folder / version, weights, self._base, dtype, manifest, self._probe_rows())  # 1
        self._point("exported")
        state.next_version = int(version[1:]) + 1
        state.versions = [*state.versions, version]
        state.exports[version] = max(self._checkpoints.serials()) + 1
        state.steps_since_export = 0
        self._save()  # 2
        self._point("export_saved")
        logger.info("candidate_exported version=%s step=%d", version, state.head_step)
        return version

    def _probe_rows(self) -> list[Row]:
        """Return rows to probe engines with: the last batch, the buffer, else a fixed sentence."""
        rows = [*self._last_rows, *(row_of(sample) for sample in self.state.pending)]
        if not rows:  # just restarted, nothing read yet
            ids = self._encode("The quick brown fox jumps over the lazy dog.")
            rows = [Row(ids[:half], ids[half:], 1.0) for half in range(1, len(ids))]
        return export.probe_rows(rows, self.config.num_probes)

    def unannounced(self) -> list[CandidateEvent]:
        """Return the proposals that the control topic does not hold yet; the folders on disk are the truth."""
        waiting = [v for v in self.state.versions if v != BASE_VERSION and v not in self.events]
        return [make_proposal(self._state_dir, version) for version in waiting]
