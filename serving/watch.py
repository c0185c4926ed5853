"""Eyes of the controller: a thread that looks at engines and gateways once a second, so that the loop never waits.

Promises: an engine counts as lost at once when its process or port is gone or its incarnation changed, and only after
`patience_s` when it is merely slow to answer: two engines and a learner share the cores.
"""

import os
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from serving.config import ServingConfig
from serving.engine import read_incarnation
from serving.plan import Engine
from serving.swap import read_gateway


class Watch:
    """Latest view of every engine and gateway."""

    def __init__(self, serving: ServingConfig, state_dir: Path, patience_s: float = 15.0) -> None:
        self._serving = serving
        self._state_dir = state_dir
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._engines: dict[str, Engine] = {}
        self._labels: dict[str, tuple[str, float]] = {}  # attached engine -> weight label, when it was asked for
        self._last_ok: dict[str, tuple[str, float]] = {}  # engine -> served model, monotonic time
        self._gateways: dict[str, dict[str, Any] | None] = {}
        # No connection is kept: a server that closed an idle one would look like a lost engine.
        self._http = httpx.Client(timeout=3.0, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))
        self.gateway_urls = serving.gateway_urls or [f"http://127.0.0.1:{serving.admin_port}"]

    def start(self, stop: threading.Event) -> None:
        threading.Thread(target=self._run, args=(stop,), name="watch", daemon=True).start()

    def _run(self, stop: threading.Event) -> None:
        while not stop.is_set():
            self.look()
            stop.wait(1.0)

    def look(self) -> None:
        """Look once at everything."""
        engines = [self._look_at(name) for name in self._names()]
        gateways = {url: read_gateway(url) for url in self.gateway_urls}
        with self._lock:
            self._engines = {engine.name: engine for engine in engines}
            self._gateways = gateways

    def _names(self) -> list[str]:
        return list(dict.fromkeys([*self._serving.attach, *self._serving.engines]))

    def _look_at(self, name: str) -> Engine:
        if url := self._serving.attach.get(name):
            served_model = self._first_model(url)
            if served_model:
                asked_at = time.monotonic()
                self._labels[name] = (self._label(url), asked_at)
            return Engine(name, url, served_model, bool(served_model), is_attached=True)
        incarnation = read_incarnation(self._state_dir, name)
        if incarnation is None:
            return Engine(name, f"http://127.0.0.1:{self._serving.engines[name]}", "", False)
        is_alive = self._is_alive(name, incarnation.url, incarnation.served_model, incarnation.pid)
        return Engine(name, incarnation.url, incarnation.served_model, is_alive)

    def _is_alive(self, name: str, url: str, served_model: str, pid: int) -> bool:
        served_before, last_ok = self._last_ok.get(name, ("", 0.0))
        answer = self._ask(url, served_model)
        if answer == "ok":
            self._last_ok[name] = (served_model, time.monotonic())
            return True
        is_slow = answer == "slow" and _process_runs(pid)
        return is_slow and served_before == served_model and time.monotonic() - last_ok < self._patience_s

    def _ask(self, url: str, served_model: str) -> str:
        """Return ok, slow (no whole answer in time) or lost (refused, unhealthy, or another model)."""
        try:
            if self._http.get(f"{url}/health").status_code != 200:
                return "lost"
            names = [model["id"] for model in self._http.get(f"{url}/v1/models").json()["data"]]
            return "ok" if served_model in names else "lost"
        except httpx.ConnectError:
            return "lost"
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return "slow"

    def _first_model(self, url: str) -> str:
        try:
            return str(self._http.get(f"{url}/v1/models").json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError):
            return ""

    def _label(self, url: str) -> str:
        try:
            return str(self._http.get(f"{url}/weight_info").json().get("weight_version"))
        except (httpx.HTTPError, ValueError):
            return ""

    def engines(self) -> list[Engine]:
        with self._lock:
            return list(self._engines.values())

    def label(self, name: str, since: float) -> str | None:
        """Return the weight label an attached engine had after `since` (monotonic); a restart has changed it."""
        label, asked_at = self._labels.get(name, ("", 0.0))
        return label if label and asked_at > since else None

    def canary_failures(self, revision: int) -> int:
        """Return the longest run of failures on the canary that a gateway has counted under this table."""
        with self._lock:
            states = [state for state in self._gateways.values() if state and state.get("revision", -1) >= revision]
        return max((state.get("arms", {}).get("canary", {}).get("failures_in_a_row", 0) for state in states), default=0)


def _process_runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
