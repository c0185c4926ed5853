"""`headrace rollback`: an operator's route table, straight to the gateways; works with the controller down.

With a canary its weight becomes 0; without one the standby, which is still loaded, becomes the champion.
"""

import time
from pathlib import Path

import msgspec

from deploy.config import load_all
from ingest.config import KafkaConfig
from ingest.events import decode, encode
from ingest.producer import Publisher
from ingest.stream import read_latest
from ingest.topics import headers, topics
from serving.routes import ROUTES_KEY, ROUTES_TYPE, RouteTable


class NothingToRollBack(Exception):
    """There is neither a canary with traffic nor a standby."""


def rolled_back(table: RouteTable, reason: str, now_s: float) -> RouteTable:
    """Return the table after an operator's rollback; NothingToRollBack if it has no canary and no standby."""
    why = f"operator: {reason or 'headrace rollback'}"
    fresh = {"revision": table.revision + 1, "at": now_s, "author": "operator", "reason": why, "canary_weight": 0.0}
    if table.canary is not None and table.canary_weight > 0:
        return msgspec.structs.replace(table, **fresh)
    serving = table.champion.version if table.champion else "no champion"
    if table.standby is None or table.standby.version == serving:
        raise NothingToRollBack(
            f"nothing to roll back: no canary has traffic, and no earlier champion is loaded beside {serving}"
        )
    # The bad version does not become the standby: a second rollback would bring it back.
    champion = msgspec.structs.replace(table.standby, arm="champion")
    return msgspec.structs.replace(table, champion=champion, standby=None, canary=None, **fresh)


def read_routes(kafka: KafkaConfig) -> RouteTable | None:
    """Return the route table in force, None before the first."""
    record = read_latest(kafka, topics(kafka).control).get(ROUTES_KEY)
    return decode(record.value, RouteTable) if record else None


def rollback(path: Path, reason: str) -> int:
    """Publish the table and say what changes; 1 if there is nothing to roll back."""
    config = load_all(path)
    table = read_routes(config.kafka)
    if table is None:
        print("headrace rollback: no route table has been published yet: nothing is served")
        return 1
    try:
        new = rolled_back(table, reason, time.time())
    except NothingToRollBack as error:
        print(f"headrace rollback: {error}")
        return 1
    publisher = Publisher(config.kafka, source="headrace-rollback")
    try:
        event_id = f"routes-{new.revision}-operator-{new.at:.6f}"
        attributes = headers(ROUTES_TYPE, event_id, "headrace-rollback", new.at)
        publisher.publish_durably(topics(config.kafka).control, ROUTES_KEY, encode(new), attributes)
    finally:
        publisher.close()
    print(f"headrace rollback: revision {new.revision} {describe(table, new)}")
    return 0


def describe(old: RouteTable, new: RouteTable) -> str:
    """Return one sentence about the change."""
    if new.champion == old.champion and old.canary is not None:
        return (
            f"takes all traffic from canary {old.canary.version}; champion is {new.champion and new.champion.version}"
        )
    return f"returns from {old.champion and old.champion.version} to {new.champion and new.champion.version}"
