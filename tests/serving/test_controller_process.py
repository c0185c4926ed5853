"""The controller as a process on a real broker, killed with SIGKILL in the middle of a canary."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ingest.config import KafkaConfig
from ingest.events import INTERACTION_TYPE, decode, encode
from ingest.producer import Publisher
from ingest.status import read_statuses
from ingest.stream import ensure_topics, read_latest
from ingest.topics import headers, topics
from learner.candidate import CANDIDATE_KEY, CANDIDATE_TYPE, CandidateEvent
from serving.controller import main
from serving.engine import Incarnation, write_incarnation
from serving.routes import ROUTES_KEY, RouteTable
from tests.serving.fake_engine import FakeEngine, FakeGateway, better, make_candidate, make_interactions, make_model

pytestmark = pytest.mark.kafka
CONFIG = """
[run]
state_dir = "{state}"
model = "{base}"
[kafka]
bootstrap_servers = "{kafka.bootstrap_servers}"
topic_prefix = "{kafka.topic_prefix}"
partitions = {kafka.partitions}
[mlflow]
tracking_uri = ""
[serving]
gateway_urls = ["{gateway}"]
[serving.gate]
delta = 0.05
weights = [0.5]
stage_units = []
n_min = 20
maturity_s = 0.5
soak_s = 2.0
t_max_s = 300.0
kl_limit = 0.5
probe_prompts = 8
probe_min_prompts = 4
probe_tokens = 8
"""


class Deployment:
    """A controller process, stub engines, a stub gateway, a broker."""

    def __init__(self, folder: Path, kafka: KafkaConfig) -> None:
        self.folder, self.kafka = folder, kafka
        base = make_model(folder / "base", 0.0)
        self.gateway = FakeGateway()
        self.engines = [FakeEngine(f"{name}-1", base) for name in ("blue", "green")]
        for engine in self.engines:
            name = engine.served_model.removesuffix("-1")
            write_incarnation(folder, Incarnation(name=name, url=engine.url, served_model=engine.served_model,
                                                  pid=os.getpid(), started_at=0.0))  # fmt: skip
        self.config = folder / "local.toml"
        self.config.write_text(CONFIG.format(state=folder, base=base, kafka=kafka, gateway=self.gateway.url))
        ensure_topics(kafka)
        self.publisher = Publisher(kafka, "test")
        self.log = (folder / "controller.log").open("ab")
        self.process = self.start()
        self.num_asked = 0

    def start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "serving.controller", str(self.config)]
        return subprocess.Popen(command, stdout=self.log, stderr=self.log)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        self.publisher.close()
        self.gateway.close()
        for engine in self.engines:
            engine.close()

    def latest(self, key: str, kind: type):
        record = read_latest(self.kafka, topics(self.kafka).control).get(key)
        return decode(record.value, kind) if record else None

    def wait(self, condition: Callable[[], bool], patience_s: float = 60.0) -> None:
        end = time.monotonic() + patience_s
        while not condition():
            assert time.monotonic() < end, (self.folder / "controller.log").read_text()[-3000:]
            assert self.process.poll() is None, (self.folder / "controller.log").read_text()[-3000:]
            time.sleep(0.3)

    def table(self) -> RouteTable | None:
        return self.latest(ROUTES_KEY, RouteTable)

    def ask(self, num: int) -> None:
        table = self.table()
        assert table is not None
        for event in make_interactions(table, self.num_asked + 1, num, time.time(), better):
            attributes = headers(INTERACTION_TYPE, event.interaction_id, "test", event.watermark)
            self.publisher.publish(topics(self.kafka).interaction, "0000", encode(event), attributes)
        self.num_asked += num
        assert self.publisher.flush(10)


@pytest.fixture
def deployment(tmp_path: Path, kafka: KafkaConfig) -> Iterator[Deployment]:
    one = Deployment(tmp_path, kafka)
    yield one
    one.close()


def test_a_controller_killed_in_a_canary_promotes_after_its_restart_and_stops_cleanly(deployment):
    deployment.wait(lambda: (table := deployment.table()) is not None and table.standby is not None)
    deployment.ask(30)
    folder, sha256 = make_candidate(deployment.folder / "candidates", "v000001", 1.0)
    event = CandidateEvent(version="v000001", state="proposed", at=time.time(), folder=str(folder),
                           manifest_sha256=sha256, parent="v000000", author="learner")  # fmt: skip
    deployment.publisher.publish_durably(topics(deployment.kafka).control, CANDIDATE_KEY + "v000001", encode(event),
                                         headers(CANDIDATE_TYPE, "v000001", "test", event.at))  # fmt: skip
    deployment.wait(lambda: (table := deployment.table()) is not None and table.canary is not None)
    rollout_id = deployment.table().rollout_id
    deployment.ask(60)

    deployment.process.send_signal(signal.SIGKILL)
    deployment.process.wait(10)
    deployment.ask(60)
    deployment.process = deployment.start()

    deployment.wait(lambda: deployment.latest(CANDIDATE_KEY + "v000001", CandidateEvent).state == "promoted")
    assert deployment.table().rollout_id in ("", rollout_id)
    deployment.wait(lambda: deployment.table().champion.version == "v000001")
    assert deployment.table().standby.version == "v000000"
    status = read_statuses(deployment.folder)["controller"]
    assert (status["champion"], status["promotions"]) == ("v000001", 1)
    deployment.process.send_signal(signal.SIGTERM)
    assert deployment.process.wait(20) == 0


def test_a_bad_configuration_and_an_absent_model_exit_with_two(tmp_path, capsys):
    path = tmp_path / "bad.toml"
    path.write_text('[run]\nmodel = "x"\n[serving.gate]\ndeltas = 1\n')
    assert main([str(path)]) == 2
    assert "deltas" in capsys.readouterr().err
    path.write_text(f'[run]\nmodel = "nobody/nothing-here"\nstate_dir = "{tmp_path}"\n')
    assert main([str(path)]) == 2
    assert "nobody/nothing-here" in capsys.readouterr().err
