"""What all feedback on one answer adds up to.

Owns the reward of an answer: one vote per actor and metric, reducers, the weighted sum. Takes an inference and its
feedback. Emits Reward. Promises: missing is never zero; a failure always has its reward; the order and doubling of
feedback change nothing.
"""

from statistics import fmean
from typing import NamedTuple

from ingest.events import Feedback, Inference, encode
from rewards.missing import without_vote
from rewards.signals import Failure, Outcome, Signal, declared_outcome, failure_of, read
from rewards.spec import Metric, RewardSpec

MAX_HINDSIGHT_CHARS = 4000


class Vote(NamedTuple):
    """One actor's current opinion under one metric."""

    occurred_at: float
    feedback_id: str
    actor: str
    signal: Signal


class Reward(NamedTuple):
    """What an interaction is worth, and why."""

    value: float | None  # [-1, 1]; None: nothing is known, so there is nothing to learn
    confidence: float  # (0, 1]; 0 if value is None
    components: dict[str, float]  # metric or outcome.<failure> -> weighted contribution, before clipping
    actor: str
    hindsight: str | None
    used: list[dict]  # feedback behind the value, in time order
    ignored: dict[str, str]  # feedback id -> why it did not count
    masked: list[str]  # declared metrics without a vote


def score(inference: Inference, feedback: list[Feedback], spec: RewardSpec) -> Reward:
    """Return the reward of one answer given all feedback known so far. Pure; the order of feedback does not matter."""
    current, ignored = _current(inference, feedback, spec)
    votes, declared = _votes(inference, current, spec, ignored)
    failure = failure_of(inference, declared)
    components: dict[str, float] = {}
    trust: list[tuple[float, float]] = []  # (weight, confidence) of each component
    masked = []
    for name, metric in sorted(spec.metrics.items()):
        signal = reduce_votes(votes[name], metric) if votes.get(name) else without_vote(metric, inference.exposure)
        if signal is None:
            masked.append(name)
            continue
        components[name] = metric.weight * signal.value
        trust.append((metric.weight, signal.confidence))
    if failure:
        components[f"outcome.{failure.outcome}"] = getattr(spec.outcomes, failure.outcome)
        trust.append((1.0, failure.confidence))
    value = min(max(sum(components.values()), -1.0), 1.0) if components else None
    confidence = sum(weight * share for weight, share in trust) / sum(weight for weight, _ in trust) if trust else 0.0
    used = _describe(current, votes, failure, declared)
    actor = _heaviest_actor(votes, spec) or inference.user_ref or inference.episode_id
    return Reward(value, confidence, components, actor, _hindsight(current), used, ignored, masked)


def reduce_votes(votes: list[Vote], metric: Metric) -> Signal:
    """Reduce one vote per actor to one signal. A sum is clipped to [-1, 1] here, where it leaves the signal's scale."""
    ordered = sorted(votes)
    signals = [vote.signal for vote in ordered]
    match metric.reducer:
        case "latest":
            return signals[-1]
        case "earliest":
            return signals[0]
        case "min":
            return min(signals)
        case "max":
            return max(signals)
    confidence = fmean(signal.confidence for signal in signals)
    if metric.reducer == "mean":
        return Signal(fmean(signal.value for signal in signals), confidence)
    return Signal(min(max(sum(signal.value for signal in signals), -1.0), 1.0), confidence)


def actor_of(feedback: Feedback, inference: Inference) -> str:
    """Return whose vote this is: the source's pseudonym, else the user of the answer, else the source's type."""
    if feedback.source.id:
        return feedback.source.id
    if feedback.source.type in ("end_user", "implicit") and inference.user_ref:
        return inference.user_ref
    return f"{feedback.source.type}:{inference.episode_id}"


