"""The controller process: `python -m serving.controller CONFIG`. serving/conductor.py is what it does each pass.

Takes the control and interaction topics. Emits candidate states and route tables, a status, gate evidence in MLflow.
"""

import argparse
import logging
import math
import signal
import sys
import threading
from pathlib import Path

from ingest.config import KafkaConfig, MlflowConfig, RunConfig, load_table
from ingest.producer import Publisher
from ingest.stage import Fenced, StageStore, open_reader, run_stage
from ingest.status import write_status
from ingest.topics import topics
from serving import weights
from serving.conductor import SCHEMA, Conductor
from serving.config import ServingConfig
from serving.plan import held_version, queue
from serving.report import Report
from serving.watch import Watch


def describe(conductor: Conductor) -> dict[str, object]:
    """Return what `headrace status` and the live view show."""
    state, verdict = conductor.state, conductor.verdict
    rollout, figures = state.rollout, verdict.figures if verdict else {}
    canary = None
    if rollout is not None:
        canary = {
            "version": rollout.version, "weight": rollout.weight, "stage": rollout.stage,
            "units": figures.get("units_canary", 0), "outcomes": figures.get("outcomes_canary", 0),
            "mean": figures.get("mean_canary", -1), "mean_champion": figures.get("mean_champion", -1),
            "e_promote": _exp(figures.get("log_e_promote", 0.0)), "threshold": rollout.threshold,
            "e_rollback": _exp(figures.get("log_e_outcome", 0.0)), "n_min": conductor.gate.n_min,
            "verdict": verdict.kind if verdict else "HOLD", "reason": verdict.reason if verdict else "",
        }  # fmt: skip
    return {
        "champion": state.champion, "standby": state.table and state.table.standby and state.table.standby.version,
        "canary": canary, "queue": queue(state), "revision": state.table.revision if state.table else 0,
        "job": f"{conductor.job.kind} {conductor.job.version}" if conductor.job else "",
        "swaps": {"count": state.num_swaps, "last_s": round(state.last_swap_s, 3)},
        "promotions": state.num_promoted, "rejections": state.num_rejected, "frozen": state.frozen,
        "ratchet": sum(state.deficits),
        "engines": {engine.name: {"alive": engine.is_alive, "holds": held_version(state, engine)}
                    for engine in conductor.watch.engines()},
    }  # fmt: skip


def _exp(log_value: float) -> float:
    return math.exp(min(log_value, 700.0))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="serving.controller", description=__doc__)
    parser.add_argument("config", type=Path)
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        run = load_table(options.config, "run", RunConfig)
        kafka = load_table(options.config, "kafka", KafkaConfig)
        serving = load_table(options.config, "serving", ServingConfig)
        mlflow = load_table(options.config, "mlflow", MlflowConfig)
        base = weights.model_folder(run.model)
        store = StageStore(run.state_dir / "serving" / "controller.sqlite", SCHEMA)
        reader = open_reader(kafka, store, [topics(kafka).control, topics(kafka).interaction], "headrace-controller")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    watch = Watch(serving, run.state_dir)
    watch.look()
    watch.start(stop)
    publisher = Publisher(kafka, "controller")
    conductor = Conductor(store, kafka, serving.gate, watch, base, run.state_dir)

    evidence = Report(mlflow, run)

    def report(figures: dict) -> None:
        write_status(run.state_dir, "controller", {**figures, **describe(conductor)})
        evidence.look(conductor, figures["at"])

    try:
        run_stage(reader, store, publisher, conductor.handle, conductor.tick, stop, report)
    except Fenced as error:
        print(error, file=sys.stderr)
        return 3
    finally:
        conductor.worker.close()
        evidence.close()
        reader.close()
        publisher.close()
        store.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
