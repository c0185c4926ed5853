"""Child processes that never outlive us: sessions of their own, told of our death, found again after a crash.

Owns starting, stopping and finding what one state folder's supervisor started.
Promises: stop() leaves no process of the child's session, vLLM's and MLflow's own children included; end_leftovers()
ends what a killed supervisor left, and never a stranger.
"""

import ctypes
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

import psutil

MARK = "HEADRACE_SUPERVISED"  # in the environment of every child: the state folder
_PR_SET_PDEATHSIG = 1
_MAX_LOG_BYTES = 64 << 20
_GROUP_GRACE_S = 3.0
_libc = ctypes.CDLL(None, use_errno=True)


class Started(NamedTuple):
    """A session that we started; enough to know it again."""

    pid: int  # also its session and group
    created_at: float


def start(argv: list[str], log: Path, state_dir: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a child in a session of its own, its output appended to a log; the kernel TERMs it when we die."""
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists() and log.stat().st_size > _MAX_LOG_BYTES:
        log.replace(log.with_suffix(".log.1"))
    supervisor = os.getpid()

    def follow_parent() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != supervisor:
            os._exit(1)

    with log.open("ab") as output:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", MARK: str(state_dir), **env},
            start_new_session=True,
            preexec_fn=follow_parent,
        )


def members(session: int) -> list[psutil.Process]:
    """Return the living processes of a session, zombies left out."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, OSError):
            continue  # ended while we looked, or is not ours to look at
    return found


def signal_all(processes: list[psutil.Process], number: int) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.Error:
            continue  # ended meanwhile


def stop(children: list[subprocess.Popen[bytes]], deadline_s: float) -> list[int]:
    """End children and everything in their sessions; return the pids that had to be killed.

    1. TERM to each leader, which ends its own children in its own way. 2. Wait. 3. KILL what is left of each session.
    """
    for child in children:
        if child.poll() is None:
            child.terminate()
    end = time.monotonic() + deadline_s
    while time.monotonic() < end and any(child.poll() is None for child in children):
        time.sleep(0.05)
    killed = [child.pid for child in children if child.poll() is None]
    for child in children:
        end_session(child.pid, 0.0 if child.pid in killed else _GROUP_GRACE_S)
        child.wait()
    return killed


def end_session(session: int, grace_s: float) -> None:
    """TERM what is left of a session, then KILL it."""
    left = members(session)
    if left and grace_s > 0:
        signal_all(left, signal.SIGTERM)
        psutil.wait_procs(left, timeout=grace_s)
        left = members(session)
    signal_all(left, signal.SIGKILL)
    psutil.wait_procs(left, timeout=5.0)


def record(state_dir: Path, children: list[subprocess.Popen[bytes]]) -> None:
    """Write down which sessions are ours, for end_leftovers after a crash."""
    started = []
    for child in children:
        try:
            started.append(Started(child.pid, psutil.Process(child.pid).create_time()))
        except psutil.NoSuchProcess:
            continue  # it has ended already
    path = _record_path(state_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"boot": psutil.boot_time(), "started": started}))
    temporary.replace(path)


def end_leftovers(state_dir: Path, deadline_s: float) -> list[str]:
    """End what an earlier supervisor of this state folder left running; return their names, for the log.

    A leftover carries our mark in its environment, or belongs to a session that we recorded in this boot.
    """
    sessions = {item.pid: item.created_at for item in _recorded(state_dir)}
    left = [process for process in psutil.process_iter() if _is_leftover(process, state_dir, sessions)]
    names = [_describe(process) for process in left]
    signal_all(left, signal.SIGTERM)
    _, alive = psutil.wait_procs(left, timeout=deadline_s)
    signal_all(alive, signal.SIGKILL)
    psutil.wait_procs(alive, timeout=5.0)
    _record_path(state_dir).unlink(missing_ok=True)
    return names


def _is_leftover(process: psutil.Process, state_dir: Path, sessions: dict[int, float]) -> bool:
    try:
        if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
            return False
        session = os.getsid(process.pid)
        if session in sessions:
            # The number may have been given to a stranger since: then its leader is younger than ours was.
            leader_changed = (
                psutil.pid_exists(session) and abs(psutil.Process(session).create_time() - sessions[session]) > 1.0
            )
            return not leader_changed and process.create_time() >= sessions[session] - 1.0
        return process.environ().get(MARK) == str(state_dir)
    except (psutil.Error, OSError):
        return False


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid}:{' '.join(process.cmdline())[:80] or process.name()}"
    except psutil.Error:
        return str(process.pid)


def _recorded(state_dir: Path) -> list[Started]:
    try:
        document = json.loads(_record_path(state_dir).read_text())
    except (OSError, json.JSONDecodeError):
        return []
    if abs(document["boot"] - psutil.boot_time()) > 5.0:
        return []
    return [Started(*item) for item in document["started"]]


def _record_path(state_dir: Path) -> Path:
    return state_dir / "supervise" / "started.json"
