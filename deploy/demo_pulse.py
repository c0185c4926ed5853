"""What the demo knows about the running loop, once a second: beats for the live view and the curves.

Takes: status files, the control topic, the clients' answers and votes. Emits: Beat, kept in demo/timeline.jsonl.
Promises: a status file that is missing or lacks a key leaves its field empty, never stops the demo.
"""

import logging
import threading
from pathlib import Path
from typing import Any

import msgspec

from deploy.demo_client import Answer, SentVote
from ingest.config import KafkaConfig
from ingest.events import decode
from ingest.stream import Reader
from ingest.topics import topics
from learner.candidate import CANDIDATE_KEY, CandidateEvent
from serving.routes import ROUTES_KEY, RouteTable

logger = logging.getLogger("deploy.demo")
MIN_SHOWN = 10  # answers or votes before a share is shown
ROLLING = 60  # answers or votes in a rolling share
STAGES = ("joiner", "archiver", "rewards", "learner", "controller")


class Beat(msgspec.Struct, kw_only=True):
    """The loop at one moment; shares in [0, 1], None where nothing is known yet."""

    elapsed_s: float
    phase: str
    champion: str = ""
    canary: str = ""
    canary_weight: float = 0.0
    true_share: float | None = None  # rolling, by the hidden rule
    observed_share: float | None = None  # rolling, by the votes
    requests_per_s: float = 0.0
    num_answers: int = 0
    num_failed: int = 0
    num_votes: int = 0
    open_requests: int = 0
    lags: dict[str, int] = {}
    step: int = 0
    reward: float | None = None
    kl: float | None = None
    backlog: int = 0  # samples that the learner has not consumed
    evidence: float | None = None  # E of the canary for promotion
    threshold: float | None = None
    num_units: int = 0
    num_swaps: int = 0
    num_promotions: int = 0
    num_rejected: int = 0
    down: list[str] = []  # processes without a fresh status


class ControlWatch:
    """Follows the control topic in a thread: every candidate event and route table, in order."""

    def __init__(self, kafka: KafkaConfig):
        self.kafka = kafka
        self.events: list[CandidateEvent] = []
        self.tables: list[RouteTable] = []
        self.num_retries = 0  # times that the broker was lost
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="control-watch", daemon=True)

    def start(self) -> "ControlWatch":
        self._thread.start()
        return self

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def _follow(self) -> None:
        """Read the topic; when the broker is away, or is killed by --kill, look again from the start."""
        seen: set[bytes] = set()
        while not self._stop.is_set():
            try:
                self._read(seen)
            except Exception as error:  # policy: whatever the broker says, the demo keeps watching and counts it
                self.num_retries += 1
                logger.warning("control_watch_retry number=%d error=%r", self.num_retries, error)
                self._stop.wait(1.0)

    def _read(self, seen: set[bytes]) -> None:
        reader = Reader(self.kafka, [topics(self.kafka).control], {}, "demo-watch")
        try:
            while not self._stop.is_set():
                for record in reader.poll(0.5):
                    if record.value not in seen:
                        seen.add(record.value)
                        self._take(record.key, record.value)
        finally:
            reader.close()

    def _take(self, key: str, value: bytes) -> None:
        if key == ROUTES_KEY:
            self.tables.append(decode(value, RouteTable))
        elif key.startswith(CANDIDATE_KEY):
            self.events.append(decode(value, CandidateEvent))

    def states_of(self, version: str) -> list[str]:
        """Return the states that a candidate went through."""
        return [event.state for event in self.events if event.version == version]

    def in_gates(self) -> bool:
        """Say whether the offline gates look at a candidate now: its last word is shadow."""
        return "shadow" in {event.version: event.state for event in self.events}.values()

    def promoted(self) -> list[CandidateEvent]:
        """Return the first promotion of each version, in order."""
        first: dict[str, CandidateEvent] = {}
        for event in self.events:
            if event.state == "promoted":
                first.setdefault(event.version, event)
        return list(first.values())

    @property
    def table(self) -> RouteTable | None:
        return max(self.tables, key=lambda table: table.revision, default=None)


