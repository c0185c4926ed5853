"""Make the topics of one deployment and exit; the supervisor runs it after each start of the broker."""

import logging
import sys
from pathlib import Path

from ingest.config import KafkaConfig, load_table
from ingest.stream import ensure_topics


def main(argv: list[str]) -> int:
    """Return 0 when every topic exists, 2 with a message when the broker cannot be reached or refuses."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        ensure_topics(load_table(Path(argv[0]), "kafka", KafkaConfig))
    except ValueError as error:
        print(f"topics: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
