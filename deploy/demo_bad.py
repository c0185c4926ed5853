"""--plant-bad: bad candidates announced like any other, and what became of them.

Takes the candidates that deploy/plant.py makes in a process of its own. Promises: an outcome for each planted version,
told by the controller's own events; exposure counted from the clients' answers.
"""

import asyncio
import json
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import msgspec

from deploy.demo_client import Answer
from deploy.demo_pulse import ControlWatch
from ingest.config import KafkaConfig
from ingest.events import encode
from ingest.producer import Publisher
from ingest.topics import headers, topics
from learner.candidate import BASE_VERSION, CANDIDATE_KEY, CANDIDATE_TYPE, CandidateEvent, version_name

FIRST_PLANTED = 900001
STOPPED = ("rejected", "rolled_back")
SET_ASIDE = ("shelved", "inconclusive")  # not judged bad: planted again on the present champion
MAX_PLANTINGS = 3
VERDICT_PATIENCE_S = 300.0


class Planted(msgspec.Struct, kw_only=True):
    """One bad candidate and where it was stopped."""

    kind: str  # nan | nonsense
    version: str
    states: list[str] = []
    reason: str = ""
    num_exposed: int = 0  # client answers that it gave

    @property
    def stopped(self) -> bool:
        return "promoted" not in self.states and bool(self.states) and self.states[-1] in STOPPED


def nonsense_folder(state_dir: Path) -> Path:
    """Return where the nonsense weights lie, trained ahead of time."""
    return state_dir / "demo" / "nonsense"


async def run_plant(*arguments: str) -> dict:
    """Run deploy.plant in its own process; ValueError with its last words if it fails."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "deploy.plant",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await process.communicate()
    except asyncio.CancelledError:
        if process.returncode is None:
            process.kill()
            await process.wait()
        raise
    if process.returncode != 0:
        raise ValueError(f"deploy.plant {' '.join(arguments)} failed:\n" + err.decode(errors="replace")[-2000:])
    return json.loads(out.decode().splitlines()[-1])


def announce(kafka: KafkaConfig, version: str, folder: Path, parent: str, manifest_sha256: str) -> None:
    """Publish a candidate as proposed, as the learner would."""
    now_s = time.time()
    event = CandidateEvent(
        version=version,
        state="proposed",
        at=now_s,
        folder=str(folder),
        manifest_sha256=manifest_sha256,
        parent=parent,
        reason="planted by the demo",
        author="learner",
    )
    publisher = Publisher(kafka, "demo-plant")
    try:
        attributes = headers(CANDIDATE_TYPE, uuid.uuid4().hex, "demo-plant", now_s)
        publisher.publish_durably(topics(kafka).control, f"{CANDIDATE_KEY}{version}", encode(event), attributes)
    finally:
        publisher.close()


async def plant_bad(
    kafka: KafkaConfig, state_dir: Path, base: Path, watch: ControlWatch, say: Callable[[str], None]
) -> list[Planted]:
    """Plant NaN, wait for its end, then nonsense; each on the champion of the moment."""
    planted: list[Planted] = []
    number = FIRST_PLANTED
    for kind in ("nan", "nonsense"):
        for _ in range(MAX_PLANTINGS):
            one = Planted(kind=kind, version=version_name(number))
            number += 1
            planted.append(one)
            await _plant_one(kafka, state_dir, base, watch, one, say)
            if one.states[-1:] and one.states[-1] not in SET_ASIDE:
                break
    return planted


async def _plant_one(
    kafka: KafkaConfig, state_dir: Path, base: Path, watch: ControlWatch, one: Planted, say: Callable[[str], None]
) -> None:
    champion = watch.table.champion if watch.table else None
    assert champion, "candidates are planted only once something is served"
    candidates = state_dir / "candidates"
    parent = base if champion.version == BASE_VERSION else candidates / champion.version
    folder = candidates / one.version
    arguments = ["--parent", str(parent), "--version", one.version, "--out", str(folder)]
    if one.kind == "nonsense":
        arguments += ["--weights", str(nonsense_folder(state_dir))]
    made = await run_plant(one.kind, *arguments)
    await asyncio.to_thread(announce, kafka, one.version, folder, champion.version, made["manifest_sha256"])
    say(f"planted a {one.kind} candidate as {one.version} on {champion.version}")
    deadline_s = time.monotonic() + VERDICT_PATIENCE_S
    while time.monotonic() < deadline_s:
        events = [event for event in watch.events if event.version == one.version]
        one.states = [event.state for event in events]
        if one.states and one.states[-1] in (*STOPPED, *SET_ASIDE, "promoted") and "once more" not in events[-1].reason:
            one.reason = events[-1].reason
            say(f"{one.kind} candidate {one.version}: {' > '.join(one.states)} ({one.reason})")
            return
        await asyncio.sleep(0.5)
    say(f"{one.kind} candidate {one.version}: no verdict after {VERDICT_PATIENCE_S:.0f} s ({' > '.join(one.states)})")


def count_exposure(planted: list[Planted], answers: list[Answer]) -> None:
    """Fill in how many client answers each planted version gave."""
    for one in planted:
        one.num_exposed = sum(answer.version == one.version and not answer.error for answer in answers)


def is_contained(planted: list[Planted]) -> bool:
    """Say whether both kinds were stopped, nothing bad was promoted, and no NaN reached a user."""
    kinds_stopped = {one.kind for one in planted if one.stopped}
    promoted = any("promoted" in one.states for one in planted)
    nan_exposed = any(one.kind == "nan" and (one.num_exposed or "canary" in one.states) for one in planted)
    return kinds_stopped == {"nan", "nonsense"} and not promoted and not nan_exposed
