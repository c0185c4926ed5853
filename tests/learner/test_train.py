"""The learner process between a real broker and its state: samples in, candidates out, fates followed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ingest.config import KafkaConfig
from ingest.events import decode, encode
from ingest.ids import route_of
from ingest.producer import Publisher
from ingest.stream import ensure_topics, read_latest
from ingest.topics import headers, topics
from learner.candidate import CANDIDATE_KEY, CANDIDATE_TYPE, CandidateEvent
from learner.lineage import read_steps, surviving_steps
from rewards.samples import SAMPLE_TYPE
from tests.learner.examples import sample
from tests.tiny_model import make_tiny_model

ROOT = Path(__file__).parents[2]
CONFIG = """
[run]
state_dir = "{folder}/state"
model = "{folder}/model"
[kafka]
bootstrap_servers = "{kafka.bootstrap_servers}"
topic_prefix = "{kafka.topic_prefix}"
partitions = {kafka.partitions}
[mlflow]
tracking_uri = ""
[learner]
objective = "tis"
lora_rank = 4
batch_samples = 8
min_batch_samples = 2
max_actor_share = 1.0
max_completion_tokens = 16
trust_region = 1.0
veto_ratio = 0.0
min_ess = 0.0
publish_every_steps = 2
publish_max_kl = 10.0
num_threads = 1
"""

pytestmark = [pytest.mark.kafka, pytest.mark.slow]


class Process:
    """The learner as its own process, and the topics around it."""

    def __init__(self, folder: Path, kafka: KafkaConfig) -> None:
        self.folder, self.kafka, self.state_dir = folder, kafka, folder / "state"
        make_tiny_model(folder / "model")
        ensure_topics(kafka)
        (folder / "headrace.toml").write_text(CONFIG.format(folder=folder, kafka=kafka))
        self.publisher = Publisher(kafka, "test")
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "learner.train", str(self.folder / "headrace.toml")]
        log = (self.folder / "learner.log").open("a")
        self.process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=log)

    def stop(self, number: int = signal.SIGTERM) -> int:
        assert self.process
        self.process.send_signal(number)
        return self.process.wait(60)

    def publish_samples(self, first: int, last: int) -> None:
        topic = topics(self.kafka).sample
        for number in range(first, last):
            item = sample(number)
            head = headers(SAMPLE_TYPE, item.sample_id, "test", 1.0)
            self.publisher.publish(topic, route_of(item.episode_id), encode(item), head)
        assert self.publisher.flush(10)

    def tell(self, version: str, state: Any) -> None:
        event = CandidateEvent(version=version, state=state, at=time.time(), author="controller")
        head = headers(CANDIDATE_TYPE, f"{version}/{state}", "test", 1.0)
        self.publisher.publish(topics(self.kafka).control, CANDIDATE_KEY + version, encode(event), head)
        assert self.publisher.flush(10)

    def proposed(self) -> dict[str, CandidateEvent]:
        latest = read_latest(self.kafka, topics(self.kafka).control)
        return {key: decode(record.value, CandidateEvent) for key, record in latest.items()}

    def status(self) -> dict[str, Any]:
        return json.loads((self.state_dir / "status" / "learner.json").read_text())

    def wait(self, what: str, is_true: Callable[[], Any], timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_true():
            assert self.process and self.process.poll() is None, (self.folder / "learner.log").read_text()[-3000:]
            assert time.monotonic() < deadline, f"{what}: {(self.folder / 'learner.log').read_text()[-3000:]}"
            time.sleep(0.1)


@pytest.fixture
def learner(tmp_path: Path, kafka: KafkaConfig) -> Iterator[Process]:
    process = Process(tmp_path, kafka)
    yield process
    if process.process and process.process.poll() is None:
        process.process.kill()
        process.process.wait(10)
    process.publisher.close()


def test_samples_become_steps_and_a_candidate_and_a_kill_loses_none(learner: Process):
    learner.publish_samples(0, 20)
    learner.start()
    learner.wait("two steps", lambda: len(read_steps(learner.state_dir)) == 2)
    learner.wait("a proposal", lambda: "candidate/v000001" in learner.proposed())
    assert learner.proposed()["candidate/v000001"].state == "proposed"
    learner.stop(signal.SIGKILL)

    learner.publish_samples(16, 32)  # 4 of them again
    learner.start()
    learner.wait("four steps", lambda: len(read_steps(learner.state_dir)) == 4)
    used = [sample_id for step in surviving_steps(learner.state_dir) for sample_id in step.sample_ids]
    assert sorted(used) == sorted(sample(i).sample_id for i in range(32))
    assert not (learner.state_dir / "candidates" / "v000002").exists()  # the first is still undecided

    learner.tell("v000001", "rejected")
    learner.wait("a return", lambda: learner.status().get("lineage") == "l0002")
    learner.wait("the samples again", lambda: len(surviving_steps(learner.state_dir)) == 4)
    again = [sample_id for step in surviving_steps(learner.state_dir) for sample_id in step.sample_ids]
    assert sorted(again) == sorted(used)
    learner.wait("a new candidate", lambda: "candidate/v000002" in learner.proposed())
    assert learner.proposed()["candidate/v000002"].parent == "v000000"
    assert learner.stop() == 0
    assert learner.status()["phase"] == "stopped"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('objective = "tis"', 'objective = "gspo"', "choose one of icepop, tis"),
        ("lora_rank = 4", "lora_rang = 4", "unknown key learner.lora_rang"),
        ('/model"', '/nothing"', "neither a folder nor a Hugging Face model"),
    ],
)
def test_bad_configuration_is_said_once_and_exits_with_2(learner: Process, old, new, message):
    path = learner.folder / "headrace.toml"
    path.write_text(path.read_text().replace(old, new))
    done = subprocess.run(
        [sys.executable, "-m", "learner.train", str(path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 2
    assert message in done.stderr.decode()
    assert "Traceback" not in done.stderr.decode()
