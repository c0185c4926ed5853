"""The story of an answer and of a version, from what the rooms keep."""

from pathlib import Path

import pytest

from deploy import explain, explain_version
from deploy.cli import main
from deploy.explain import Control
from ingest.arrow import to_row
from ingest.events import Assignment, Inference, Policy, Timing, Tokens, Usage
from learner.candidate import CandidateEvent, StepRecord
from tests.deploy.test_cli import write_config

INFERENCE_ID = "inf_00ff_" + "0" * 31 + "1"
STEPS = [
    StepRecord(step=1, lineage="a", based_on="v000000", next_version="v000001", sample_ids=["x@0", "y@0"]),
    StepRecord(
        step=2, lineage="a", based_on="v000000", next_version="v000002", sample_ids=["z@0"], dropped={"w@0": "stale"}
    ),
    StepRecord(step=2, lineage="b", based_on="v000001", next_version="v000003", sample_ids=["z@0"]),
]


def event(version: str, state: str, parent: str) -> CandidateEvent:
    return CandidateEvent(version=version, state=state, at=1.0, parent=parent, author="controller")  # type: ignore[arg-type]


CONTROL = Control(
    {"v000001": event("v000001", "promoted", "v000000"), "v000002": event("v000002", "rejected", "v000001")}
)


def inference() -> Inference:
    return Inference(
        inference_id=INFERENCE_ID,
        response_id="resp_00ff_" + "0" * 31 + "1",
        episode_id="ep_1",
        tenant="acme",
        timing=Timing(received_at=100.0, first_token_at=100.5, completed_at=102.25),
        policy=Policy(model="tiny", version="v000007"),
        request={"messages": [{"role": "user", "content": "What is rain?"}]},
        response_text="Water  that\nfalls.",
        finish_reason="stop",
        usage=Usage(prompt_tokens=5, completion_tokens=3),
        tokens=Tokens(prompt_ids=[1], completion_ids=[2, 3, 4], logprobs=[-0.1, -0.2, -0.3]),
        assignment=Assignment(rollout_id="r1", arm="canary", propensity=0.5, unit="u"),
    )


def test_answer_is_told_with_version_arm_and_propensity() -> None:
    assert explain.answer_lines(to_row(inference())) == [
        f"inference   {INFERENCE_ID}  (response resp_00ff_{'0' * 31}1, episode ep_1)",
        "  from      tenant acme, app default, function default, user -",
        "  version   v000007  arm canary with propensity 0.5 in rollout r1",
        "  prompt    user: What is rain?",
        "  answer    Water that falls.",
        "  finished: stop, 3 tokens with log-probs, 2.25 s",
    ]


def test_reward_is_told_with_its_parts_or_with_the_reason_for_none() -> None:
    verdict = {
        "revision": 1,
        "state": "correction",
        "verdict": "sample",
        "reward": -0.5,
        "confidence": 0.9,
        "baseline": 0.25,
        "components": {"thumbs": -0.6, "token_cost": 0.1},
        "spec_version": "abc",
        "ignored": {"fb_2": "too late"},
        "sample_id": "x@1",
        "reason": "delta",
    }
    assert explain.verdict_lines(verdict) == [
        "reward      revision 1 (correction): sample  R = -0.500 (confidence 0.90, baseline +0.250)",
        "  parts     thumbs -0.600, token_cost +0.100  (spec abc)",
        "  ignored   fb_2: too late",
        "  sample    x@1",
    ]
    masked = verdict | {"reward": None, "verdict": "masked", "reason": "no feedback"}
    assert explain.verdict_lines(masked) == ["reward      revision 1 (correction): masked, no feedback"]


def test_steps_are_told_with_the_version_and_what_was_undone() -> None:
    lines = explain.step_lines(["z@0", "w@0"], STEPS, [STEPS[0], STEPS[2]], CONTROL)
    assert lines == [
        "step        2 used z@0, one of 1; first in v000002 (rejected); undone by a return to an earlier version",
        "step        2 dropped w@0: stale",
        "step        2 used z@0, one of 1; first in v000003",
    ]
    assert explain.step_lines(["q@0"], STEPS, [], CONTROL) == ["step        none has used it yet"]


def test_version_lists_its_own_steps_and_children() -> None:
    assert [(step.lineage, step.step) for step in explain_version.steps_of(STEPS, "v000003", None)] == [("b", 2)]
    assert explain_version.children_lines("v000001", CONTROL) == ["children    v000002 (rejected)"]
    assert explain_version.children_lines("v000002", CONTROL) == []


@pytest.mark.parametrize("given", ["inf_zz", "v12", "v0000001", "something"])
def test_what_is_no_id_is_refused_with_an_example(tmp_path: Path, capsys, given: str) -> None:
    assert main(["explain", given, "--config", str(write_config(tmp_path))]) == 2
    message = capsys.readouterr().err
    assert f"'{given}' is not a" in message
    assert "v000003" in message or "inf_<4 hex>" in message


def test_unknown_answer_is_said_to_be_unknown(tmp_path: Path, capsys) -> None:
    assert main(["explain", INFERENCE_ID, "--config", str(write_config(tmp_path))]) == 1
    assert f"nothing is known of {INFERENCE_ID}" in capsys.readouterr().err
