"""What one piece of feedback says: a value in [-1, 1] with a confidence in (0, 1].

Owns the signals, one pure function per metric kind, and how an answer failed. Takes feedback and the answer.
Emits Signal or None (says nothing). ValueError: the feedback cannot be read as the declared kind.
"""

import math
import re
from typing import Literal, NamedTuple

from ingest.events import Feedback, Inference
from rewards.spec import Metric

Outcome = Literal["error", "invalid_tool_call", "empty", "truncated", "refusal", "clarification"]
DECLARABLE: tuple[Outcome, ...] = ("invalid_tool_call", "refusal", "clarification")
PRECEDENCE: tuple[Outcome, ...] = ("error", "invalid_tool_call", "empty", "refusal", "clarification", "truncated")
MAX_COMPARED_WORDS = 2000
HEURISTIC_CONFIDENCE = 0.6
DEFAULT_OUTCOME_VALUES = {"success": 1.0, "partial": 0.0, "failure": -1.0}


def _lexicon(words: str) -> frozenset[str]:
    return frozenset(words.split())


_POSITIVE = _lexicon(
    "accurate amazing awesome brilliant clear correct excellent fantastic good great helpful love nice perfect "
    "right solved spot-on super thank thanks useful wonderful works"
)
_NEGATIVE = _lexicon(
    "awful bad broken confusing failed garbage hallucinated horrible inaccurate incorrect irrelevant junk "
    "misleading nonsense outdated poor rubbish terrible unhelpful unclear useless worse worst wrong"
)
_NEGATION = _lexicon("not no never isn't wasn't don't doesn't didn't won't can't cannot hardly nothing")
_REFUSAL = re.compile(
    r"^\W*(?:(?:i'm|i am) (?:very |really |so )?sorry,? (?:but )?(?:as an? |i (?:can't|cannot|can not|am unable|won't))"
    r"|(?:sorry|unfortunately|i apologi[sz]e),? (?:but )?i (?:can't|cannot|can not|am unable|am not able|won't)"
    r"|i (?:can't|cannot|can not|won't|will not|am unable to|am not able to|must decline to)\s+"
    r"(?:to )?(?:help|assist|answer|provide|comply|do that|discuss|fulfil+|continue|share|support)"
    r"|i'm (?:unable|not able) to |as an ai\b[^.]{0,60}\b(?:can't|cannot|can not|unable|not able))"
)
_CLARIFICATION = re.compile(
    r"\b(?:(?:could|can|would) you (?:please |kindly )?(?:clarify|specify|elaborate|rephrase|explain what you mean"
    r"|(?:provide|give|share|tell)\b[^?]{0,30}\b(?:more|which|details?|context))"
    r"|what (?:exactly )?do you mean|which (?:one|of (?:these|those|them)) (?:do|are|did) you)\b[^?]*\?\W*$"
)


class Signal(NamedTuple):
    """What a vote says about the answer."""

    value: float  # [-1, 1]; a noise-corrected one may lie outside
    confidence: float  # (0, 1]


class Failure(NamedTuple):
    """How an answer failed."""

    outcome: Outcome
    confidence: float


def read(metric: Metric, feedback: Feedback, answer: str) -> Signal | None:
    """Return what this feedback says under its declared metric: directed, denoised, with the metric's confidence."""
    match metric.kind:
        case "boolean":
            signal = boolean(feedback.value, metric.values)
        case "numeric":
            signal = numeric(feedback.value, metric.low or 0.0, metric.high or 0.0)
        case "categorical":
            signal = categorical(_label(feedback), metric.values)
        case "outcome":
            signal = outcome(feedback.value if feedback.value is not None else feedback.label, metric.values)
        case "demonstration":
            signal = correction(answer, _text(feedback, feedback.correction, "correction"))
        case "comment":
            signal = comment(_text(feedback, feedback.comment, "comment"))
    if signal is None:
        return None
    value = signal.value if metric.direction == "higher_is_better" else -signal.value
    value = denoise(value, metric.flip_to_positive, metric.flip_to_negative)
    return Signal(value, signal.confidence * metric.confidence)


def boolean(value: bool | float | str | None, values: dict[str, float]) -> Signal:
    """Thumbs, completion: true is +1 and false -1 unless values says otherwise; 1, 0, "true", "false" will do."""
    word = value.strip().lower() if isinstance(value, str) else value
    if word in (True, "true"):
        return Signal(values.get("true", 1.0), 1.0)
    if word in (False, "false"):
        return Signal(values.get("false", -1.0), 1.0)
    raise ValueError(f"value {value!r} is not boolean; send true or false")


