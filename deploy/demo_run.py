"""The phases of the demo, and what they leave for its report.

Takes the stack, the options, the view. Traffic is slowed while the learner has enough unconsumed samples: on a small
machine generation and training share the cores.
"""

import asyncio
import os
import time
from pathlib import Path
from typing import NamedTuple

from deploy import model
from deploy.books import held_by
from deploy.config import load_all
from deploy.demo_bad import Planted, nonsense_folder, plant_bad, run_plant
from deploy.demo_client import Answer, Client
from deploy.demo_kill import Kill, run_kills
from deploy.demo_measure import ask_held_out
from deploy.demo_pulse import ControlWatch, Timeline, backlog_of, take_beat
from deploy.demo_questions import held_out_questions, training_questions
from deploy.demo_report import Criterion
from deploy.demo_results import finish
from deploy.demo_stack import Stack
from deploy.demo_traffic import Traffic
from deploy.demo_users import Windows
from deploy.demo_view import View
from deploy.reconcile import Check, reconcile, seen_by
from ingest.config import load_table
from ingest.status import read_statuses
from learner.config import LearnerConfig

PLANT_BY = 0.4  # of the minutes: then bad candidates are planted although nothing has been promoted
MEASURE_RESERVE_S = 60.0  # of the minutes, for the champion's held-out questions
CANARY_GRACE_S = 75.0  # a canary that runs when time is up may still gather evidence this long
READY_PATIENCE_S = 420.0
DRAIN_PATIENCE_S = 180.0
TRAINING = ("stepping", "exporting")  # phases of the learner that want the cores
THINK_S = 0.5  # mean pause of a user after an answer
TRAINING_PAUSE_S = 10.0
FEW_CORES = 8  # with more, learner and engines hardly meet
BASE_CONCURRENCY = 12  # held-out questions of the base that are open at a time, beside the traffic that teaches
MIN_CHAMPION_ANSWERS = 40  # traffic answers of the present champion before its share counts


class Options(NamedTuple):
    """The demo's command line."""

    config: Path
    state_dir: Path
    minutes: float
    target: float
    concurrency: int
    max_backlog: int | None
    num_questions: int
    seed: int
    plant_bad: bool
    kills: tuple[str, ...]
    live: bool | None


class Pace(NamedTuple):
    """How many users may have an open question, and how long each pauses after its answer."""

    concurrency: int
    pause_s: float


def shares_cores(num_cores: int, learner_threads: int, engine_threads: int) -> bool:
    """Say whether the learner and an engine compute on the same few cores; 0 threads means all cores."""
    used = (learner_threads or num_cores) + (engine_threads or num_cores)
    return used > num_cores and num_cores <= FEW_CORES


