"""A scripted product and the configuration that the end-to-end test drives."""

import itertools
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest

from deploy.config import load_all
from ingest.stream import read_latest
from ingest.topics import topics
from learner.candidate import CANDIDATE_KEY, CandidateEvent

ROOT = Path(__file__).parents[2]
FINAL = "SELECT inference.inference_id AS inference_id FROM interaction WHERE state = 'final'"
DECIDED = {"promoted", "rejected", "rolled_back", "inconclusive"}

CONFIG = """
[run]
state_dir = "{state}"
model = "{model}"
name = "tiny"
[kafka]
bootstrap_servers = "127.0.0.1:{broker}"
partitions = 2
[ingest]
observation_window_s = 2.0
late_window_s = 8.0
orphan_window_s = 4.0
archive_interval_s = 0.5
[mlflow]
tracking_uri = "http://127.0.0.1:{mlflow}"
[learner]
lora_rank = 4
batch_samples = 8
min_batch_samples = 4
max_wait_s = 5.0
max_actor_share = 1.0
max_completion_tokens = 32
micro_batch_tokens = 1024
publish_every_steps = 1
publish_max_kl = 10.0
num_probes = 2
[serving]
port = {gateway}
admin_port = {admin}
engines = {{ blue = {blue}, green = {green} }}
max_model_len = 512
max_num_seqs = 8
cpu_threads = 1
[serving.gate]
delta = 0.4
weights = [0.5]
stage_units = []
n_min = 4
maturity_s = 2.0
soak_s = 2.0
t_max_s = 20.0
fdr = 0.9
kl_limit = 10.0
probe_min_prompts = 4
probe_prompts = 4
probe_tokens = 8
[deploy]
broker = "bundled"
restart_delay_s = 0.2
"""


@dataclass
class Client:
    """A scripted product: asks, votes on most answers, and remembers everything."""

    url: str
    answered: dict[str, str] = field(default_factory=dict)  # inference id -> version
    response_ids: list[str] = field(default_factory=list)
    voted: dict[str, str] = field(default_factory=dict)  # feedback id -> inference id
    failures: list[str] = field(default_factory=list)
    guard: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, number: int) -> None:
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": f"question {number}?"}],
            "max_tokens": 12,
            "temperature": 1.0,
        }
        with httpx.Client(timeout=120) as http:
            user = {"x-headrace-user": f"user-{number % 40}"}
            answer = http.post(f"{self.url}/v1/chat/completions", json=body, headers=user)
            if answer.status_code != 200:
                with self.guard:
                    self.failures.append(f"{answer.status_code} {answer.text[:300]}")
                return
            inference_id = answer.headers["x-headrace-inference-id"]
            with self.guard:
                self.answered[inference_id] = answer.headers["x-headrace-version"]
                self.response_ids.append(answer.json()["id"])
            if number % 4 == 3:
                return  # this user says nothing
            vote = {"inference_id": inference_id, "metric": "thumbs", "value": number % 3 != 0}
            told = http.post(f"{self.url}/v1/feedback", json={"feedback": [vote]}, headers=user)
            with self.guard:
                if told.status_code == 202:
                    self.voted |= {item["feedback_id"]: inference_id for item in told.json()["accepted"]}
                else:
                    self.failures.append(f"feedback {told.status_code} {told.text[:300]}")


@dataclass
class Loop:
    """What the run left, for the tests to look at."""

    config_path: Path
    client: Client
    candidates: dict[str, CandidateEvent]
    explained_answer: str
    explained_version: str
    status: str
    runs: list[dict]
    restarts: dict[str, int]
    exit_code: int
    log: str
    pids: list[int]

    @property
    def state_dir(self) -> Path:
        return load_all(self.config_path).state_dir


def wait_for(what: str, condition, timeout_s: float, log: Path):
    end = time.monotonic() + timeout_s
    while not (value := condition()):
        if time.monotonic() > end:
            pytest.fail(
                f"no {what} after {timeout_s:.0f} s; the supervisor's log ends with:\n{log.read_text()[-4000:]}"
            )
        time.sleep(0.5)
    return value


def headrace(*argv: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "deploy.cli", *argv], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def read_candidates(path: Path) -> dict[str, CandidateEvent]:
    import msgspec

    kafka = load_all(path).kafka
    records = read_latest(kafka, topics(kafka).control)
    return {
        key.removeprefix(CANDIDATE_KEY): msgspec.json.decode(record.value, type=CandidateEvent)
        for key, record in records.items()
        if key.startswith(CANDIDATE_KEY)
    }


def drive(client: Client, is_done, timeout_s: float) -> None:
    """Ask, four at a time, until is_done or the deadline."""
    end = time.monotonic() + timeout_s
    with ThreadPoolExecutor(4) as pool:
        for batch in itertools.count():
            list(pool.map(client.ask, range(batch * 8, batch * 8 + 8)))
            if is_done() or time.monotonic() > end:
                return
