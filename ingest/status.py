"""Status files (contract): each process says once a second how it is, for `headrace status` and the live view."""

import json
import os
from pathlib import Path
from typing import Any


def write_status(state_dir: Path, process: str, status: dict[str, Any]) -> None:
    """Replace <state_dir>/status/<process>.json atomically. Put at = time.time() in it; not durable, only current."""
    folder = state_dir / "status"
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{process}.{os.getpid()}.tmp"
    temporary.write_text(json.dumps(status))
    temporary.rename(folder / f"{process}.json")


def read_statuses(state_dir: Path) -> dict[str, dict[str, Any]]:
    """Return process -> last status written."""
    statuses = {}
    for path in sorted((state_dir / "status").glob("*.json")):
        try:
            statuses[path.stem] = json.loads(path.read_text())
        except (OSError, json.JSONDecodeError):
            continue  # replaced or removed while we looked; the next look sees it
    return statuses
