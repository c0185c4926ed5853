"""Which steps survive, and which steps and candidates used a sample (contract).

Reads what the learner made durable: steps.jsonl (every step ever taken), the current checkpoint, candidates' manifests.
A step survives when the chain of parent steps that ends at the current checkpoint holds it; steps after a candidate
that was rejected do not, and their samples were used again.
"""

import json
import os
from pathlib import Path

import msgspec

from learner.candidate import Manifest, StepRecord, read_manifest


def learner_folder(state_dir: Path) -> Path:
    return state_dir / "learner"


def candidates_folder(state_dir: Path) -> Path:
    return state_dir / "candidates"


def read_steps(state_dir: Path) -> list[StepRecord]:
    """Return every step ever taken, by number; of a step taken again after a damaged checkpoint, the later one."""
    path = learner_folder(state_dir) / "steps.jsonl"
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    steps: dict[int, StepRecord] = {}
    for line in lines:
        try:
            record = msgspec.json.decode(line, type=StepRecord)
        except msgspec.MsgspecError:
            continue  # a line cut by a crash; the step is appended again on restart
        steps[record.step] = record
    return [steps[number] for number in sorted(steps)]


def append_step(state_dir: Path, record: StepRecord) -> None:
    """Append a step's line durably, unless it is the last line already (a restart after its checkpoint)."""
    path = learner_folder(state_dir) / "steps.jsonl"
    line = msgspec.json.encode(record) + b"\n"
    existing = path.read_bytes() if path.exists() else b""
    if existing.endswith(line):
        return
    with path.open("ab") as file:
        file.write(b"" if not existing or existing.endswith(b"\n") else b"\n")
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def head_step(state_dir: Path) -> int:
    """Return the last step of the surviving lineage; 0 before any."""
    folder = learner_folder(state_dir) / "checkpoints"
    try:
        state = json.loads((folder / (folder / "CURRENT").read_text().strip() / "state.json").read_bytes())
    except (OSError, ValueError):
        return 0
    return int(state["head_step"])


def chain(steps: list[StepRecord], last: int) -> list[StepRecord]:
    """Return the steps that lead to step number last, oldest first."""
    by_number = {record.step: record for record in steps}
    found: list[StepRecord] = []
    while last in by_number:
        record = by_number.pop(last)
        found.append(record)
        last = record.parent_step
    return found[::-1]


def surviving_steps(state_dir: Path) -> list[StepRecord]:
    """Return the steps that the learner's current weights are made of, oldest first."""
    return chain(read_steps(state_dir), head_step(state_dir))


def read_manifests(state_dir: Path) -> list[Manifest]:
    """Return the manifests of all candidates on disk, by version."""
    folder = candidates_folder(state_dir)
    found = []
    for path in sorted(folder.glob("v*/manifest.json")):
        try:
            found.append(read_manifest(path.parent)[0])
        except ValueError:
            continue  # a damaged candidate is the gates' business
    return found


def steps_of_candidate(state_dir: Path, version: str) -> list[StepRecord]:
    """Return all steps that made a candidate's weights, its ancestors' included; ValueError if it is unknown."""
    manifest, _ = read_manifest(candidates_folder(state_dir) / version)
    return chain(read_steps(state_dir), manifest.step)


def steps_of_sample(state_dir: Path, sample_id: str) -> list[StepRecord]:
    """Return the steps that used a sample, dead lineages included."""
    return [record for record in read_steps(state_dir) if sample_id in record.sample_ids]


def candidates_of_sample(state_dir: Path, sample_id: str) -> list[str]:
    """Return the versions of the candidates that trained on a sample."""
    steps = read_steps(state_dir)
    used = {record.step for record in steps if sample_id in record.sample_ids}
    return [
        manifest.version
        for manifest in read_manifests(state_dir)
        if used & {record.step for record in chain(steps, manifest.step)}
    ]