def _current(inference: Inference, feedback: list[Feedback], spec: RewardSpec) -> tuple[list[Feedback], dict[str, str]]:
    """Return the newest revision of each feedback that may count, in time order, and why the others may not."""
    newest: dict[str, Feedback] = {}
    for item in feedback:
        held = newest.get(item.feedback_id)
        if held is None or _age(item) > _age(held):
            newest[item.feedback_id] = item
    ignored: dict[str, str] = {}
    current = []
    for item in sorted(newest.values(), key=lambda item: (item.occurred_at, item.feedback_id)):
        metric = spec.metrics.get(item.metric)
        age_s = item.occurred_at - inference.timing.completed_at
        if item.op == "retract":
            ignored[item.feedback_id] = "retracted"
        elif metric is None:
            ignored[item.feedback_id] = f"metric {item.metric!r} is not declared"
        elif item.solicited:
            ignored[item.feedback_id] = "solicited: kept for the gates, never trained"
        elif metric.window_s is not None and age_s > metric.window_s:
            ignored[item.feedback_id] = f"later than window_s = {metric.window_s:g}"
        else:
            current.append(item)
    return current, ignored


def _age(feedback: Feedback) -> tuple[int, float, bytes]:
    """Order the revisions of one feedback; the content decides between equals, so that arrival order never does."""
    return feedback.revision, feedback.received_at, encode(feedback)


def _votes(
    inference: Inference, current: list[Feedback], spec: RewardSpec, ignored: dict[str, str]
) -> tuple[dict[str, list[Vote]], set[Outcome]]:
    """Return metric -> one vote per actor (the last in time), and the failures that feedback declares."""
    by_actor: dict[tuple[str, str], Vote] = {}
    declared: set[Outcome] = set()
    for item in current:
        metric = spec.metrics[item.metric]
        if metric.kind == "outcome" and (named := declared_outcome(item)):
            declared.add(named)
            continue
        try:
            signal = read(metric, item, inference.response_text)
        except ValueError as error:
            ignored[item.feedback_id] = str(error)
            continue
        if signal is None:
            ignored[item.feedback_id] = "says nothing"
            continue
        actor = actor_of(item, inference)
        earlier = by_actor.get((item.metric, actor))
        if earlier:
            ignored[earlier.feedback_id] = "the same actor voted again"
        by_actor[item.metric, actor] = Vote(item.occurred_at, item.feedback_id, actor, signal)
    votes: dict[str, list[Vote]] = {}
    for (name, _), vote in by_actor.items():
        votes.setdefault(name, []).append(vote)
    return votes, declared


def _describe(
    current: list[Feedback], votes: dict[str, list[Vote]], failure: Failure | None, declared: set[Outcome]
) -> list[dict]:
    """Return the feedback behind the reward for `headrace explain`."""
    counted = {vote.feedback_id: vote for cast in votes.values() for vote in cast}
    used: list[dict] = []
    for item in current:
        said = item.value if item.value is not None else item.label or item.comment or item.correction
        row = {"feedback_id": item.feedback_id, "metric": item.metric, "said": said, "occurred_at": item.occurred_at}
        if vote := counted.get(item.feedback_id):
            used.append(row | vote.signal._asdict() | {"actor": vote.actor})
        elif failure and failure.outcome in declared and declared_outcome(item) == failure.outcome:
            used.append(row | {"value": None, "confidence": 1.0, "actor": ""})
    return used


def _heaviest_actor(votes: dict[str, list[Vote]], spec: RewardSpec) -> str:
    """Return the actor whose votes weigh most, so that the cap on one actor's influence finds it; "" without votes."""
    weights: dict[str, float] = {}
    for name, cast in sorted(votes.items()):
        for vote in sorted(cast):
            influence = spec.metrics[name].weight * abs(vote.signal.value)
            weights[vote.actor] = weights.get(vote.actor, 0.0) + influence
    return max(sorted(weights), key=lambda actor: weights[actor]) if weights else ""


def _hindsight(current: list[Feedback]) -> str | None:
    """Return the last correction, cut: it is a user's text, so it may be an attack."""
    texts = [item.correction for item in current if item.correction and item.correction.strip()]
    return texts[-1][:MAX_HINDSIGHT_CHARS] if texts else None
