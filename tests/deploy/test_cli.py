"""Every bad input of the command says what, where and how to fix it, and nothing is started."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.cli import main
from deploy.model import find, get

ROOT = Path(__file__).parents[2]


def write_config(tmp_path: Path, text: str = "", model: str = "") -> Path:
    model = model or str(tiny_model_folder(tmp_path))
    path = tmp_path / "headrace.toml"
    ports = free_ports(6)
    path.write_text(
        f'[run]\nmodel = "{model}"\nstate_dir = "{tmp_path}/state"\n'
        f'[kafka]\nbootstrap_servers = "127.0.0.1:{ports[0]}"\n'
        f'[mlflow]\ntracking_uri = "http://127.0.0.1:{ports[1]}"\n'
        f"[serving]\nport = {ports[2]}\nadmin_port = {ports[3]}\n"
        f"engines = {{ blue = {ports[4]}, green = {ports[5]} }}\n{text}"
    )
    return path


def tiny_model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")
    return folder


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(list(argv)) == 2
    return capsys.readouterr().err


def test_up_refuses_a_model_folder_without_weights(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "hollow"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    message = refusal(capsys, "up", "--config", str(write_config(tmp_path, model=str(folder))))
    assert f"the folder {folder} has no weights (*.safetensors), no a tokenizer" in message
    assert "`make model`" in message


def test_up_refuses_a_model_that_is_nowhere(tmp_path: Path, capsys) -> None:
    message = refusal(capsys, "up", "--config", str(write_config(tmp_path, model="owner/not-there")))
    assert "'owner/not-there' is neither a folder here nor a Hugging Face model" in message
    message = refusal(capsys, "up", "--config", str(write_config(tmp_path, model="/not/there")))
    assert "the folder /not/there does not exist; `make model`" in message


def test_up_refuses_a_taken_port_and_names_its_owner(tmp_path: Path, capsys) -> None:
    path = write_config(tmp_path)
    port = int(path.read_text().split("\nport = ")[1].split()[0])
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        message = refusal(capsys, "up", "--config", str(path))
    assert f"port {port} (serving.port in {path}) is taken by pid" in message
    assert "set serving.port to a free port" in message


def test_up_refuses_an_unreachable_broker(tmp_path: Path, capsys) -> None:
    message = refusal(capsys, "up", "--config", str(write_config(tmp_path, '[deploy]\nbroker = "external"\n')))
    assert "no broker answers at kafka.bootstrap_servers = '127.0.0.1:" in message
    assert 'set deploy.broker = "auto" for a local one' in message


def test_up_refuses_an_unreachable_mlflow_and_engine(tmp_path: Path, capsys) -> None:
    text = 'attach = { blue = "http://127.0.0.1:9" }\n[deploy]\nmlflow = "external"\n'
    message = refusal(capsys, "up", "--config", str(write_config(tmp_path, text)))
    assert "no MLflow server answers at mlflow.tracking_uri" in message
    assert "no vLLM server answers at serving.attach.blue = 'http://127.0.0.1:9'" in message


def test_up_refuses_an_unknown_key_before_anything_starts(tmp_path: Path, capsys) -> None:
    path = write_config(tmp_path, "[deploy]\nbrocker = 1\n")
    message = refusal(capsys, "up", "--config", str(path))
    assert f"{path}: unknown key deploy.brocker; known keys of [deploy]: broker" in message
    assert not (tmp_path / "state").exists()


def test_up_refuses_kafka_without_its_jars(tmp_path: Path, capsys) -> None:
    text = f'[deploy]\nbroker = "kafka"\nkafka_jars = "{tmp_path}/none"\n'
    message = refusal(capsys, "up", "--config", str(write_config(tmp_path, text)))
    assert "Apache Kafka cannot run: no Apache Kafka jars in" in message


def test_unknown_configuration_file_is_named_by_every_command(tmp_path: Path, capsys) -> None:
    absent = str(tmp_path / "absent.toml")
    for argv in (["up"], ["down"], ["status"], ["rollback"], ["explain", "v000001"]):
        assert f"configuration file {absent} does not exist" in refusal(capsys, *argv, "--config", absent)


def test_down_and_status_with_nothing_running_say_so(tmp_path: Path, capsys) -> None:
    path = str(write_config(tmp_path))
    assert main(["down", "--config", path]) == 0
    assert f"nothing runs from {tmp_path}/state" in capsys.readouterr().out
    assert main(["status", "--config", path]) == 1
    assert "not running" in " ".join(capsys.readouterr().out.split())  # a terminal breaks lines


def test_up_refuses_a_state_folder_that_is_a_file(tmp_path: Path, capsys) -> None:
    path = write_config(tmp_path)
    (tmp_path / "state").write_text("")
    assert f"run.state_dir = {tmp_path}/state cannot be written" in refusal(capsys, "up", "--config", str(path))


def test_doctor_names_each_problem_with_a_fix(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("deploy.doctor._LIBRARIES", {"json": "", "no_such_library": "make setup"})
    path = write_config(tmp_path, '[deploy]\nbroker = "external"\n', model="/not/there")
    assert main(["doctor", "--config", str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "headrace doctor: 3 failure(s)"
    assert [line.split()[1] for line in lines if line.startswith("fail")] == ["model", "outer", "no_such_library"]
    assert sum(line.strip().startswith("fix: ") for line in lines) == 3
    assert "No module named 'no_such_library'" in "\n".join(lines)
    assert not (tmp_path / "state").exists()


def test_unknown_command_is_refused_with_the_known_ones() -> None:
    done = subprocess.run([sys.executable, "-m", "deploy.cli", "run"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert "invalid choice: 'run'" in done.stderr
    assert "rollback" in done.stderr


def test_model_folder_is_found_and_not_made_again(tmp_path: Path) -> None:
    folder = tiny_model_folder(tmp_path)
    assert find(str(folder)) == folder
    assert get(folder) is False
