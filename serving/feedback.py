"""POST /v1/feedback: one signal or a batch of them, checked item by item, durable before it is accepted.

Takes: JSON items and the caller's tenant. Emits: Feedback events, key = route of the target. Promises: 202 only after
the broker's acknowledgement or an fsync into the spool; a repeated item has the same event id, so it counts once.
"""

import hashlib
import math
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from ingest import ids
from ingest.events import Feedback, FeedbackKind, Preference, Source, SourceType

TEXT_CHARS = 16384
ID_CHARS = 128
MAX_FUTURE_S = 300.0  # ingest quarantines what is dated further ahead
TARGETS = ("inference_id", "response_id", "episode_id")


class FeedbackItem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One item as a client sends it."""

    metric: str
    feedback_id: str | None = None
    inference_id: str | None = None
    response_id: str | None = None
    episode_id: str | None = None
    kind: FeedbackKind | None = None
    value: bool | float | str | None = None
    label: str | None = None
    comment: str | None = None
    correction: str | None = None
    preference: Preference | None = None
    occurred_at: float | None = None
    op: Literal["upsert", "retract"] = "upsert"
    revision: int = 0
    is_final: bool = True
    solicited: bool = False
    solicited_probability: float = 0.0
    source_type: SourceType = "end_user"
    user: str | None = None  # raw id; only its pseudonym is kept
    tags: dict[str, str] = {}


class BadFeedback(ValueError):
    """An item that is refused; says which parameter, what is wrong and how to fix it."""

    def __init__(self, message: str, param: str | None, how_to_fix: str):
        super().__init__(message)
        self.message, self.param, self.how_to_fix = message, param, how_to_fix

    def body(self) -> dict[str, Any]:
        return {
            "message": self.message,
            "type": "invalid_request_error",
            "param": self.param,
            "code": None,
            "how_to_fix": self.how_to_fix,
        }


def parse_item(raw: Any) -> FeedbackItem:
    """Return a well-formed item; BadFeedback names the field that is missing, unknown or mistyped."""
    try:
        return msgspec.convert(raw, FeedbackItem)
    except msgspec.ValidationError as error:
        param = str(error).partition("`$.")[2].rstrip("`") or None
        known = ", ".join(FeedbackItem.__struct_fields__)
        raise BadFeedback(
            str(error), param, f"send an object with metric, one target and a value; fields: {known}"
        ) from error


def target_of(item: FeedbackItem) -> tuple[str, str, str]:
    """Return (field, id, route) of the item's one target."""
    named = [(name, getattr(item, name)) for name in TARGETS if getattr(item, name)]
    if len(named) != 1:
        raise BadFeedback(f"feedback names {len(named)} targets", None, f"name exactly one of {', '.join(TARGETS)}")
    field, target = named[0]
    if field == "episode_id":
        if len(target) > 256:
            raise BadFeedback("episode_id is too long", field, "use the x-headrace-episode-id header of the answer")
        return field, target, ids.route_of(target)
    try:
        parsed = ids.parse(target)
    except ValueError as error:
        raise BadFeedback(str(error), field, "copy it from the answer: x-headrace-inference-id, or id") from error
    if parsed.kind != ("inf" if field == "inference_id" else "resp"):
        raise BadFeedback(
            f"{field} holds an id of another kind: {target}", field, "inf_ is an inference, resp_ a response"
        )
    return field, target, parsed.route


def kind_of(item: FeedbackItem) -> FeedbackKind:
    """Return the kind, from the value when it is not named; BadFeedback unless they fit each other."""
    kind = item.kind or _implied_kind(item)
    if item.op == "retract":
        return kind or "outcome"  # what was said no longer matters
    if kind is None or not _fits(kind, item):
        raise BadFeedback(
            f"{kind or 'feedback without a kind'} does not fit value {item.value!r}",
            "value",
            "boolean: true or false; numeric: a finite number; categorical: a text; comment: comment; demonstration: "
            "correction; preference: preference; outcome: a boolean, number or text",
        )
    return kind


def _implied_kind(item: FeedbackItem) -> FeedbackKind | None:
    if isinstance(item.value, bool):
        return "boolean"
    if isinstance(item.value, str):
        return "categorical"
    if item.value is not None:
        return "numeric"
    if item.preference is not None:
        return "preference"
    if item.correction is not None:
        return "demonstration"
    return "comment" if item.comment is not None else None


