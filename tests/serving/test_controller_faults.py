"""The controller under faults, restarts and operators' hands."""

import msgspec

from ingest.events import encode
from serving import audit
from serving.controller import describe
from serving.routes import RouteTable
from tests.serving.controller_bench import Bench, promote_one
from tests.serving.fake_engine import better


def test_a_restart_in_the_middle_of_a_canary_goes_on_with_the_same_evidence(bench):
    bench.serve_base()
    bench.reach_canary("v000001")
    for _ in range(10):
        bench.step(bench.ask(8, better))
    rollout, outcomes = bench.conductor.state.rollout, describe(bench.conductor)["canary"]["outcomes"]
    bench.reopen()
    bench.step()
    assert bench.conductor.state.rollout == rollout
    assert describe(bench.conductor)["canary"]["outcomes"] == outcomes > 20
    assert bench.conductor.state.tests["v000001"].index == 1
    for _ in range(20):
        bench.step(bench.ask(8, better))
    assert ("v000001", "promoted") in bench.said()


def test_every_recorded_verdict_replays(bench):
    bench.serve_base()
    bench.reach_canary("v000001")
    for _ in range(25):
        bench.step(bench.ask(8, better))
    rows = audit.read_decisions(bench.store.connection)
    assert [(row.gate, row.verdict) for row in rows] == [
        ("offline", "PASS"),
        ("offline", "PASS"),
        ("canary", "PROMOTE"),
    ]
    assert all(audit.replay(row) == row.verdict for row in rows)


def test_a_canary_whose_engine_dies_is_invalid_and_tried_once_more(bench):
    bench.serve_base()
    bench.reach_canary("v000001")
    name = bench.conductor.state.rollout.engine
    bench.lose_engine(name)
    bench.step()
    assert bench.said()[-1] == ("v000001", "inconclusive")
    assert bench.table.canary is None
    bench.start_engine(name)
    bench.until(lambda: bench.conductor.state.rollout is not None, seconds=1.0)
    assert bench.conductor.state.tests["v000001"].index == 1
    assert bench.conductor.state.rollout.threshold == 2 * bench.conductor.state.tests["v000001"].threshold
    bench.lose_engine(name)
    bench.step()
    assert bench.conductor.state.versions["v000001"].state == "inconclusive"


def test_a_lost_champion_engine_is_stood_in_for_by_the_champion_before_then_loaded_anew(bench):
    promote_one(bench)
    name = bench.table.champion.engine
    bench.lose_engine(name)
    bench.step()
    assert bench.table.champion.version == "v000000"
    assert "v000000" in bench.table.reason
    engine = bench.start_engine(name)
    bench.until(lambda: bench.served_by() == ("v000001", None, "v000000"))
    assert bench.table.champion.served_model == engine.served_model
    assert engine.label.startswith("v000001:")


def test_a_champion_lost_under_a_canary_takes_the_canary_engine(bench):
    bench.serve_base()
    bench.reach_canary("v000001")
    canary_engine = bench.conductor.state.rollout.engine
    bench.lose_engine(bench.table.champion.engine)
    bench.until(lambda: bench.table.champion is not None and bench.table.champion.engine == canary_engine, seconds=1.0)
    assert bench.said()[-1] == ("v000001", "inconclusive")
    assert bench.served_by() == ("v000000", None, None)


def test_an_operators_rollback_is_adopted(bench):
    promote_one(bench)
    table = bench.table
    rolled = RouteTable(
        revision=table.revision + 1, at=1.0, author="operator", champion=table.standby, reason="bad day"
    )
    bench.step([bench.record("control.v1", "routes", encode(rolled))])
    assert bench.conductor.state.champion == "v000000"
    assert bench.said()[-1] == ("v000001", "rolled_back")
    assert bench.table.revision > rolled.revision
    assert bench.table.champion.version == "v000000"
    bench.until(lambda: bench.served_by() == ("v000000", None, "v000000"), seconds=1.0)


