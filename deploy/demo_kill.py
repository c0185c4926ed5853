"""kill -9 for the demo: shoots named processes of the supervisor, one after another, and waits for their return.

Takes: process names, as the supervisor's status file has them, or canary-engine (the one that is not the champion's).
Promises: only pids that the supervisor's status names are ever killed.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ingest.status import read_statuses
from serving.routes import RouteTable

RETURN_PATIENCE_S = 240.0


class Kill(msgspec.Struct, kw_only=True):
    """One kill and what came of it."""

    process: str
    pid: int
    at: float
    back_after_s: float | None = None  # None: not back in time


def processes_of(state_dir: Path) -> dict[str, dict[str, Any]]:
    """Return process -> {pid, state, ...} from the supervisor's status."""
    return read_statuses(state_dir).get("supervisor", {}).get("processes", {})


def resolve(name: str, table: RouteTable | None) -> str:
    """Return the supervisor's name of a process; canary-engine is the one that does not hold the champion."""
    if name not in ("canary-engine", "champion-engine"):
        return {"blue": "engine-blue", "green": "engine-green"}.get(name, name)
    champion = table.champion.engine if table and table.champion else "blue"
    if name == "champion-engine":
        return f"engine-{champion}"
    return f"engine-{'green' if champion == 'blue' else 'blue'}"


def kill_now(state_dir: Path, process: str) -> Kill:
    """Send SIGKILL to a supervised process; ValueError if the supervisor knows no such running process."""
    known = processes_of(state_dir)
    pid = known.get(process, {}).get("pid")
    if not pid:
        raise ValueError(f"--kill {process}: not a running process; known: {', '.join(sorted(known)) or 'none'}")
    os.kill(int(pid), signal.SIGKILL)
    return Kill(process=process, pid=int(pid), at=time.time())


async def wait_back(state_dir: Path, kill: Kill) -> None:
    """Wait until the supervisor runs another pid of the process and calls it ready."""
    while time.time() - kill.at < RETURN_PATIENCE_S:
        entry = processes_of(state_dir).get(kill.process, {})
        if entry.get("pid") not in (None, 0, kill.pid) and entry.get("state") in ("ready", "running"):
            kill.back_after_s = round(time.time() - kill.at, 1)
            return
        await asyncio.sleep(0.5)


async def run_kills(
    state_dir: Path,
    names: list[str],
    between_s: float,
    table: Callable[[], RouteTable | None],
    say: Callable[[str], None],
) -> list[Kill]:
    """Kill each named process in turn, between_s apart, and wait for its return before the next."""
    kills = []
    for name in names:
        await asyncio.sleep(between_s)
        try:
            kill = kill_now(state_dir, resolve(name, table()))
        except (ValueError, ProcessLookupError) as error:
            say(f"kill {name}: {error}")
            kills.append(Kill(process=name, pid=0, at=time.time()))
            continue
        kills.append(kill)
        say(f"killed {kill.process} (pid {kill.pid}) with SIGKILL")
        await wait_back(state_dir, kill)
        back = "did not come back" if kill.back_after_s is None else f"is back after {kill.back_after_s} s"
        say(f"{kill.process} {back}")
    return kills
