"""Measures true satisfaction on held-out questions through the gateway, base against champion, with a quality guard.

Owns the held-out questioning (asked without consent to training), the paired interval, the guard. The interval is a
paired percentile bootstrap over questions, seeded.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from deploy.demo_client import Answer, Client
from deploy.demo_questions import Question
from deploy.demo_rule import is_on_topic, is_repetitive, words_of

NUM_RESAMPLES = 4000
FLUENT_QUANTILE = 0.05  # an answer is fluent if its mean log-prob is above this quantile of the base's own answers
MAX_ASKS = 12


class Gain(NamedTuple):
    """Paired comparison over questions, shares in [0, 1]."""

    num_questions: int
    base: float
    champion: float
    difference: float
    low: float  # 95 % interval of the difference
    high: float


class Guard(NamedTuple):
    """Share of sound answers (on topic, no loop, fluent under the base model) and its parts."""

    base: float
    champion: float
    on_topic: tuple[float, float]  # base, champion
    no_loop: tuple[float, float]
    fluent: tuple[float, float] | None  # None: not scored
    mean_logprob: tuple[float, float] | None  # nats per token under the base model


async def ask_held_out(
    client: Client,
    questions: list[Question],
    purpose: str,
    champion_now: Callable[[], str],
    concurrency: int = 16,
) -> dict[str, Answer]:
    """Ask every question until the present champion has answered it; question text -> answer.

    A user may fall into the canary's arm and the champion may change meanwhile: such answers are asked again by another
    user. Failed requests stay in the client's journal.
    """
    kept: dict[str, Answer] = {}
    gate = asyncio.Semaphore(concurrency)

    async def one(question: Question, turn: int) -> None:
        async with gate:
            answer = await client.ask(question, f"{purpose}-{turn}-{question.text}", purpose, consent=False)
        if not answer.error and answer.version == champion_now():
            kept[question.text] = answer

    for turn in range(MAX_ASKS):
        current = champion_now()
        kept = {text: answer for text, answer in kept.items() if answer.version == current}
        missing = [question for question in questions if question.text not in kept]
        if not missing:
            break
        await asyncio.gather(*(one(question, turn) for question in missing))
    return kept


def paired_gain(base: dict[str, Answer], champion: dict[str, Answer], seed: int = 0) -> Gain:
    """Compare satisfaction on the questions that both answered; ValueError if there is none."""
    texts = sorted(base.keys() & champion.keys())
    if not texts:
        raise ValueError("no held-out question was answered by both the base and the champion")
    pairs = np.array([(base[text].satisfied, champion[text].satisfied) for text in texts], dtype=float)
    differences = pairs[:, 1] - pairs[:, 0]
    picks = np.random.default_rng(seed).integers(0, len(texts), (NUM_RESAMPLES, len(texts)))
    low, high = np.quantile(differences[picks].mean(axis=1), [0.025, 0.975])
    shares = pairs.mean(axis=0)
    return Gain(len(texts), float(shares[0]), float(shares[1]), float(differences.mean()), float(low), float(high))


def quality_guard(
    questions: list[Question],
    base: dict[str, Answer],
    champion: dict[str, Answer],
    logprobs: tuple[dict[str, float], dict[str, float]] | None,
) -> Guard:
    """Compare soundness on common questions; logprobs: question -> mean log-prob under the base, for both sides."""
    asked = [question for question in questions if question.text in base and question.text in champion]
    sides = (base, champion)
    on_topic = [[is_on_topic(question, side[question.text].text) for question in asked] for side in sides]
    no_loop = [[not is_repetitive(words_of(side[question.text].text)) for question in asked] for side in sides]
    fluent = [[True] * len(asked), [True] * len(asked)]
    if logprobs and logprobs[0]:
        floor = float(np.quantile(list(logprobs[0].values()), FLUENT_QUANTILE))
        fluent = [[scores.get(question.text, -99.0) >= floor for question in asked] for scores in logprobs]
    sound = [
        np.mean([all(parts) for parts in zip(on_topic[side], no_loop[side], fluent[side], strict=True)])
        for side in (0, 1)
    ]

    def shares(values: list[list[bool]]) -> tuple[float, float]:
        return float(np.mean(values[0])), float(np.mean(values[1]))

    return Guard(
        base=float(sound[0]),
        champion=float(sound[1]),
        on_topic=shares(on_topic),
        no_loop=shares(no_loop),
        fluent=shares(fluent) if logprobs else None,
        mean_logprob=(_mean(logprobs[0]), _mean(logprobs[1])) if logprobs else None,
    )


def _mean(scores: dict[str, float]) -> float:
    return float(np.mean(list(scores.values()))) if scores else float("nan")
