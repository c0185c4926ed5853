"""Atomic checkpoints: weights, optimiser, RNG, offsets, buffer, consumed ids and counters, together or not at all.

Order of a save: 1. write everything into a temporary folder; 2. the sha256 of each file; 3. fsync files and folder;
4. rename; 5. replace CURRENT; 6. remove old ones. A crash leaves the previous CURRENT whole. A checkpoint whose files
differ from their sha256 is not loaded: the newest sound one is.
"""

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec

from learner.candidate import BASE_VERSION, StepRecord, file_sha256
from rewards.samples import Sample

logger = logging.getLogger("learner.checkpoints")

CURRENT = "CURRENT"
STATE = "state.json"
_HASHES = "hashes.json"


class LearnerState(msgspec.Struct, kw_only=True):
    """All that the learner knows beside its weights and optimiser."""

    serial: int = 0  # of the checkpoint
    step: int = 0  # last step number ever taken, dead lineages included
    head_step: int = 0  # last step of the surviving lineage
    lineage: str = "l0001"
    num_lineages: int = 1
    based_on: str = BASE_VERSION
    champion: str = BASE_VERSION
    promoted: list[str] = msgspec.field(
        default_factory=lambda: [BASE_VERSION]
    )  # champions of the surviving lineage, in order
    versions: list[str] = msgspec.field(
        default_factory=lambda: [BASE_VERSION]
    )  # exports of the surviving lineage, in order
    exports: dict[str, int] = {}  # version -> serial of the checkpoint with its weights
    steps_since_export: int = 0
    next_version: int = 1
    beta: float = 0.0
    m2: float = 1.0
    offsets: dict[str, int] = {}  # partition of the sample topic -> next offset
    log_id: str = ""
    pending: list[Sample] = []
    consumed: list[str] = []  # newest last, bounded
    num_consumed: int = 0  # by the surviving lineage
    attempts: dict[str, int] = {}  # sample id -> skipped steps
    num_dropped: dict[str, int] = {}  # reason -> count
    num_skipped: dict[str, int] = {}
    dropped: dict[str, str] = {}  # sample id -> reason, since the last step; goes into the next step's record
    last_record: StepRecord | None = None
    rng: bytes = b""


def read_state(folder: Path) -> LearnerState:
    """Read the state of one checkpoint."""
    return msgspec.json.decode((folder / STATE).read_bytes(), type=LearnerState)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != _HASHES)


def find_problems(folder: Path) -> list[str]:
    """Return what is wrong with a checkpoint's files; empty when sound."""
    try:
        hashes = json.loads((folder / _HASHES).read_text())
    except (OSError, ValueError) as error:
        return [f"{_HASHES} unreadable: {error}"]
    problems = []
    for name, sha256 in hashes.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif file_sha256(path) != sha256:
            problems.append(f"{name} differs from its sha256")
    return problems


class Checkpoints:
    """The checkpoint folder of one learner."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(".tmp-*"):
            shutil.rmtree(leftover)

    def path(self, serial: int) -> Path:
        return self._folder / f"{serial:08d}"

    def serials(self) -> list[int]:
        return sorted(int(path.name) for path in self._folder.iterdir() if path.name.isdigit())

    def save(self, state: LearnerState, write: Callable[[Path], None], keep: set[int]) -> Path:
        """Save under a new serial; write(folder) puts weights and optimiser there; keep: serials still needed."""
        state.serial = max(self.serials(), default=0) + 1
        final = self.path(state.serial)
        temporary = self._folder / f".tmp-{final.name}"
        temporary.mkdir()
        write(temporary)  # 1
        (temporary / STATE).write_bytes(msgspec.json.encode(state))
        hashes = {str(path.relative_to(temporary)): file_sha256(path) for path in _files(temporary)}
        (temporary / _HASHES).write_text(json.dumps(hashes, indent=1))  # 2
        for path in [*_files(temporary), temporary / _HASHES, temporary]:  # 3
            _fsync(path)
        temporary.rename(final)  # 4
        _fsync(self._folder)
        self._point_to(final.name)  # 5
        self._remove_old(keep | set(self.serials()[-self._keep :]))  # 6
        return final

    def _point_to(self, name: str) -> None:
        temporary = self._folder / f".{CURRENT}.tmp"
        with temporary.open("w") as file:
            file.write(name)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(self._folder / CURRENT)
        _fsync(self._folder)

    def _remove_old(self, keep: set[int]) -> None:
        for serial in self.serials():
            if serial not in keep:
                shutil.rmtree(self.path(serial))

    def newest_sound(self) -> Path | None:
        """Return the checkpoint to resume from: CURRENT, or if it is damaged the newest sound one before it."""
        try:
            current = int((self._folder / CURRENT).read_text())
        except (OSError, ValueError):
            current = max(self.serials(), default=0)
        for serial in reversed(self.serials()):
            problems = [] if serial > current else find_problems(self.path(serial))
            if serial > current or problems:
                # newer than CURRENT: its save was cut between rename and pointer, and nothing has seen it
                logger.error("checkpoint_refused serial=%d problems=%s", serial, problems or "newer than CURRENT")
                shutil.move(self.path(serial), self._folder / f".tmp-refused-{serial:08d}")
                continue
            self._point_to(f"{serial:08d}")
            return self.path(serial)
        return None
