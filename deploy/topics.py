"""Make the topics of one deployment and exit; the supervisor runs it after each start of the broker."""

import logging
import sys
from pathlib import Path

from deploy.config import DeployConfig
from ingest.config import KafkaConfig, RunConfig, load_table
from ingest.status import read_statuses
from ingest.stream import connection_options, ensure_topics
from ingest.topics import num_partitions, topics

logger = logging.getLogger("deploy.topics")


def main(argv: list[str]) -> int:
    """Return 0 when every topic exists, 2 with a message when the broker cannot be reached or refuses."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    path = Path(argv[0])
    try:
        kafka = load_table(path, "kafka", KafkaConfig)
        if is_memory_only(path):
            remove_self_made(kafka)
        ensure_topics(kafka)
    except ValueError as error:
        print(f"topics: {error}", file=sys.stderr)
        return 2
    return 0


def is_memory_only(path: Path) -> bool:
    """Tell whether the local broker is the bundled one, which came back empty."""
    if load_table(path, "deploy", DeployConfig).broker == "external":
        return False
    state_dir = load_table(path, "run", RunConfig).state_dir
    return read_statuses(state_dir).get("broker", {}).get("durable") is False


def remove_self_made(kafka: KafkaConfig) -> None:
    """Delete topics that the bundled broker made by itself, with its own partition count, for a reader that fetched.

    It does so for readers that were connected when it restarted, although they ask it not to. They are empty:
    the log of before is gone, and no producer sends to a partition that it does not know.
    """
    from kafka import KafkaAdminClient
    from kafka.errors import KafkaError

    try:
        admin = KafkaAdminClient(**connection_options(kafka, "headrace-topics"))
    except (KafkaError, OSError):
        return  # ensure_topics waits for it, and says what is wrong
    try:
        counts = {
            topic["name"]: len(topic["partitions"]) for topic in admin.describe_topics() if not topic["error_code"]
        }
        wrong = [
            name
            for name in topics(kafka)
            if counts.get(name, num_partitions(kafka, name)) != num_partitions(kafka, name)
        ]
        if wrong:
            logger.warning("self_made_topics_removed topics=%s", ",".join(wrong))
            admin.delete_topics(wrong)
    except (KafkaError, OSError) as error:
        logger.warning("self_made_topics_kept error=%r", error)
    finally:
        admin.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
