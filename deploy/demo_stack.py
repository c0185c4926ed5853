"""The demo's own deployment: a configuration with a fresh state folder, `headrace up` as a child, ready, stopped.

Promises: stop() returns only when the supervisor has ended; a supervisor that fails is told with its last lines.
"""

import asyncio
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from deploy import children
from ingest.status import read_statuses

STOP_PATIENCE_S = 90.0


def write_config(template: Path, state_dir: Path) -> Path:
    """Write the template with another run.state_dir into the state folder; return its path.

    Paths in a configuration are relative to the folder where `headrace` is started, which stays the same.
    """
    text = template.read_text()
    line = f'state_dir = "{state_dir}"'
    if re.search(r"(?m)^state_dir\s*=.*$", text):
        text = re.sub(r"(?m)^state_dir\s*=.*$", lambda _: line, text, count=1)
    elif re.search(r"(?m)^\[run\]", text):
        text = re.sub(r"(?m)^\[run\].*$", lambda match: f"{match.group(0)}\n{line}", text, count=1)
    else:
        text = f"[run]\n{line}\n\n{text}"
    state_dir.mkdir(parents=True, exist_ok=True)
    path = state_dir / "demo.toml"
    path.write_text(text)
    return path


class Stack:
    """`headrace up` as a child process: Ctrl-C reaches us first, and it stops when we die, however we die."""

    def __init__(self, config_path: Path, state_dir: Path):
        self.config_path, self.state_dir = config_path, state_dir
        self.log = state_dir / "logs" / "up.log"
        self._popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        argv = [sys.executable, "-m", "deploy.cli", "up", "--config", str(self.config_path)]
        self._popen = children.start(argv, self.log, self.state_dir, {})

    def check_alive(self) -> None:
        """Raise ValueError with the supervisor's last words if it has ended."""
        assert self._popen, "start() comes first"
        code = self._popen.poll()
        if code is not None:
            last = self.log.read_text(errors="replace").splitlines()[-15:]
            raise ValueError(f"`headrace up` ended with code {code}; its log {self.log} ends with:\n" + "\n".join(last))

    async def wait_ready(self, gateway_url: str, patience_s: float, say: Callable[[str], None]) -> None:
        """Wait until every process is ready and the gateway answers; ValueError after patience_s."""
        deadline_s, told = time.monotonic() + patience_s, ""
        while True:
            self.check_alive()
            supervisor = read_statuses(self.state_dir).get("supervisor", {})
            processes: dict[str, dict[str, Any]] = supervisor.get("processes", {})
            waiting = [name for name, entry in processes.items() if entry.get("state") not in ("ready", "done")]
            news = f"waiting for {', '.join(waiting)}" if waiting else "waiting for the gateway to answer"
            if processes and news != told:
                told = news
                say(news)
            if supervisor.get("state") == "running" and await is_healthy(gateway_url):
                return
            if time.monotonic() > deadline_s:
                raise ValueError(f"not ready after {patience_s:.0f} s: {news}; logs are in {self.state_dir / 'logs'}")
            await asyncio.sleep(1.0)

    def stop(self) -> None:
        """TERM the supervisor and wait; KILL it only if it hangs."""
        if self._popen is None or self._popen.poll() is not None:
            return
        self._popen.send_signal(signal.SIGTERM)
        try:
            self._popen.wait(STOP_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()


async def is_healthy(gateway_url: str) -> bool:
    """Say whether the gateway answers /health with 200."""
    try:
        timeout = aiohttp.ClientTimeout(total=3)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(f"{gateway_url}/health") as response,
        ):
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
