"""Shared fixtures: brokers."""

from collections.abc import Iterator

import pytest

from ingest.config import KafkaConfig
from tests.brokers import Broker, choose


def _broker(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    choice = choose(kind)
    if isinstance(choice, str):
        pytest.skip(f"NOT RUN on {kind}: {choice}")
    broker = Broker(choice, tmp_path_factory.mktemp(f"broker-{kind}"))
    broker.start()
    yield broker
    broker.close()


@pytest.fixture(scope="session")
def bundled_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """The bundled memory-only broker."""
    yield from _broker("bundled", tmp_path_factory)


@pytest.fixture(scope="session")
def apache_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """Apache Kafka, durable; skipped aloud where its jars or Java are missing."""
    yield from _broker("kafka", tmp_path_factory)


@pytest.fixture
def own_bundled_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A bundled broker of the test's own, not started: the test starts and kills it."""
    choice = choose("bundled")
    if isinstance(choice, str):
        pytest.skip(f"NOT RUN on the bundled broker: {choice}")
    broker = Broker(choice, tmp_path_factory.mktemp("own-broker"))
    yield broker
    broker.close()


@pytest.fixture(params=["bundled", "kafka"])
def broker(request: pytest.FixtureRequest) -> Broker:
    """Each broker in turn."""
    return request.getfixturevalue("bundled_broker" if request.param == "bundled" else "apache_broker")


@pytest.fixture
def kafka(bundled_broker: Broker) -> KafkaConfig:
    """Topics of the test's own on the bundled broker."""
    return bundled_broker.config()
