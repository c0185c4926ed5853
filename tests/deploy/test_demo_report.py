"""The demo's verdict on itself: every criterion can fail; latency ends at the first answer that learned."""

import json

from deploy.demo_bad import Planted, is_contained
from deploy.demo_client import Answer, SentVote
from deploy.demo_kill import Kill
from deploy.demo_measure import Gain, Guard
from deploy.demo_report import failed_requests, feedback_latency, judge_run, summary
from deploy.reconcile import Check

GAIN = Gain(100, 0.10, 0.70, 0.60, 0.48, 0.71)
GUARD = Guard(0.90, 0.88, (0.95, 0.94), (0.98, 0.97), (0.95, 0.95), (-1.0, -1.1))
SOUND = [Check("archived once each", 5, 5, [])]


def answer(at, version="v000000", error="", inference_id="i"):
    return Answer(
        question="q",
        purpose="traffic",
        user="ann",
        streamed=False,
        started_at=at - 1,
        completed_at=at,
        inference_id=inference_id,
        version=version,
        error=error,
    )


def vote(number, accepted_at):
    return SentVote(
        feedback_id=f"f{number}",
        inference_id=f"i{number}",
        user="ann",
        version="v000000",
        habit="normal",
        op="upsert",
        value=True,
        revision=0,
        sent_at=accepted_at,
        accepted_at=accepted_at,
        num_accepted=1,
    )


def verdicts(times=(200.0, 400.0), gain=GAIN, guard=GUARD, answers=(), kills=(), checks=SOUND, planted=None):
    judged = judge_run(list(times), gain, guard, list(answers), list(kills), checks, planted)
    return [criterion.ok for criterion in judged]


def test_a_good_run_passes_every_criterion():
    assert verdicts() == [True] * 5


def test_each_criterion_can_fail():
    assert verdicts(times=(200.0,))[0] is False
    assert verdicts(times=(200.0, 800.0))[0] is False
    assert verdicts(gain=GAIN._replace(difference=0.39))[1] is False
    assert verdicts(gain=GAIN._replace(low=0.25))[1] is False
    assert verdicts(gain=None)[1] is False
    assert verdicts(guard=GUARD._replace(champion=0.79))[2] is False
    assert verdicts(guard=GUARD._replace(fluent=None))[2] is False
    assert verdicts(answers=[answer(5.0, error="HTTP 503")])[3] is False
    assert verdicts(checks=[Check("archived once each", 5, 6, ["i1 x2"])])[4] is False
    assert verdicts(checks=[])[4] is False
    assert verdicts(planted=[])[5] is False
    assert verdicts(kills=[Kill(process="joiner", pid=1, at=0.0)])[5] is False


def test_failures_are_a_kills_only_while_a_serving_process_is_down():
    failed = answer(100.5, error="ClientError")
    assert failed_requests([failed], [Kill(process="gateway", pid=1, at=100.0, back_after_s=2.0)]) == ([], 1)
    assert failed_requests([failed], [Kill(process="engine-green", pid=1, at=50.0, back_after_s=60.0)]) == ([], 1)
    assert failed_requests([failed], [Kill(process="gateway", pid=1, at=50.0, back_after_s=2.0)]) == ([failed], 0)
    assert failed_requests([failed], [Kill(process="learner", pid=1, at=100.0, back_after_s=2.0)]) == ([failed], 0)


def test_latency_is_to_the_first_answer_of_a_promoted_version_that_used_the_feedback():
    answers = [answer(50.0), answer(110.0, "v000001"), answer(150.0, "v000001"), answer(300.0, "v000002")]
    used = {"v000001": {"i1"}, "v000002": {"i1", "i2"}}
    votes = [vote(1, 10.0), vote(2, 100.0), vote(3, 20.0), vote(1, 10.0)]
    latency = feedback_latency(votes, answers, ["v000001", "v000002"], used)
    assert latency is not None
    assert (latency.num_feedback, latency.median_s) == (2, 150.0)  # 100 s for f1, 200 s for f2
    assert feedback_latency(votes, answers, ["v000001"], {"v000001": set()}) is None


def test_planted_candidates_are_contained_only_if_both_were_stopped_and_nan_reached_nobody():
    nan = Planted(kind="nan", version="v900001", states=["proposed", "shadow", "rejected"])
    nonsense = Planted(kind="nonsense", version="v900002", states=["proposed", "canary", "rolled_back"], num_exposed=12)
    assert is_contained([nan, nonsense])
    assert not is_contained([nan])
    assert not is_contained([Planted(kind="nan", version="v900001", states=["canary", "rolled_back"]), nonsense])
    assert not is_contained([Planted(kind="nan", version="v900001", states=["rejected"], num_exposed=1), nonsense])
    assert not is_contained(
        [nan, Planted(kind="nonsense", version="v900002", states=["proposed", "promoted", "rolled_back"])]
    )
    shelved = Planted(kind="nonsense", version="v900002", states=["proposed", "shelved"])
    assert not is_contained([nan, shelved])
    assert is_contained([nan, shelved, nonsense])


def test_the_summary_is_plain_json():
    criteria = judge_run([200.0, 400.0], GAIN, GUARD, [], [], SOUND, None)
    document = summary(criteria, gain=GAIN, guard=GUARD, latency=None, planted=[Planted(kind="nan", version="v900001")])
    read = json.loads(json.dumps(document))
    assert read["ok"] is True
    assert read["gain"]["difference"] == 0.60
    assert read["planted"][0]["kind"] == "nan"
