"""The canary's decision as a pure function: order, duplicates, error rates, stages, restarts."""

import math

import msgspec
import numpy as np
import pytest

from serving.canary import SHARES, Evidence, Unit, decide, mature, stage_contrasts
from serving.gate_config import GateConfig

GATE = GateConfig.model_validate(
    {"delta": 0.05, "weights": [0.5], "stage_units": [], "n_min": 40, "maturity_s": 5, "soak_s": 20, "t_max_s": 600}
)


def simulate(num: int, p_canary: float, p_champion: float, seed: int, weight: float = 0.5) -> list[Unit]:
    random = np.random.default_rng(seed)
    units = []
    for i in range(num):
        arm = "canary" if random.random() < weight else "champion"
        outcome = float(random.random() < (p_canary if arm == "canary" else p_champion))
        units.append(Unit(f"u{i}", arm, weight, at=float(i), outcome=outcome, outcome_at=float(i)))
    return units


def seen(units: list[Unit], **fields: object) -> Evidence:
    known = {"version": "v000001", "now_s": 400.0, "started_at": 0.0, "stage": 0, "stage_started_at": 0.0,
             "last_interaction_at": 399.0, "units": units, "threshold": 26.0}  # fmt: skip
    return Evidence(**(known | fields))  # type: ignore[arg-type]


def test_shares_of_the_rollback_level_sum_to_one():
    assert sum(SHARES.values()) == pytest.approx(1.0)


def test_the_order_of_units_and_duplicates_change_nothing():
    units = simulate(200, 0.6, 0.4, seed=3)
    shuffled = [units[i] for i in np.random.default_rng(0).permutation(200)]
    assert decide(seen(shuffled + units[:50]), GATE) == decide(seen(units), GATE)


def test_a_gain_is_promoted_a_loss_rolled_back_and_little_data_held():
    assert decide(seen(simulate(300, 0.7, 0.3, seed=1)), GATE).kind == "PROMOTE"
    assert decide(seen(simulate(300, 0.3, 0.7, seed=1)), GATE).kind == "ROLLBACK"
    assert decide(seen(simulate(20, 0.7, 0.3, seed=1)), GATE).kind == "HOLD"


def judged_all_the_way(p_canary: float, p_champion: float, seed: int) -> str:
    units = simulate(300, p_canary, p_champion, seed)
    for num in range(10, 301, 10):
        kind = decide(seen(units[:num], now_s=float(num) + 10, last_interaction_at=float(num)), GATE).kind
        if kind != "HOLD":
            return kind
    return "HOLD"


def test_an_equal_canary_judged_at_every_step_is_hardly_ever_rolled_back():
    verdicts = [judged_all_the_way(0.5, 0.5, seed) for seed in range(120)]
    assert verdicts.count("ROLLBACK") + verdicts.count("INVALID") <= 3


def test_a_gain_of_thirty_points_is_promoted_nearly_always_within_300_units():
    verdicts = [judged_all_the_way(0.6, 0.3, seed) for seed in range(60)]
    assert verdicts.count("PROMOTE") >= 50
    assert verdicts.count("ROLLBACK") == 0


def test_neither_few_units_nor_a_short_soak_are_promoted():
    units = simulate(300, 0.9, 0.1, seed=1)
    assert decide(seen(units, started_at=390.0), GATE).kind == "HOLD"
    gate = GATE.model_copy(update={"n_min": 1000})
    assert decide(seen(units), gate).kind == "HOLD"


def test_outcomes_that_are_not_mature_do_not_count():
    units = simulate(300, 0.9, 0.1, seed=1)
    figures = decide(seen(units, now_s=100.0), GATE).figures
    assert figures["outcomes_canary"] + figures["outcomes_champion"] == 96  # at + 5 s <= 100 s


