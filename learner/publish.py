"""How a candidate is described and announced: manifest and proposal, and what a crash left of them.

Promises: a candidate is announced from its folder, so that announcing it twice says the same.
"""

import hashlib
from pathlib import Path
from typing import Literal

from learner.candidate import CandidateEvent, Manifest, read_manifest
from learner.checkpoints import LearnerState
from learner.lineage import candidates_folder, read_manifests


def find_unsaved(state_dir: Path, state: LearnerState, events: dict[str, CandidateEvent]) -> str | None:
    """Return a complete export of exactly this step that a crash left before its checkpoint."""
    for manifest in read_manifests(state_dir):
        is_ours = 0 < manifest.step == state.head_step and manifest.lineage == state.lineage
        if is_ours and manifest.version not in state.versions and manifest.version not in events:
            return manifest.version
    return None


def make_manifest(
    version: str, state: LearnerState, kind: Literal["lora", "full"], config_hash: str, code_commit: str, run_id: str
) -> Manifest:
    """Return the manifest of the current weights, without files and probes."""
    metrics = state.last_record.metrics if state.last_record else {}
    return Manifest(
        version=version,
        parent=state.versions[-1],
        kind=kind,
        files=[],
        created_at=0.0,
        step=state.head_step,
        lineage=state.lineage,
        sample_cursor=dict(state.offsets),
        num_samples=state.num_consumed,
        ledger_sha256=hashlib.sha256("\n".join(state.consumed).encode()).hexdigest(),
        config_hash=config_hash,
        code_commit=code_commit,
        mlflow_run_id=run_id,
        metrics=metrics,
        gate_inputs={"kl_champion": metrics["kl_champion"]} if metrics else {},
    )


def make_proposal(state_dir: Path, version: str) -> CandidateEvent:
    """Return the event that announces a candidate; its folder is the truth."""
    folder = candidates_folder(state_dir) / version
    manifest, sha256 = read_manifest(folder)
    return CandidateEvent(
        version=version,
        state="proposed",
        at=manifest.created_at,
        folder=str(folder.resolve()),
        manifest_sha256=sha256,
        parent=manifest.parent,
        author="learner",
    )
