"""Configuration of deploy, and the whole configuration of one deployment read at once.

Owns the [deploy] table. Promises: an unknown table or key, a bad value or a contradiction between tables is a
ValueError that says what, where and how to fix it, before any process starts.
"""

import importlib
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from pydantic import Field

from ingest.config import IngestConfig, KafkaConfig, MlflowConfig, RunConfig, StrictModel, load_table, read_toml
from serving.config import ServingConfig


class DeployConfig(StrictModel):
    """[deploy]"""

    broker: Literal["auto", "kafka", "bundled", "external"] = Field(
        "auto",
        description="auto: Apache Kafka where its jars and Java are at hand, else the bundled one; external: yours",
    )
    kafka_jars: Path | None = Field(
        None, description="folder of Apache Kafka's jars; unset: HEADRACE_KAFKA_JARS, then deploy/kafka/jars"
    )
    kafka_heap_mb: int = Field(512, ge=128, description="heap of the local Apache Kafka")
    mlflow: Literal["local", "external", "off"] = Field(
        "local", description="local: start a server at mlflow.tracking_uri; external: yours; off: no tracking server"
    )
    restart_delay_s: float = Field(1.0, gt=0, description="first wait before a process is started again; it doubles")
    max_restart_delay_s: float = Field(30.0, gt=0, description="longest wait before a restart")
    stop_deadline_s: float = Field(20.0, gt=0, description="TERM, then KILL what still runs after this long")
    unhealthy_s: float = Field(60.0, gt=0, description="a server that answers no health check this long is restarted")
    stage_patience_s: float = Field(
        180.0, gt=0, description="start what comes next although its forerunner is not ready after this long"
    )


class Config(NamedTuple):
    """Every table of one deployment, validated."""

    path: Path
    run: RunConfig
    kafka: KafkaConfig
    ingest: IngestConfig
    mlflow: MlflowConfig
    serving: ServingConfig
    deploy: DeployConfig

    @property
    def state_dir(self) -> Path:
        return self.run.state_dir.resolve()

    @property
    def broker_address(self) -> tuple[str, int]:
        """Host and port of the first bootstrap server."""
        return parse_address(self.kafka.bootstrap_servers.split(",")[0], "kafka.bootstrap_servers")

    @property
    def mlflow_address(self) -> tuple[str, int]:
        parts = urlsplit(self.mlflow.tracking_uri)
        return parts.hostname or "127.0.0.1", parts.port or (443 if parts.scheme == "https" else 80)


# Tables with their model; rooms that the supervisor needs no field of are loaded by name and only validated.
_OWN = {
    "run": RunConfig,
    "kafka": KafkaConfig,
    "ingest": IngestConfig,
    "mlflow": MlflowConfig,
    "serving": ServingConfig,
    "deploy": DeployConfig,
}
_VALIDATED = {"rewards": ("rewards.config", "RewardsConfig"), "learner": ("learner.config", "LearnerConfig")}
_LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


def load_all(path: Path) -> Config:
    """Validate every table of a configuration file together; ValueError lists every problem, one a line."""
    document = read_toml(path)
    known = [*_OWN, *_VALIDATED]
    problems = [
        f"{path}: unknown table [{name}]; known tables: {', '.join(f'[{table}]' for table in known)}"
        for name in document
        if name not in known
    ]
    loaded: dict[str, Any] = {}
    for table, kind in {**_OWN, **_room_models()}.items():
        try:
            loaded[table] = load_table(path, table, kind)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("\n".join(problems))
    config = Config(path, *(loaded[table] for table in _OWN))
    try:
        problems = contradictions(config)
    except ValueError as error:
        problems = [str(error)]
    if problems:
        raise ValueError("\n".join(f"{path}: {problem}" for problem in problems))
    return config


def _room_models() -> dict[str, type[StrictModel]]:
    return {table: getattr(importlib.import_module(module), name) for table, (module, name) in _VALIDATED.items()}


def contradictions(config: Config) -> list[str]:
    """Return what is valid by itself and wrong together."""
    problems = []
    if config.deploy.broker != "external" and (
        "," in config.kafka.bootstrap_servers or config.broker_address[0] not in _LOCAL_HOSTS
    ):
        problems.append(
            f"kafka.bootstrap_servers = {config.kafka.bootstrap_servers!r} is not this machine; "
            'set deploy.broker = "external" to use it, or name 127.0.0.1:PORT for a local broker'
        )
    if config.deploy.mlflow == "local":
        if not config.mlflow.tracking_uri.startswith("http://") or config.mlflow_address[0] not in _LOCAL_HOSTS:
            problems.append(
                f"mlflow.tracking_uri = {config.mlflow.tracking_uri!r} is not this machine; "
                'set deploy.mlflow = "external" to use it, or name http://127.0.0.1:PORT for a local server'
            )
    elif config.deploy.mlflow == "external" and not config.mlflow.tracking_uri:
        problems.append('deploy.mlflow = "external" needs mlflow.tracking_uri')
    unknown = set(config.serving.attach) - set(config.serving.engines)
    if unknown:
        problems.append(
            f"serving.attach names {', '.join(sorted(unknown))}; known engines: {', '.join(config.serving.engines)}"
        )
    owners: dict[int, str] = {}
    for key, port in own_ports(config).items():
        if port in owners:
            problems.append(f"{key} and {owners[port]} both use port {port}; give each its own")
        owners.setdefault(port, key)
    return problems


def own_ports(config: Config) -> dict[str, int]:
    """Return configuration key -> port, for every port that this deployment listens on."""
    ports = {"serving.port": config.serving.port, "serving.admin_port": config.serving.admin_port}
    for name, port in config.serving.engines.items():
        if name not in config.serving.attach:
            ports[f"serving.engines.{name}"] = port
    if config.deploy.broker != "external":
        ports["kafka.bootstrap_servers"] = config.broker_address[1]
    if config.deploy.mlflow == "local":
        ports["mlflow.tracking_uri"] = config.mlflow_address[1]
    return ports


def parse_address(text: str, key: str) -> tuple[str, int]:
    """Parse host:port; ValueError names the key."""
    host, colon, port = text.strip().rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{key} = {text!r} is not host:port, such as 127.0.0.1:9092")
    return host.strip("[]"), int(port)
