"""Contracts and the command load without the heavy libraries."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "vllm", "deepspeed", "mlflow", "transformers", "peft")
CONTRACTS = [
    "ingest.events",
    "ingest.ids",
    "ingest.topics",
    "ingest.producer",
    "ingest.stream",
    "ingest.stage",
    "ingest.log",
    "ingest.config",
    "ingest.status",
    "rewards.samples",
    "rewards.ledger",
    "rewards.config",
    "learner.candidate",
    "learner.lineage",
    "learner.tracking",
    "learner.config",
    "serving.routes",
    "serving.config",
    "serving.gate_config",
]
COMMANDS = ["deploy.cli", "deploy.up", "deploy.supervise", "deploy.preflight", "deploy.doctor", "deploy.status"]


@pytest.mark.parametrize("module", [*CONTRACTS, *COMMANDS, "deploy.explain", "deploy.rollback", "serving.gateway"])
def test_module_loads_without_heavy_libraries(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_help_loads_neither_kafka_nor_configuration_models() -> None:
    code = (
        "import sys\nfrom deploy.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "print([name for name in ('kafka', 'pydantic', 'msgspec', 'rich', 'psutil') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip().splitlines()[-1] == "[]", done.stdout + done.stderr
