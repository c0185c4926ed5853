"""The supervisor restarts what dies, gives up on bad configuration, and leaves nothing behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from deploy import children, lock
from deploy.config import DeployConfig
from deploy.processes import Process, Ready
from deploy.supervise import Supervisor
from ingest.status import read_statuses

QUICK = DeployConfig(restart_delay_s=0.05, max_restart_delay_s=0.2, stop_deadline_s=2.0)

WELL = """
import json, os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1]) / "status"; folder.mkdir(parents=True, exist_ok=True)
while True:
    part = folder / f".{sys.argv[2]}.part"
    part.write_text(json.dumps({"at": time.time()})); part.rename(folder / f"{sys.argv[2]}.json")
    time.sleep(0.05)
"""
STUBBORN = "import signal, subprocess, sys\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + WELL
WITH_CHILD = (
    "import signal, subprocess, sys\n"
    "subprocess.Popen([sys.executable, '-c', 'import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\\n"
    "while True: time.sleep(1)'])\n" + WELL
)


def process(name: str, code: str, state_dir: Path, ready: str = "status", after: tuple[str, ...] = ()) -> Process:
    return Process(name, [sys.executable, "-c", code, str(state_dir), name], Ready(ready), after=after)  # type: ignore[arg-type]


class Lines:
    """Collects what the supervisor says, and acts when a line is said for the n-th time."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self._actions: list[tuple[str, int, object]] = []
        self.supervisor: Supervisor | None = None

    def when(self, words: str, times: int, action) -> None:
        self._actions.append((words, times, action))

    def __call__(self, line: str) -> None:
        self.said.append(line)
        for words, times, action in self._actions:
            if words in line and self.count(words) == times:
                action()  # type: ignore[operator]

    def count(self, words: str) -> int:
        return sum(words in line for line in self.said)


def run(processes: list[Process], state_dir: Path, lines: Lines) -> int:
    supervisor = Supervisor(processes, QUICK, state_dir, lines)
    lines.supervisor = supervisor
    signal.signal(signal.SIGALRM, lambda *_: supervisor.request_stop("test took too long"))
    signal.alarm(60)
    try:
        return supervisor.run()
    finally:
        signal.alarm(0)


def pid_of(state_dir: Path, name: str) -> int:
    return read_statuses(state_dir)["supervisor"]["processes"][name]["pid"]


def test_killed_child_is_restarted_and_everything_is_stopped(tmp_path: Path) -> None:
    lines = Lines()
    pids: list[int] = []

    def kill_it() -> None:
        pids.append(int(lines.said[-1].split("pid=")[1].split()[0]) if "pid=" in lines.said[-1] else 0)

    lines.when("event=started process=joiner", 1, kill_it)
    lines.when("event=ready process=joiner", 1, lambda: os.kill(pids[0], signal.SIGKILL))
    lines.when("event=ready process=joiner", 2, lambda: lines.supervisor.request_stop("seen"))  # type: ignore[union-attr]
    code = run([process("joiner", WELL, tmp_path), process("rewards", WELL, tmp_path)], tmp_path, lines)
    assert code == 0
    assert lines.count("event=exited process=joiner signal=SIGKILL") == 1
    listed = read_statuses(tmp_path)["supervisor"]
    assert listed["processes"]["joiner"]["restarts"] == 1
    assert listed["processes"]["rewards"]["restarts"] == 0
    assert listed["state"] == "stopped"
    assert children.end_leftovers(tmp_path, 0.1) == []


def test_child_starts_only_when_its_forerunner_is_ready(tmp_path: Path) -> None:
    lines = Lines()
    lines.when("event=running", 1, lambda: lines.supervisor.request_stop("seen"))  # type: ignore[union-attr]
    done = process("topics", "raise SystemExit(0)", tmp_path, ready="exit", after=("broker",))
    late = process("joiner", WELL, tmp_path, after=("topics",))
    assert run([process("broker", WELL, tmp_path), done, late], tmp_path, lines) == 0
    order = [line.split(" pid=")[0].split(" after_s=")[0] for line in lines.said if "event=" in line][:6]
    assert order == [
        "event=started process=broker",
        "event=ready process=broker",
        "event=started process=topics",
        "event=done process=topics",
        "event=started process=joiner",
        "event=ready process=joiner",
    ]


