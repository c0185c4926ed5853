"""The gateway as a process: it starts against a broker, follows the control topic, and refuses to start wrongly."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from deploy.broker import choose_broker, command, prepare, wait_ready
from ingest.config import KafkaConfig
from ingest.events import Feedback, Inference, decode, encode
from ingest.producer import Publisher
from ingest.stream import Reader, ensure_topics
from ingest.topics import headers, topics
from serving.gateway import listen
from serving.routes import ROUTES_KEY, ROUTES_TYPE, RouteTable
from tests.serving.stand import ANSWERS, Stand, stand

ROOT = Path(__file__).resolve().parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def write_config(folder: Path, serving: str, bootstrap: str = "127.0.0.1:9") -> Path:
    path = folder / "headrace.toml"
    path.write_text(
        f'[run]\nstate_dir = "{folder}/state"\nmodel = "none"\n'
        f'[kafka]\nbootstrap_servers = "{bootstrap}"\npartitions = 2\n[serving]\n{serving}\n'
    )
    return path


def start(config: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "serving.gateway", str(config)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_until(condition: Callable[[], object], timeout_s: float = 20) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not true after {timeout_s} s"
        time.sleep(0.05)


def test_an_unknown_key_stops_the_start_with_a_message(tmp_path: Path) -> None:
    process = start(write_config(tmp_path, "prot = 8100"))
    _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "unknown key serving.prot" in said and "Traceback" not in said


def test_a_taken_port_stops_the_start_with_a_message(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        process = start(write_config(tmp_path, f"port = {port}\nadmin_port = {free_port()}"))
        _, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert f"127.0.0.1:{port}" in said and "Traceback" not in said


@pytest.fixture
def kafka(tmp_path: Path) -> Iterator[KafkaConfig]:
    port = free_port()
    choice = choose_broker(None, "bundled")
    prepare(choice, tmp_path / "kafka", port)
    argv, environment = command(choice, tmp_path / "kafka", port)
    with (tmp_path / "broker.log").open("wb") as log:
        broker = subprocess.Popen(argv, env=environment, stdout=log, stderr=log)
    try:
        wait_ready(f"127.0.0.1:{port}", 20)
        yield KafkaConfig(bootstrap_servers=f"127.0.0.1:{port}", partitions=2)
    finally:
        broker.kill()
        broker.wait(10)


@pytest.fixture
def engines() -> Iterator[Stand]:
    with stand() as opened:
        yield opened


@pytest.mark.kafka
def test_a_gateway_follows_the_control_topic_and_publishes_what_it_served(
    tmp_path: Path, kafka: KafkaConfig, engines: Stand
) -> None:
    ensure_topics(kafka)
    publisher = Publisher(kafka, "test")
    port, admin_port = free_port(), free_port()
    config = write_config(tmp_path, f"port = {port}\nadmin_port = {admin_port}", kafka.bootstrap_servers)
    process = start(config)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=20) as client:
            wait_until(lambda: answers(client, 503))
            for revision, engine in ((2, engines.blue), (1, engines.green), (3, engines.green)):
                table = RouteTable(
                    revision=revision, at=0, author="controller", champion=engines.route(engine, f"v00000{revision}")
                )
                about = headers(ROUTES_TYPE, f"routes-{revision}", "test", 0)
                publisher.publish(topics(kafka).control, ROUTES_KEY, encode(table), about)
                publisher.flush(10)
                if revision == 2:
                    wait_until(lambda: answers(client, 200))
            wait_until(lambda: client.get("/health").json()["revision"] == 3)
            answer = client.post("/v1/chat/completions", json=ANSWERS["chat_n2"]["body"])
            assert answer.headers["x-headrace-version"] == "v000003"
            ids = answer.headers["x-headrace-inference-id"].split(",")
            vote = {"inference_id": ids[1], "metric": "thumb", "value": True, "feedback_id": "vote-1"}
            assert client.post("/v1/feedback", json=vote).status_code == 202
            status = tmp_path / "state" / "status" / "gateway.json"
            wait_until(lambda: json.loads(status.read_text())["served"] == 2)
            told = json.loads(status.read_text())
            assert (told["revision"], told["versions"], told["feedback_accepted"]) == (3, {"v000003": 2}, 1)
    finally:
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=30)
        publisher.close()
    assert process.returncode == 0, said
    reader = Reader(kafka, [topics(kafka).inference, topics(kafka).feedback], {}, "test-reader")
    records = []
    wait_until(lambda: records.extend(reader.poll(0.2)) or len(records) >= 3)
    reader.close()
    inferences = [decode(r.value, Inference) for r in records if r.topic == topics(kafka).inference]
    votes = [decode(r.value, Feedback) for r in records if r.topic == topics(kafka).feedback]
    assert sorted(one.inference_id for one in inferences) == sorted(ids)
    assert [(one.feedback_id, one.inference_id) for one in votes] == [("vote-1", ids[1])]
    assert len({record.partition for record in records}) == 1, "feedback must meet its inference in one partition"


def answers(client: httpx.Client, status: int) -> bool:
    try:
        return client.get("/health").status_code == status
    except httpx.TransportError:
        return False


def test_answers_are_not_held_back_by_nagles_algorithm() -> None:
    """asyncio sets TCP_NODELAY only on sockets made with IPPROTO_TCP; without it each answer takes 40 ms more."""
    with listen("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP
