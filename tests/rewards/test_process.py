"""The rewards process against a real broker: killed in the middle, stopped, started without one."""

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.broker import choose_broker, command, prepare, wait_ready
from ingest.config import KafkaConfig, load_table
from ingest.events import INTERACTION_TYPE, decode, encode
from ingest.ids import route_of
from ingest.producer import Publisher
from ingest.status import read_statuses
from ingest.stream import Reader, ensure_topics
from ingest.topics import headers, topics
from rewards import stage
from rewards.ledger import count
from rewards.samples import Sample
from tests.rewards.interactions import DEPLOYED_SPEC, feedback, interaction

pytestmark = [pytest.mark.kafka, pytest.mark.slow]
NUM_INTERACTIONS = 3000


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def write_config(folder: Path, port: int) -> Path:
    path = folder / "local.toml"
    path.write_text(
        f'[run]\nstate_dir = "{folder / "state"}"\nmodel = "m"\n'
        f'[kafka]\nbootstrap_servers = "127.0.0.1:{port}"\npartitions = 2\n'
        "[rewards]\npoll_records = 50\n"
    )
    return path


@pytest.fixture
def config_path(tmp_path: Path) -> Iterator[Path]:
    port = free_port()
    choice = choose_broker(None, "bundled")
    prepare(choice, tmp_path / "kafka", port)
    argv, environment = command(choice, tmp_path / "kafka", port)
    broker = subprocess.Popen(argv, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_ready(f"127.0.0.1:{port}", 20.0)
        yield write_config(tmp_path, port)
    finally:
        broker.kill()
        broker.wait()


def start(config_path: Path) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "rewards.stage", str(config_path)]
    return subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])


def publish_interactions(kafka: KafkaConfig) -> None:
    publisher = Publisher(kafka, "test")
    for number in range(NUM_INTERACTIONS):
        episode = f"episode-{number}"
        event = interaction(feedback(value=number % 2 == 0), inference_id=f"inf_{number}", episode_id=episode)
        about = headers(INTERACTION_TYPE, f"{event.interaction_id}@0", "joiner", 1.0)
        publisher.publish(topics(kafka).interaction, route_of(episode), encode(event), about)
    assert publisher.flush(30.0)
    publisher.close()


def read_samples(kafka: KafkaConfig) -> list[Sample]:
    reader = Reader(kafka, [topics(kafka).sample], {}, "test")
    samples: list[Sample] = []
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline:
        records = reader.poll(0.5)
        samples += [decode(record.value, Sample) for record in records]
        if not records and reader.caught_up():
            break
    reader.close()
    return samples


def wait_for(state_dir: Path, num_interactions: int, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while count(state_dir)["interactions"] < num_interactions:
        assert time.monotonic() < deadline, f"only {count(state_dir)} after {timeout_s:.0f} s"
        time.sleep(0.02)


def test_a_killed_stage_resumes_and_every_interaction_has_one_sample(config_path: Path) -> None:
    kafka, state_dir = load_table(config_path, "kafka", KafkaConfig), config_path.parent / "state"
    ensure_topics(kafka)
    publish_interactions(kafka)
    for share in (0.1, 0.4):
        process = start(config_path)
        wait_for(state_dir, int(NUM_INTERACTIONS * share))
        process.kill()
        process.communicate()
    assert count(state_dir)["interactions"] < NUM_INTERACTIONS
    process = start(config_path)
    try:
        wait_for(state_dir, NUM_INTERACTIONS)
        deadline = time.monotonic() + 20.0
        while read_statuses(state_dir).get("rewards", {}).get("samples_full") != NUM_INTERACTIONS:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=20)
    assert process.returncode == 0, log
    status = read_statuses(state_dir)["rewards"]
    assert (status["masked"], status["untrainable"], status["quarantined"], status["lag"]) == (0, {}, 0, 0)
    samples = read_samples(kafka)
    by_id = {sample.sample_id: sample for sample in samples}
    assert sorted(by_id) == sorted(f"inf_{number}@0" for number in range(NUM_INTERACTIONS))
    assert all(by_id[sample.sample_id] == sample for sample in samples)  # a resent one is the same one
    weight = DEPLOYED_SPEC.metrics["thumbs"].weight
    assert all(sample.kind == "full" and sample.reward in (weight, -weight) for sample in samples)


def test_an_unreachable_broker_ends_with_2_and_one_clear_message(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(stage, "open_reader", lambda kafka, *_: ensure_topics(kafka, timeout_s=0.5))
    assert stage.main([str(write_config(tmp_path, free_port()))]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith("rewards: no Kafka broker answers at 127.0.0.1")
