"""Reconciliation by id: what the clients saw against what the archive, the joiner, the ledger and the learner hold.

Owns the checks, pure on sets of ids; deploy/books.py reads both sides. Promises: each check names the ids that differ.
"""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from deploy.demo_client import Answer, SentVote
from learner.candidate import StepRecord

MAX_LISTED = 10
SETTLED = {"applied", "quarantined", "expired", "retracted"}


class Seen(NamedTuple):
    """The clients' side."""

    answered: set[str]  # inference ids of complete answers
    interrupted: set[str]  # inference ids of failed requests, where the response carried one
    num_failed_unnamed: int  # failed requests whose response carried no id
    private: set[str]  # inference ids asked without consent to training
    accepted: dict[str, int]  # feedback id -> times accepted (upserts)
    uncertain: set[str]  # feedback ids sent, never answered
    retracted: set[str]  # feedback ids whose retraction was accepted
    num_malformed: int
    num_malformed_accepted: int


class Held(NamedTuple):
    """The pipeline's side; lists, so that anything held twice shows."""

    archived: list[str]  # inference ids in the archive
    final: list[str]  # inference ids of interactions emitted as final
    revisions: list[str]  # <inference id>@<revision> of every emitted interaction
    dispositions: dict[str, str]  # feedback id -> applied | quarantined | expired | retracted | pending
    counted: list[str]  # <inference id>/<feedback id> of the latest interactions' feedback
    dead_letters: list[str]  # place and reason
    samples: dict[str, str]  # sample id -> inference id
    sample_ids: list[str]  # as emitted
    surviving: list[StepRecord]
    all_steps: list[StepRecord]


class Check(NamedTuple):
    """One line of the table."""

    name: str
    left: int
    right: int
    differing: list[str]
    note: str = ""

    @property
    def ok(self) -> bool:
        return not self.differing


def twice(ids: Iterable[str]) -> list[str]:
    """Return what occurs more than once."""
    return sorted(f"{name} x{count}" for name, count in Counter(ids).items() if count > 1)


def check_inferences(seen: Seen, held: Held) -> list[Check]:
    """Served = archived = joined."""
    archived, final = set(held.archived), set(held.final)
    extra = archived - seen.answered - seen.interrupted
    excused = len(extra) <= seen.num_failed_unnamed
    lost = [f"{name} not archived" for name in sorted(seen.answered - archived)]
    unknown = [] if excused else [f"{name} no client saw" for name in sorted(extra)]
    note = f"{len(seen.interrupted) + seen.num_failed_unnamed} requests failed" if not lost and not unknown else ""
    return [
        Check("answers served = archived", len(seen.answered), len(archived), lost + unknown, note),
        Check("archived once each", len(archived), len(held.archived), twice(held.archived)),
        Check(
            "archived = joined as final",
            len(archived),
            len(final),
            [f"{name} not joined" for name in sorted(archived - final)]
            + [f"{name} not archived" for name in sorted(final - archived)],
        ),
        Check(
            "joined once each, revisions distinct",
            len(final),
            len(held.final),
            twice(held.final) + twice(held.revisions),
        ),
    ]


def check_feedback(seen: Seen, held: Held) -> list[Check]:
    """Accepted = applied + quarantined + expired (+ retracted), by id."""
    known = set(held.dispositions)
    accepted = set(seen.accepted)
    unsettled = [f"{name} {state}" for name, state in held.dispositions.items() if state not in SETTLED]
    differing = [f"{name} has no disposition" for name in sorted(accepted - known)]
    differing += [f"{name} no client sent" for name in sorted(known - accepted - seen.uncertain)]
    tally = Counter(held.dispositions[name] for name in accepted & known)
    note = ", ".join(f"{count} {state}" for state, count in sorted(tally.items()))
    doubled = {name for name, count in seen.accepted.items() if count > 1}
    kept = [
        name for name in seen.retracted if held.dispositions.get(name) not in ("retracted", "expired", "quarantined")
    ]
    counted_ids = {entry.partition("/")[2] for entry in held.counted}
    return [
        Check("feedback accepted = settled", len(accepted), len(accepted & known), differing + sorted(unsettled), note),
        Check(
            "feedback counted once",
            len(counted_ids),
            len(held.counted),
            twice(held.counted),
            f"{len(doubled)} sent twice",
        ),
        Check(
            "retracted feedback not counted",
            len(seen.retracted),
            len(seen.retracted) - len(kept),
            sorted(set(kept) | (seen.retracted & counted_ids)),
        ),
        Check(
            "malformed feedback refused",
            seen.num_malformed,
            seen.num_malformed - seen.num_malformed_accepted,
            [f"{seen.num_malformed_accepted} accepted"] if seen.num_malformed_accepted else [],
        ),
        Check(
            "dead letters are quarantined feedback",
            tally["quarantined"],
            len(held.dead_letters),
            sorted(held.dead_letters) if len(held.dead_letters) > tally["quarantined"] else [],
        ),
    ]


