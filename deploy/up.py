"""`headrace up` and `headrace down`: a supervisor in front or in the background, and its end.

Promises: a bad configuration or surroundings end before anything is started, with what, where and how to fix it; one
supervisor per state folder; down leaves nothing running, however the supervisor ended.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from deploy import children, lock
from deploy.broker import Choice, choose_broker
from deploy.config import Config, load_all
from deploy.preflight import folder_problems, problems
from deploy.processes import build
from deploy.supervise import Supervisor
from ingest.config import RunConfig, config_hash, load_table
from ingest.status import read_statuses

_STOPPED_POLL_S = 0.2


def say(line: str) -> None:
    """Print one line with the time, at once."""
    print(f"{time.strftime('%H:%M:%S')} {line}" if line.startswith("event=") else line, flush=True)


def run_foreground(path: Path, kafka_jars: Path | None = None) -> int:
    """Supervise until a signal. kafka_jars: used where deploy.kafka_jars is unset.

    1. Validate. 2. Lock the state folder. 3. End what a killed supervisor left. 4. Check the surroundings. 5. Run.
    """
    config = load_all(path)
    _refuse(folder_problems(config))
    with lock.acquire(config.state_dir):
        for left in children.end_leftovers(config.state_dir, config.deploy.stop_deadline_s):
            say(f"event=leftover_ended process={left}")
        broker = chosen_broker(config, kafka_jars)
        _refuse(problems(config, broker.kind if broker else None))
        say(
            f"event=up config={path} hash={config_hash(path)} state_dir={config.state_dir} logs={config.state_dir}/logs"
        )
        if broker:
            say(f"event=broker kind={broker.kind} durable={broker.durable} ({broker.meaning}; {broker.reason})")
        return Supervisor(build(config, kafka_jars), config.deploy, config.state_dir, say).run()


def _refuse(found: list[str]) -> None:
    if found:
        raise ValueError("\n".join(found))


def chosen_broker(config: Config, kafka_jars: Path | None) -> Choice | None:
    """Return which local broker runs, None with one of your own; ValueError when the wanted one cannot."""
    if config.deploy.broker == "external":
        return None
    return choose_broker(config.deploy.kafka_jars or kafka_jars, config.deploy.broker)


def run_detached(path: Path) -> int:
    """Start a supervisor in the background and wait until everything is ready; its exit status if it ends before."""
    config = load_all(path)
    _refuse(folder_problems(config))
    if lock.holder(config.state_dir) is not None:
        lock.acquire(config.state_dir)  # says who holds it
    log = config.state_dir / "logs" / "supervisor.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    offset = log.stat().st_size if log.exists() else 0
    began = time.time()
    with log.open("ab") as output:
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "deploy.cli", "up", "--config", str(path)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        while True:
            offset = _copy_new_lines(log, offset)
            if supervisor.poll() is not None:
                return supervisor.returncode
            status = read_statuses(config.state_dir).get("supervisor", {})
            if status.get("at", 0.0) > began and status.get("state") == "running":
                _copy_new_lines(log, offset)
                print(f"headrace up: running with pid {supervisor.pid}; headrace status, headrace down; log {log}")
                return 0
            time.sleep(_STOPPED_POLL_S)
    except KeyboardInterrupt:
        supervisor.terminate()
        supervisor.wait()
        return 130


def _copy_new_lines(log: Path, offset: int) -> int:
    with log.open("rb") as file:
        file.seek(offset)
        new = file.read()
    sys.stdout.write(new.decode("utf-8", "replace"))
    sys.stdout.flush()
    return offset + len(new)


def stop(path: Path) -> int:
    """TERM the supervisor of a configuration's state folder and wait; then end what is still there."""
    config = load_table(path, "run", RunConfig)
    state_dir = config.state_dir.resolve()
    pid = lock.holder(state_dir)
    if pid:
        os.kill(pid, signal.SIGTERM)
        end = time.monotonic() + 90.0
        while lock.holder(state_dir) is not None:
            if time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
                end = float("inf")
            time.sleep(_STOPPED_POLL_S)
    left = children.end_leftovers(state_dir, deadline_s=10.0)
    for name in left:
        print(f"headrace down: ended {name}, left by a killed supervisor")
    print("headrace down: stopped" if pid or left else f"headrace down: nothing runs from {state_dir}")
    return 0
