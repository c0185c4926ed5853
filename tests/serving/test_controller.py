"""The controller over stub engines and a stub gateway: bootstrap, promotion, rollback, faults, restarts."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from ingest.config import KafkaConfig
from ingest.events import decode, encode
from ingest.stage import StageStore
from ingest.stream import Record
from learner.candidate import CandidateEvent
from serving import audit
from serving.conductor import SCHEMA, Conductor
from serving.config import ServingConfig
from serving.controller import describe
from serving.engine import Incarnation, write_incarnation
from serving.gate_config import GateConfig
from serving.routes import RouteTable
from serving.watch import Watch
from tests.serving.fake_engine import FakeEngine, FakeGateway, better, make_candidate, make_interactions, make_model

LOCAL = {
    "delta": 0.05, "weights": [0.5], "stage_units": [], "n_min": 40, "maturity_s": 5.0, "soak_s": 20.0, "t_max_s": 300,
    "kl_limit": 0.5, "probe_prompts": 8, "probe_min_prompts": 4, "probe_tokens": 8, "prompts_kept": 16,
}  # fmt: skip


class Bench:
    """A conductor over stubs, with a clock of its own and the outbox in sight."""

    def __init__(self, folder: Path, attached: bool = False, **gate: object) -> None:
        self.folder, self.now_s, self.offset, self.served = folder, 1000.0, 0, 0
        self.base = make_model(folder / "base", 0.0)
        self.gateway = FakeGateway()
        self.engines: dict[str, FakeEngine] = {}
        self.attached = attached
        self.gate = GateConfig.model_validate(LOCAL | gate)
        for name in ("blue", "green"):
            self.start_engine(name)
        self.open()
        self.interactions = 0

    def open(self) -> None:
        attach = {name: engine.url for name, engine in self.engines.items()} if self.attached else {}
        serving = ServingConfig.model_validate(
            {"gateway_urls": [self.gateway.url], "gate": self.gate, "attach": attach}
        )
        self.watch = Watch(serving, self.folder)
        self.store = StageStore(self.folder / "serving" / "controller.sqlite", SCHEMA)
        self.conductor = Conductor(self.store, KafkaConfig(), self.gate, self.watch, self.base, self.folder)

    def reopen(self) -> None:
        """As after kill -9: memory is gone, the database stays."""
        self.conductor.worker.close()
        self.store.close()
        self.open()

    def close(self) -> None:
        self.conductor.worker.close()
        self.store.close()
        for engine in self.engines.values():
            engine.close()
        self.gateway.close()

    def start_engine(self, name: str) -> FakeEngine:
        self.served += 1
        engine = FakeEngine(f"{name}-{self.served:08d}", self.base)
        self.engines[name] = engine
        incarnation = Incarnation(name=name, url=engine.url, served_model=engine.served_model, pid=0, started_at=0.0)
        write_incarnation(self.folder, incarnation)
        return engine

    def lose_engine(self, name: str) -> None:
        self.engines.pop(name).close()

    def step(self, records: list[Record] | None = None, seconds: float = 1.0) -> None:
        self.now_s += seconds
        self.watch.look()
        with self.store.transaction() as connection:
            self.conductor.handle(connection, records or [])
            self.conductor.tick(connection, self.now_s, True)

    def until(self, condition: Callable[[], bool], patience_s: float = 10.0, seconds: float = 0.0) -> None:
        end = time.monotonic() + patience_s
        while not condition():
            assert time.monotonic() < end, f"waited in vain: {describe(self.conductor)}, said {self.said()}"
            self.step(seconds=seconds)
            time.sleep(0.02)

    def record(self, topic: str, key: str, value: bytes) -> Record:
        self.offset += 1
        return Record(topic, 0, self.offset, key, value, {}, self.now_s)

    def propose(self, version: str, value: float, style: str = "topical", **fields: object) -> Path:
        folder, sha256 = make_candidate(self.folder / "candidates", version, value, style, **fields)
        event = CandidateEvent(version=version, state="proposed", at=self.now_s, folder=str(folder),
                               manifest_sha256=sha256, parent="v000000", author="learner")  # fmt: skip
        self.step([self.record("control.v1", f"candidate/{version}", encode(event))])
        return folder

    def outbox(self) -> list[tuple[str, bytes]]:
        return self.store.connection.execute("SELECT key, value FROM stage_outbox ORDER BY id").fetchall()

    def said(self) -> list[tuple[str, str]]:
        events = [decode(value, CandidateEvent) for key, value in self.outbox() if key.startswith("candidate/")]
        return [(event.version, event.state) for event in events]

    def reason(self, version: str, state: str) -> str:
        events = [decode(value, CandidateEvent) for key, value in self.outbox() if key == f"candidate/{version}"]
        return next(event.reason for event in events if event.state == state)

    @property
    def table(self) -> RouteTable:
        return decode([value for key, value in self.outbox() if key == "routes"][-1], RouteTable)

    def served_by(self) -> tuple[str | None, str | None, str | None]:
        table = self.table
        return tuple(route and route.version for route in (table.champion, table.canary, table.standby))  # type: ignore

    def ask(self, num: int, happy: Callable[[str, int], bool | None], error: str = "") -> list[Record]:
        """Answer `num` new users under the table in force; happy(arm, i) is their thumb."""
        events = make_interactions(self.table, self.interactions + 1, num, self.now_s, happy, error)
        self.interactions += num
        return [self.record("interaction.v1", "0000", encode(event)) for event in events]

    def serve_base(self) -> None:
        self.until(lambda: self.conductor.state.table is not None and self.served_by()[2] == "v000000")
        self.step(self.ask(30, lambda *_: None))

    def reach_canary(self, version: str, value: float = 1.0) -> None:
        self.propose(version, value)
        self.until(lambda: self.conductor.state.rollout is not None)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    one = Bench(tmp_path)
    yield one
    one.close()


def worse(side: str, i: int) -> bool:
    return i % 10 < (2 if side == "canary" else 8)


def test_the_base_model_is_served_without_a_gate_and_without_loading_it(bench):
    bench.serve_base()
    assert bench.served_by() == ("v000000", None, "v000000")
    assert all("/collective_rpc" not in engine.calls for engine in bench.engines.values())
    assert all(engine.label.startswith("v000000:") for engine in bench.engines.values())


def test_a_better_candidate_is_promoted_and_the_champion_stays_as_standby(bench):
    bench.serve_base()
    bench.reach_canary("v000001")
    assert bench.served_by() == ("v000000", "v000001", None)
    assert bench.table.canary_weight == 0.5
    for _ in range(25):
        bench.step(bench.ask(8, better))
    assert ("v000001", "promoted") in bench.said()
    assert bench.served_by() == ("v000001", None, "v000000")
    assert [state for _, state in bench.said()] == ["shadow", "canary", "promoted"]
    assert bench.conductor.state.num_promoted == 1


def test_a_worse_candidate_is_rolled_back_and_no_weights_are_loaded_for_the_champion(bench):
    bench.serve_base()
    bench.reach_canary("v000001")
    champion = bench.engines[bench.table.champion.engine]
    calls = len(champion.calls)
    for _ in range(25):
        bench.step(bench.ask(8, worse))
        if bench.table.canary is None:
            break
    assert bench.said()[-1] == ("v000001", "rolled_back")
    assert bench.served_by()[:2] == ("v000000", None)
    assert len(champion.calls) == calls
    bench.until(lambda: bench.served_by()[2] == "v000000")  # and the idle engine gets a sane version again


def test_canary_errors_beside_a_clean_champion_roll_back(bench):
    bench.serve_base()
    bench.reach_canary("v000001")
    for _ in range(5):
        bench.step(bench.ask(8, lambda *_: None, error="engine_error"))
    assert bench.said()[-1] == ("v000001", "rolled_back")
    assert "errors" in bench.reason("v000001", "rolled_back")


def test_five_failures_in_a_row_end_the_canary_at_once(bench):
    bench.serve_base()
    bench.reach_canary("v000001")
    bench.gateway.state["arms"] = {"canary": {"failures_in_a_row": 5}}
    bench.step()
    assert bench.said()[-1] == ("v000001", "rolled_back")
    assert bench.table.canary is None


@pytest.mark.parametrize(
    ("style", "fails"), [("nonsense", "topic"), ("loops", "loops"), ("drifted", "log-probs differ from the learner's")]
)
def test_a_degenerate_candidate_never_meets_a_user(bench, style, fails):
    bench.serve_base()
    bench.propose("v000001", 1.0, style)
    bench.until(lambda: ("v000001", "rejected") in bench.said())
    assert fails in bench.reason("v000001", "rejected")
    assert ("v000001", "canary") not in bench.said()


def test_nan_weights_another_hash_and_equal_weights_are_refused_without_touching_an_engine(bench):
    bench.serve_base()
    calls = {name: len(engine.calls) for name, engine in bench.engines.items()}
    bench.propose("v000001", float("nan"))
    bench.until(lambda: ("v000001", "rejected") in bench.said())
    folder = bench.propose("v000002", 2.0)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1] + b"\x01")
    bench.until(lambda: ("v000002", "rejected") in bench.said() or bench.conductor.state.rollout is not None)
    bench.propose("v000003", 0.0)
    bench.until(lambda: ("v000003", "rejected") in bench.said())
    assert "finite" in bench.reason("v000001", "rejected")
    assert "sha256" in bench.reason("v000002", "rejected")
    assert "equal the parent" in bench.reason("v000003", "rejected")
    assert calls == {name: len(engine.calls) for name, engine in bench.engines.items()}


def test_the_newest_candidate_wins_and_older_ones_are_shelved(bench):
    bench.serve_base()
    bench.reach_canary("v000001")
    bench.propose("v000002", 2.0)
    bench.propose("v000003", 3.0)
    for _ in range(25):
        bench.step(bench.ask(8, better))
    bench.until(lambda: bench.conductor.state.rollout is not None)
    assert ("v000002", "shelved") in bench.said()
    assert bench.conductor.state.rollout.version == "v000003"


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


def promote_one(bench: Bench) -> None:
    bench.serve_base()
    bench.reach_canary("v000001")
    for _ in range(25):
        bench.step(bench.ask(8, better))
    assert bench.served_by() == ("v000001", None, "v000000")


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
