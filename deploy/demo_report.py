"""What the demo says at its end: criteria with their figures, feedback-to-served latency, summary.json, the table.

Pure on what was measured. Promises: the exit status is 0 only if every criterion holds, and each is printed with the
figure that decided it.
"""

from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from deploy.demo_bad import Planted, is_contained
from deploy.demo_client import Answer, SentVote
from deploy.demo_kill import Kill
from deploy.demo_measure import Gain, Guard
from deploy.reconcile import Check

MIN_PROMOTIONS = 2
PROMOTIONS_WITHIN_S = 720.0
MIN_GAIN = 0.40
MIN_GAIN_LOW = 0.25
MAX_GUARD_LOSS = 0.10
KILL_SHADOW_S = 5.0  # requests that fail this long after a killed server is back are still the kill's


class Criterion(NamedTuple):
    """One thing that must hold."""

    name: str
    ok: bool
    figure: str


class Latency(NamedTuple):
    """Seconds from a feedback's acceptance to the first answer of a promoted version that had learned from it."""

    num_feedback: int
    median_s: float
    p90_s: float


def feedback_latency(
    votes: list[SentVote], answers: list[Answer], promoted: list[str], samples_of: dict[str, set[str]]
) -> Latency | None:
    """samples_of: promoted version -> inference ids that its lineage used; None if none was used and served."""
    first_served: dict[str, float] = {}
    for answer in sorted(answers, key=lambda answer: answer.completed_at):
        if not answer.error:
            first_served.setdefault(answer.version, answer.completed_at)
    accepted = {
        vote.feedback_id: vote
        for vote in votes
        if vote.num_accepted and vote.op == "upsert" and vote.habit != "malformed"
    }
    delays = []
    for vote in accepted.values():
        served = [
            first_served[version]
            for version in promoted
            if version in first_served
            and vote.inference_id in samples_of.get(version, ())
            and first_served[version] > vote.accepted_at
        ]
        if served:
            delays.append(min(served) - vote.accepted_at)
    if not delays:
        return None
    median_s, p90_s = np.quantile(delays, [0.5, 0.9])
    return Latency(len(delays), float(median_s), float(p90_s))


def failed_requests(answers: list[Answer], kills: list[Kill]) -> tuple[list[Answer], int]:
    """Return the failures that no kill explains, and the number of the others.

    A request that was open while a server of the serving path was down is the kill's.
    """
    shadows = [
        (kill.at, kill.at + (kill.back_after_s or 600.0) + KILL_SHADOW_S)
        for kill in kills
        if kill.process == "gateway" or kill.process.startswith("engine")
    ]
    failed = [answer for answer in answers if answer.error]
    ours = [
        answer
        for answer in failed
        if not any(answer.started_at < until and answer.completed_at > since for since, until in shadows)
    ]
    return ours, len(failed) - len(ours)


def judge_run(
    promotion_times_s: list[float],
    gain: Gain | None,
    guard: Guard | None,
    answers: list[Answer],
    kills: list[Kill],
    checks: list[Check],
    planted: list[Planted] | None,
) -> list[Criterion]:
    """Return every criterion of the run."""
    in_time = [at for at in promotion_times_s if at <= PROMOTIONS_WITHIN_S]
    when = ", ".join(f"{at:.0f} s" for at in promotion_times_s)
    ours, excused = failed_requests(answers, kills)
    failures = f"{len(ours)} of {len(answers)}" + (
        f", {excused} more while a killed server was down" if excused else ""
    )
    failures += f"; first: {ours[0].error}" if ours else ""
    wrong = [check.name for check in checks if not check.ok]
    criteria = [
        Criterion(
            f"at least {MIN_PROMOTIONS} promotions by the gate",
            len(in_time) >= MIN_PROMOTIONS,
            f"{len(promotion_times_s)} ({when or 'none'} after the start of traffic)",
        ),
        _gain_criterion(gain),
        _guard_criterion(guard),
        Criterion("no failed client request", not ours, failures),
        Criterion(
            "reconciliation by id",
            bool(checks) and not wrong,
            f"{len(checks)} checks" + (f", FAIL: {'; '.join(wrong)}" if wrong else ", all OK"),
        ),
    ]
    if planted is not None:
        how = "; ".join(
            f"{one.kind} {one.version}: {' > '.join(one.states)}, {one.num_exposed} answers" for one in planted
        )
        criteria.append(Criterion("planted candidates stopped", is_contained(planted), how or "nothing was planted"))
    if kills:
        back = ", ".join(
            f"{kill.process} {'NOT back' if kill.back_after_s is None else kill.back_after_s}" for kill in kills
        )
        criteria.append(
            Criterion("killed processes are back", all(k.back_after_s is not None for k in kills), f"{back} (s)")
        )
    return criteria


