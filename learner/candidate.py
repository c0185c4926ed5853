"""Candidates and their life (contract): manifest, lifecycle events, step records.

A candidate is a folder with safetensors files and manifest.json. The manifest lists every file with its sha256; a file
outside it or with another hash is refused. Its life is told on the control topic, key candidate/<version>.
"""

import hashlib
import os
from pathlib import Path
from typing import Literal

import msgspec

MANIFEST = "manifest.json"
CANDIDATE_KEY = "candidate/"
CANDIDATE_TYPE = "llm.candidate.v1"
BASE_VERSION = "v000000"

State = Literal["proposed", "shadow", "canary", "promoted", "rejected", "rolled_back", "shelved", "inconclusive"]


class CandidateFile(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    sha256: str
    num_bytes: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a candidate is and where it comes from."""

    version: str
    parent: str | None
    kind: Literal["base", "lora", "full"]  # how it was trained; the files are always a complete merged model
    files: list[CandidateFile]
    created_at: float
    step: int = 0
    lineage: str = ""  # id of the learner's current line of descent; changes when it returns to a champion
    sample_cursor: dict[str, int] = {}  # partition -> next offset of the sample topic
    num_samples: int = 0  # consumed by the whole surviving lineage
    ledger_sha256: str = ""
    config_hash: str = ""
    code_commit: str = ""
    mlflow_run_id: str = ""
    metrics: dict[str, float] = {}
    gate_inputs: dict[str, float] = {}
    probes: list["Probe"] = []


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids with the learner's own log-probs (temperature 1), to verify a loaded engine against."""

    prompt_ids: list[int]
    completion_ids: list[int]
    logprobs: list[float]


class CandidateEvent(msgspec.Struct, frozen=True, kw_only=True):
    """The latest word about one candidate; the value under key candidate/<version>."""

    version: str
    state: State
    at: float
    folder: str = ""
    manifest_sha256: str = ""
    parent: str | None = None
    reason: str = ""
    evidence: dict[str, float] = {}
    author: str = ""  # learner | controller | operator


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One optimisation step: which samples it used. Kept in the checkpoint and in steps.jsonl."""

    step: int
    lineage: str
    based_on: str  # version whose weights the lineage started from
    next_version: str  # version that the next export will carry
    sample_ids: list[str]
    dropped: dict[str, str] = {}  # sample id -> reason
    at: float = 0.0
    metrics: dict[str, float] = {}
    parent_step: int = 0  # the step whose weights this one started from; 0: the base model. Surviving steps are a chain


def version_name(number: int) -> str:
    """Return v000123."""
    return f"v{number:06d}"


def version_number(version: str) -> int:
    """Parse v000123; ValueError says what a version looks like."""
    if len(version) != 7 or version[0] != "v" or not version[1:].isdigit():
        raise ValueError(f"{version!r} is not a version: expected v and six digits, such as v000003")
    return int(version[1:])


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def list_files(folder: Path) -> list[CandidateFile]:
    """Hash every file of a folder except the manifest."""
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file() and entry.name != MANIFEST)
    return [
        CandidateFile(name=name, sha256=file_sha256(folder / name), num_bytes=(folder / name).stat().st_size)
        for name in names
    ]


def write_manifest(folder: Path, manifest: Manifest) -> str:
    """Write the manifest durably (temporary, fsync, rename) and return its sha256."""
    value = msgspec.json.format(msgspec.json.encode(manifest), indent=1)
    temporary = folder / f".{MANIFEST}.tmp"
    with temporary.open("wb") as file:
        file.write(value)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(folder / MANIFEST)
    return hashlib.sha256(value).hexdigest()


def read_manifest(folder: Path) -> tuple[Manifest, str]:
    """Read a manifest and its sha256; ValueError says what is wrong."""
    path = folder / MANIFEST
    try:
        value = path.read_bytes()
        return msgspec.json.decode(value, type=Manifest), hashlib.sha256(value).hexdigest()
    except OSError as error:
        raise ValueError(f"candidate {folder} has no readable {MANIFEST}: {error}") from error
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} is not a valid manifest: {error}") from error


def check_files(folder: Path, manifest: Manifest) -> list[str]:
    """Return every problem of a candidate's files: missing, unlisted, changed, or not allowed; empty when sound."""
    problems = []
    present = {entry.name for entry in folder.iterdir() if entry.name != MANIFEST}
    listed = {file.name for file in manifest.files}
    problems += [f"{name} is not in the manifest" for name in sorted(present - listed)]
    for file in manifest.files:
        path = folder / file.name
        if "/" in file.name or file.name.endswith((".bin", ".pt", ".pth", ".pkl")):
            problems.append(f"{file.name}: only safetensors weights are accepted")
        elif not path.is_file():
            problems.append(f"{file.name} is listed but missing")
        elif path.stat().st_size != file.num_bytes or file_sha256(path) != file.sha256:
            problems.append(f"{file.name} differs from its sha256 in the manifest")
    return problems
