"""Health of servers, asked in a thread of its own so that a slow answer never holds up the supervisor."""

import http.client
import socket
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

from deploy.processes import Process
from ingest.status import read_statuses

_TIMEOUT_S = 5.0


def http_status(url: str, timeout_s: float = _TIMEOUT_S) -> int:
    """Return the status that a GET answers with, 0 for no answer."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        connection.request("GET", parts.path or "/")
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        connection.close()


def answers_tcp(address: str, timeout_s: float = _TIMEOUT_S) -> bool:
    """Tell whether host:port accepts a connection."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=timeout_s):
            return True
    except OSError:
        return False


def answers_http(url: str, timeout_s: float = _TIMEOUT_S) -> bool:
    """Tell whether a GET answers well."""
    return 0 < http_status(url, timeout_s) < 500


class Probes:
    """When each server last answered at all, and last answered well (monotonic seconds)."""

    def __init__(self, processes: list[Process], interval_s: float = 0.5) -> None:
        self._targets = {p.name: p.ready for p in processes if p.ready.kind in ("http", "tcp")}
        self._good: dict[str, float] = {}
        self._any: dict[str, float] = {}
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._watch, args=(name,), daemon=True) for name in self._targets]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def _watch(self, name: str) -> None:
        ready = self._targets[name]
        while not self._stop.wait(self._interval_s if name not in self._good else 4 * self._interval_s):
            status = http_status(ready.target) if ready.kind == "http" else 200 * answers_tcp(ready.target)
            if status:
                self._any[name] = time.monotonic()
            if 0 < status < 500:
                self._good[name] = time.monotonic()

    def last_good(self, name: str) -> float:
        """Return when the server last answered well; minus infinity: never."""
        return self._good.get(name, float("-inf"))

    def last_answer(self, name: str) -> float:
        """Return when the server last answered at all: a gateway without a champion says 503 and does not hang."""
        return self._any.get(name, float("-inf"))

    def forget(self, name: str) -> None:
        self._good.pop(name, None)
        self._any.pop(name, None)

    def close(self) -> None:
        self._stop.set()


def has_fresh_status(state_dir: Path, name: str, since: float) -> bool:
    """Tell whether a process has written its status since a wall-clock time."""
    return read_statuses(state_dir).get(name, {}).get("at", 0.0) >= since