def check_samples(seen: Seen, held: Held) -> list[Check]:
    """Samples come from the archive, with consent, and are used at most once by the surviving lineage."""
    emitted = set(held.sample_ids)
    used = [name for step in held.surviving for name in step.sample_ids]
    ever = {name for step in held.all_steps for name in step.sample_ids}
    dropped = {name for step in held.all_steps for name in step.dropped}
    pending = emitted - set(used) - dropped
    archived = set(held.archived)
    return [
        Check("samples emitted once each", len(emitted), len(held.sample_ids), twice(held.sample_ids)),
        Check(
            "samples come from archived answers",
            len(emitted),
            sum(inference in archived for inference in held.samples.values()),
            sorted(name for name, inference in held.samples.items() if inference not in archived),
        ),
        Check(
            "no sample without consent",
            0,
            len(set(held.samples.values()) & seen.private),
            sorted(set(held.samples.values()) & seen.private),
        ),
        Check(
            "samples used = emitted ones",
            len(ever),
            len(ever & emitted),
            sorted((ever | dropped) - emitted),
            f"{len(emitted)}: {len(set(used))} consumed, {len(dropped - set(used))} dropped, {len(pending)} pending",
        ),
        Check("no sample in two surviving steps", len(set(used)), len(used), twice(used)),
    ]


def reconcile(seen: Seen, held: Held) -> list[Check]:
    """Return every check."""
    return check_inferences(seen, held) + check_feedback(seen, held) + check_samples(seen, held)


def seen_by(answers: list[Answer], votes: list[SentVote]) -> Seen:
    """Sum up the clients' journal."""
    upserts = [vote for vote in votes if vote.op == "upsert" and vote.habit != "malformed"]
    malformed = [vote for vote in votes if vote.habit == "malformed"]
    failed = [answer for answer in answers if answer.error]
    return Seen(
        answered={answer.inference_id for answer in answers if not answer.error},
        interrupted={answer.inference_id for answer in failed if answer.inference_id},
        num_failed_unnamed=sum(not answer.inference_id for answer in failed),
        private={answer.inference_id for answer in answers if answer.purpose != "traffic"} - {""},
        accepted={vote.feedback_id: vote.num_accepted for vote in upserts if vote.num_accepted},
        uncertain={vote.feedback_id for vote in upserts if not vote.num_accepted and vote.status in (0, 503)},
        retracted={vote.feedback_id for vote in votes if vote.op == "retract" and vote.num_accepted},
        num_malformed=len(malformed),
        num_malformed_accepted=sum(bool(vote.num_accepted) for vote in malformed),
    )


def table_lines(checks: list[Check]) -> list[str]:
    """Render the checks as plain lines, with up to ten differing ids each."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        verdict = "OK  " if check.ok else "FAIL"
        lines.append(f"{verdict} {check.name:<{width}}  {check.left:>6} | {check.right:>6}  {check.note}".rstrip())
        lines += [f"       {entry}" for entry in check.differing[:MAX_LISTED]]
        if len(check.differing) > MAX_LISTED:
            lines.append(f"       and {len(check.differing) - MAX_LISTED} more")
    return lines