def wanted_pace(
    most: int, backlog: int, max_backlog: int, is_training: bool, in_gates: bool, has_canary: bool, takes_turns: bool
) -> Pace:
    """Choose the users' pace.

    On the same cores, generation and training slow each other down far more than taking turns would (measured: a step
    took 93 s beside four users, who got 0.3 answers a second): a single user is left while the learner trains or has
    enough to train on. A canary needs its units soon. With cores of their own, users slow down only when the learner
    falls far behind, or while the offline gates ask the engines.
    """
    if not takes_turns:
        is_slow = not has_canary and (in_gates or backlog >= 2 * max_backlog)
        return Pace(max(1, most // 4) if is_slow else most, THINK_S)
    if has_canary:
        return Pace(most // 2 if is_training else most, THINK_S)
    return Pace(1, TRAINING_PAUSE_S) if is_training or backlog >= max_backlog else Pace(most, THINK_S)


class Demo:
    """One run; its phases are called in order by deploy/demo.py."""

    def __init__(self, options: Options, stack: Stack, view: View):
        self.options, self.stack, self.view = options, stack, view
        self.config = load_all(stack.config_path)
        self.url = f"http://127.0.0.1:{self.config.serving.port}"
        self.watch = ControlWatch(self.config.kafka)
        self.questions = held_out_questions(options.num_questions)
        self.client = Client(self.url, self.config.run.name, options.state_dir / "demo")
        windows = Windows(self.config.ingest.observation_window_s, self.config.ingest.late_window_s)
        self.traffic = Traffic(self.client, training_questions(options.seed), windows, options.seed)
        learner = load_table(stack.config_path, "learner", LearnerConfig)
        self.takes_turns = shares_cores(os.cpu_count() or 1, learner.num_threads, self.config.serving.cpu_threads)
        self.max_backlog = learner.batch_samples if options.max_backlog is None else options.max_backlog
        self.timeline = Timeline(options.state_dir / "demo" / "timeline.jsonl")
        self.phase, self.started_at = "starting", time.time()
        self.base: dict[str, Answer] = {}
        self.champion: dict[str, Answer] = {}
        self.kills: list[Kill] = []
        self.planted: list[Planted] | None = [] if options.plant_bad else None
        self.checks: list[Check] = []
        self._tasks: list[asyncio.Task] = []

    @property
    def elapsed_s(self) -> float:
        return time.time() - self.started_at

    async def ready(self) -> None:
        """Wait for the deployment; train the nonsense weights meanwhile, if asked."""
        await self.stack.wait_ready(self.url, READY_PATIENCE_S, self.view.say)
        broker = read_statuses(self.options.state_dir).get("broker", {})
        self.view.say(f"broker: {broker.get('kind', 'external')} {broker.get('meaning', '')}".rstrip())
        if "broker" in self.options.kills and broker.get("durable") is False:
            self.view.say(
                "killing a broker that keeps events in memory loses what no stage has read yet: that shows below"
            )
        self.watch.start()
        await self.client.__aenter__()
        deadline_s = time.monotonic() + READY_PATIENCE_S
        while not (self.watch.table and self.watch.table.champion):
            self.stack.check_alive()
            if time.monotonic() > deadline_s:
                raise ValueError(f"no champion is served; see {self.options.state_dir / 'logs' / 'controller.log'}")
            await asyncio.sleep(0.5)
        if self.options.plant_bad:
            self.view.say("training the nonsense candidate ahead of time")
            base, out = model.find(self.config.run.model), nonsense_folder(self.options.state_dir)
            await run_plant("train", "--base", str(base), "--out", str(out))

    async def traffic_phase(self) -> None:
        """Users ask and vote from the first second; the base is measured beside them; then watch until done."""
        self.started_at, self.phase = time.time(), "base"
        self._start(self.traffic.run())
        self._start(self._keep_pace())
        self._start(self._beats())
        self.base = await ask_held_out(
            self.client, self.questions, "base", self._champion, concurrency=BASE_CONCURRENCY
        )
        satisfied = sum(answer.satisfied for answer in self.base.values())
        self.view.say(f"base on held-out questions: {satisfied} of {len(self.base)} satisfied")
        self.phase = "learning"
        works = []
        if self.options.plant_bad:
            works.append(self._start(self._plant()))
        if self.options.kills:
            works.append(self._start(self._kill()))
        while self._goes_on(works):
            self.stack.check_alive()
            for work in works:
                if work.done():
                    work.result()  # a failure of ours ends the demo
            if all(work.done() for work in works) and self._has_learned():
                self.view.say(f"target reached after {self.elapsed_s:.0f} s")
                break
            await asyncio.sleep(1.0)

    async def measure_phase(self) -> None:
        """Stop the users; ask the held-out questions of whoever is champion now."""
        self.phase = "measure"
        self.traffic.stop()
        await self.traffic.drain(with_votes=False)
        self.champion = await ask_held_out(self.client, self.questions, "champion", self._champion)
        satisfied = sum(answer.satisfied for answer in self.champion.values())
        self.view.say(
            f"champion {self._champion()} on held-out questions: {satisfied} of {len(self.champion)} satisfied"
        )

    async def drain_phase(self) -> None:
        """Wait for the votes to come and for every window to close: the reconciliation holds, or time is up."""
        self.phase = "drain"
        self.traffic.close_late_votes()
        await self.traffic.drain()
        deadline_s = time.monotonic() + DRAIN_PATIENCE_S
        while time.monotonic() < deadline_s:
            self.checks = await asyncio.to_thread(self._reconcile)
            if all(check.ok for check in self.checks):
                break
            await asyncio.sleep(4.0)
        self.phase = "done"

    async def report(self) -> list[Criterion]:
        """Reconcile once more, now that everything has stopped; print and write the results."""
        self.checks = await asyncio.to_thread(self._reconcile)
        return await finish(self)

    async def close(self) -> None:
        """Stop what runs in this process; the stack is stopped by its owner."""
        self.traffic.stop()
        for task in [*self._tasks, *self.traffic.tasks]:
            task.cancel()
        await self.client.__aexit__()
        self.watch.close()
        self.timeline.close()

    def _champion(self) -> str:
        table = self.watch.table
        return table.champion.version if table and table.champion else ""

    def _start(self, work) -> asyncio.Task:
        task = asyncio.create_task(work)
        self._tasks.append(task)
        return task

    def _reconcile(self) -> list[Check]:
        seen = seen_by(list(self.client.answers), list(self.client.votes))
        return reconcile(seen, held_by(self.options.state_dir))

    async def _keep_pace(self) -> None:
        while True:
            statuses, table = read_statuses(self.options.state_dir), self.watch.table
            pace = wanted_pace(
                self.options.concurrency,
                backlog_of(statuses),
                self.max_backlog,
                is_training=statuses.get("learner", {}).get("phase") in TRAINING,
                in_gates=self.watch.in_gates(),
                has_canary=bool(table and table.canary),
                takes_turns=self.takes_turns,
            )
            most = max(1, self.options.concurrency - BASE_CONCURRENCY) if self.phase == "base" else pace.concurrency
            self.traffic.concurrency, self.traffic.pause_s = min(most, pace.concurrency), pace.pause_s
            await asyncio.sleep(0.5)

    def _goes_on(self, works: list[asyncio.Task]) -> bool:
        """Say whether users stay: until time is up, then for what is planted or killed, or for a running canary."""
        late_s = self.elapsed_s - (60 * self.options.minutes - MEASURE_RESERVE_S)
        has_canary = bool(self.watch.table and self.watch.table.canary)
        return late_s < 0 or not all(work.done() for work in works) or (has_canary and late_s < CANARY_GRACE_S)

    def _has_learned(self) -> bool:
        """Say whether two promotions are in and the present champion satisfies its users."""
        champion = self._champion()
        recent = [a.satisfied for a in self.client.answers[-300:] if a.version == champion and a.purpose == "traffic"]
        enough = len(recent) >= MIN_CHAMPION_ANSWERS and sum(recent) / len(recent) >= self.options.target
        return enough and len(self.watch.promoted()) >= 2

    async def _beats(self) -> None:
        told = 0
        while True:
            statuses = read_statuses(self.options.state_dir)
            now_s = time.time()
            beat = take_beat(
                self.elapsed_s,
                now_s,
                self.phase,
                statuses,
                self.watch,
                self.client.answers,
                self.client.votes,
                self.traffic.num_open,
            )
            self.timeline.add(beat)
            for event in self.watch.events[told:]:
                told += 1
                self.view.say(f"{int(beat.elapsed_s):>4} s  {event.version} {event.state} {event.reason}".rstrip())
            self.view.show(self.timeline.beats)
            await asyncio.sleep(1.0)

    async def _plant(self) -> None:
        """Plant on the first promoted champion, or on the base when none comes in time."""
        while not self.watch.promoted() and self.elapsed_s < PLANT_BY * 60 * self.options.minutes:
            await asyncio.sleep(0.5)
        self.planted = await plant_bad(
            self.config.kafka, self.options.state_dir, model.find(self.config.run.model), self.watch, self.view.say
        )

    async def _kill(self) -> None:
        span_s = 60 * self.options.minutes - MEASURE_RESERVE_S - self.elapsed_s
        between_s = max(10.0, 0.7 * span_s / (len(self.options.kills) + 1))
        self.kills = await run_kills(
            self.options.state_dir, list(self.options.kills), between_s, lambda: self.watch.table, self.view.say
        )