def test_bad_configuration_three_times_stops_everything_and_shows_the_last_lines(tmp_path: Path) -> None:
    lines = Lines()
    refuses = process("rewards", "import sys; print('rewards: unknown key x'); sys.exit(2)", tmp_path)
    assert run([process("joiner", WELL, tmp_path), refuses], tmp_path, lines) == 2
    assert lines.count("event=exited process=rewards code=2") == 3
    assert lines.count("event=gave_up process=rewards") == 1
    assert lines.count("rewards: unknown key x") >= 3
    assert lines.count("event=stopped process=joiner") == 1
    assert children.end_leftovers(tmp_path, 0.1) == []


def test_crash_is_retried_and_never_taken_for_bad_configuration(tmp_path: Path) -> None:
    lines = Lines()
    lines.when("event=exited process=learner", 5, lambda: lines.supervisor.request_stop("seen"))  # type: ignore[union-attr]
    assert run([process("learner", "raise SystemExit(1)", tmp_path)], tmp_path, lines) == 0
    waits = [line.split("restart_in_s=")[1].split()[0] for line in lines.said if "restart_in_s" in line]
    assert waits[:4] == ["0.05", "0.1", "0.2", "0.2"]


@pytest.mark.parametrize("code", [STUBBORN, WITH_CHILD], ids=["ignores TERM", "has a child that ignores TERM"])
def test_stubborn_process_is_killed_with_its_children(tmp_path: Path, code: str) -> None:
    lines = Lines()
    lines.when("event=running", 1, lambda: lines.supervisor.request_stop("seen"))  # type: ignore[union-attr]
    run([process("engine-blue", code, tmp_path)], tmp_path, lines)
    pid = int(next(line for line in lines.said if "event=started" in line).split("pid=")[1].split()[0])
    assert children.members(pid) == []


DRIVER = """
import sys
from pathlib import Path
from deploy import lock
from deploy.supervise import Supervisor
from tests.deploy.test_supervise import QUICK, WELL, WITH_CHILD, process
state = Path(sys.argv[1])
with lock.acquire(state):
    Supervisor([process("a", WELL, state), process("b", WITH_CHILD, state)], QUICK, state, print).run()
"""


@pytest.fixture
def driver(tmp_path: Path):
    root = Path(__file__).parents[2]
    popen = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)], cwd=root, stdout=subprocess.DEVNULL)
    wait_for(lambda: read_statuses(tmp_path).get("supervisor", {}).get("state") == "running")
    yield popen
    popen.kill()
    popen.wait()
    children.end_leftovers(tmp_path, 0.5)


def wait_for(condition, timeout_s: float = 30.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


def test_killed_supervisor_takes_its_children_along_and_the_rest_is_found(tmp_path: Path, driver) -> None:
    a, b = pid_of(tmp_path, "a"), pid_of(tmp_path, "b")
    stubborn = [child.pid for child in psutil.Process(b).children()]
    driver.kill()
    driver.wait()
    wait_for(lambda: not psutil.pid_exists(a) and not psutil.pid_exists(b))
    assert [psutil.pid_exists(pid) for pid in stubborn] == [True]
    left = children.end_leftovers(tmp_path, 0.5)
    assert [int(name.split(":")[0]) for name in left] == stubborn
    assert not psutil.pid_exists(stubborn[0])


def test_second_supervisor_on_a_state_folder_is_refused(tmp_path: Path, driver) -> None:
    assert lock.holder(tmp_path) == driver.pid
    with pytest.raises(lock.Held, match=f"pid {driver.pid}; stop it with `headrace down`"):
        lock.acquire(tmp_path)
    driver.terminate()
    assert driver.wait(timeout=30) == 0
    assert lock.holder(tmp_path) is None


def test_strangers_are_not_leftovers(tmp_path: Path) -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    try:
        path = tmp_path / "supervise" / "started.json"
        path.parent.mkdir(parents=True)
        # The pid was ours in this boot once, and was given to a stranger since.
        path.write_text(json.dumps({"boot": psutil.boot_time(), "started": [[stranger.pid, time.time() - 3600]]}))
        assert children.end_leftovers(tmp_path, 0.1) == []
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
