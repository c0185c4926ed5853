"""e-LOND: of all promotions, at most a share of FDR is expected to be false, however many candidates come.

Candidate t is promoted if E >= 1/alpha_t, alpha_t = FDR * gamma_t * (promotions before + 1), sum gamma_t = 1.
Source: Xu and Ramdas, AISTATS 2024; online_fdr.ELond is the reference in the test.
Departure 1: gamma_t = t^-1.5 / zeta(1.5), not LOND's default. It asks 26 of the first candidate where the default asks
187, and 138 of the tenth after five promotions: here most candidates are meant to be good, and promotions pay back.
"""

_ZETA_3_2 = 2.612375348685488


def gamma(index: int) -> float:
    """Return the share of candidate number index >= 1."""
    if index < 1:
        raise ValueError(f"candidates are counted from 1, not {index}")
    return index**-1.5 / _ZETA_3_2


def threshold(index: int, num_promoted: int, fdr: float) -> float:
    """Return the E that candidate number index needs, when num_promoted before it were promoted."""
    return 1.0 / (fdr * gamma(index) * (num_promoted + 1))
