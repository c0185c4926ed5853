"""The learner's durable life on a tiny model: steps, kills, candidates, returns to the champion."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from learner.candidate import CandidateEvent, check_files, read_manifest
from learner.lineage import candidates_of_sample, read_steps, steps_of_candidate, surviving_steps
from learner.step import Stopped
from tests.learner.examples import sample, tiny_config, tiny_session
from tests.tiny_model import make_tiny_model

# One process imports the heavy libraries and forks a child per life, which opens the session and may kill itself.
RUN = """
import json, os, signal, sys
from pathlib import Path
import deepspeed, peft, torch, transformers
from tests.learner.examples import sample, tiny_config, tiny_session

def live(folder, point, nth, zero_stage, dtype):
    seen = []
    def kill(name):
        seen.append(name)
        if name == point and seen.count(name) == nth:
            os.kill(os.getpid(), signal.SIGKILL)
    config = tiny_config(zero_stage=zero_stage, dtype=dtype, max_pending_candidates=9)
    session = tiny_session(Path(folder), config, kill)
    session.follow(session.unannounced())
    while True:
        if session.is_export_due():
            session.export()
        session.follow(session.unannounced())
        if session.state.num_consumed == 32:
            return
        if session.state.offsets.get("0", 0) < 32:
            start = session.state.offsets.get("0", 0)
            session.take([sample(i) for i in range(start, start + 8)], {"0": start + 8})
        plan = session.plan(False)
        if plan:
            session.step(plan)

for life in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        live(*life)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
POINTS = [("step_begin", 2), ("weights_moved", 2), ("saved", 3), ("recorded", 2), ("exported", 1), ("export_saved", 1)]
ATOL = {"float32": 1e-4, "bfloat16": 2e-3}  # between ZeRO stages; the weights moved by up to 0.04


def run_lives(lives: list[tuple[Path, str, int, int, str]]) -> list[int]:
    """Run lives of 4 steps of 8 samples, killed at the nth pass of a point if one is named; return exit codes."""
    root = Path(__file__).parents[2]
    argument = json.dumps([[str(folder), *rest] for folder, *rest in lives])
    command = [sys.executable, "-c", RUN, argument]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, check=True)
    return [int(line) for line in done.stdout.decode().splitlines() if line.lstrip("-").isdigit()]


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    checkpoints = folder / "state" / "learner" / "checkpoints"
    return load_file(checkpoints / (checkpoints / "CURRENT").read_text() / "trainable.safetensors")


@pytest.fixture(scope="module")
def lives(tmp_path_factory) -> dict[str, Path]:
    """Folders of lives: undisturbed ones by precision and ZeRO stage, killed and resumed ones by point."""
    root = tmp_path_factory.mktemp("lives")
    undisturbed = {f"{dtype} {stage}": (dtype, stage) for dtype in ATOL for stage in (0, 2)}
    killed = {f"{dtype} {point}": (dtype, point, nth) for dtype in ATOL for point, nth in POINTS}
    folders = {name: root / name for name in (*undisturbed, *killed)}
    make_tiny_model(root / "model")
    for folder in folders.values():
        folder.mkdir()
        (folder / "model").symlink_to(root / "model")
    planned = [(folders[name], "", 1, stage, dtype) for name, (dtype, stage) in undisturbed.items()]
    for name, (dtype, point, nth) in killed.items():
        planned += [(folders[name], point, nth, 0, dtype), (folders[name], "", 1, 0, dtype)]
    assert run_lives(planned) == [0] * len(undisturbed) + [-signal.SIGKILL, 0] * len(killed)
    return folders


@pytest.mark.parametrize("point", [point for point, _ in POINTS])
@pytest.mark.parametrize("dtype", ATOL)
def test_a_kill_at_any_point_ends_in_the_same_weights_bit_for_bit(lives, dtype, point):
    expected, ours = final_weights(lives[f"{dtype} 0"]), final_weights(lives[f"{dtype} {point}"])
    assert all(torch.equal(expected[name], ours[name]) for name in expected)
    state_dir = lives[f"{dtype} {point}"] / "state"
    steps = surviving_steps(state_dir)
    used = [sample_id for record in steps for sample_id in record.sample_ids]
    assert sorted(used) == sorted(sample(i).sample_id for i in range(32))
    assert [record.step for record in steps] == [1, 2, 3, 4]
    assert len((state_dir / "learner" / "steps.jsonl").read_text().splitlines()) == 4
    assert sorted(p.name for p in (state_dir / "candidates").glob("v*")) == ["v000001", "v000002"]


