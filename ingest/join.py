"""The join as a state machine: feedback meets inference in event time; windows, revisions, dispositions.

Owns every rule of the join, and no I/O: state comes in as JoinState, time as an argument; take() gives the results.
    dedup       an event id is seen once; a feedback revision too, under whatever event id
    target      inference_id; response_id (every choice, also those that come later); episode_id (the last inference
                known when the feedback came, else the first to come; of the same tenant). trace_id: quarantined
    order       by (revision, retract after upsert), not by arrival; the highest that is in time counts
    in time     received no later than late_s after exposure; else expired. No inference within orphan_s: expired
    tenant      feedback of another tenant than its inference's is quarantined
    emission    final (revision 0) once the watermark passes exposure + observation_s, each inference exactly once;
                a change after that is a correction (revision + 1) with all feedback known
    watermark   per partition: the least over the topics of the latest event time seen, or the wall clock where the
                topic is read to its end; so a topic that is read ahead of the other closes no window early
"""

from typing import NamedTuple

import msgspec

from ingest import ids
from ingest.events import Feedback, Inference
from ingest.state import InferenceRow, JoinState, RevisionRow

_EMIT_LIMIT = 2000  # windows closed per partition and pass, which bounds a transaction
_KEEP_SEEN_S = 3600.0
# Status of a feedback that counts for no inference -> its disposition and the reason.
_UNUSED = {
    "pending": ("pending", "its inference has not been seen yet"),
    "late": ("expired", "came later than late_window_s after exposure"),
    "orphaned": ("expired", "its inference was not seen within orphan_window_s"),
    "quarantined": ("quarantined", "of another tenant than its inference"),
}


class Windows(NamedTuple):
    """Seconds of event time."""

    observation_s: float
    late_s: float
    orphan_s: float
    max_future_s: float


class Arrival(NamedTuple):
    """Where and how an event came."""

    topic: str
    partition: int
    offset: int
    key: str
    event_key: str  # ce_source/ce_id; empty when the producer sent none
    value: bytes

    @property
    def place(self) -> str:
        return f"{self.topic}[{self.partition}]@{self.offset}"


class Emission(NamedTuple):
    """An interaction to publish."""

    inference_id: str
    revision: int
    key: str
    value: bytes


class Quarantined(NamedTuple):
    """A record for the dead letter topic."""

    place: str
    reason: str
    key: str
    value: bytes


class _InteractionOut(msgspec.Struct):
    """events.Interaction with its parts as they came: nothing is decoded and encoded again."""

    inference: msgspec.Raw
    feedback: list[msgspec.Raw]
    state: str
    revision: int
    watermark: float
    retracted_ids: list[str]
    source_offsets: dict[str, int]


def _routable_target(feedback: Feedback) -> tuple[str, str]:
    """Return (field, id) of the target; ValueError if it names none, two, or one that no partition follows from."""
    field, target_id = feedback.target()
    if field == "trace_id":
        raise ValueError(f"trace_id {target_id!r} cannot be routed: name an inference, response or episode id")
    if field != "episode_id" and ids.parse(target_id).kind != {"inference_id": "inf", "response_id": "resp"}[field]:
        raise ValueError(f"{target_id!r} is not of the kind that {field} names")
    if not 0 <= feedback.revision < 1 << 31:
        raise ValueError(f"revision {feedback.revision} is not between 0 and {(1 << 31) - 1}")
    return field, target_id


