"""A controller over stub engines and a stub gateway, stepped by hand."""

import time
from collections.abc import Callable
from pathlib import Path

from ingest.config import KafkaConfig
from ingest.events import decode, encode
from ingest.stage import StageStore
from ingest.stream import Record
from learner.candidate import CandidateEvent
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


def worse(side: str, i: int) -> bool:
    return i % 10 < (2 if side == "canary" else 8)


def promote_one(bench: Bench) -> None:
    bench.serve_base()
    bench.reach_canary("v000001")
    for _ in range(25):
        bench.step(bench.ask(8, better))
    assert bench.served_by() == ("v000001", None, "v000000")
