"""Two real vLLM engines, tiny random models: a swap in place equals a fresh start, bad candidates are refused."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from learner.candidate import Manifest, Probe, list_files, write_manifest
from learner.export import score_folder
from learner.logprobs import Row
from serving import jobs, swap
from serving.engine import Incarnation, kill_incarnation, read_incarnation
from serving.engine_client import EngineClient, EngineError
from serving.gate_config import GateConfig
from serving.plan import Engine, Job, Known
from tests.deploy.test_cli import free_ports
from tests.tiny_model import make_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
GATE = GateConfig.model_validate({"drain_deadline_s": 0.1})
PROMPTS = [[1, 2, 3, 4, 5], [7] * 20, list(range(40, 200))]


class Stand:
    """Starts engines as the supervisor does, and ends what it started."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.processes, self.models = folder, {}, {}
        self.ports = dict(zip(("blue", "green"), free_ports(2), strict=True))

    def start(self, name: str, model: Path) -> None:
        self.models[name] = model
        config = self.folder / f"{name}.toml"
        engines = ", ".join(f"{key} = {port}" for key, port in self.ports.items())
        config.write_text(
            f'[run]\nstate_dir = "{self.folder}"\nmodel = "{model}"\n'
            f'[serving]\ndtype = "float32"\n'  # bounds are those of float32, whatever the machine can do
            f"max_model_len = 512\nmax_num_seqs = 16\nengines = {{ {engines} }}\n"
        )
        log = (self.folder / f"{name}.log").open("ab")
        command = [sys.executable, "-m", "serving.engine", str(config), "--name", name]
        self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log)

    def ready(self, name: str, but: str = "") -> Incarnation:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            assert self.processes[name].poll() is None, (self.folder / f"{name}.log").read_text()[-3000:]
            incarnation = read_incarnation(self.folder, name)
            if incarnation and incarnation.served_model != but and client(incarnation).is_healthy():
                return incarnation
            time.sleep(0.3)
        raise AssertionError(f"engine {name} is not ready: {(self.folder / f'{name}.log').read_text()[-3000:]}")

    def close(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


def client(incarnation: Incarnation) -> EngineClient:
    return EngineClient(incarnation.url, incarnation.served_model)


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stand]:
    one = Stand(tmp_path_factory.mktemp("stand"))
    make_tiny_model(one.folder / "base", seed=0)
    one.start("blue", one.folder / "base")
    one.start("green", one.folder / "base")
    yield one
    one.close()


def make_candidate(stand: Stand, version: str, seed: int, probes: list[Probe]) -> Known:
    folder = make_tiny_model(stand.folder / "candidates" / version, seed)
    manifest = Manifest(version=version, parent="v000000", kind="full", files=list_files(folder), created_at=0.0,
                        probes=probes)  # fmt: skip
    return Known(version=version, folder=str(folder), manifest_sha256=write_manifest(folder, manifest))


def learner_probes(folder: Path) -> list[Probe]:
    """The log-probs of plain transformers, in float32, as the learner writes them."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    probes = []
    for prompt in PROMPTS:
        completion = [11, 12, 13, 14]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(-1)[range(4), completion].tolist()
        probes.append(Probe(prompt_ids=prompt, completion_ids=completion, logprobs=logprobs))
    return probes


def as_engine(incarnation: Incarnation) -> Engine:
    return Engine(incarnation.name, incarnation.url, incarnation.served_model, True)


def put(stand: Stand, known: Known, incarnation: Incarnation) -> jobs.Result:
    job = Job("prepare", known.version, incarnation.name)
    return jobs.put_into_engine(job, known, as_engine(incarnation), True, 0, [], GATE)


def test_a_swap_in_place_changes_the_answers_to_those_of_a_fresh_engine(stand):
    candidate = make_candidate(stand, "v000001", seed=1, probes=[])
    probes = learner_probes(Path(candidate.folder))
    make_tiny_model(stand.folder / "candidates" / "v000002", seed=1)
    with_probes = make_candidate(stand, "v000002", seed=1, probes=probes)
    blue, green = stand.ready("blue"), stand.ready("green")
    before = client(blue).sample(PROMPTS, 12, 0.0)
    assert [a.token_ids for a in client(green).sample(PROMPTS, 12, 0.0)] == [a.token_ids for a in before]

    result = put(stand, with_probes, blue)

    assert result.is_loaded, (result.refused, result.failed)
    assert result.figures["logprob_difference"] < 0.01
    assert client(blue).weight_label() == f"v000002:{result.digest}"
    after = client(blue).sample(PROMPTS, 12, 0.0)
    assert [a.token_ids for a in after] != [a.token_ids for a in before]

    # A fresh engine on the candidate: kill green as a fault would, start it on the candidate's folder.
    assert kill_incarnation(green)
    stand.processes["green"].wait(20)
    stand.start("green", Path(candidate.folder))
    fresh = stand.ready("green", but=green.served_model)
    assert fresh.served_model != green.served_model
    with pytest.raises(EngineError, match="404"):
        client(green).sample(PROMPTS[:1], 1, 0.0)
    answers = client(fresh).sample(PROMPTS, 12, 0.0)
    assert [a.token_ids for a in answers] == [a.token_ids for a in after]
    scores = client(fresh).score(PROMPTS, [[11, 12, 13, 14]] * 3)
    assert np.allclose(
        np.concatenate(client(blue).score(PROMPTS, [[11, 12, 13, 14]] * 3)), np.concatenate(scores), atol=1e-4
    )


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_the_learner_finds_the_log_probs_that_the_engine_reported(stand, temperature):
    """A/A: equal weights, float32. At temperature 0.7 a log-prob of temperature 1 would be off by far more."""
    green = stand.ready("green")
    folder = stand.models["green"]
    prompts = [[1 + (7 * i + j) % 200 for j in range(12)] for i in range(32)]
    answers = client(green).sample(prompts, 24, temperature, seed=3)
    rows = [Row(prompt, answer.token_ids, temperature) for prompt, answer in zip(prompts, answers, strict=True)]
    learner = np.concatenate([np.asarray(scores) for scores in score_folder(folder, rows)])
    log_rho = learner - np.concatenate([np.asarray(answer.logprobs) for answer in answers])
    assert len(log_rho) > 300
    assert abs(log_rho.mean()) < 1e-3
    assert np.abs(log_rho).max() < 1e-2


def test_weights_that_are_not_the_learners_are_refused_by_the_probes(stand):
    blue = stand.ready("blue")
    other = learner_probes(make_tiny_model(stand.folder / "other", seed=5))
    result = put(stand, make_candidate(stand, "v000003", seed=3, probes=other), blue)
    assert "log-probs differ from the learner's" in result.refused and result.quarantine


def test_nan_and_changed_files_are_refused_before_any_engine(stand):
    import torch
    from safetensors.torch import load_file, save_file

    base = Known(version="v000000", folder=str(stand.folder / "base"))
    nan = make_candidate(stand, "v000004", seed=4, probes=[])
    path = Path(nan.folder) / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})
    changed = jobs.inspect(Job("inspect", "v000004"), nan, base, "")
    assert "sha256" in changed.refused and "finite_weights" in changed.refused
    assert torch.isnan(load_file(path)["model.norm.weight"]).any()


def test_nan_weights_that_reach_an_engine_are_caught_by_verification(stand):
    blue = stand.ready("blue")
    version = swap.Version("v000004", stand.folder / "candidates" / "v000004", "d", [])
    with pytest.raises(swap.SwapError):
        swap.load(client(blue), version, True, GATE.verify_bound)
