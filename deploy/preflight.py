"""What must hold before anything is started: free ports, a model with weights, a reachable broker, room on the disk.

Emits one line per problem: what, where, how to fix it. Promises: looks only.
"""

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import psutil

from deploy.config import Config, own_ports, parse_address
from deploy.probes import answers_http, answers_tcp

MIN_FREE_BYTES = 2 << 30


Broker = Literal["kafka", "bundled"] | None


def problems(config: Config, broker: Broker = None) -> list[str]:
    """Return every problem that keeps this deployment from starting, with the local broker that was chosen."""
    checks: list[Callable[[Config], list[str]]] = [model_problems, outer_problems, folder_problems]
    return [*port_problems(config, broker), *(problem for check in checks for problem in check(config))]


def port_problems(config: Config, broker: Broker = None) -> list[str]:
    """Name each port that something else listens on, and who that is where the system tells."""
    found = []
    ports = list(own_ports(config).items())
    if broker == "kafka":  # its controller listens on the next port
        ports.append(("kafka.bootstrap_servers", config.broker_address[1] + 1))
    for key, port in ports:
        host = config.serving.host if key == "serving.port" else "127.0.0.1"
        if not is_free(host, port):
            found.append(
                f"port {port} ({key} in {config.path}) is taken{_owner_of(port)}; "
                f"stop that process, or set {key} to a free port"
            )
    return found


def is_free(host: str, port: int) -> bool:
    """Tell whether we could listen on host:port now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def _owner_of(port: int) -> str:
    try:
        for connection in psutil.net_connections("tcp"):
            local = connection.laddr
            if connection.status == psutil.CONN_LISTEN and local and local[1] == port and connection.pid:
                process = psutil.Process(connection.pid)
                return f" by pid {connection.pid} ({' '.join(process.cmdline())[:100] or process.name()})"
    except psutil.Error:
        pass  # not ours to look at; the message is whole without it
    return ""


def model_problems(config: Config) -> list[str]:
    """Check that the base model is a folder with weights, or a Hugging Face id that is here already."""
    from deploy.model import find

    if not _local_engines(config) and not Path(config.run.model).is_dir():
        return []  # attached engines have their own; the learner will say what it misses
    try:
        find(config.run.model)
    except ValueError as error:
        return [f"run.model in {config.path}: {error}"]
    return []


def _local_engines(config: Config) -> list[str]:
    return [name for name in config.serving.engines if name not in config.serving.attach]


def outer_problems(config: Config) -> list[str]:
    """Check that the parts which are yours can be reached, and that a local broker can be had."""
    found = []
    if config.deploy.broker == "external":
        servers = config.kafka.bootstrap_servers
        addresses = [parse_address(server, "kafka.bootstrap_servers") for server in servers.split(",")]
        if not any(answers_tcp(f"{host}:{port}", timeout_s=3.0) for host, port in addresses):
            found.append(
                f"no broker answers at kafka.bootstrap_servers = {servers!r} ({config.path}); start it, correct the "
                'address, or set deploy.broker = "auto" for a local one'
            )
    if config.deploy.mlflow == "external" and config.mlflow.tracking_uri.startswith("http"):
        host, port = config.mlflow_address
        if not answers_tcp(f"{host}:{port}", timeout_s=3.0):
            found.append(
                f"no MLflow server answers at mlflow.tracking_uri = {config.mlflow.tracking_uri!r} ({config.path}); "
                'start it, correct the address, or set deploy.mlflow = "local" or "off"'
            )
    for name, url in config.serving.attach.items():
        if not answers_http(f"{url.rstrip('/')}/health", timeout_s=5.0):
            found.append(
                f"no vLLM server answers at serving.attach.{name} = {url!r} ({config.path}); start it, correct the "
                "address, or leave the name out to have one started here"
            )
    return found


def folder_problems(config: Config) -> list[str]:
    """Check that the state folder can be written and the disk has room for checkpoints."""
    folder = nearest_folder(config.state_dir)
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        return [f"run.state_dir = {config.state_dir} cannot be written; name another folder in {config.path}"]
    free = shutil.disk_usage(folder).free
    if free < MIN_FREE_BYTES:
        return [
            f"run.state_dir = {config.state_dir} is on a disk with {free / 2**30:.1f} GiB free; "
            f"at least {MIN_FREE_BYTES >> 30} GiB are needed for checkpoints and candidates"
        ]
    return []


def nearest_folder(path: Path) -> Path:
    """Return the path itself, or the nearest parent that exists."""
    return path if path.exists() else nearest_folder(path.parent)
