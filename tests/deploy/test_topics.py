"""Topics are made right again after the memory-only broker restarted under its readers."""

import json
from pathlib import Path

import pytest
from kafka import KafkaAdminClient
from kafka.admin import NewTopic

from deploy.broker import choose_broker, command, prepare, wait_ready
from deploy.topics import main
from tests.deploy.test_cli import write_config


@pytest.mark.kafka
def test_self_made_topic_with_a_wrong_partition_count_is_made_again(tmp_path: Path) -> None:
    import subprocess

    path = write_config(tmp_path, '[deploy]\nbroker = "bundled"\n')
    servers = path.read_text().split('bootstrap_servers = "')[1].split('"')[0]
    status = tmp_path / "state" / "status" / "broker.json"
    status.parent.mkdir(parents=True)
    status.write_text(json.dumps({"durable": False}))
    choice = choose_broker(None, "bundled")
    port = int(servers.split(":")[1])
    prepare(choice, tmp_path / "kafka", port)
    argv, environment = command(choice, tmp_path / "kafka", port)
    broker = subprocess.Popen(argv, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_ready(servers, 20.0)
        admin = KafkaAdminClient(bootstrap_servers=servers)
        admin.create_topics([NewTopic("control.v1", 4, 1), NewTopic("inference.v1", 8, 1)])
        assert main([str(path)]) == 0
        counts = {topic["name"]: len(topic["partitions"]) for topic in admin.describe_topics()}
        admin.close()
        assert counts == {
            "control.v1": 1,
            **dict.fromkeys((f"{name}.v1" for name in ("inference", "feedback", "interaction", "sample", "dlq")), 8),
        }
    finally:
        broker.kill()
        broker.wait()


def test_unreachable_broker_is_said_with_exit_status_2(tmp_path: Path, capsys, monkeypatch) -> None:
    path = write_config(tmp_path)
    monkeypatch.setattr("deploy.topics.ensure_topics", refuse)
    assert main([str(path)]) == 2
    assert "topics: no Kafka broker answers" in capsys.readouterr().err


def refuse(kafka) -> None:
    raise ValueError(f"no Kafka broker answers at {kafka.bootstrap_servers}")
