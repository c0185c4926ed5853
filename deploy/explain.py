"""`headrace explain ID`: the story of one answer, from request to the versions that learned from it, or of a version.

Takes the archive, the joiner's dispositions, the rewards' ledger, the learner's steps and the control topic, through
their contracts; emits lines. Promises: looks only; says which part of the story cannot be told now, and why.
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from deploy.config import Config, load_all
from ingest import ids, log
from ingest.stream import read_latest
from ingest.topics import topics
from learner.candidate import CANDIDATE_KEY, CandidateEvent, StepRecord, version_number
from learner.lineage import candidates_of_sample, read_steps, surviving_steps
from rewards import ledger

_MAX_TEXT = 400
_MAX_LISTED = 12


class Control(NamedTuple):
    """The last word about each candidate, or why it cannot be read."""

    candidates: dict[str, CandidateEvent]
    problem: str = ""


def explain(path: Path, given: str) -> int:
    """Print the story; 1 if nothing is known of the id. ValueError for what is no id at all."""
    config = load_all(path)
    if given.startswith("v") and given[1:2].isdigit():
        from deploy.explain_version import tell

        version_number(given)
        lines = tell(config, given, read_control(config))
    else:
        lines = tell_response(config, given)
    if not lines:
        print(f"headrace explain: nothing is known of {given} in {config.state_dir}", file=sys.stderr)
        if given[:1] != "v":
            seconds = f"{config.ingest.archive_interval_s:g}"
            print(f"  a new answer is archived within about {seconds} s; is this its deployment?", file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


def read_control(config: Config) -> Control:
    """Read the candidates from the control topic; a broker that is away is a problem to tell, not an error."""
    try:
        records = read_latest(config.kafka, topics(config.kafka).control)
    except Exception as error:  # policy: the rest of the story is on disk and can be told without the broker
        return Control({}, f"the control topic cannot be read ({str(error).splitlines()[0]})")
    candidates = {}
    for key, record in records.items():
        if key.startswith(CANDIDATE_KEY):
            candidates[key.removeprefix(CANDIDATE_KEY)] = msgspec.json.decode(record.value, type=CandidateEvent)
    return Control(candidates)


def tell_response(config: Config, given: str) -> list[str]:
    """Tell of each choice of a response, or of one inference."""
    parsed = ids.parse(given)
    column = "inference_id" if parsed.kind == "inf" else "response_id"
    rows = log.query(config.state_dir, f"SELECT * FROM inference WHERE {column} = ? ORDER BY inference_id", [given])
    if not rows:
        return []
    control = read_control(config)
    lines: list[str] = []
    for row in rows:
        lines += [*([""] if lines else []), *tell_answer(config.state_dir, row, control)]
    return lines


def tell_answer(state_dir: Path, inference: dict[str, Any], control: Control) -> list[str]:
    """Tell of one archived answer."""
    inference_id = inference["inference_id"]
    verdicts = ledger.why(state_dir, inference_id)
    sample_ids = [sample.sample_id for sample in ledger.samples_of(state_dir, inference_id)]
    lines = answer_lines(inference)
    lines += feedback_lines(state_dir, inference, verdicts)
    lines += [line for verdict in verdicts for line in verdict_lines(verdict)] or ["reward      not judged yet"]
    lines += step_lines(sample_ids, read_steps(state_dir), surviving_steps(state_dir), control)
    carriers = sorted({version for name in sample_ids for version in candidates_of_sample(state_dir, name)})
    if carriers:
        lines.append(f"carried by  {listed([version_words(version, control) for version in carriers])}")
    if control.problem:
        lines.append(f"note        {control.problem}; what became of the versions is not shown")
    return lines


def answer_lines(row: dict[str, Any]) -> list[str]:
    """Return what was asked and answered, by which version, in which arm."""
    policy, assignment, timing = (_part(row, name) for name in ("policy", "assignment", "timing"))
    tokens = _part(row, "tokens")
    num_tokens = len(tokens.get("completion_ids") or [])
    end = f"failed: {row['error_type']}" if row.get("error_type") else f"finished: {row.get('finish_reason')}"
    took = (timing.get("completed_at") or 0.0) - (timing.get("received_at") or 0.0)
    arm = f"arm {assignment.get('arm')} with propensity {assignment.get('propensity', 1.0):g}"
    if assignment.get("rollout_id"):
        arm += f" in rollout {assignment['rollout_id']}"
    why_not = f", untrainable: {row['untrainable']}" if row.get("untrainable") else ""
    user = row["user_ref"] or "-"
    return [
        f"inference   {row['inference_id']}  (response {row['response_id']}, episode {row['episode_id']})",
        f"  from      tenant {row['tenant']}, app {row['app']}, function {row['function']}, user {user}",
        f"  version   {policy.get('version')}  {arm}",
        f"  prompt    {_short(_prompt(row.get('request')))}",
        f"  answer    {_short(row.get('response_text') or '')}",
        f"  {end}, {num_tokens} tokens with log-probs{why_not}, {took:.2f} s",
    ]


def feedback_lines(state_dir: Path, inference: dict[str, Any], verdicts: list[dict]) -> list[str]:
    """Return the feedback that names this answer, its response or its episode, each with its disposition."""
    names = [inference[name] for name in ("inference_id", "response_id", "episode_id")]
    rows = log.query(
        state_dir,
        "SELECT * FROM feedback WHERE inference_id = ? OR response_id = ? OR episode_id = ? "
        "ORDER BY received_at, feedback_id, revision",
        names,
    )
    archived = {row["feedback_id"] for row in rows}
    used = [item for verdict in verdicts for item in verdict["feedback"] if item.get("feedback_id") not in archived]
    dispositions = log.feedback_dispositions(state_dir) if rows or used else {}
    lines = []
    for item in [*rows, *used]:
        fate = dispositions.get(item["feedback_id"], "pending")
        lines.append(f"feedback    {item['feedback_id']}  {item.get('metric')} {_said(item)}  -> {fate}")
    return lines or ["feedback    none"]


def _said(item: dict[str, Any]) -> str:
    """Return what one feedback says."""
    if item.get("op") == "retract":
        return "is retracted"
    told = [item.get(name) for name in ("value", "correction", "comment")]
    said = next((str(value) for value in told if value is not None and value != "null"), "(nothing)")
    return f"= {_short(said)}"


def verdict_lines(verdict: dict) -> list[str]:
    """Return the reward of one interaction revision, its components and what became of it."""
    head = f"reward      revision {verdict['revision']} ({verdict['state']}): {verdict['verdict']}"
    if verdict["reward"] is None:
        return [f"{head}, {verdict['reason']}"]
    parts = ", ".join(f"{name} {value:+.3f}" for name, value in verdict["components"].items())
    baseline = "" if verdict["baseline"] is None else f", baseline {verdict['baseline']:+.3f}"
    lines = [
        f"{head}  R = {verdict['reward']:+.3f} (confidence {verdict['confidence']:.2f}{baseline})",
        f"  parts     {parts or 'none'}  (spec {verdict['spec_version']})",
    ]
    if verdict["ignored"]:
        lines.append("  ignored   " + ", ".join(f"{name}: {reason}" for name, reason in verdict["ignored"].items()))
    if verdict["sample_id"]:
        lines.append(f"  sample    {verdict['sample_id']}")
    elif verdict["reason"]:
        lines.append(f"  no sample {verdict['reason']}")
    return lines


def step_lines(
    sample_ids: list[str], steps: list[StepRecord], surviving: list[StepRecord], control: Control
) -> list[str]:
    """Return the steps that used these samples, and the versions that carry them."""
    kept = {(step.lineage, step.step) for step in surviving}
    lines = []
    for step in steps:
        fate = "" if (step.lineage, step.step) in kept else "; undone by a return to an earlier version"
        for sample_id in sample_ids:
            if sample_id in step.sample_ids:
                lines.append(
                    f"step        {step.step} used {sample_id}, one of {len(step.sample_ids)}; "
                    f"first in {version_words(step.next_version, control)}{fate}"
                )
            elif sample_id in step.dropped:
                lines.append(f"step        {step.step} dropped {sample_id}: {step.dropped[sample_id]}")
    if sample_ids and not lines:
        lines.append("step        none has used it yet")
    return lines


def version_words(version: str, control: Control) -> str:
    """Return a version with the last word about it."""
    event = control.candidates.get(version)
    return f"{version} ({event.state})" if event else version


def listed(names: list[str]) -> str:
    """Return names in one line, the tail as a count."""
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more


def _part(row: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a nested struct of an archived row; columns hold structs or JSON text."""
    value = row.get(name)
    if isinstance(value, str | bytes):
        value = msgspec.json.decode(value)
    return value or {}


def _prompt(request: Any) -> str:
    if isinstance(request, str | bytes):
        request = msgspec.json.decode(request)
    if not isinstance(request, dict):
        return ""
    messages = request.get("messages")
    if messages:
        return " | ".join(f"{message.get('role')}: {message.get('content')}" for message in messages)
    return str(request.get("prompt", ""))


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= _MAX_TEXT else f"{flat[:_MAX_TEXT]}..."