def test_an_operators_table_that_was_unread_at_a_kill_is_not_overruled_by_the_restart(bench):
    promote_one(bench)
    table = bench.table
    rolled = RouteTable(
        revision=table.revision + 1, at=1.0, author="operator", champion=table.standby, reason="bad day"
    )
    record = bench.record("control.v1", "routes", encode(rolled))
    bench.reopen()
    with bench.store.transaction() as connection:
        bench.watch.look()
        bench.conductor.tick(connection, bench.now_s, False)  # not caught up: nothing may be said yet
    assert bench.table == table
    bench.step([record])
    assert (bench.table.champion.version, bench.conductor.state.champion) == ("v000000", "v000000")
    assert bench.table.revision == rolled.revision + 1


def test_an_operators_table_that_crosses_ours_is_followed(bench):
    promote_one(bench)
    table = bench.table
    rolled = RouteTable(revision=table.revision, at=1.0, author="operator", champion=table.standby, reason="bad day")
    bench.step([bench.record("control.v1", "routes", encode(rolled))])
    assert (bench.table.champion.version, bench.table.revision) == ("v000000", table.revision + 1)


def test_taking_the_canarys_traffic_away_by_hand_is_a_rollback(bench):
    bench.serve_base()
    bench.reach_canary("v000001")
    stopped = msgspec.structs.replace(
        bench.table, revision=bench.table.revision + 1, author="operator", canary_weight=0.0
    )
    records = bench.ask(4, better)
    bench.step([bench.record("control.v1", "routes", encode(stopped)), *records])
    assert bench.said()[-1] == ("v000001", "rolled_back")
    assert bench.table.canary is None


def test_a_failed_swap_leaves_the_engine_out_of_every_table(bench):
    bench.serve_base()
    idle = bench.table.standby.engine
    bench.engines[idle].reset_succeeds = False
    bench.propose("v000001", 1.0)
    bench.until(lambda: ("v000001", "inconclusive") in bench.said())
    for _ in range(5):
        bench.step(seconds=0.0)
        assert bench.table.champion.engine != idle
        assert bench.table.standby is None and bench.table.canary is None


def test_promotions_wait_for_approval_when_told_so(tmp_path):
    bench = Bench(tmp_path, auto_promote=False)
    try:
        bench.serve_base()
        bench.reach_canary("v000001")
        for _ in range(25):
            bench.step(bench.ask(8, better))
        assert describe(bench.conductor)["canary"]["verdict"] == "AWAIT_APPROVAL"
        table = bench.table
        approved = RouteTable(
            revision=table.revision + 1, at=1.0, author="operator", champion=table.canary, reason="ok"
        )
        bench.step([bench.record("control.v1", "routes", encode(approved))])
        assert bench.served_by() == ("v000001", None, "v000000")
    finally:
        bench.close()


def test_observe_mode_exposes_nothing(tmp_path):
    bench = Bench(tmp_path, observe=True)
    try:
        bench.serve_base()
        bench.propose("v000001", 1.0)
        bench.until(lambda: ("v000001", "shelved") in bench.said())
        assert ("v000001", "canary") not in bench.said()
    finally:
        bench.close()


def test_silence_holds_then_ends_without_blame(bench):
    bench.serve_base()
    bench.reach_canary("v000001")
    bench.step(bench.ask(8, better), seconds=100)
    assert describe(bench.conductor)["canary"]["verdict"] == "HOLD"
    bench.step(seconds=250)
    assert bench.said()[-1] == ("v000001", "inconclusive")


def test_attached_servers_are_loaded_at_first_sight_and_again_after_a_restart_of_theirs(tmp_path):
    bench = Bench(tmp_path, attached=True)
    try:
        bench.until(lambda: bench.conductor.state.table is not None and bench.served_by()[2] == "v000000")
        assert all(engine.calls.count("/collective_rpc") == 1 for engine in bench.engines.values())
        champion = bench.engines[bench.table.champion.engine]
        champion.label = "default"  # as after a restart: the name is the same, the weights are not ours
        bench.until(lambda: champion.calls.count("/collective_rpc") == 2, seconds=1.0)
        bench.until(lambda: bench.served_by() == ("v000000", None, "v000000"), seconds=1.0)
    finally:
        bench.close()