@pytest.mark.parametrize("dtype", ATOL)
def test_zero_stage_2_takes_the_same_steps(lives, dtype):
    """In bfloat16 too: there, without ZeRO, another optimiser of DeepSpeed is at work."""
    expected, ours = final_weights(lives[f"{dtype} 0"]), final_weights(lives[f"{dtype} 2"])
    assert all(torch.allclose(expected[name], ours[name], atol=ATOL[dtype]) for name in expected)


@pytest.fixture
def session(tmp_path, lives):
    (tmp_path / "model").symlink_to(lives["float32 0"] / "model")
    session = tiny_session(tmp_path)
    session.folder = tmp_path  # pyright: ignore[reportAttributeAccessIssue]
    return session


def take_steps(session, first: int, num: int) -> None:
    session.take([sample(i) for i in range(first, first + 8 * num)], {"0": first + 8 * num})
    for _ in range(num):
        plan = session.plan(False)
        assert plan is not None and session.step(plan).skipped == ""


def test_a_candidate_is_sound_and_its_probes_are_its_own_log_probs(session):
    take_steps(session, 0, 2)
    assert session.is_export_due()
    version = session.export()
    folder = session.folder / "state" / "candidates" / version
    manifest, sha256 = read_manifest(folder)
    assert check_files(folder, manifest) == []
    assert (manifest.version, manifest.parent, manifest.step, manifest.num_samples) == ("v000001", "v000000", 2, 16)
    assert {file.name for file in manifest.files} >= {"model.safetensors", "config.json", "tokenizer.json"}
    (proposal,) = session.unannounced()
    assert (proposal.state, proposal.manifest_sha256) == ("proposed", sha256)
    assert not session.is_export_due()

    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(session.folder / "model", dtype=torch.float32)
    probe = manifest.probes[0]
    ids = torch.tensor([probe.prompt_ids + probe.completion_ids])
    first = len(probe.prompt_ids) - 1

    def scored(model) -> torch.Tensor:
        logprobs = torch.log_softmax(model(ids).logits[0, first:-1], -1)
        return logprobs.gather(1, torch.tensor(probe.completion_ids)[:, None])[:, 0]

    assert scored(merged).tolist() == pytest.approx(probe.logprobs, abs=1e-4)
    assert not torch.allclose(scored(base), torch.tensor(probe.logprobs), atol=1e-2)
    assert [record.step for record in steps_of_candidate(session.folder / "state", version)] == [1, 2]
    assert candidates_of_sample(session.folder / "state", sample(3).sample_id) == [version]


def test_the_learner_waits_for_the_verdict_when_it_is_too_far_ahead(session):
    session.config = session.config.model_copy(update={"max_steps_ahead": 1})
    take_steps(session, 0, 2)
    version = session.export()
    take_steps(session, 16, 1)
    session.take([sample(i) for i in range(24, 32)], {"0": 32})
    assert session.plan(False) is None
    session.follow([CandidateEvent(version=version, state="inconclusive", at=1.0)])
    assert session.plan(False) is not None


def test_a_rejected_candidate_is_undone_and_its_samples_are_used_again(session):
    take_steps(session, 0, 2)
    first = session.export()
    session.state.beta = 9.0  # as adapted on the way to this candidate
    session.follow([CandidateEvent(version=first, state="promoted", at=1.0)])
    assert session.state.beta == session.config.beta
    champion = {name: value.clone() for name, value in session._engine.trainable_state().items()}
    take_steps(session, 16, 2)
    second = session.export()
    session.follow([CandidateEvent(version=second, state="rejected", at=2.0)])
    state = session.state
    assert (state.lineage, state.head_step, state.offsets, state.num_consumed) == ("l0002", 2, {"0": 16}, 16)
    assert all(torch.equal(champion[name], value) for name, value in session._engine.trainable_state().items())
    take_steps(session, 16, 2)
    assert [record.step for record in surviving_steps(session.folder / "state")] == [1, 2, 5, 6]
    assert [record.step for record in read_steps(session.folder / "state")] == [1, 2, 3, 4, 5, 6]
    assert session.export() == "v000003"
    manifest, _ = read_manifest(session.folder / "state" / "candidates" / "v000003")
    assert (manifest.parent, manifest.lineage) == ("v000001", "l0002")


