"""What runs follows from the configuration."""

from pathlib import Path

from deploy.config import load_all
from deploy.processes import Process, build
from tests.deploy.test_cli import write_config


def processes(tmp_path: Path, text: str = "") -> dict[str, Process]:
    return {process.name: process for process in build(load_all(write_config(tmp_path, text)), Path("jars"))}


def test_local_deployment_has_every_process_and_the_first_answer_waits_for_little(tmp_path: Path) -> None:
    built = processes(tmp_path)
    assert list(built)[:5] == ["broker", "topics", "engine-blue", "gateway", "controller"]
    assert set(built) == {
        *("broker", "topics", "mlflow", "engine-blue", "engine-green", "gateway"),
        *("joiner", "archiver", "rewards", "learner", "controller"),
    }
    late = {name for name, process in built.items() if "gateway" in process.after}
    assert late == {"engine-green", "learner", "mlflow"}
    assert built["broker"].argv[-2:] == ["--jars", "jars"]


def test_outer_parts_are_not_started(tmp_path: Path) -> None:
    text = (
        'attach = { blue = "http://gpu:1", green = "http://gpu:2" }\n'
        '[deploy]\nbroker = "external"\nmlflow = "external"\n'
    )
    assert set(processes(tmp_path, text)) == {
        *("topics", "gateway", "joiner", "archiver", "rewards", "learner", "controller")
    }


def test_every_forerunner_is_a_process(tmp_path: Path) -> None:
    built = processes(tmp_path)
    assert {name for process in built.values() for name in process.after} <= set(built)


def test_jars_of_the_configuration_win(tmp_path: Path) -> None:
    built = processes(tmp_path, '[deploy]\nkafka_jars = "mine"\n')
    assert "--jars" not in built["broker"].argv
