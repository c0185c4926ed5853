"""Both sides' books for the reconciliation: the demo client's journal, and what the rooms hold on disk.

Takes ingest's archive and dispositions, the archived samples, the learner's steps. Emits Seen and Held.
    python -m deploy.books STATE_DIR [--json]        reconciles a demo again from its state folder
"""

import argparse
import json
import sys
from pathlib import Path

from deploy.demo_client import read_journal
from deploy.reconcile import Held, reconcile, seen_by, table_lines
from ingest.log import feedback_dispositions, query
from learner.lineage import read_steps, surviving_steps


def held_by(state_dir: Path) -> Held:
    """Read the pipeline's side from the archive, the joiner's store and the learner's steps.

    An event that was sent again under its own id is one event; the same answer or sample under two ids is two.
    """
    inferences = query(state_dir, "SELECT DISTINCT inference_id, event_key FROM all_inference WHERE raw IS NULL")
    samples = query(state_dir, "SELECT DISTINCT sample_id, inference_id, event_key FROM all_sample")
    interactions = query(
        state_dir,
        "SELECT inference.inference_id AS inference_id, state, revision, "
        "list_transform(feedback, lambda vote: vote.feedback_id) AS feedback_ids FROM interaction",
    )
    latest = {row["inference_id"]: row for row in sorted(interactions, key=lambda row: row["revision"])}
    return Held(
        archived=[row["inference_id"] for row in inferences],
        final=[row["inference_id"] for row in interactions if row["state"] == "final"],
        revisions=[f"{row['inference_id']}@{row['revision']}" for row in interactions],
        dispositions=feedback_dispositions(state_dir),
        counted=[f"{name}/{feedback_id}" for name, row in latest.items() for feedback_id in row["feedback_ids"] or ()],
        dead_letters=[f"{row['place']} {row['reason']}" for row in query(state_dir, "SELECT place, reason FROM dlq")],
        samples={row["sample_id"]: row["inference_id"] for row in samples},
        sample_ids=[row["sample_id"] for row in samples],
        surviving=surviving_steps(state_dir),
        all_steps=read_steps(state_dir),
    )


def main(argv: list[str]) -> int:
    """Reconcile a stopped or drained demo again from its state folder."""
    parser = argparse.ArgumentParser(prog="python -m deploy.books", description=main.__doc__)
    parser.add_argument("state_dir", type=Path)
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    checks = reconcile(seen_by(*read_journal(arguments.state_dir)), held_by(arguments.state_dir))
    if arguments.json:
        print(json.dumps([{**check._asdict(), "ok": check.ok} for check in checks], indent=1))
    else:
        print("\n".join(table_lines(checks)))
    return 0 if all(check.ok for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