class Join:
    """One transaction's worth of the join: feed it, advance() it, take() the results."""

    def __init__(self, state: JoinState, windows: Windows, topics: tuple[str, ...]) -> None:
        self._state = state
        self._windows = windows
        self._topics = topics
        self._marks = state.watermarks()
        self._dirty: dict[str, None] = {}  # windows whose feedback changed, in order
        self._emissions: list[Emission] = []
        self._quarantined: list[Quarantined] = []

    def take(self) -> tuple[list[Emission], list[Quarantined]]:
        return self._emissions, self._quarantined

    # Arrivals

    def on_inference(self, arrival: Arrival, inference: Inference, now_s: float) -> None:
        """Open a window; feedback that waited for it is applied."""
        exposed_at = inference.timing.completed_at or inference.timing.received_at
        if self._is_future(exposed_at, arrival, now_s) or self._is_duplicate(
            arrival, f"i/{inference.inference_id}", now_s
        ):
            return
        self._see(arrival, exposed_at)
        source = f"{arrival.topic}[{arrival.partition}]"
        named = (inference.inference_id, inference.response_id, inference.episode_id, inference.tenant)
        came = (source, arrival.partition, arrival.offset, arrival.key, arrival.value)
        row = InferenceRow(*named, exposed_at, -1, *came)
        self._state.add_inference(row)
        self._state.count("inferences")
        waiting = self._state.waiting_for(row)
        for revision in waiting:
            self._resolve(revision)
        for tenant, feedback_id in dict.fromkeys((w.tenant, w.feedback_id) for w in waiting):
            self._settle(tenant, feedback_id, now_s)

    def on_feedback(self, arrival: Arrival, feedback: Feedback, now_s: float) -> None:
        """Apply one revision of one feedback, or let it wait."""
        rank = 2 * feedback.revision + (feedback.op == "retract")
        natural_key = f"f/{feedback.tenant}/{feedback.feedback_id}/{rank}"
        try:
            field, target_id = _routable_target(feedback)
        except ValueError as error:
            if not self._is_duplicate(arrival, natural_key, now_s):
                self.quarantine(arrival, f"unroutable: {error}")
                self._mark(feedback.tenant, feedback.feedback_id, "quarantined", str(error), now_s)
            return
        if self._is_future(feedback.received_at, arrival, now_s):
            return self._mark(feedback.tenant, feedback.feedback_id, "quarantined", "dated in the future", now_s)
        if self._is_duplicate(arrival, natural_key, now_s):
            return
        self._see(arrival, feedback.received_at)
        named = (feedback.tenant, feedback.feedback_id, rank, field, target_id)
        came = (arrival.partition, arrival.place, arrival.key, arrival.value)
        row = RevisionRow(*named, feedback.received_at, "pending", "", *came)
        self._state.add_revision(row)
        self._resolve(row)
        self._settle(feedback.tenant, feedback.feedback_id, now_s)

    def quarantine(self, arrival: Arrival, reason: str) -> None:
        self._state.count("quarantined")
        self._quarantined.append(Quarantined(arrival.place, reason, arrival.key, arrival.value))

    def malformed_feedback(self, arrival: Arrival, tenant: str, feedback_id: str, reason: str, now_s: float) -> None:
        """Quarantine a feedback record that cannot be decoded, and account for its id where it has one."""
        self.quarantine(arrival, reason)
        if feedback_id:
            self._mark(tenant, feedback_id, "quarantined", reason, now_s)

    def _is_future(self, at: float, arrival: Arrival, now_s: float) -> bool:
        if at <= now_s + self._windows.max_future_s:
            return False
        self.quarantine(
            arrival, f"dated {at - now_s:.0f} s in the future; max_future_s is {self._windows.max_future_s:.0f}"
        )
        return True

    def _is_duplicate(self, arrival: Arrival, natural_key: str, now_s: float) -> bool:
        known = bool(arrival.event_key) and not self._state.first_sight(f"e/{arrival.event_key}", now_s)
        known = not self._state.first_sight(natural_key, now_s) or known
        if known:
            self._state.count("duplicates")
        return known

    def _see(self, arrival: Arrival, at: float) -> None:
        tp = (arrival.topic, arrival.partition)
        self._marks[tp] = max(self._marks.get(tp, 0.0), at)

    # Feedback finds its inference

    def _resolve(self, row: RevisionRow) -> None:
        """Set a revision's status from what is known about its target."""
        targets = self._targets(row)
        if not targets:
            return
        if any(target.tenant != row.tenant for target in targets):
            reason = f"tenant {row.tenant!r} gave feedback on an inference of another tenant"
            self._state.count("quarantined")
            self._quarantined.append(Quarantined(row.place, reason, row.key, row.value))
            return self._state.update_revision(row._replace(status="quarantined"))
        in_time = any(self._in_time(row, target) for target in targets)
        resolved = targets[0].inference_id if row.field == "episode_id" else ""
        self._state.update_revision(row._replace(status="live" if in_time else "late", resolved=resolved))

    def _targets(self, row: RevisionRow) -> list[InferenceRow]:
        if row.field == "response_id":
            return self._state.inferences_of(row.target_id)
        if row.field == "inference_id":
            found = self._state.inference(row.target_id)
        else:
            siblings = self._state.revisions(row.tenant, row.feedback_id)
            resolved = [s.resolved for s in siblings if s.resolved and s.target_id == row.target_id]
            known = self._state.inference(resolved[0]) if resolved else None
            found = known or self._state.last_of_episode(row.tenant, row.target_id)
        return [found] if found else []

    def _in_time(self, row: RevisionRow, target: InferenceRow) -> bool:
        return row.received_at <= target.exposed_at + self._windows.late_s

    def _settle(self, tenant: str, feedback_id: str, now_s: float) -> None:
        """Let the highest live revision count: link it, unlink what it replaces, record the disposition."""
        rows = self._state.revisions(tenant, feedback_id)
        winner = next((row for row in rows if row.status == "live"), None)
        before = self._state.linked(tenant, feedback_id)
        after = (
            {t.inference_id: winner.rank for t in self._targets(winner) if self._in_time(winner, t)} if winner else {}
        )
        for inference_id in before.keys() - after.keys():
            self._state.unlink(inference_id, tenant, feedback_id)
        for inference_id, rank in after.items():
            if winner and before.get(inference_id) != rank:
                self._state.link(inference_id, winner)
        self._dirty |= {key: None for key in sorted(before.keys() | after.keys()) if before.get(key) != after.get(key)}
        if winner:
            return self._mark(tenant, feedback_id, "retracted" if winner.retracts else "applied", "", now_s)
        statuses = {row.status for row in rows}
        status = next(s for s in ("pending", "late", "orphaned", "quarantined") if s in statuses)
        self._mark(tenant, feedback_id, *_UNUSED[status], now_s)

    def _mark(self, tenant: str, feedback_id: str, disposition: str, reason: str, now_s: float) -> None:
        """Record a disposition; what was applied or retracted once stays so when a later revision comes to nothing."""
        before = self._state.disposition(tenant, feedback_id)
        if before in ("applied", "retracted") and disposition not in ("applied", "retracted"):
            return
        self._state.set_disposition(tenant, feedback_id, disposition, reason, now_s)

    # Time passes

    def watermark(self, partition: int) -> float:
        return min(self._marks.get((topic, partition), 0.0) for topic in self._topics)

    def advance(self, caught_up: set[tuple[str, int]], partitions: int, now_s: float) -> None:
        """Move the watermarks, close windows, expire orphans, emit corrections, save counts."""
        for tp in caught_up:
            self._marks[tp] = max(self._marks.get(tp, 0.0), now_s)
        for partition in range(partitions):
            mark = self.watermark(partition)
            for row in self._state.orphans(partition, mark - self._windows.orphan_s, _EMIT_LIMIT):
                self._state.update_revision(row._replace(status="orphaned"))
                self._settle(row.tenant, row.feedback_id, now_s)
            for row in self._state.due(partition, mark - self._windows.observation_s, _EMIT_LIMIT):
                self._dirty.pop(row.inference_id, None)
                self._emit(row, "final", mark)
        for inference_id in self._dirty:
            row = self._state.inference(inference_id)
            if row is not None and row.revision >= 0:
                self._emit(row, "correction", self.watermark(row.source_partition))
        self._dirty.clear()
        self._state.save_watermarks(self._marks)
        self._state.save_counts()

    def _emit(self, row: InferenceRow, state: str, watermark: float) -> None:
        revision = row.revision + 1
        feedback = self._state.feedback_on(row.inference_id)
        value = msgspec.json.encode(
            _InteractionOut(
                inference=msgspec.Raw(row.value),
                feedback=[msgspec.Raw(one.value) for one in feedback if not one.retracts],
                state=state,
                revision=revision,
                watermark=watermark,
                retracted_ids=[one.feedback_id for one in feedback if one.retracts],
                source_offsets={row.source: row.source_offset},
            )
        )
        self._state.set_revision(row.inference_id, revision)
        self._state.count("joined" if state == "final" else "corrections")
        self._emissions.append(Emission(row.inference_id, revision, row.key, value))

    def evict(self, partitions: int, now_s: float) -> None:
        """Forget what no feedback in time can change any more."""
        keep_s = self._windows.late_s + self._windows.orphan_s
        for partition in range(partitions):
            self._state.evict(partition, self.watermark(partition) - keep_s)
        self._state.evict_seen(now_s - max(keep_s, _KEEP_SEEN_S))
