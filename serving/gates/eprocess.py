"""E-processes for one contrast of canary and champion: bet on it, stop at any time (METHODS section 4).

Legend: N = blocks of one canary unit and k champion units, Z_N = contrast in [-1, 1], G_N = its gain under a null.
    E = 1/8 sum_j prod_N (1 + l_j G_N),  l_j = (0.75/g) 2^-j, j = 0..7,  g = -min G
Source: Waudby-Smith and Ramdas, arXiv 2010.09686. Under the null E >= 1/alpha has probability <= alpha, at any time.
"""

import math
from collections.abc import Sequence

import numpy as np

_FRACTIONS = 0.75 * 0.5 ** np.arange(8)


def log_capitals(gains_N: np.ndarray, largest_loss: float) -> np.ndarray:
    """Return the 8 log-capitals after betting on gains_N >= -largest_loss."""
    if not len(gains_N):
        return np.zeros(len(_FRACTIONS))
    bets = _FRACTIONS / largest_loss
    return np.log1p(bets[:, None] * np.asarray(gains_N)[None, :]).sum(axis=1)


def log_e(gains_N: np.ndarray, largest_loss: float) -> float:
    """Return log E of the mixture over the grid."""
    capitals = log_capitals(gains_N, largest_loss)
    top = float(capitals.max())
    return top + math.log(float(np.exp(capitals - top).mean()))


def log_e_promote(contrasts_N: np.ndarray, delta: float) -> float:
    """Return log E against H0: tau <= -delta; large means that the canary is not worse by delta."""
    return log_e(np.asarray(contrasts_N) + delta, 1.0 - delta)


def log_e_rollback(contrasts_N: np.ndarray) -> float:
    """Return log E against H0: tau >= 0; large means that the canary is worse."""
    return log_e(-np.asarray(contrasts_N), 1.0)


def lower_bound(contrasts_N: np.ndarray, alpha: float, step: float = 0.01) -> float:
    """Return the largest t of a grid such that tau <= t is rejected at alpha, and every lower one too; -1 if none."""
    bound = -1.0
    for t in np.arange(-1.0 + step, 1.0, step):
        if log_e(np.asarray(contrasts_N) - t, 1.0 + float(t)) < math.log(1.0 / alpha):
            break
        bound = float(t)
    return bound


def num_contemporaries(weight: float) -> int:
    """Return k = min(9, floor((1-w)/w)), at least 1."""
    return max(1, min(9, math.floor((1.0 - weight) / weight + 1e-9)))


def contrasts(canary: Sequence[float], champion: Sequence[float], k: int) -> np.ndarray:
    """Pair the i-th canary outcome with the i-th block of k champion outcomes, both in the order of time.

    Each champion unit is used once, so blocks are independent; units without a full block wait.
    """
    num_blocks = min(len(canary), len(champion) // k)
    champion_NK = np.asarray(champion[: num_blocks * k], dtype=float).reshape(num_blocks, k)
    return np.asarray(canary[:num_blocks], dtype=float) - champion_NK.mean(axis=1) if num_blocks else np.zeros(0)
