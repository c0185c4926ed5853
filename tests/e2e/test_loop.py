"""The whole loop on the bundled broker with real vLLM and a tiny random model: asked, judged, learned, gated."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import httpx
import pytest

from deploy import children, lock
from deploy.config import load_all, own_ports
from deploy.preflight import is_free
from ingest.log import feedback_dispositions, query
from ingest.status import read_statuses
from learner.candidate import CandidateEvent, read_manifest
from learner.lineage import read_steps, surviving_steps
from rewards.ledger import count, samples_of
from tests.deploy.test_cli import free_ports
from tests.e2e.driver import CONFIG, DECIDED, FINAL, ROOT, Client, Loop, drive, headrace, read_candidates, wait_for
from tests.tiny_model import make_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def loop(tmp_path_factory: pytest.TempPathFactory):
    """Bring everything up, drive it until a gate has decided, let it settle, look, and stop it."""
    folder = tmp_path_factory.mktemp("loop")
    names = ("broker", "mlflow", "gateway", "admin", "blue", "green")
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    model = make_tiny_model(folder / "model")
    path = folder / "headrace.toml"
    path.write_text(CONFIG.format(state=folder / "state", model=model, **ports))
    log = folder / "up.log"
    argv = [sys.executable, "-m", "deploy.cli", "up", "--config", str(path)]
    with log.open("w") as output:
        supervisor = subprocess.Popen(argv, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield run_through(path, folder / "state", ports, supervisor, log)
    finally:
        if supervisor.poll() is None:
            supervisor.kill()
            supervisor.wait()
        children.end_leftovers((folder / "state").resolve(), 5.0)


def run_through(path: Path, state_dir: Path, ports: dict[str, int], supervisor: subprocess.Popen, log: Path) -> Loop:
    client = Client(f"http://127.0.0.1:{ports['gateway']}")

    def supervised() -> dict:
        assert supervisor.poll() is None, log.read_text()[-4000:]
        return read_statuses(state_dir).get("supervisor", {})

    def answers() -> bool:
        supervised()
        try:
            return httpx.get(f"{client.url}/health", timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    # 1. The first answer comes before the second engine is up.
    wait_for("champion", answers, 300, log)
    drive(client, lambda: len(client.answered) >= 24, 60)
    # 2. A killed joiner and gateway-independent learner lose nothing.
    os.kill(supervised()["processes"]["joiner"]["pid"], signal.SIGKILL)
    # 3. Until a gate has decided about a candidate.
    wait_for("every process", lambda: supervised().get("state") == "running", 300, log)
    decided: dict[str, CandidateEvent] = {}

    def has_decided() -> bool:
        decided.update({name: event for name, event in read_candidates(path).items() if event.state in DECIDED})
        return bool(decided)

    drive(client, has_decided, 300)
    # 4. Until every window has closed and every feedback is settled.
    wait_for("settled books", lambda: is_settled(state_dir, client), 60, log)
    used = {name.rpartition("@")[0] for step in surviving_steps(state_dir) for name in step.sample_ids}
    answer_id = next(name for name in client.voted.values() if name in used)
    version = next(iter(decided), "v000001")
    seen = {
        "explained_answer": headrace("explain", answer_id, "--config", str(path)),
        "explained_version": headrace("explain", version, "--config", str(path)),
        "status": headrace("status", "--config", str(path)),
        "candidates": read_candidates(path),
        "runs": mlflow_runs(ports["mlflow"]),
    }
    processes = supervised()["processes"]
    # 5. A clean stop.
    supervisor.terminate()
    exit_code = supervisor.wait(timeout=120)
    return Loop(
        config_path=path,
        client=client,
        restarts={name: item["restarts"] for name, item in processes.items()},
        exit_code=exit_code,
        log=log.read_text(),
        pids=[item["pid"] for item in processes.values() if item["pid"]],
        **seen,  # type: ignore[arg-type]
    )


def is_settled(state_dir: Path, client: Client) -> bool:
    final = {row["inference_id"] for row in query(state_dir, FINAL)}
    dispositions = feedback_dispositions(state_dir)
    return set(client.answered) <= final and all(
        dispositions.get(name, "pending") != "pending" for name in client.voted
    )


def mlflow_runs(port: int) -> list[dict]:
    with httpx.Client(base_url=f"http://127.0.0.1:{port}/api/2.0/mlflow", timeout=30) as http:
        found = http.post("/experiments/search", json={"max_results": 10}).json().get("experiments", [])
        ids = [item["experiment_id"] for item in found]
        return http.post("/runs/search", json={"experiment_ids": ids, "max_results": 100}).json().get("runs", [])


def test_no_client_request_failed(loop: Loop) -> None:
    assert loop.client.failures == []
    assert len(loop.client.answered) >= 24


def test_every_answer_is_archived_once_and_joined_once(loop: Loop) -> None:
    archived = [row["inference_id"] for row in query(loop.state_dir, "SELECT inference_id FROM inference")]
    final = query(loop.state_dir, FINAL)
    assert Counter(archived) == Counter(list(loop.client.answered))
    assert Counter(row["inference_id"] for row in final) == Counter(list(loop.client.answered))


def test_every_accepted_feedback_is_settled(loop: Loop) -> None:
    dispositions = feedback_dispositions(loop.state_dir)
    assert {name: dispositions.get(name) for name in loop.client.voted} == dict.fromkeys(loop.client.voted, "applied")


def test_samples_are_learned_from_once(loop: Loop) -> None:
    counts = count(loop.state_dir)
    assert counts["samples_full"] > 0
    steps = surviving_steps(loop.state_dir)
    assert len(read_steps(loop.state_dir)) >= 1
    used = Counter(name for step in steps for name in step.sample_ids)
    assert [name for name, times in used.items() if times > 1] == []
    for name in used:
        assert name in {sample.sample_id for sample in samples_of(loop.state_dir, name.rpartition("@")[0])}


def test_gate_has_decided_about_an_announced_candidate(loop: Loop) -> None:
    decided = {name: event for name, event in loop.candidates.items() if event.state in DECIDED}
    assert decided
    for name, event in decided.items():
        assert event.author == "controller"
        manifest, _ = read_manifest(Path(event.folder))
        assert manifest.version == name


def test_explain_tells_the_story_both_ways(loop: Loop) -> None:
    for words in ("version   v0000", "with propensity", "thumbs", "-> applied", "reward ", "sample ", "step  "):
        assert words in loop.explained_answer, loop.explained_answer
    for words in ("child of v0000", "state ", "steps ", "samples "):
        assert words in loop.explained_version, loop.explained_version


def test_killed_joiner_was_restarted_and_nothing_else(loop: Loop) -> None:
    assert loop.restarts["joiner"] == 1
    others = {name: n for name, n in loop.restarts.items() if name != "joiner" and n}
    assert others == {}, loop.log[-4000:]


def test_status_shows_every_process(loop: Loop) -> None:
    for name in ("broker", "engine-blue", "engine-green", "gateway", "joiner", "learner", "controller"):
        assert name in loop.status


def test_mlflow_has_a_run_with_metrics(loop: Loop) -> None:
    metrics = [metric["key"] for run in loop.runs for metric in run["data"].get("metrics", [])]
    assert metrics, json.dumps(loop.runs)[:500]


def test_stop_leaves_nothing(loop: Loop) -> None:
    assert loop.exit_code == 0
    assert [pid for pid in loop.pids if children.members(pid)] == []
    assert lock.holder(loop.state_dir) is None
    config = load_all(loop.config_path)
    assert {key: is_free("127.0.0.1", port) for key, port in own_ports(config).items()} == dict.fromkeys(
        own_ports(config), True
    )
    assert "killed" not in loop.log
