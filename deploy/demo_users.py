"""The demo's simulated product users: who asks, who votes, when, and how wrongly (pure; randomness is an argument).

Owns the habits of real feedback: sparse, delayed with a long tail, noisy, sometimes doubled, late, expired, retracted,
ahead of its inference, or malformed. The traffic client carries the plans out.
"""

import math
import random
from typing import Literal, NamedTuple

Habit = Literal["normal", "late", "expired", "early"]


class Habits(NamedTuple):
    """How the users give feedback; shares are probabilities."""

    vote_share: float = 0.5
    flip_share: float = 0.10  # a vote says the opposite of what its user felt
    median_delay_s: float = 3.0
    delay_sigma: float = 0.6  # log-normal
    late_share: float = 0.02  # of votes: after the observation window
    expired_share: float = 0.01  # of votes: after the late window, so never used
    duplicate_share: float = 0.03  # of votes: sent twice under the same id
    retract_share: float = 0.02  # of votes: taken back some seconds later
    early_share: float = 0.04  # of votes on streamed answers: before the answer is complete
    malformed_share: float = 0.01  # of answers: a broken feedback event goes with it
    repeat_share: float = 0.1  # of questions: asked by a user seen before


class Vote(NamedTuple):
    """One planned vote of one user."""

    habit: Habit
    delay_s: float  # after the answer is complete; 0 for an early vote
    value: bool
    num_sends: int  # 2: a duplicate
    retract_after_s: float | None  # after the vote


class Windows(NamedTuple):
    """When the joiner closes: observation and late window after the answer."""

    observation_s: float
    late_s: float


def plan_vote(rng: random.Random, habits: Habits, windows: Windows, satisfied: bool) -> Vote | None:
    """Plan the vote on a complete answer; None: this user stays silent."""
    if rng.random() >= habits.vote_share:
        return None
    habit, delay_s = _delay(rng, habits, windows)
    retracted = habit == "normal" and rng.random() < habits.retract_share
    return Vote(
        habit=habit,
        delay_s=delay_s,
        value=satisfied != (rng.random() < habits.flip_share),
        num_sends=2 if rng.random() < habits.duplicate_share else 1,
        retract_after_s=rng.uniform(1.0, 4.0) if retracted else None,
    )


def plan_early_vote(rng: random.Random, habits: Habits) -> Vote | None:
    """Plan a vote on a streamed answer's first words: a guess, sent before the answer is complete."""
    if rng.random() >= habits.vote_share * habits.early_share:
        return None
    return Vote("early", 0.0, rng.random() < 0.5, 1, None)


def _delay(rng: random.Random, habits: Habits, windows: Windows) -> tuple[Habit, float]:
    draw = rng.random()
    if draw < habits.expired_share:
        return "expired", windows.late_s + rng.uniform(4.0, 8.0)
    if draw < habits.expired_share + habits.late_share:
        return "late", windows.observation_s + rng.uniform(
            1.0, max(2.0, 0.5 * (windows.late_s - windows.observation_s))
        )
    return "normal", rng.lognormvariate(math.log(habits.median_delay_s), habits.delay_sigma)


def malformed_votes(inference_id: str) -> list[dict]:
    """Return feedback bodies that a gateway must refuse with a 4xx."""
    return [
        {"inference_id": inference_id, "kind": "boolean", "value": True},  # no metric
        {"metric": "thumbs", "kind": "boolean", "value": True},  # no target
        {"inference_id": "not-an-id", "metric": "thumbs", "kind": "boolean", "value": True},
        {"inference_id": inference_id, "metric": "thumbs", "kind": "boolean", "value": {"up": 1}},
    ]


class Users:
    """User names: mostly new ones, now and then one seen before, so that canary units are plentiful."""

    def __init__(self, rng: random.Random, repeat_share: float):
        self.rng, self.repeat_share, self.num_users = rng, repeat_share, 0

    def next(self) -> str:
        """Return the user who asks the next question."""
        if self.num_users and self.rng.random() < self.repeat_share:
            return f"user-{self.rng.randrange(self.num_users):06d}"
        self.num_users += 1
        return f"user-{self.num_users - 1:06d}"