def _gain_criterion(gain: Gain | None) -> Criterion:
    name = f"true satisfaction on held-out up {100 * MIN_GAIN:.0f} points, interval above {100 * MIN_GAIN_LOW:.0f}"
    if gain is None:
        return Criterion(name, False, "not measured")
    figure = (
        f"{100 * gain.base:.1f} % -> {100 * gain.champion:.1f} %, {100 * gain.difference:+.1f} points "
        f"[{100 * gain.low:+.1f}, {100 * gain.high:+.1f}] on {gain.num_questions} questions"
    )
    return Criterion(name, gain.difference >= MIN_GAIN and gain.low > MIN_GAIN_LOW, figure)


def _guard_criterion(guard: Guard | None) -> Criterion:
    name = f"quality (on topic, no loop, fluent under the base) not worse than {100 * MAX_GUARD_LOSS:.0f} %"
    if guard is None:
        return Criterion(name, False, "not measured")

    def pair(values: tuple[float, float]) -> str:
        return f"{100 * values[0]:.0f} -> {100 * values[1]:.0f} %"

    figure = (
        f"sound {pair((guard.base, guard.champion))}; on topic {pair(guard.on_topic)}, no loop {pair(guard.no_loop)}"
    )
    if guard.fluent and guard.mean_logprob:
        figure += f", fluent {pair(guard.fluent)}"
        figure += f" (mean log-prob {guard.mean_logprob[0]:.2f} -> {guard.mean_logprob[1]:.2f})"
    scored = guard.fluent is not None
    return Criterion(
        name,
        scored and guard.champion >= guard.base - MAX_GUARD_LOSS,
        figure if scored else f"{figure}; fluency was not scored",
    )


def criteria_table(criteria: list[Criterion]) -> Table:
    """Render the criteria."""
    table = Table(title="Did it learn?", show_lines=False)
    table.add_column("", width=4)
    table.add_column("criterion")
    table.add_column("figure")
    for criterion in criteria:
        mark = "[green]OK[/]" if criterion.ok else "[red]FAIL[/]"
        table.add_row(mark, criterion.name, criterion.figure)
    return table


def checks_table(checks: list[Check]) -> Table:
    """Render the reconciliation."""
    table = Table(title="Reconciliation by id")
    for column in ("", "check", "left", "right", "note"):
        table.add_column(column, justify="right" if column in ("left", "right") else "left")
    for check in checks:
        mark = "[green]OK[/]" if check.ok else "[red]FAIL[/]"
        note = "; ".join([check.note, *check.differing[:10]]).strip("; ")
        table.add_row(mark, check.name, str(check.left), str(check.right), note)
    return table


def summary(criteria: list[Criterion], **parts: Any) -> dict[str, Any]:
    """Return the machine-readable summary; NamedTuples and structs become plain objects."""
    import msgspec

    plain = {
        name: msgspec.to_builtins(part) if not hasattr(part, "_asdict") else part._asdict()
        for name, part in parts.items()
    }
    return {
        "ok": all(criterion.ok for criterion in criteria),
        "criteria": [criterion._asdict() for criterion in criteria],
        **plain,
    }
