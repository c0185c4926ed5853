"""The rewards stage over a real store, without Kafka."""

from pathlib import Path

from ingest.config import KafkaConfig
from ingest.events import Interaction, decode, encode
from ingest.stage import StageStore
from ingest.stream import Record
from rewards.config import RewardsConfig
from rewards.samples import Sample
from rewards.spec import RewardSpec
from rewards.stage import SCHEMA, RewardStage
from tests.rewards.interactions import DEFAULT_SPEC

NOW_S = 5000.0


class Room:
    """The stage over a real store, without Kafka: records in, outbox out."""

    def __init__(self, state_dir: Path, spec: RewardSpec = DEFAULT_SPEC) -> None:
        self.state_dir = state_dir
        self.store = StageStore(state_dir / "rewards" / "ledger.sqlite", SCHEMA)
        self.stage = RewardStage(self.store, KafkaConfig(), spec, RewardsConfig(), "cafe", lambda: NOW_S)
        self.offset = 0

    def give(self, *values: Interaction | bytes) -> None:
        """Handle these interactions as one batch."""
        records = []
        for value in values:
            raw = value if isinstance(value, bytes) else encode(value)
            records.append(Record("interaction.v1", 0, self.offset, "0000", raw, {}, NOW_S))
            self.offset += 1
        with self.store.transaction() as connection:
            self.stage.handle(connection, records)

    def sent(self, topic: str = "sample.v1") -> list[bytes]:
        return [
            row[0]
            for row in self.store.connection.execute(
                "SELECT value FROM stage_outbox WHERE topic = ? ORDER BY id", (topic,)
            )
        ]

    def samples(self) -> list[Sample]:
        return [decode(value, Sample) for value in self.sent()]
