"""What reward to expect of a request before it is answered: a hierarchical, decayed value tracker.

Owns the tracker's arithmetic and its table. Takes rewards in order. Emits the baseline and the probability of success,
both read before the update. Promises: state lives in the caller's transaction, so that a replay reads the same numbers.

    b = (n_c * p_c + n_0 * p_parent) / (n_c + n_0)       prior -> tenant -> function -> intent, METHODS.md section 2
1. n and the sums decay by a constant at each update of a key, so that the baseline follows a policy that improves.
2. Late corrections (deltas) do not update: b estimates the reward that a full sample carries.
Shapes: N samples, L = 3 levels, K keys.
"""

import hashlib
import re
import sqlite3
from collections.abc import Sequence
from typing import Any, NamedTuple

import numba
import numpy as np

from ingest.events import Inference
from rewards.config import RewardsConfig

SCHEMA = """
CREATE TABLE IF NOT EXISTS tracker (
    key TEXT PRIMARY KEY, num REAL NOT NULL, reward_sum REAL NOT NULL, success_sum REAL NOT NULL
);
"""
INTENT_WORDS = 3
NUM_INTENTS = 4096  # buckets per function: bounds the table whatever users write


class Expectation(NamedTuple):
    """What the tracker knew before the sample, and the reward after its token cost."""

    baseline: float
    expected_success: float
    reward: float


def intent_of(request: dict[str, Any]) -> str:
    """Return a bucket (3 hex digits) of how the last user message begins, with digits and case removed.

    Cheap and deterministic: requests from one template share their first words. The words themselves are not stored.
    """
    text = request.get("prompt") or ""
    messages = request.get("messages")
    for message in messages if isinstance(messages, list) else []:
        if isinstance(message, dict) and message.get("role") == "user":
            text = message.get("content") or ""
    if isinstance(text, list):  # parts of a multi-part message, or several prompts
        text = " ".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in text)
    words = re.findall(r"[^\W\d_]+", str(text)[:1000].lower())[:INTENT_WORDS]
    digest = hashlib.blake2b(" ".join(words).encode(), digest_size=2).digest()
    return f"{int.from_bytes(digest, 'big') % NUM_INTENTS:03x}"


def keys_of(inference: Inference) -> tuple[str, str, str]:
    """Return the tracker keys of an inference, parent first."""
    tenant, function = f"t:{inference.tenant}", f"f:{inference.tenant}/{inference.function}"
    return tenant, function, f"i:{inference.tenant}/{inference.function}/{intent_of(inference.request)}"


def expect(
    connection: sqlite3.Connection,
    keys_NL: Sequence[Sequence[str]],
    rewards_N: Sequence[float],
    costs_N: Sequence[float],
    config: RewardsConfig,
) -> list[Expectation]:
    """Read, then update the tracker with each reward in order, inside the caller's transaction.

    cost is lambda * tokens / L_max; a positive reward loses cost * expected success, but never its sign.
    """
    if not keys_NL:
        return []
    row_of = {key: row for row, key in enumerate(dict.fromkeys(key for keys in keys_NL for key in keys))}
    state_K3 = np.zeros((len(row_of), 3))
    for key, row in row_of.items():
        held = connection.execute("SELECT num, reward_sum, success_sum FROM tracker WHERE key = ?", (key,)).fetchone()
        if held:
            state_K3[row] = held
    rows_NL = np.array([[row_of[key] for key in keys] for keys in keys_NL], dtype=np.int64)
    out_N3 = track(
        state_K3,
        rows_NL,
        np.asarray(rewards_N, dtype=np.float64),
        np.asarray(costs_N, dtype=np.float64),
        config.baseline_decay,
        config.baseline_prior_weight,
        config.baseline_prior,
        config.prior_success,
    )
    connection.executemany(
        "INSERT INTO tracker VALUES (?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET num = excluded.num, "
        "reward_sum = excluded.reward_sum, success_sum = excluded.success_sum",
        [(key, *map(float, state_K3[row])) for key, row in row_of.items()],
    )
    return [Expectation(*map(float, row)) for row in out_N3]


@numba.njit(cache=True)
def charge(reward: float, cost: float, success: float) -> float:
    """Take the token cost off a positive reward, never past zero; the others pay nothing."""
    return max(reward - cost * success, 0.0) if reward > 0.0 else reward


@numba.njit(cache=True)
def track(state_K3, rows_NL, rewards_N, costs_N, decay, prior_weight, prior, prior_success):
    """Return (baseline, expected success, reward after cost) per sample; state (n, reward sum, success sum) changes."""
    num_samples, num_levels = rows_NL.shape
    out_N3 = np.empty((num_samples, 3))
    for i in range(num_samples):
        value = prior
        success = prior_success
        for level in range(num_levels):
            row = rows_NL[i, level]
            total = state_K3[row, 0] + prior_weight
            value = (state_K3[row, 1] + prior_weight * value) / total
            success = (state_K3[row, 2] + prior_weight * success) / total
        reward = charge(rewards_N[i], costs_N[i], success)
        is_success = 1.0 if rewards_N[i] > 0.0 else 0.0
        for level in range(num_levels):
            row = rows_NL[i, level]
            state_K3[row, 0] = decay * state_K3[row, 0] + 1.0
            state_K3[row, 1] = decay * state_K3[row, 1] + reward
            state_K3[row, 2] = decay * state_K3[row, 2] + is_success
        out_N3[i, 0] = value
        out_N3[i, 1] = success
        out_N3[i, 2] = reward
    return out_N3
