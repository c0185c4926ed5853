"""Runs one job at a time in a thread beside the controller's loop."""

import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from serving import jobs
from serving.gate_config import GateConfig
from serving.plan import Engine, Job, Known

logger = logging.getLogger("serving.worker")


class Order(NamedTuple):
    """A job with all that it needs to know."""

    job: Job
    known: Known
    champion: Known
    parent_digest: str
    engine: Engine | None  # to work on
    champion_engine: Engine | None  # judges the offline gates
    reload: bool  # false: the engine was just started with these weights
    revision: int  # of the table that cordons the engine; -1: it was never in one
    prompts: list[list[int]]


class Worker:
    """One thread, one job; take() hands the result over once."""

    def __init__(self, gate: GateConfig, gateways: list[str]) -> None:
        self._gate, self._gateways = gate, gateways
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="job")
        self._future: Future[jobs.Result] | None = None
        self._cached: jobs.ChampionAnswers | None = None

    def start(self, order: Order) -> None:
        assert self._future is None, "one job at a time"
        logger.info("job=start kind=%s version=%s engine=%s", order.job.kind, order.job.version, order.job.engine)
        self._future = self._pool.submit(self._work, order)

    @property
    def is_running(self) -> bool:
        return self._future is not None

    def take(self) -> jobs.Result | None:
        """Return the finished job's result, or None; a fault of our own propagates."""
        if self._future is None or not self._future.done():
            return None
        future, self._future = self._future, None
        return future.result()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _work(self, order: Order) -> jobs.Result:
        started = time.monotonic()
        if order.job.kind == "inspect":
            result = jobs.inspect(order.job, order.known, order.champion, order.parent_digest)
        else:
            assert order.engine is not None, f"{order.job} has no engine"
            result = jobs.put_into_engine(
                order.job, order.known, order.engine, order.reload, order.revision, self._gateways, self._gate
            )
            if order.job.kind == "prepare" and result.is_loaded:
                result = self._ask(order, result)
        logger.info("job=end kind=%s version=%s engine=%s seconds=%.2f refused=%r failed=%r", order.job.kind,
                    order.job.version, order.job.engine, time.monotonic() - started, result.refused,
                    result.failed)  # fmt: skip
        return result

    def _ask(self, order: Order, loaded: jobs.Result) -> jobs.Result:
        assert order.engine is not None and order.champion_engine is not None, "offline gates need two engines"
        result, self._cached = jobs.ask_offline(
            loaded, order.engine, order.champion_engine, order.champion.version, order.prompts, self._cached, self._gate
        )
        return result