def numeric(value: bool | float | str | None, low: float, high: float) -> Signal:
    """Map [low, high] linearly to [-1, 1]; beyond is clipped."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"value {value!r} is not a number; send one between {low:g} and {high:g}")
    return Signal(min(max(2.0 * (value - low) / (high - low) - 1.0, -1.0), 1.0), 1.0)


def categorical(label: str, values: dict[str, float]) -> Signal:
    """Look the label up in the declared values."""
    if label not in values:
        raise ValueError(f"label {label!r} is not declared; send one of {', '.join(sorted(values))}")
    return Signal(values[label], 1.0)


def outcome(value: bool | float | str | None, values: dict[str, float]) -> Signal | None:
    """A result of the world: success, partial, failure, or the metric's own values; also true, false and [0, 1].

    The name of a declarable failure is None here: the terminal outcome carries it.
    """
    if isinstance(value, bool):
        return Signal(1.0 if value else -1.0, 1.0)
    if isinstance(value, (int, float)):
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"value {value!r} is not an outcome; send a share of success in [0, 1]")
        return Signal(2.0 * value - 1.0, 1.0)
    if value in DECLARABLE:
        return None
    known = values or DEFAULT_OUTCOME_VALUES
    return categorical(value if isinstance(value, str) else str(value), known)


def correction(answer: str, corrected: str) -> Signal:
    """How much of the answer the user kept: 2 s - 1 with s the share of words in the longest common subsequence."""
    answer_words, corrected_words = answer.split()[:MAX_COMPARED_WORDS], corrected.split()[:MAX_COMPARED_WORDS]
    num_words = len(answer_words) + len(corrected_words)
    kept = 2.0 * common_words(answer_words, corrected_words) / num_words if num_words else 1.0
    return Signal(2.0 * kept - 1.0, 1.0)


def common_words(first: list[str], second: list[str]) -> int:
    """Return the length of the longest common subsequence, bit-parallel (Hyyro 2004): one integer holds a row."""
    places: dict[str, int] = {}
    for position, word in enumerate(second):
        places[word] = places.get(word, 0) | 1 << position
    full = (1 << len(second)) - 1
    row = full
    for word in first:
        matched = row & places.get(word, 0)
        row = ((row + matched) | (row - matched)) & full
    return len(second) - row.bit_count()


def comment(text: str) -> Signal | None:
    """Words of praise against words of blame; a negation up to three words before flips one. Low confidence."""
    words = re.findall(r"[a-z][a-z'-]*", text.lower().replace("\u2019", "'"))
    num_positive = num_negative = 0
    for position, word in enumerate(words):
        if word not in _POSITIVE and word not in _NEGATIVE:
            continue
        is_negated = any(before in _NEGATION for before in words[max(0, position - 3) : position])
        if (word in _POSITIVE) != is_negated:
            num_positive += 1
        else:
            num_negative += 1
    num_hits = num_positive + num_negative
    if not num_hits:
        return None
    return Signal((num_positive - num_negative) / num_hits, min(0.1 + 0.1 * num_hits, 0.4))


def denoise(value: float, flip_to_positive: float, flip_to_negative: float) -> float:
    """Return the unbiased value of a label with known flip rates; beyond [-1, 1] when they are not 0 (METHODS 2)."""
    if not flip_to_positive and not flip_to_negative:
        return value
    return (value - (flip_to_positive - flip_to_negative)) / (1.0 - flip_to_positive - flip_to_negative)


def failure_of(inference: Inference, declared: set[Outcome]) -> Failure | None:
    """Return how this answer failed, if it did; what was declared or observed is certain, what was guessed is not."""
    observed = _observed(inference) | declared
    guessed: set[Outcome] = set()
    text = inference.response_text.lower().replace("\u2019", "'").strip()
    if _REFUSAL.search(text[:400]):
        guessed.add("refusal")
    elif len(text) <= 400 and _CLARIFICATION.search(text):
        guessed.add("clarification")
    for candidate in PRECEDENCE:
        if candidate in observed:
            return Failure(candidate, 1.0)
        if candidate in guessed:
            return Failure(candidate, HEURISTIC_CONFIDENCE)
    return None


def declared_outcome(feedback: Feedback) -> Outcome | None:
    """Return the failure that feedback of kind outcome names, if it names one."""
    for candidate in DECLARABLE:
        if candidate in (feedback.value, feedback.label):
            return candidate
    return None


def _observed(inference: Inference) -> set[Outcome]:
    observed: set[Outcome] = set()
    if inference.error_type is not None or inference.finish_reason in ("error", "abort"):
        observed.add("error")
    tools = inference.request.get("tools")
    offered = {_tool_name(tool) for tool in tools} if isinstance(tools, list) else set()
    if any(not call.parsed or (offered and call.name not in offered) for call in inference.tool_calls):
        observed.add("invalid_tool_call")
    if not inference.response_text.strip() and not inference.tool_calls:
        observed.add("empty")
    if inference.finish_reason == "length":
        observed.add("truncated")
    if inference.finish_reason == "content_filter":
        observed.add("refusal")
    return observed


def _tool_name(tool: object) -> str:
    function = tool.get("function") if isinstance(tool, dict) else None
    return str(function.get("name")) if isinstance(function, dict) else ""


def _label(feedback: Feedback) -> str:
    label = feedback.label if feedback.label is not None else feedback.value
    if not isinstance(label, str):
        raise ValueError(f"value {label!r} is not a label; send a string")
    return label


def _text(feedback: Feedback, text: str | None, field: str) -> str:
    """Return the field's text, or a string sent as value."""
    text = text if text is not None else feedback.value if isinstance(feedback.value, str) else None
    if text is None or not text.strip():
        raise ValueError(f"feedback has no {field}; send it as text")
    return text
