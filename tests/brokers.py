"""Real brokers for tests, started on free ports of 127.0.0.1: the bundled one, and Apache Kafka where its jars are."""

import os
import signal
import socket
import subprocess
import uuid
from pathlib import Path

from deploy.broker import Choice, choose_broker, command, prepare, wait_ready
from ingest.config import KafkaConfig

ROOT = Path(__file__).parents[1]


def find_jars() -> Path | None:
    """Return the folder of Apache Kafka jars: HEADRACE_KAFKA_JARS, deploy/kafka/jars, or one beside the checkout."""
    named = os.environ.get("HEADRACE_KAFKA_JARS")
    folders = (
        [Path(named)] if named else [ROOT / "deploy" / "kafka" / "jars", ROOT.parent / "shared" / "kafka" / "libs"]
    )
    return next((folder for folder in folders if any(folder.glob("kafka_2.13-*.jar"))), None)


def choose(kind: str) -> Choice | str:
    """Return the choice, or why it cannot run here."""
    jars = find_jars()
    if kind == "kafka" and jars is None:
        return "no Apache Kafka jars: set HEADRACE_KAFKA_JARS, or run `make kafka`"
    try:
        return choose_broker(jars, "kafka" if kind == "kafka" else "bundled")
    except ValueError as error:
        return str(error)


def free_port_pair() -> int:
    """Return a port that is free together with the next one."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


class Broker:
    """A broker process that a test may kill and start again."""

    def __init__(self, choice: Choice, folder: Path) -> None:
        self.choice = choice
        self.port = free_port_pair()
        self.bootstrap = f"127.0.0.1:{self.port}"
        self._folder = folder
        self._process: subprocess.Popen | None = None

    def start(self, timeout_s: float = 60.0) -> None:
        prepare(self.choice, self._folder, self.port)
        argv, environment = command(self.choice, self._folder, self.port, heap_mb=256)
        log = (self._folder / "broker.log").open("ab")
        self._process = subprocess.Popen(argv, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        wait_ready(self.bootstrap, timeout_s)

    def kill(self, number: int = signal.SIGKILL) -> None:
        assert self._process is not None
        self._process.send_signal(number)
        self._process.wait(30)
        self._process = None

    def close(self) -> None:
        if self._process is not None:
            self.kill()

    def config(self, **more) -> KafkaConfig:
        """Return a configuration with topics of its own."""
        more = {"partitions": 4, "linger_ms": 5} | more
        return KafkaConfig(bootstrap_servers=self.bootstrap, topic_prefix=f"t{uuid.uuid4().hex[:8]}.", **more)