def test_a_step_with_equal_rewards_is_skipped_counted_and_its_data_kept_until_hopeless(session):
    before = session._engine.trainable_state()
    session.take([sample(i, reward=1.0) for i in range(8)], {"0": 8})
    plan = session.plan(False)
    assert session.step(plan).skipped == "equal_rewards"
    assert len(session.state.pending) == 8
    assert session.plan(False) is None  # until others join
    assert all(torch.equal(before[name], value) for name, value in session._engine.trainable_state().items())
    for start in (8, 10):
        session.take([sample(start + i, reward=1.0, served_at=-1.0) for i in range(2)], {"0": start})
        session.step(session.plan(False))
    assert session.state.num_skipped == {"equal_rewards": 3}
    assert session.state.num_dropped == {"skipped_equal_rewards": 8}
    assert len(session.state.pending) == 4


def test_a_step_that_is_not_finite_leaves_the_weights_alone(session):
    before = session._engine.trainable_state()
    broken = [sample(i, baseline=float("nan") if i == 3 else 0.0) for i in range(8)]
    session.take(broken, {"0": 8})
    assert session.step(session.plan(False)).skipped == "not_finite"
    assert all(torch.equal(before[name], value) for name, value in session._engine.trainable_state().items())


def test_a_stop_in_the_middle_of_a_step_applies_nothing(session):
    before = session._engine.trainable_state()
    session.take([sample(i) for i in range(8)], {"0": 8})
    calls = []

    def check_stop() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise Stopped

    with pytest.raises(Stopped):
        session.step(session.plan(False), check_stop)
    assert all(torch.equal(before[name], value) for name, value in session._engine.trainable_state().items())
    assert session._engine.gradient_norm() == 0.0
    assert len(session.state.pending) == 8


def test_samples_of_others_and_without_log_probs_and_with_hindsight_are_trained_on(session):
    mixed = [
        sample(0, policy_version="v000009"),
        sample(1, logprobs=None),
        sample(2, logprobs=None, reward=-1.0),
        sample(3, hindsight="it is on the river"),
        sample(4, kind="delta", reward=-1.6),
        *(sample(i) for i in range(5, 8)),
    ]
    session.take(mixed, {"0": 8})
    result = session.step(session.plan(False))
    assert result.skipped == ""
    metrics = result.metrics
    assert (metrics["num_without_logprobs"], metrics["num_hindsight"], metrics["num_deltas"]) == (2.0, 1.0, 1.0)
    assert metrics["loss_hindsight"] != 0.0


def test_duplicates_and_refused_samples_are_counted_by_reason(session):
    session.take([sample(1), sample(1), sample(2, consent_training=False)], {"0": 3})
    assert session.state.num_dropped == {"duplicate": 1, "no_consent": 1}
    assert session.state.dropped == {sample(2).sample_id: "no_consent"}
    assert len(session.state.pending) == 1


def test_a_configuration_that_does_not_fit_the_checkpoint_is_refused(session):
    with pytest.raises(ValueError, match="lora_rank"):
        tiny_session(session.folder, tiny_config(lora_rank=8))


def test_scores_of_a_file_are_mean_log_probs(session, tmp_path):
    from learner.score import main

    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt_ids": [1, 2], "completion_ids": [3, 4], "id": 7}, {"prompt": "ab", "completion": ""}]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["--model", str(session.folder / "model"), "--input", str(source), "--output", str(target)]) == 0
    first, second = (json.loads(line) for line in target.read_text().splitlines())
    assert first["id"] == 7 and first["num_tokens"] == 2 and -20 < first["mean_logprob"] < 0
    assert second["mean_logprob"] is None and second["num_tokens"] == 0
    source.write_text('{"prompt": "a"}\n')
    assert main(["--model", str(session.folder / "model"), "--input", str(source), "--output", str(target)]) == 2
