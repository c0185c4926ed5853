"""All processes of one machine: started in stages, restarted from durable state, stopped without a trace.

Takes the table of deploy/processes.py; emits one line `event=...` per change and the status file `supervisor`.
Promises: a process that dies is started again after a growing wait; one that says three times that its configuration is
bad (exit code 2, before it was ever ready) stops everything; after run() returns, nothing that it started is running.
"""

import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from deploy import children
from deploy.config import DeployConfig
from deploy.probes import Probes, has_fresh_status
from deploy.processes import Process
from ingest.status import write_status

BAD_CONFIGURATION = 2
_MAX_REFUSALS = 3
_STEADY_S = 60.0  # after this long ready, the wait before a restart is short again
_TICK_S = 0.1
_LAST = ("mlflow", "broker")  # stopped after the others, which still have to say something to them


@dataclass
class Child:
    """One process and what has become of it."""

    process: Process
    state: str = "waiting"  # waiting | starting | ready | done | backoff | stopped
    popen: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0  # Unix seconds
    started_mono: float = 0.0
    ready_at: float = 0.0
    was_ready: bool = False
    num_restarts: int = 0
    num_failures: int = 0  # in a row: sets the wait
    num_refusals: int = 0  # exits with 2 in a row
    next_start: float = 0.0  # monotonic
    last_exit: int | None = None


