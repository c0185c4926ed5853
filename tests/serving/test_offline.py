"""Offline gates as pure verdicts."""

import numpy as np
import pytest

from serving.gate_config import GateConfig
from serving.gates import offline
from serving.gates.offline import Answers, check_answers, check_candidate_files, check_trust_region, is_passed

GATE = GateConfig.model_validate({})
TEXTS = [f"The answer to question {i} is word{i} and word{i + 1}." for i in range(16)]
CHAMPION = Answers(texts=TEXTS, finish_reasons=["length"] * 16, own=[-1.0] * 16, other=[-3.0] * 16)


def failed(checks):
    return {check.name for check in checks if check.outcome == "FAIL"}


def answers(texts=TEXTS, reasons=("stop",) * 16, own=(-1.2,) * 16, other=(-3.0,) * 16) -> Answers:
    return Answers(texts=list(texts), finish_reasons=list(reasons), own=list(own), other=list(other))


def test_short_plain_answers_on_topic_pass():
    assert is_passed(check_answers(answers([f"It is word{i} here." for i in range(16)]), CHAMPION, GATE))


@pytest.mark.parametrize(
    ("new", "name"),
    [
        (answers([""] * 8 + TEXTS[8:]), "empty"),
        (answers(["it is it is it is it is it is"] * 8 + TEXTS[8:]), "loops"),
        (answers(["I'm sorry, but I can't help with that."] * 8 + TEXTS[8:]), "refusals"),
        (answers(["I\u2019m sorry, I can\u2019t."] * 8 + TEXTS[8:]), "refusals"),
        (answers(["A fine day to all of us."] * 9 + TEXTS[9:]), "alike"),
        (answers(own=[-4.0] * 16), "fluency"),
        (answers(own=[-1.0] * 16, other=[-1.1] * 16), "topic"),
        (answers(own=[float("nan")] * 16), "fluency"),
    ],
)
def test_each_kind_of_junk_is_named(new, name):
    assert name in failed(check_answers(new, CHAMPION, GATE))


def test_answers_that_are_all_cut_off_fail_only_if_the_champions_were_not():
    stopped = answers()
    cut = answers(reasons=["length"] * 16)
    assert "truncation" in failed(check_answers(cut, stopped, GATE))
    assert "truncation" not in failed(check_answers(cut, CHAMPION, GATE))


def test_loops_are_found_by_back_to_back_repeats_only():
    assert offline.is_looping("no no no no")
    assert offline.is_looping("the red fox the red fox the red fox")
    assert not offline.is_looping("the red fox and the red hen and the red dog")
    assert not offline.is_looping("very very good")


def test_the_trust_region_is_the_mean_log_ratio_on_the_candidates_own_tokens():
    new, champion = np.array([-1.0, -2.0]), np.array([-1.04, -2.04])
    assert check_trust_region(new, champion, GATE).outcome == "PASS"
    far = check_trust_region(new, champion - 0.1, GATE)
    assert (far.outcome, round(far.value, 3)) == ("FAIL", 0.14)
    assert check_trust_region(np.zeros(0), np.zeros(0), GATE).outcome == "FAIL"
    assert check_trust_region(np.array([np.nan]), np.array([-1.0]), GATE).outcome == "FAIL"


def test_files_shapes_finite_weights_and_a_new_digest_are_each_checked():
    good = {"w": (2, 2)}
    assert is_passed(check_candidate_files([], good, good, [], "a", "b"))
    assert failed(check_candidate_files(["x"], good, good, [], "a", "b")) == {"manifest"}
    assert failed(check_candidate_files([], {"w": (2, 3)}, good, [], "a", "b")) == {"shapes"}
    assert failed(check_candidate_files([], {}, good, [], "a", "b")) == {"shapes"}
    assert failed(check_candidate_files([], good, good, ["w"], "a", "b")) == {"finite_weights"}
    assert failed(check_candidate_files([], good, good, [], "a", "a")) == {"new_weights"}
