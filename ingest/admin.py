"""The door to Kafka's administration: connection options, capability probe, topics, identities of logs.

Promises: a broker that does not answer is a ValueError that names it and says what to do; creating topics twice is a
no-op; another partition count than configured is refused (a broker that makes topics by itself is put right).
"""

import logging
import time
from typing import Any

from kafka import KafkaAdminClient
from kafka.admin import NewTopic
from kafka.errors import KafkaError, TopicAlreadyExistsError

from ingest.config import KafkaConfig
from ingest.topics import num_partitions, topics

logger = logging.getLogger("ingest.admin")
logging.getLogger("kafka").setLevel(logging.CRITICAL)  # it logs every reconnect; we say once what matters

MAX_RECORD_BYTES = 8 << 20
_OFFSET_FOR_LEADER_EPOCH = 23  # an api key that a broker with real replicated logs answers and the bundled one does not


class LogWiped(Exception):
    """The log behind our positions was replaced; reopen from durable state, which starts it at 0."""


def connection_options(kafka: KafkaConfig, client_id: str, **more: Any) -> dict[str, Any]:
    """Return the options shared by every client of this deployment."""
    options: dict[str, Any] = {
        "bootstrap_servers": kafka.bootstrap_servers.split(","),
        "client_id": client_id,
        "security_protocol": kafka.security_protocol,
        "reconnect_backoff_max_ms": 1000,
        "bootstrap_timeout_ms": 1000,
        **more,
    }
    if kafka.sasl_mechanism:
        options |= {
            "sasl_mechanism": kafka.sasl_mechanism,
            "sasl_plain_username": kafka.sasl_username,
            "sasl_plain_password": kafka.sasl_password,
        }
    if kafka.ssl_cafile:
        options["ssl_cafile"] = kafka.ssl_cafile
    return options


def open_admin(kafka: KafkaConfig, timeout_s: float) -> Any:
    """Connect, trying until the deadline; ValueError names the broker and what to do."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return KafkaAdminClient(**connection_options(kafka, "headrace-admin", request_timeout_ms=5000))
        except (KafkaError, OSError) as error:
            if time.monotonic() >= deadline:
                raise ValueError(
                    f"no Kafka broker answers at {kafka.bootstrap_servers} ({type(error).__name__}); start one "
                    "(`headrace up` starts a local one) or set bootstrap_servers in [kafka]"
                ) from error
            time.sleep(0.2)


def trusts_idempotence(kafka: KafkaConfig, timeout_s: float = 10.0) -> bool:
    """Tell whether the broker's idempotence can be trusted: the bundled one lost acknowledged events with it."""
    admin = open_admin(kafka, timeout_s)
    try:
        return is_complete(admin)
    finally:
        admin.close()


def is_complete(admin: Any) -> bool:
    """The capability probe: the bundled broker lacks this api, and is wrong about end offsets and idempotence."""
    return any(int(key) == _OFFSET_FOR_LEADER_EPOCH for key in admin.api_versions())


def ensure_topics(kafka: KafkaConfig, timeout_s: float = 30.0) -> None:
    """Create the missing topics, wait for their leaders; ValueError: no broker, or another partition count."""
    admin = open_admin(kafka, timeout_s)
    try:
        known = {topic["name"]: topic for topic in admin.describe_topics() if not topic["error_code"]}
        for name in topics(kafka):
            if name not in known:
                _create_topic(admin, kafka, name)
                continue
            found, wanted = len(known[name]["partitions"]), num_partitions(kafka, name)
            if found != wanted and not is_complete(admin):
                # The bundled broker makes a topic for whoever asks first; only its restart leads here.
                logger.error("topic_remade topic=%s partitions=%d was=%d what was in it is gone", name, wanted, found)
                admin.delete_topics([name])
                _create_topic(admin, kafka, name)
            elif found != wanted:
                raise ValueError(
                    f"topic {name} has {found} partitions, the configuration says {wanted}: the count is fixed once a "
                    "topic exists; set [kafka] partitions to it, or use another topic_prefix"
                )
        _await_leaders(admin, list(topics(kafka)), timeout_s)
    except KafkaError as error:
        raise ValueError(f"cannot create topics at {kafka.bootstrap_servers}: {error!r}") from error
    finally:
        admin.close()


def _create_topic(admin: Any, kafka: KafkaConfig, name: str) -> None:
    configs = {"max.message.bytes": str(MAX_RECORD_BYTES)}
    if name == topics(kafka).control:
        configs["cleanup.policy"] = "compact"
    try:
        admin.create_topics(
            [NewTopic(name, num_partitions(kafka, name), kafka.replication_factor, topic_configs=configs)]
        )
    except TopicAlreadyExistsError:
        return  # another process was first
    logger.info("topic_created topic=%s partitions=%d", name, num_partitions(kafka, name))


def _await_leaders(admin: Any, names: list[str], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        described = admin.describe_topics(names)
        waiting = [
            topic["name"]
            for topic in described
            if topic["error_code"] or not topic["partitions"] or any(p["leader_id"] < 0 for p in topic["partitions"])
        ]
        if not waiting:
            return
        if time.monotonic() >= deadline:
            raise ValueError(
                f"topics {', '.join(waiting)} have no leader after {timeout_s:.0f} s; look at the broker's log"
            )
        time.sleep(0.1)


def read_log_ids(kafka: KafkaConfig, names: list[str], timeout_s: float = 30.0) -> dict[str, str]:
    """Return topic -> cluster id/topic id; a log that was made anew has another one."""
    admin = open_admin(kafka, timeout_s)
    try:
        return log_ids_of(admin, names)
    finally:
        admin.close()


def log_ids_of(admin: Any, names: list[str]) -> dict[str, str]:
    cluster = admin.describe_cluster()["cluster_id"]
    described = {topic["name"]: topic for topic in admin.describe_topics(names)}
    for name in names:
        if name not in described or described[name]["error_code"]:
            raise LogWiped(f"topic {name} does not exist on the broker (it did not survive a restart, or was deleted)")
    return {name: f"{cluster}/{described[name]['topic_id']}" for name in names}
