"""The joiner process on a real broker: SIGKILL, replays, bad records, bad configuration."""

import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

from ingest.config import KafkaConfig
from ingest.events import (
    FEEDBACK_TYPE,
    INFERENCE_TYPE,
    Feedback,
    Inference,
    Interaction,
    Policy,
    Timing,
    decode,
    encode,
)
from ingest.ids import inference_id, response_id, route_of
from ingest.joiner import main
from ingest.log import feedback_dispositions
from ingest.producer import Publisher
from ingest.status import read_statuses
from ingest.stream import Reader, ensure_topics
from ingest.topics import headers, topics

ROOT = Path(__file__).parents[2]


def write_config(folder: Path, kafka: KafkaConfig, ingest: str) -> Path:
    path = folder / "headrace.toml"
    path.write_text(
        f'[run]\nstate_dir = "{folder}/state"\nmodel = "none"\n'
        f'[kafka]\nbootstrap_servers = "{kafka.bootstrap_servers}"\ntopic_prefix = "{kafka.topic_prefix}"\n'
        f"partitions = {kafka.partitions}\n[ingest]\n{ingest}\n"
    )
    return path


def start(module: str, config: Path) -> subprocess.Popen:
    log = (config.parent / f"{module}.log").open("ab")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-m", module, str(config)], stderr=log, env=environment, cwd=config.parent)


def wait_status(state_dir: Path, process: str, condition, timeout_s: float = 40.0) -> dict:
    deadline = time.monotonic() + timeout_s
    status: dict = {}
    while time.monotonic() < deadline:
        status = read_statuses(state_dir).get(process, {})
        if status and condition(status):
            return status
        time.sleep(0.05)
    raise AssertionError(f"{process} did not get there in {timeout_s} s: {status}")


def event_pair(number: int, now_s: float) -> tuple[str, Inference, Feedback]:
    episode = f"ep_{number}"
    route = route_of(episode)
    inference = Inference(
        inference_id=inference_id(route, f"{number:032x}"),
        response_id=response_id(route, f"{number:032x}"),
        episode_id=episode,
        tenant="a",
        timing=Timing(received_at=now_s, completed_at=now_s),
        policy=Policy(model="m", version="v000000"),
    )
    feedback = Feedback(
        feedback_id=f"f{number}",
        tenant="a",
        metric="thumb",
        kind="boolean",
        occurred_at=now_s,
        received_at=now_s,
        inference_id=inference.inference_id,
        value=True,
    )
    return route, inference, feedback


@pytest.mark.kafka
def test_joiner_killed_under_load_joins_everything_exactly_once(kafka, tmp_path) -> None:
    config = write_config(tmp_path, kafka, "observation_window_s = 1.0\nlate_window_s = 300.0")
    ensure_topics(kafka)
    publisher, names = Publisher(kafka, "test"), topics(kafka)
    joiner = start("ingest.joiner", config)
    for number in range(1500):
        now_s = time.time()
        route, inference, feedback = event_pair(number, now_s)
        sent = [
            (names.feedback, encode(feedback), headers(FEEDBACK_TYPE, f"e{number}", "test", now_s)),
            (names.inference, encode(inference), headers(INFERENCE_TYPE, f"i{number}", "test", now_s)),
        ]
        for topic, value, event_headers in sent if number % 3 else sent[::-1] * 2:
            publisher.publish(topic, route, value, event_headers)
        time.sleep(0.002)
        if number in (500, 1000):
            joiner.kill()
            joiner.wait()
            joiner = start("ingest.joiner", config)
    publisher.publish(names.inference, "00aa", b"{broken", [])
    publisher.publish(names.feedback, "00aa", b'{"feedback_id": "bad", "tenant": "a"}', [])
    assert publisher.flush(10)
    publisher.close()
    status = wait_status(
        tmp_path / "state", "joiner", lambda s: s["joined"] == 1500 and not s["outbox"] and s["quarantined"] == 2
    )
    joiner.send_signal(signal.SIGTERM)
    assert joiner.wait(20) == 0
    assert (status["inferences"], status["open_windows"], status["duplicates"]) == (1500, 0, 1000)
    assert {k: n for k, n in status["feedback"].items() if n} == {"applied": 1500, "quarantined": 1}
    applied = {f"f{number}": "applied" for number in range(1500)}
    assert feedback_dispositions(tmp_path / "state") == applied | {"bad": "quarantined"}
    reader = Reader(kafka, [names.interaction, names.dlq], {}, "test")
    interactions: dict[str, dict[int, Interaction]] = defaultdict(dict)
    letters = []
    while not reader.caught_up():
        for record in reader.poll(0.1):
            if record.topic == names.dlq:
                letters.append(record)
                continue
            interaction = decode(record.value, Interaction)
            known = interactions[interaction.interaction_id].setdefault(interaction.revision, interaction)
            assert known == interaction
    reader.close()
    assert len(interactions) == 1500
    assert all(revisions[max(revisions)].feedback[0].value is True for revisions in interactions.values())
    assert {letter.value for letter in letters} == {b"{broken", b'{"feedback_id": "bad", "tenant": "a"}'}
    assert all("malformed" in letter.headers["headrace_reason"] for letter in letters)


def test_unknown_key_is_one_message_and_exit_2(tmp_path, capsys) -> None:
    config = write_config(tmp_path, KafkaConfig(), "observation_windw_s = 1")
    assert main([str(config)]) == 2
    assert "unknown key ingest.observation_windw_s" in capsys.readouterr().err


def test_unreachable_broker_is_named_with_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"no Kafka broker answers at 127\.0\.0\.1:1 .*set bootstrap_servers"):
        ensure_topics(KafkaConfig(bootstrap_servers="127.0.0.1:1"), timeout_s=0.2)
