"""Offline gates 1, 2 and 6 of METHODS section 5: pure verdicts on what was gathered, before any user sees a thing.

1 files, shapes, finite weights, another digest than the parent. 2 trust region: mean KL(new || champion) per token.
6 degeneration: empty, looping, refusing, cut off, all-alike answers, distinct-2, fluency and topic under the champion.
The topic check asks how much likelier an answer is after its own prompt than after another one, under the champion:
fluent nonsense that fits every question has no such lift, whatever a proxy reward says about it.
"""

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from serving.gate_config import GateConfig

Outcome = Literal["PASS", "FAIL", "INCONCLUSIVE"]
_LIFT_NOISE = 0.1  # nats; a model whose answers never had a topic has none to lose
_REFUSAL = re.compile(
    r"\b(i'?m sorry|i am sorry|i can(?:not|'t)|i'?m (?:not able|unable)|as an ai|i won'?t|unable to (?:help|assist))\b",
    re.I,
)


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One check: what was measured, against which limit."""

    name: str
    outcome: Outcome
    value: float
    limit: float
    detail: str = ""


class Answers(msgspec.Struct, frozen=True, kw_only=True):
    """Answers of one version to the probe prompts, with the champion's log-probs of their tokens.

    own: mean log-prob per token after the answer's own prompt; other: after another probe's prompt (nats).
    """

    texts: list[str]
    finish_reasons: list[str]
    own: list[float]
    other: list[float]


def check_candidate_files(
    problems: Sequence[str],
    shapes: dict[str, tuple[int, ...]],
    champion_shapes: dict[str, tuple[int, ...]],
    non_finite: Sequence[str],
    digest: str,
    parent_digest: str,
) -> list[Check]:
    """Gate 1. Missing tensors, other shapes, NaN or infinity, or weights equal to the parent's fail."""
    other = sorted(n for n in shapes.keys() | champion_shapes.keys() if shapes.get(n) != champion_shapes.get(n))
    return [
        _zero("manifest", problems),
        _zero("shapes", other),
        _zero("finite_weights", non_finite),
        _zero("new_weights", ["the weights equal the parent's"] if digest == parent_digest else []),
    ]


def check_trust_region(new_logprobs: np.ndarray, champion_logprobs: np.ndarray, gate: GateConfig) -> Check:
    """Gate 2. Mean KL(new || champion) per token on tokens sampled from new: E[log new - log champion]."""
    log_ratio = np.clip(champion_logprobs - new_logprobs, -20, 5)
    if not len(log_ratio):
        return Check(name="kl", outcome="FAIL", value=0.0, limit=gate.kl_limit, detail="the candidate answers nothing")
    k1 = float(np.mean(new_logprobs - champion_logprobs))
    k3 = float(np.mean(np.exp(log_ratio) - 1.0 - log_ratio))
    return _at_most("kl", k1, gate.kl_limit, f"k3={k3:.4f} tokens={len(log_ratio)}")


def check_answers(new: Answers, champion: Answers, gate: GateConfig) -> list[Check]:
    """Gate 6. Shares may rise by a tolerance over the champion's own answers to the same prompts."""
    checks = []
    for name, share in (
        ("empty", _share(is_empty)),
        ("loops", _share(is_looping)),
        ("refusals", _share(is_refusal)),
        ("alike", most_common_share),
    ):
        rise = share(new.texts) - share(champion.texts)
        checks.append(_at_most(name, rise, gate.share_tolerance, f"new={share(new.texts):.2f}"))
    cut = truncated_share(new.finish_reasons) - truncated_share(champion.finish_reasons)
    checks.append(_at_most("truncation", cut, gate.truncation_tolerance))
    least = gate.distinct_ratio * distinct_2(champion.texts)
    checks.append(_at_least("distinct_2", distinct_2(new.texts), least))
    checks.append(_at_least("fluency", _mean(new.own), _mean(champion.own) - gate.fluency_drop))
    least_lift = gate.topic_ratio * topic_lift(champion) - _LIFT_NOISE
    checks.append(_at_least("topic", topic_lift(new), least_lift, f"champion={topic_lift(champion):.3f}"))
    return checks


def is_passed(checks: Sequence[Check]) -> bool:
    return all(check.outcome == "PASS" for check in checks)


def topic_lift(answers: Answers) -> float:
    """Return the mean gain in nats per token that an answer has after its own prompt; 5 % trimmed at each end."""
    lift = np.sort(np.asarray(answers.own) - np.asarray(answers.other))
    cut = len(lift) // 20
    return float(lift[cut : len(lift) - cut].mean()) if len(lift) else 0.0


def is_empty(text: str) -> bool:
    return not any(character.isalnum() for character in text)


def is_refusal(text: str) -> bool:
    return bool(_REFUSAL.search(text[:120].replace("\u2019", "'")))


def is_looping(text: str) -> bool:
    """Tell whether one run of up to 8 words is repeated back to back at least four times (longer runs: three)."""
    words = text.lower().split()
    for size in range(1, 9):
        needed = 4 if size <= 2 else 3
        repeats = 1
        for start in range(size, len(words) - size + 1, 1):
            same = words[start : start + size] == words[start - size : start]
            if not same:
                continue
            repeats = 2
            place = start + size
            while words[place : place + size] == words[start : start + size]:
                repeats += 1
                place += size
            if repeats >= needed:
                return True
    return False


def most_common_share(texts: Sequence[str]) -> float:
    """Return the share of the most frequent answer; probes have distinct prompts, so answers should differ."""
    counts = Counter(" ".join(text.lower().split()) for text in texts)
    return max(counts.values()) / len(texts) if texts else 0.0


def truncated_share(finish_reasons: Sequence[str]) -> float:
    return sum(reason == "length" for reason in finish_reasons) / len(finish_reasons) if finish_reasons else 0.0


def distinct_2(texts: Sequence[str]) -> float:
    """Return distinct word pairs over all word pairs; 1 when there are none."""
    pairs = []
    for text in texts:
        words = text.lower().split()
        pairs += list(itertools.pairwise(words))
    return len(set(pairs)) / len(pairs) if pairs else 1.0


def _share(predicate):
    return lambda texts: sum(map(predicate, texts)) / len(texts) if texts else 0.0


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def _zero(name: str, problems: Sequence[str]) -> Check:
    outcome: Outcome = "FAIL" if problems else "PASS"
    return Check(name=name, outcome=outcome, value=float(len(problems)), limit=0.0, detail="; ".join(problems[:3]))


def _at_most(name: str, value: float, limit: float, detail: str = "") -> Check:
    passed = bool(np.isfinite(value)) and value <= limit
    return Check(name=name, outcome="PASS" if passed else "FAIL", value=value, limit=limit, detail=detail)


def _at_least(name: str, value: float, limit: float, detail: str = "") -> Check:
    passed = bool(np.isfinite(value)) and value >= limit
    return Check(name=name, outcome="PASS" if passed else "FAIL", value=value, limit=limit, detail=detail)