def test_ten_canary_errors_beside_none_are_a_failure_even_without_outcomes():
    units = [Unit(f"u{i}", "canary" if i % 2 else "champion", 0.5, float(i), errors=i % 2) for i in range(20)]
    verdict = decide(seen(units), GATE)
    assert (verdict.kind, verdict.figures["errors_canary"], verdict.figures["errors_champion"]) == ("ROLLBACK", 10, 0)


def test_a_hundred_errors_of_one_unit_are_one_event():
    units = [Unit(f"u{i}", "canary" if i % 2 else "champion", 0.5, float(i)) for i in range(20)]
    units[1] = msgspec.structs.replace(units[1], errors=100)
    assert decide(seen(units), GATE).kind == "HOLD"


def test_a_split_that_is_not_the_weight_is_invalid():
    units = [Unit(f"u{i}", "canary" if i % 10 == 0 else "champion", 0.5, float(i)) for i in range(60)]
    verdict = decide(seen(units), GATE)
    assert (verdict.kind, "mismatch" in verdict.reason) == ("INVALID", True)


def test_an_arm_that_answers_faster_is_no_mismatch():
    units = [Unit(f"u{i}", "canary", 0.5, 390.0) for i in range(30)]
    assert decide(seen(units), GATE).kind == "HOLD"


def test_nan_is_not_zero():
    units = simulate(100, 0.5, 0.5, seed=1)
    units[5] = msgspec.structs.replace(units[5], outcome=math.nan)
    assert decide(seen(units), GATE).kind == "INVALID"


def test_rollback_is_armed_while_approval_is_awaited_and_a_breaker_comes_first():
    good = simulate(300, 0.8, 0.2, seed=1)
    assert decide(seen(good, frozen="ratchet"), GATE).kind == "AWAIT_APPROVAL"
    assert decide(seen(good, frozen="ratchet", breaker="five failures in a row"), GATE).kind == "ROLLBACK"
    broken = [msgspec.structs.replace(u, errors=1) if u.arm == "canary" else u for u in good]
    assert decide(seen(broken, frozen="ratchet"), GATE).kind == "ROLLBACK"


def test_a_lost_engine_and_a_silent_source_are_invalid_and_the_end_is_inconclusive():
    few = simulate(20, 0.5, 0.5, seed=1)
    assert decide(seen(few, engine_lost="gone"), GATE).kind == "INVALID"
    assert decide(seen(few, now_s=2000.0), GATE).kind == "INVALID"
    assert decide(seen(few, now_s=700.0, last_interaction_at=699.0), GATE).kind == "INCONCLUSIVE"


def test_a_canary_that_is_not_halfway_yields_when_told_so_and_only_after_n_min_and_soak():
    gate = GATE.model_copy(update={"yield_to_newer": True})
    slow = simulate(120, 0.5, 0.5, seed=8)
    assert decide(seen(slow), gate).kind == "HOLD"
    assert decide(seen(slow, newer="v000002"), gate).kind == "INCONCLUSIVE"
    assert decide(seen(slow, newer="v000002", started_at=390.0), gate).kind == "HOLD"
    assert decide(seen(slow[:40], newer="v000002"), gate).kind == "HOLD"
    assert decide(seen(simulate(300, 0.7, 0.3, seed=1), newer="v000002"), gate).kind == "PROMOTE"


def test_stages_advance_by_their_own_outcomes_and_pair_within_a_stage():
    gate = GateConfig.model_validate({"weights": [0.1, 0.5], "stage_units": [10], "maturity_s": 0})
    first = simulate(200, 0.5, 0.5, seed=2, weight=0.1)
    verdict = decide(seen(first), gate)
    assert verdict.kind == "ADVANCE"
    second = [msgspec.structs.replace(u, unit=f"b{u.unit}", weight=0.5) for u in simulate(50, 0.5, 0.5, seed=3)]
    num_first, num_second = len(stage_contrasts(mature(first, 400, 0))), len(stage_contrasts(mature(second, 400, 0)))
    assert len(stage_contrasts(mature(first + second, 400, 0))) == num_first + num_second