class Supervisor:
    """The loop over all processes of one deployment."""

    def __init__(
        self, processes: list[Process], config: DeployConfig, state_dir: Path, say: Callable[[str], None]
    ) -> None:
        self._children = {process.name: Child(process) for process in processes}
        self._config = config
        self._state_dir = state_dir
        self._say = say
        self._probes = Probes(processes)
        self._stopping = ""
        self._exit_code = 0
        self._last_status = 0.0
        self._announced = False
        self._began = time.monotonic()

    def request_stop(self, reason: str) -> None:
        self._stopping = self._stopping or reason

    def run(self) -> int:
        """Run until a signal or a bad configuration; return 0, or 2 for the latter.

        1. Take TERM and INT. 2. Each tick: see who died, who became ready, who hangs; start who is due; write status.
        3. Stop everything.
        """

        def on_signal(number: int, _frame: FrameType | None) -> None:
            self.request_stop(signal.Signals(number).name)

        before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
        self._probes.start()
        try:
            while not self._stopping:
                for child in self._children.values():
                    self._look_at(child)
                for child in self._children.values():
                    if self._is_due(child):
                        self._start(child)
                self._write_status()
                time.sleep(_TICK_S)
        finally:
            self._stop_all()
            for number, handler in before.items():
                signal.signal(number, handler)
        return self._exit_code

    def _look_at(self, child: Child) -> None:
        if child.popen is None:
            return
        code = child.popen.poll()
        if code is not None:
            self._on_exit(child, code)
        elif child.state == "starting" and self._has_become_ready(child):
            child.state, child.ready_at, child.was_ready, child.num_refusals = "ready", time.time(), True, 0
            self._say(f"event=ready process={child.process.name} after_s={child.ready_at - child.started_at:.1f}")
        elif child.state == "ready":
            if time.time() - child.ready_at > _STEADY_S:
                child.num_failures = 0
            if self._hangs(child):
                self._say(f"event=unhealthy process={child.process.name} silent_s={self._config.unhealthy_s:g}")
                children.end_session(child.popen.pid, grace_s=2.0)

    def _has_become_ready(self, child: Child) -> bool:
        ready = child.process.ready
        if ready.kind == "status":
            return has_fresh_status(self._state_dir, child.process.name, child.started_at)
        return ready.kind != "exit" and self._probes.last_good(child.process.name) > child.started_mono

    def _hangs(self, child: Child) -> bool:
        if child.process.ready.kind != "http":
            return False
        return time.monotonic() - self._probes.last_answer(child.process.name) > self._config.unhealthy_s

    def _on_exit(self, child: Child, code: int) -> None:
        """Clear what is left of the session, then plan the restart, or stop everything for a bad configuration."""
        assert child.popen is not None, "only a started process exits"
        name = child.process.name
        children.end_session(child.popen.pid, grace_s=1.0)
        child.popen, child.last_exit = None, code
        if child.process.ready.kind == "exit" and code == 0:
            child.state, child.was_ready, child.num_refusals, child.num_failures = "done", True, 0, 0
            self._say(f"event=done process={name}")
            return
        refused = code == BAD_CONFIGURATION and not child.was_ready and not self._missing_forerunners(child)
        child.num_refusals = child.num_refusals + 1 if refused else 0
        delay = min(self._config.restart_delay_s * 2**child.num_failures, self._config.max_restart_delay_s)
        child.num_failures = min(child.num_failures + 1, 16)
        child.state, child.next_start = "backoff", time.monotonic() + delay
        how = f"signal={signal.Signals(-code).name}" if code < 0 else f"code={code}"
        self._say(f"event=exited process={name} {how} restart_in_s={delay:g} log={self._log(name)}")
        if not child.was_ready:
            self._say_last_lines(name, 3)
        if name == "broker":
            self._children["topics"].state = "waiting"  # a memory-only broker comes back without them
        if child.num_refusals >= _MAX_REFUSALS:
            self._say(f"event=gave_up process={name} reason=it refuses its configuration or surroundings")
            self._say_last_lines(name, 20)
            self._exit_code = BAD_CONFIGURATION
            self.request_stop(f"{name} cannot run")

    def _missing_forerunners(self, child: Child) -> list[str]:
        known = [self._children[name] for name in child.process.after if name in self._children]
        return [other.process.name for other in known if other.state not in ("ready", "done")]

    def _is_due(self, child: Child) -> bool:
        if child.state == "backoff":
            return time.monotonic() >= child.next_start
        if child.state != "waiting":
            return False
        missing = self._missing_forerunners(child)
        needs_broker = any(name in ("broker", "topics") and not self._children[name].was_ready for name in missing)
        waited_s = time.monotonic() - self._began
        return not missing or (not needs_broker and waited_s > self._config.stage_patience_s)

    def _start(self, child: Child) -> None:
        name = child.process.name
        self._probes.forget(name)
        if child.last_exit is not None and child.state == "backoff":
            child.num_restarts += 1
        child.started_at, child.started_mono = time.time(), time.monotonic()
        child.popen = children.start(child.process.argv, self._log(name), self._state_dir, child.process.env)
        child.state = "starting"
        children.record(self._state_dir, self._running())
        self._say(f"event=started process={name} pid={child.popen.pid} restarts={child.num_restarts}")

    def _running(self) -> list[subprocess.Popen[bytes]]:
        return [child.popen for child in self._children.values() if child.popen is not None]

    def _log(self, name: str) -> Path:
        return self._state_dir / "logs" / f"{name}.log"

    def _say_last_lines(self, name: str, num_lines: int) -> None:
        for line in last_lines(self._log(name), num_lines):
            self._say(f"  {name}: {line}")

    def _write_status(self, final_state: str = "") -> None:
        if not final_state and time.monotonic() - self._last_status < 1.0:
            return
        self._last_status = time.monotonic()
        all_up = all(child.state in ("ready", "done") for child in self._children.values())
        if all_up and not self._announced:
            self._announced = True
            self._say(f"event=running after_s={time.monotonic() - self._began:.1f}")
        listed = {
            name: {
                "pid": child.popen.pid if child.popen else None,
                "state": child.state,
                "restarts": child.num_restarts,
                "started_at": child.started_at,
                "ready_at": child.ready_at if child.state == "ready" else None,
                "last_exit": child.last_exit,
            }
            for name, child in self._children.items()
        }
        state = final_state or ("running" if all_up else "degraded" if self._announced else "starting")
        status = {"at": time.time(), "state": state, "pid": children.os.getpid(), "processes": listed}
        write_status(self._state_dir, "supervisor", status)

    def _stop_all(self) -> None:
        self._say(f"event=stopping reason={self._stopping or 'an error in the supervisor'}")
        self._write_status("stopping")
        self._probes.close()
        for late in (False, True):
            batch = {
                name: child.popen
                for name, child in self._children.items()
                if child.popen is not None and (name in _LAST) == late
            }
            killed = children.stop(list(batch.values()), self._config.stop_deadline_s)
            for name, popen in batch.items():
                how = "killed" if popen.pid in killed else f"code={popen.returncode}"
                self._say(f"event=stopped process={name} {how}")
                self._children[name].popen, self._children[name].state = None, "stopped"
        children.end_leftovers(self._state_dir, 2.0)
        self._write_status("stopped")
        self._say("event=all_stopped")


def last_lines(path: Path, num_lines: int) -> list[str]:
    """Return the last lines of a log, at most 300 characters each."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16384))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    return [line[:300] for line in lines if line.strip()][-num_lines:]
