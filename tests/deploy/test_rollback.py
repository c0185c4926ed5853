"""An operator's rollback takes traffic away and never brings a bad version back."""

import pytest

from deploy.rollback import NothingToRollBack, describe, rolled_back
from serving.routes import Route, RouteTable


def route(arm: str, version: str, engine: str) -> Route:
    return Route(arm=arm, version=version, engine=engine, url="http://127.0.0.1:1", served_model="m")  # type: ignore[arg-type]


BLUE = route("champion", "v000002", "blue")
STANDBY = route("standby", "v000001", "green")
CANARY = route("canary", "v000003", "green")


def test_canary_loses_its_traffic_and_the_champion_stays() -> None:
    table = RouteTable(revision=7, at=1.0, author="controller", champion=BLUE, canary=CANARY, canary_weight=0.5)
    new = rolled_back(table, "complaints", 9.0)
    assert (new.revision, new.author, new.at, new.canary_weight) == (8, "operator", 9.0, 0.0)
    assert new.champion == BLUE
    assert new.reason == "operator: complaints"
    assert describe(table, new) == "takes all traffic from canary v000003; champion is v000002"


def test_without_canary_the_standby_becomes_champion() -> None:
    table = RouteTable(revision=7, at=1.0, author="controller", champion=BLUE, standby=STANDBY)
    new = rolled_back(table, "", 9.0)
    assert new.champion == route("champion", "v000001", "green")
    assert (new.standby, new.canary) == (None, None)
    assert describe(table, new) == "returns from v000002 to v000001"


def test_second_rollback_does_not_return_to_the_bad_version() -> None:
    table = RouteTable(revision=7, at=1.0, author="controller", champion=BLUE, standby=STANDBY)
    with pytest.raises(NothingToRollBack, match="no earlier champion is loaded beside v000001"):
        rolled_back(rolled_back(table, "", 9.0), "", 10.0)


def test_standby_of_the_same_version_is_nothing_to_return_to() -> None:
    table = RouteTable(
        revision=7, at=1.0, author="controller", champion=BLUE, standby=route("standby", "v000002", "green")
    )
    with pytest.raises(NothingToRollBack, match="no earlier champion is loaded beside v000002"):
        rolled_back(table, "", 9.0)
