"""How an engine is launched, without launching one."""

import socket
import subprocess
import sys

import pytest

from ingest.config import RunConfig
from serving.config import ServingConfig
from serving.engine import (
    Incarnation,
    check_launch,
    kill_incarnation,
    launch_arguments,
    launch_environment,
    main,
    read_incarnation,
    resolve_dtype,
    write_incarnation,
)

SERVING = ServingConfig.model_validate({"engines": {"blue": 21471, "green": 21472}})


def model(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    return RunConfig(model=str(tmp_path), state_dir=tmp_path / "state")


def test_dtype_auto_is_float32_only_on_a_cpu_without_bf16_units():
    assert resolve_dtype("auto", True, "flags: avx2") == "float32"
    assert resolve_dtype("auto", True, "flags: avx512_bf16") == "bfloat16"
    assert resolve_dtype("auto", False, "flags: avx2") == "bfloat16"
    assert resolve_dtype("bfloat16", True, "flags: avx2") == "bfloat16"


def test_a_cpu_engine_is_eager_in_one_process_and_loopback_only(tmp_path):
    run = model(tmp_path)
    arguments = launch_arguments(run, SERVING, "green", "green-1", on_cpu=True)
    assert arguments[:2] == ["-m", "serving.vllm_server"]
    assert {"--enforce-eager", "uni", "processed_logprobs", "green-1", "21472", "127.0.0.1"} <= set(arguments)
    environment = launch_environment(run, SERVING, on_cpu=True)
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert environment["MALLOC_MMAP_MAX_"] == "0"
    assert arguments[arguments.index("--block-size") + 1] == "32"


def test_a_gpu_engine_shares_the_memory_and_is_compiled(tmp_path):
    arguments = launch_arguments(model(tmp_path), SERVING, "blue", "blue-1", on_cpu=False)
    assert "--enforce-eager" not in arguments
    assert arguments[arguments.index("--gpu-memory-utilization") + 1] == "0.450"


def test_bad_launches_are_told_with_what_to_do(tmp_path):
    run = model(tmp_path)
    with pytest.raises(ValueError, match="blue, green"):
        check_launch(run, SERVING, "red")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="safetensors weights there"):
        check_launch(run, SERVING, "blue")
    with pytest.raises(ValueError, match="no such folder"):
        check_launch(RunConfig(model="/no/such/model"), SERVING, "blue")


def test_a_taken_port_is_told_with_its_key(tmp_path):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 21471))
        holder.listen()
        with pytest.raises(ValueError, match="is taken"):
            check_launch(model(tmp_path), SERVING, "blue")


def test_a_bad_configuration_exits_with_two(tmp_path, capsys):
    path = tmp_path / "bad.toml"
    path.write_text('[run]\nmodel = "x"\n[serving]\nenginess = {}\n')
    assert main([str(path), "--name", "blue"]) == 2
    assert "enginess" in capsys.readouterr().err


def test_only_the_process_of_that_incarnation_is_killed(tmp_path):
    command = [sys.executable, "-c", "import time; time.sleep(60)", "blue-1234"]
    with subprocess.Popen(command) as process:
        mine = Incarnation(name="blue", url="u", served_model="blue-1234", pid=process.pid, started_at=0.0)
        other = Incarnation(name="blue", url="u", served_model="blue-9999", pid=process.pid, started_at=0.0)
        write_incarnation(tmp_path, mine)
        assert read_incarnation(tmp_path, "blue") == mine
        assert not kill_incarnation(other)
        assert process.poll() is None
        assert kill_incarnation(mine)
        assert process.wait(10) == -9
    assert not kill_incarnation(mine)
