"""What runs on one machine, in which order, and how each shows that it is ready.

Owns the table of processes. Takes the whole configuration; emits Process descriptions that the supervisor starts.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from deploy.config import Config


@dataclass(frozen=True)
class Ready:
    """How a process shows that it is ready."""

    kind: Literal["http", "tcp", "status", "exit"]  # status: its status file is fresh; exit: it ended with 0
    target: str = ""  # URL, or host:port


@dataclass(frozen=True)
class Process:
    """One process of the deployment."""

    name: str
    argv: list[str]
    ready: Ready
    after: tuple[str, ...] = ()  # started when these are ready, or when stage_patience_s has passed
    env: dict[str, str] = field(default_factory=dict)


def build(config: Config, kafka_jars: Path | None = None) -> list[Process]:
    """Return every process of this deployment, forerunners first. kafka_jars: where deploy.kafka_jars is unset."""
    processes = [*_broker(config, kafka_jars), *_mlflow(config), *_engines(config), *_rooms(config)]
    return sorted(processes, key=lambda process: _ORDER.get(process.name, len(_ORDER)))


# The order in which processes of one stage are started, so that the first answer comes early on two cores.
_ORDER = {name: place for place, name in enumerate(("broker", "topics", "engine-blue", "gateway", "controller"))}


# What the first answer does not need starts when the gateway has a champion; records for it wait in queues till then.
_LATE = ("topics", "gateway")


def _module(module: str, config: Config, *args: str) -> list[str]:
    return [sys.executable, "-m", module, str(config.path), *args]


def _broker(config: Config, kafka_jars: Path | None) -> list[Process]:
    topics = _module("deploy.topics", config)
    if config.deploy.broker == "external":
        return [Process("topics", topics, Ready("exit"))]
    host, port = config.broker_address
    jars = ("--jars", str(kafka_jars)) if kafka_jars and not config.deploy.kafka_jars else ()
    broker = Process("broker", _module("deploy.broker", config, *jars), Ready("tcp", f"{host}:{port}"))
    return [broker, Process("topics", topics, Ready("exit"), after=("broker",))]


def _mlflow(config: Config) -> list[Process]:
    if config.deploy.mlflow != "local":
        return []
    folder = config.state_dir / "mlflow"
    host, port = config.mlflow_address
    argv = [sys.executable, "-m", "mlflow", "server", "--host", host, "--port", str(port), "--workers", "1"]
    argv += ["--uvicorn-opts", "--log-level=warning"]
    argv += [
        "--backend-store-uri",
        f"sqlite:///{folder}/mlflow.db",
        "--artifacts-destination",
        str(folder / "artifacts"),
    ]
    env = {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # its job runner would be three more processes
    }
    return [Process("mlflow", argv, Ready("http", f"http://{host}:{port}/health"), after=_LATE, env=env)]


def _engines(config: Config) -> list[Process]:
    """The first engine at once, the others late: two that load together on two cores make the first answer wait."""
    processes: list[Process] = []
    for name, port in config.serving.engines.items():
        if name in config.serving.attach:
            continue
        after = _LATE if processes else ("topics",)
        argv = _module("serving.engine", config, "--name", name)
        processes.append(Process(f"engine-{name}", argv, Ready("http", f"http://127.0.0.1:{port}/health"), after=after))
    return processes


def _rooms(config: Config) -> list[Process]:
    gateway = Ready("http", f"http://127.0.0.1:{config.serving.port}/health")
    return [
        Process("gateway", _module("serving.gateway", config), gateway, after=("topics",)),
        Process("controller", _module("serving.controller", config), Ready("status"), after=("topics",)),
        Process("joiner", _module("ingest.joiner", config), Ready("status"), after=("topics",)),
        Process("archiver", _module("ingest.archiver", config), Ready("status"), after=("topics",)),
        Process("rewards", _module("rewards.stage", config), Ready("status"), after=("topics",)),
        Process("learner", _module("learner.train", config), Ready("status"), after=_LATE),
    ]
