"""The split is sticky, monotone in its weight, and fair."""

from hypothesis import given
from hypothesis import strategies as st

from serving.router import arm, pick, position
from serving.routes import Route, RouteTable

WEIGHTS = st.floats(0, 1)


def route(name: str) -> Route:
    return Route(arm="champion", version="v000001", engine=name, url="http://x", served_model=f"{name}-1")


@given(st.text(), st.text(), WEIGHTS, WEIGHTS)
def test_growing_the_weight_only_moves_champion_units_to_the_canary(
    salt: str, unit: str, one: float, other: float
) -> None:
    low, high = sorted((one, other))
    if arm(salt, unit, low) == "canary":
        assert arm(salt, unit, high) == "canary"


@given(st.text(), st.text())
def test_nobody_is_in_an_empty_canary_and_everybody_in_a_full_one(salt: str, unit: str) -> None:
    assert arm(salt, unit, 0.0) == "champion"
    assert arm(salt, unit, 1.0) == "canary"


def test_the_split_is_the_same_in_every_process() -> None:
    assert position("salt", "user-1") == 0.8298019805082419


def test_the_share_of_units_is_the_weight() -> None:
    share = sum(arm("salt", f"user-{i}", 0.2) == "canary" for i in range(20_000)) / 20_000
    assert abs(share - 0.2) < 0.01  # 3.5 standard deviations


def test_two_rollouts_split_independently() -> None:
    both = sum(arm("a", f"u{i}", 0.5) == arm("b", f"u{i}", 0.5) for i in range(20_000)) / 20_000
    assert abs(both - 0.5) < 0.015


def test_a_pick_says_its_propensity() -> None:
    table = RouteTable(
        revision=7, at=0, author="controller", champion=route("blue"), canary=route("green"), canary_weight=0.25,
        rollout_id="r1", salt="s",
    )  # fmt: skip
    picks = [pick(table, f"u{i}") for i in range(50)]
    found = {(one.arm, one.propensity, one.route.engine, one.rollout_id) for one in picks if one}
    assert found == {("canary", 0.25, "green", "r1"), ("champion", 0.75, "blue", "r1")}


def test_without_a_canary_the_champion_answers_with_certainty() -> None:
    table = RouteTable(
        revision=1, at=0, author="controller", champion=route("blue"), canary_weight=0.5, rollout_id="old"
    )
    chosen = pick(table, "u")
    assert chosen is not None
    assert (chosen.arm, chosen.propensity, chosen.rollout_id, chosen.revision) == ("champion", 1.0, "", 1)


def test_without_a_champion_nobody_answers() -> None:
    assert pick(RouteTable(revision=1, at=0, author="controller", champion=None), "u") is None
