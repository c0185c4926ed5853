"""The rewards process: interactions in, samples out. `python -m rewards.stage CONFIG`

Owns <state>/rewards/ledger.sqlite: ledger, tracker, offsets and outbox in one database.
For each batch of interactions, inside one transaction (ingest.stage commits it with the offsets):
    1. decode; a bad record goes to the quarantine topic with its reason
    2. drop revisions that the ledger already holds: a replay makes no second sample
    3. score the feedback, read and update the tracker, judge
    4. append verdict and sample to the ledger, queue the sample for publication
"""

import logging
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ingest.config import KafkaConfig, RunConfig, config_hash, load_table
from ingest.events import Interaction, decode, encode
from ingest.producer import Publisher
from ingest.stage import StageStore, open_reader, run_stage
from ingest.status import write_status
from ingest.stream import Record
from ingest.topics import headers, topics
from rewards import baseline, ledger
from rewards.config import RewardsConfig, spec_path
from rewards.reward import score
from rewards.samples import SAMPLE_TYPE, Sample
from rewards.spec import RewardSpec, load_spec
from rewards.verdict import Scored, cost_of, judge, never_trains

logger = logging.getLogger("rewards.stage")
SOURCE = "rewards"
DEAD_LETTER_TYPE = "llm.dead_letter.v1"  # same headers as the joiner's
SCHEMA = ledger.SCHEMA + baseline.SCHEMA


class RewardStage:
    """Handles batches of interaction records; all state is in the store."""

    def __init__(
        self,
        store: StageStore,
        kafka: KafkaConfig,
        spec: RewardSpec,
        config: RewardsConfig,
        resolved_hash: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._spec, self._config = store, spec, config
        self._topics, self._hash, self._clock = topics(kafka), resolved_hash, clock
        self.num_quarantined = self.num_replayed = 0

    def handle(self, connection: sqlite3.Connection, records: list[Record]) -> None:
        """Handle one batch inside the caller's transaction."""
        now_s = self._clock()
        # 1. decode
        decoded = [(record, interaction) for record in records if (interaction := self._decode(connection, record))]
        num_samples = 0
        for group in _distinct(decoded):
            # 2. drop replays
            scored = [(record, item) for record, each in group if (item := self._score(connection, each))]
            self.num_replayed += len(group) - len(scored)
            # 3. score and judge
            firsts = [item.interaction.inference for _, item in scored if item.is_first_sample]
            rewards = [item.reward.value or 0.0 for _, item in scored if item.is_first_sample]
            costs = [cost_of(inference, self._spec) for inference in firsts]
            keys = [baseline.keys_of(inference) for inference in firsts]
            expectations = iter(baseline.expect(connection, keys, rewards, costs, self._config))
            for record, item in scored:
                expected = next(expectations) if item.is_first_sample else None
                verdict, sample = judge(item, expected, self._spec, now_s, self._hash)
                # 4. ledger and outbox
                ledger.append(connection, verdict, sample)
                if sample:
                    self._publish(connection, record.key, sample)
                    num_samples += 1
        logger.info("batch_rewarded records=%d samples=%d", len(records), num_samples)

    def _decode(self, connection: sqlite3.Connection, record: Record) -> Interaction | None:
        try:
            return decode(record.value, Interaction)
        except ValueError as error:
            self.num_quarantined += 1
            logger.warning("interaction_quarantined record=%s reason=%s", record.where, error)
            about = headers(DEAD_LETTER_TYPE, record.where, SOURCE, record.timestamp_s)
            about += [("headrace_place", record.where.encode()), ("headrace_reason", str(error).encode()[:2000])]
            self._store.enqueue(connection, self._topics.dlq, record.key, record.value, about)
            return None

    def _score(self, connection: sqlite3.Connection, interaction: Interaction) -> Scored | None:
        """Return the scored interaction, or None for a revision that has its verdict."""
        previous = ledger.last_verdict(connection, interaction.interaction_id)
        if previous and previous.revision >= interaction.revision:
            return None
        reward = score(interaction.inference, interaction.feedback, self._spec)
        seen = ledger.last_hindsight(connection, interaction.interaction_id) if previous and reward.hindsight else None
        return Scored(interaction, reward, never_trains(interaction.inference), previous, seen)

    def _publish(self, connection: sqlite3.Connection, key: str, sample: Sample) -> None:
        about = headers(SAMPLE_TYPE, sample.sample_id, SOURCE, sample.created_at)
        self._store.enqueue(connection, self._topics.sample, key, encode(sample), about)


def _distinct(decoded: Iterable[tuple[Record, Interaction]]) -> Iterator[list[tuple[Record, Interaction]]]:
    """Cut a batch so that each group holds an interaction once: a revision builds on the verdict before it."""
    group: list[tuple[Record, Interaction]] = []
    seen: set[str] = set()
    for record, interaction in decoded:
        if interaction.interaction_id in seen:
            yield group
            group, seen = [], set()
        group.append((record, interaction))
        seen.add(interaction.interaction_id)
    yield group


def run(config_path: Path) -> None:
    """Run the stage until SIGTERM or SIGINT; ValueError for configuration, specification or broker out of order."""
    run_config = load_table(config_path, "run", RunConfig)
    kafka = load_table(config_path, "kafka", KafkaConfig)
    config = load_table(config_path, "rewards", RewardsConfig)
    spec = load_spec(spec_path(config, config_path))
    logger.info(
        "reward_spec version=%s metrics=%s config=%s", spec.version, ",".join(spec.metrics), config.model_dump()
    )
    store = StageStore(run_config.state_dir / "rewards" / "ledger.sqlite", SCHEMA)
    reader = open_reader(kafka, store, [topics(kafka).interaction], "headrace-rewards")
    publisher = Publisher(kafka, SOURCE)
    stop = threading.Event()  # from here on a signal waits for the transaction; before, it simply ends the process
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    stage = RewardStage(store, kafka, spec, config, config_hash(config_path))

    def report(status: dict[str, Any]) -> None:
        counts = ledger.count(run_config.state_dir)
        counts |= {"quarantined": stage.num_quarantined, "replayed": stage.num_replayed, "spec_version": spec.version}
        write_status(run_config.state_dir, "rewards", status | counts)

    try:
        run_stage(reader, store, publisher, stage.handle, lambda *_: None, stop, report, config.poll_records)
    finally:
        publisher.close()
        reader.close()
        store.close()


def main(argv: list[str] | None = None) -> int:
    """Run the rewards process; 2 for bad configuration or an unreachable broker."""
    arguments = sys.argv[1:] if argv is None else argv
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if len(arguments) != 1:
        print("usage: python -m rewards.stage CONFIG.toml", file=sys.stderr)
        return 2
    try:
        run(Path(arguments[0]))
    except ValueError as error:
        print(f"rewards: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