def _fits(kind: FeedbackKind, item: FeedbackItem) -> bool:
    value = item.value
    is_number = isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value)
    return {
        "boolean": isinstance(value, bool),
        "numeric": is_number,
        "categorical": isinstance(value, str),
        "comment": bool(item.comment),
        "demonstration": bool(item.correction),
        "preference": item.preference is not None,
        "outcome": isinstance(value, bool | str) or is_number,
    }[kind]


def derived_id(tenant: str, item: FeedbackItem, target: str, source_id: str, idempotency_key: str | None) -> str:
    """Return an id that a retry of the same item gets again: of its Idempotency-Key, else of what it says."""
    if idempotency_key:
        said: list[Any] = [tenant, "key", idempotency_key]
    else:
        said = [tenant, target, item.metric, item.kind, item.value, item.label, item.comment, item.correction]
        said += [item.preference, item.occurred_at, item.source_type, source_id]
    return "fb_" + hashlib.blake2b(msgspec.json.encode(said), digest_size=16).hexdigest()


def check_limits(item: FeedbackItem, metrics: frozenset[str], now_s: float) -> None:
    """Refuse what no reader downstream could use."""
    if not item.metric or len(item.metric) > ID_CHARS:
        raise BadFeedback("metric must have 1 to 128 characters", "metric", "use a metric of the reward spec")
    if metrics and item.metric not in metrics:
        raise BadFeedback(f"unknown metric {item.metric!r}", "metric", f"use one of {', '.join(sorted(metrics))}")
    if item.feedback_id is not None and not (0 < len(item.feedback_id) <= ID_CHARS and item.feedback_id.isprintable()):
        raise BadFeedback(
            "feedback_id must have 1 to 128 printable characters", "feedback_id", "shorten it, or leave it out"
        )
    if item.op == "retract" and item.feedback_id is None:
        raise BadFeedback(
            "a retraction must name its feedback", "feedback_id", "send the feedback_id that was accepted"
        )
    if item.revision < 0:
        raise BadFeedback("revision is negative", "revision", "start at 0, and add one for each change")
    if not 0.0 <= item.solicited_probability <= 1.0:
        raise BadFeedback("solicited_probability is outside 0 to 1", "solicited_probability", "send a probability")
    if item.occurred_at is not None and not 0 < item.occurred_at <= now_s + MAX_FUTURE_S:
        raise BadFeedback(
            f"occurred_at {item.occurred_at} is no past time",
            "occurred_at",
            "send Unix seconds in UTC, or leave it out",
        )
    for name in ("value", "label", "comment", "correction"):
        text = getattr(item, name)
        if isinstance(text, str) and len(text) > TEXT_CHARS:
            raise BadFeedback(f"{name} is longer than {TEXT_CHARS} characters", name, "shorten it")


def to_event(
    raw: Any,
    tenant: str,
    source_id_of: Callable[[str | None], str],
    metrics: frozenset[str],
    now_s: float,
    idempotency_key: str | None = None,
) -> tuple[Feedback, str]:
    """Return the event of one item and its Kafka key; source_id_of gives the pseudonym of the item's user, if any."""
    item = parse_item(raw)
    source_id = source_id_of(item.user)
    check_limits(item, metrics, now_s)
    field, target, route = target_of(item)
    kind = kind_of(item)
    event = Feedback(
        feedback_id=item.feedback_id or derived_id(tenant, item, target, source_id, idempotency_key),
        tenant=tenant,
        metric=item.metric,
        kind=kind,
        occurred_at=now_s if item.occurred_at is None else item.occurred_at,
        received_at=now_s,
        inference_id=target if field == "inference_id" else None,
        response_id=target if field == "response_id" else None,
        episode_id=target if field == "episode_id" else None,
        value=item.value,
        label=item.label,
        comment=item.comment,
        correction=item.correction,
        preference=item.preference,
        source=Source(type=item.source_type, id=source_id),
        solicited=item.solicited,
        solicited_probability=item.solicited_probability,
        is_final=item.is_final,
        op=item.op,
        revision=item.revision,
        tags=item.tags,
    )
    return event, route