def rolling_true(answers: list[Answer]) -> float | None:
    """Return the true share of satisfied users among the last answers of the traffic."""
    last = [answer.satisfied for answer in answers[-3 * ROLLING :] if answer.purpose == "traffic" and not answer.error]
    return sum(last[-ROLLING:]) / len(last[-ROLLING:]) if len(last) >= MIN_SHOWN else None


def rolling_observed(votes: list[SentVote]) -> float | None:
    """Return the share of thumbs up among the last accepted votes."""
    last = [vote.value for vote in votes[-3 * ROLLING :] if vote.num_accepted and vote.op == "upsert"][-ROLLING:]
    return sum(last) / len(last) if len(last) >= MIN_SHOWN else None


def requests_per_s(answers: list[Answer], now_s: float, window_s: float = 15.0) -> float:
    """Return answers per second over the last window."""
    recent = 0
    for answer in reversed(answers):
        if answer.completed_at < now_s - window_s:
            break
        recent += not answer.error
    return recent / window_s


def number(status: dict[str, Any], *keys: str) -> float | None:
    """Return the first of the keys that holds a number."""
    for key in keys:
        value = status.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return None


def part(status: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a nested table of a status; empty where there is none."""
    value = status.get(name)
    return value if isinstance(value, dict) else {}


def backlog_of(statuses: dict[str, dict[str, Any]]) -> int:
    """Return how many emitted samples the learner has not consumed: buffered ones and those still on the topic."""
    learner = statuses.get("learner", {})
    return int((number(learner, "num_buffered", "num_pending", "buffered") or 0) + (number(learner, "lag") or 0))


def take_beat(
    elapsed_s: float,
    now_s: float,
    phase: str,
    statuses: dict[str, dict[str, Any]],
    watch: ControlWatch,
    answers: list[Answer],
    votes: list[SentVote],
    open_requests: int,
) -> Beat:
    """Take one beat."""
    table = watch.table
    learner, controller = statuses.get("learner", {}), statuses.get("controller", {})
    canary = part(controller, "canary")
    stopped = {event.version for event in watch.events if event.state in ("rejected", "rolled_back")}
    return Beat(
        elapsed_s=round(elapsed_s, 1),
        phase=phase,
        champion=table.champion.version if table and table.champion else "",
        canary=table.canary.version if table and table.canary else "",
        canary_weight=table.canary_weight if table else 0.0,
        true_share=rolling_true(answers),
        observed_share=rolling_observed(votes),
        requests_per_s=round(requests_per_s(answers, now_s), 2),
        num_answers=sum(not answer.error for answer in answers),
        num_failed=sum(bool(answer.error) for answer in answers),
        num_votes=len({vote.feedback_id for vote in votes if vote.num_accepted}),
        open_requests=open_requests,
        lags={name: int(number(statuses[name], "lag") or 0) for name in STAGES if name in statuses},
        step=int(number(learner, "head_step", "step") or 0),
        reward=number(learner, "reward_mean", "mean_reward", "reward"),
        kl=number(learner, "kl_champion", "kl_to_champion", "kl"),
        backlog=backlog_of(statuses),
        evidence=number(canary, "e_promote"),
        threshold=number(canary, "threshold"),
        num_units=int(number(canary, "outcomes") or 0),
        num_swaps=int(number(part(controller, "swaps"), "count") or 0),
        num_promotions=len(watch.promoted()),
        num_rejected=len(stopped),
        down=sorted(name for name in STAGES if now_s - float(statuses.get(name, {}).get("at", 0)) > 15),
    )


class Timeline:
    """All beats, in memory and in a file."""

    def __init__(self, path: Path):
        self.beats: list[Beat] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")

    def add(self, beat: Beat) -> None:
        self.beats.append(beat)
        self._file.write(msgspec.json.encode(beat) + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
