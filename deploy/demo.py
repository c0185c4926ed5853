"""`headrace demo`: the whole loop on this machine, with simulated users, until it has learned or time is up.

Owns the order of the demo: start, measure the base, let users ask and vote, measure the champion, drain, stop,
reconcile, report. Promises: exit status 0 only if it learned, nothing was lost or doubled, and no request failed;
whatever happens, everything that it started is stopped.
"""

import argparse
import asyncio
import signal
import sys
import time
from pathlib import Path

from deploy.demo_results import log_curves
from deploy.demo_run import Demo, Options
from deploy.demo_stack import Stack, write_config
from deploy.demo_view import View

LOCAL_TOML = Path(__file__).parent / "local.toml"


def parse(argv: list[str]) -> Options:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="headrace demo", description="watch a model learn from its users' feedback")
    parser.add_argument(
        "--config", type=Path, default=LOCAL_TOML, help="deployment to run (default: deploy/local.toml)"
    )
    parser.add_argument("--state-dir", type=Path, help="state folder (default: a new one, bench-out/demo-TIME)")
    parser.add_argument("--minutes", type=float, default=10.0, help="of traffic, measuring included (default 10)")
    parser.add_argument("--target", type=float, default=0.75, help="true share of satisfied users to stop at (0.75)")
    parser.add_argument("--concurrency", type=int, default=32, help="users with an open question (32)")
    parser.add_argument(
        "--max-backlog", type=int, help="samples unconsumed at which users slow down (default: a batch)"
    )
    parser.add_argument("--questions", type=int, default=80, help="held-out questions to measure on (80)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--plant-bad", action="store_true", help="announce a NaN and a nonsense candidate; both must stop"
    )
    parser.add_argument(
        "--kill",
        action="append",
        default=[],
        metavar="PROCESS",
        help="SIGKILL this process during the traffic; repeatable (learner, joiner, canary-engine, ..)",
    )
    parser.add_argument("--plain", action="store_true", help="plain lines also on a terminal")
    arguments = parser.parse_args(argv)
    state_dir = arguments.state_dir or Path("bench-out") / time.strftime("demo-%Y%m%d-%H%M%S")
    return Options(
        config=arguments.config,
        state_dir=state_dir.resolve(),
        minutes=arguments.minutes,
        target=arguments.target,
        concurrency=arguments.concurrency,
        max_backlog=arguments.max_backlog,
        num_questions=arguments.questions,
        seed=arguments.seed,
        plant_bad=arguments.plant_bad,
        kills=tuple(arguments.kill),
        live=False if arguments.plain else None,
    )


async def run(options: Options) -> int:
    """Run the demo; return 0 if every criterion holds, else 1.

    1. Start the deployment. 2. Measure and learn. 3. Report.  In every case: stop the deployment.
    """
    this = asyncio.current_task()
    assert this, "run() is a task"
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    stack = Stack(write_config(options.config, options.state_dir), options.state_dir)
    with View(options.live) as view:
        demo = Demo(options, stack, view)
        view.say(f"state folder {options.state_dir}")
        try:
            stack.start()
            await demo.ready()
            await demo.traffic_phase()
            await demo.measure_phase()
            await demo.drain_phase()
            await asyncio.to_thread(log_curves, demo)
        finally:
            await demo.close()
            view.say("stopping")
            await asyncio.to_thread(stack.stop)
    criteria = await demo.report()
    return 0 if all(criterion.ok for criterion in criteria) else 1


def main(argv: list[str]) -> int:
    """Run `headrace demo`."""
    options = parse(argv)
    if (options.state_dir / "demo").exists():
        print(f"--state-dir {options.state_dir} holds an earlier demo; name a new folder", file=sys.stderr)
        return 2
    try:
        return asyncio.run(run(options))
    except ValueError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("demo: interrupted; everything is stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
