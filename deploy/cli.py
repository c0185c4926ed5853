"""The `headrace` command: up, down, status, explain, rollback, doctor, demo.

Nothing heavy is imported before a command needs it. Exit status: 0 done, 1 not so (see the message), 2 bad input.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

DEFAULT_CONFIG = Path("deploy/local.toml")
BAD_INPUT = 2


def main(argv: list[str] | None = None) -> int:
    """Run one command; ValueError anywhere below is bad input: its message and exit status 2."""
    args = sys.argv[1:] if argv is None else argv
    if args[:1] == ["demo"]:  # has options of its own
        from deploy.demo import main as demo

        return demo(args[1:])
    parsed = parser().parse_args(args)
    try:
        return parsed.run(parsed)
    except ValueError as error:
        for line in str(error).splitlines():
            print(f"headrace {parsed.command}: {line}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    """Return the parser of every command."""
    top = argparse.ArgumentParser(
        prog="headrace", description="The more a product is used, the better its own model gets."
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    up = _command(commands, "up", "start and supervise every process of a configuration", run_up)
    up.add_argument("--detach", action="store_true", help="return when everything is ready; stop with headrace down")
    _command(commands, "down", "stop what headrace up started, and anything a killed supervisor left", run_down)
    status = _command(commands, "status", "one screen: what runs, what is served, what is learned", run_status)
    status.add_argument("--watch", action="store_true", help="refresh until interrupted")
    status.add_argument("--json", action="store_true", help="print the raw status files")
    explain = _command(commands, "explain", "the story of one answer, or of one version", run_explain)
    explain.add_argument("id", help="inference id (inf_...), response id (resp_...) or version (v000003)")
    rollback = _command(
        commands, "rollback", "take the canary's traffic away, else return to the last champion", run_rollback
    )
    rollback.add_argument("--reason", default="", help="kept with the decision")
    _command(commands, "doctor", "check this machine and a configuration, with a fix for each problem", run_doctor)
    commands.add_parser("demo", help="simulated users teach a real model; live view", add_help=False)
    return top


def _command(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    text: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=text)
    command.add_argument("--config", type=Path, default=DEFAULT_CONFIG, help=f"TOML file (default: {DEFAULT_CONFIG})")
    command.set_defaults(run=run)
    return command


def run_up(args: argparse.Namespace) -> int:
    from deploy.up import run_detached, run_foreground

    return run_detached(args.config) if args.detach else run_foreground(args.config, _jars())


def run_down(args: argparse.Namespace) -> int:
    from deploy.up import stop

    return stop(args.config)


def run_status(args: argparse.Namespace) -> int:
    from deploy.status import show

    return show(args.config, watch=args.watch, as_json=args.json)


def run_explain(args: argparse.Namespace) -> int:
    from deploy.explain import explain

    return explain(args.config, args.id)


def run_rollback(args: argparse.Namespace) -> int:
    from deploy.rollback import rollback

    return rollback(args.config, args.reason)


def run_doctor(args: argparse.Namespace) -> int:
    from deploy.doctor import examine

    return examine(args.config, _jars())


def _jars() -> Path | None:
    """Return the folder of Apache Kafka jars that the environment names; nothing below reads the environment."""
    named = os.environ.get("HEADRACE_KAFKA_JARS")
    return Path(named) if named else None


if __name__ == "__main__":
    sys.exit(main())
