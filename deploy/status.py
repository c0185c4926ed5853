"""`headrace status`: one screen from the status files and the control topic; looks only."""

import json
import time
from pathlib import Path
from typing import Any

from deploy import lock
from ingest.config import RunConfig, load_table
from ingest.status import read_statuses

_STALE_S = 10.0
_HIDDEN = ("at", "pid", "process", "positions", "meaning")
_MAX_SAYS = 400
_REFRESH_S = 1.0


def show(path: Path, watch: bool, as_json: bool) -> int:
    """Print the state of a deployment; 1 if no supervisor runs."""
    state_dir = load_table(path, "run", RunConfig).state_dir.resolve()
    if as_json:
        print(json.dumps(read_statuses(state_dir), indent=1))
        return 0 if lock.holder(state_dir) is not None else 1
    from rich.console import Console
    from rich.live import Live

    if not watch:
        Console().print(screen(state_dir, time.time()))
        return 0 if lock.holder(state_dir) is not None else 1
    with Live(screen(state_dir, time.time()), auto_refresh=False, screen=True) as live:
        while True:
            live.update(screen(state_dir, time.time()), refresh=True)
            time.sleep(_REFRESH_S)


def screen(state_dir: Path, now_s: float) -> Any:
    """Return a rich table: one row a process, with what it says about itself."""
    from rich.table import Table

    statuses = read_statuses(state_dir)
    supervisor = statuses.pop("supervisor", {})
    pid = lock.holder(state_dir)
    title = (
        f"{state_dir}: {supervisor.get('state', 'unknown')}, supervisor pid {pid}"
        if pid
        else f"{state_dir}: not running"
    )
    table = Table(title=title, title_justify="left", expand=True)
    for column, options in _COLUMNS.items():
        table.add_column(column, **options)
    for name, state, age, restarts, says in rows(supervisor, statuses, now_s, running=pid is not None):
        table.add_row(name, state, age, restarts, says)
    return table


_COLUMNS: dict[str, dict[str, Any]] = {
    "process": {"no_wrap": True},
    "state": {"no_wrap": True},
    "for": {"justify": "right", "no_wrap": True},
    "restarts": {"justify": "right"},
    "says": {"ratio": 1, "overflow": "fold"},
}


def rows(
    supervisor: dict[str, Any], statuses: dict[str, dict[str, Any]], now_s: float, running: bool
) -> list[tuple[str, str, str, str, str]]:
    """Return (process, state, age, restarts, what it says) of every process known."""
    supervised = supervisor.get("processes", {})
    listed = []
    for name in [*supervised, *(name for name in statuses if name not in supervised)]:
        process, status = supervised.get(name, {}), statuses.get(name, {})
        state = process.get("state", "") if running else "stopped"
        since = process.get("started_at") if running else None
        age = f"{now_s - since:.0f} s" if since else ""
        says = sentence(status)
        if running and status.get("at") and now_s - status["at"] > _STALE_S and name != "broker":
            says = f"(silent for {now_s - status['at']:.0f} s) {says}"
        listed.append((name, state, age, str(process.get("restarts", "")), says))
    return listed


def sentence(status: dict[str, Any]) -> str:
    """Return a status as key=value words, nested ones with dots, floats short; zeros and positions are left out."""
    told = {key: value for key, value in status.items() if key not in _HIDDEN}
    text = " ".join(f"{key}={value}" for key, value in _flat("", told))
    return text if len(text) <= _MAX_SAYS else f"{text[:_MAX_SAYS]}..."


def _flat(prefix: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [pair for key, item in value.items() for pair in _flat(f"{prefix}.{key}" if prefix else str(key), item)]
    if value in (None, "", [], 0) and not isinstance(value, bool):
        return []
    if isinstance(value, float):
        return [(prefix, f"{value:.4g}" if abs(value) < 1e6 else f"{value:.0f}")]
    return [(prefix, str(value))]
