"""`headrace doctor`: looks at this machine and a configuration; each line says ok, warn or fail, and how to fix it.

Heavy libraries are imported in processes of their own, so that a broken one is a line here and not a crash.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from deploy import lock, preflight
from deploy.config import Config, load_all

_IMPORT_TIMEOUT_S = 180.0
_MIN_MEMORY_BYTES = 10 << 30


class Finding(NamedTuple):
    """One line of the report."""

    level: str  # ok | warn | fail
    subject: str
    text: str
    fix: str = ""


def examine(path: Path, kafka_jars: Path | None = None) -> int:
    """Print every finding; 1 if one of them is a failure."""
    num_failures = 0
    for finding in findings(path, kafka_jars):
        num_failures += finding.level == "fail"
        print(f"{finding.level:<5} {finding.subject:<14} {finding.text}", flush=True)
        if finding.fix:
            print(f"{'':<20} fix: {finding.fix}", flush=True)
    print(f"headrace doctor: {num_failures} failure(s)" if num_failures else "headrace doctor: this machine can run it")
    return 1 if num_failures else 0


def findings(path: Path, kafka_jars: Path | None) -> Iterator[Finding]:
    """Yield the findings, the quick ones first."""
    yield _python()
    yield from _machine()
    try:
        config = load_all(path)
    except ValueError as error:
        for line in str(error).splitlines():
            yield Finding("fail", "configuration", line, f"edit {path}")
    else:
        yield Finding("ok", "configuration", f"{path}, state in {config.state_dir}")
        yield from _surroundings(config)
        yield _broker(config, kafka_jars)
    for module, fix in _LIBRARIES.items():
        yield _import(module, fix)


def _python() -> Finding:
    return Finding("ok", "python", f"{sys.version.split()[0]} in {sys.prefix}")


def _machine() -> Iterator[Finding]:
    import psutil

    cores = len(os.sched_getaffinity(0))
    text = f"{cores} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB memory"
    if psutil.virtual_memory().total < _MIN_MEMORY_BYTES:
        yield Finding("warn", "machine", text, "two engines and a learner of the demo model use about 10 GiB")
    elif cores < 2:
        yield Finding("warn", "machine", text, "one core works, but the demo was measured on two")
    else:
        yield Finding("ok", "machine", text)


def _surroundings(config: Config) -> Iterator[Finding]:
    """Report the checks of `headrace up`, told apart by subject."""
    pid = lock.holder(config.state_dir)
    if pid:
        yield Finding("ok", "supervisor", f"runs with pid {pid}; its ports are not checked")
    checks = {
        "ports": preflight.port_problems,
        "model": preflight.model_problems,
        "outer parts": preflight.outer_problems,
        "state folder": preflight.folder_problems,
    }
    for subject, check in checks.items():
        if subject == "ports" and pid:
            continue
        problems = check(config)
        for problem in problems:
            what, _, fix = problem.partition("; ")
            yield Finding("fail", subject, what, fix)
        if not problems:
            yield Finding("ok", subject, _ALL_WELL[subject].format(config=config))
    free = shutil.disk_usage(preflight.nearest_folder(config.state_dir)).free
    yield Finding("ok" if free > 10 << 30 else "warn", "disk", f"{free / 2**30:.0f} GiB free at {config.state_dir}")


_ALL_WELL = {
    "ports": "all free",
    "model": "{config.run.model}",
    "outer parts": "broker {config.deploy.broker}, mlflow {config.deploy.mlflow}",
    "state folder": "{config.state_dir} can be written",
}


def _broker(config: Config, kafka_jars: Path | None) -> Finding:
    """Say which local broker would run, and what that means."""
    from deploy.up import chosen_broker

    try:
        choice = chosen_broker(config, kafka_jars)
    except ValueError as error:
        what, _, fix = str(error).partition("; ")
        return Finding("fail", "broker", what, fix)
    if choice is None:
        return Finding("ok", "broker", f"yours, at {config.kafka.bootstrap_servers}")
    return Finding(
        "ok" if choice.durable else "warn", "broker", choice.meaning, "" if choice.durable else choice.reason
    )


_LIBRARIES = {
    "torch": "make setup (see PIP_EXTRA_INDEX_URL in the Makefile for a CPU build)",
    "vllm": "make setup; on a GPU host: pip install 'headrace[gpu]'",
    "deepspeed": "make setup",
    "mlflow": "make setup",
    "kafka": "make setup",
}


def _import(module: str, fix: str) -> Finding:
    """Import a library in a process of its own and report its version."""
    code = f"import {module}; print(getattr({module}, '__version__', ''))"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=_IMPORT_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Finding("fail", module, f"does not import in {_IMPORT_TIMEOUT_S:.0f} s", fix)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return Finding("fail", module, last[:200], fix)
    return Finding("ok", module, (done.stdout.strip().splitlines() or [""])[-1])
