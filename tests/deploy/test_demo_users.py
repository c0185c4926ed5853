"""The habits of the demo's users."""

import random
import statistics

from deploy.demo_users import Habits, Users, Windows, malformed_votes, plan_early_vote, plan_vote

WINDOWS = Windows(observation_s=8.0, late_s=90.0)
NUM = 20_000


def votes(satisfied=True, habits=None):
    rng = random.Random(7)
    return [plan_vote(rng, habits or Habits(), WINDOWS, satisfied) for _ in range(NUM)]


def test_about_half_of_the_answers_get_a_vote_and_a_tenth_of_votes_is_flipped():
    given = [vote for vote in votes() if vote]
    assert abs(len(given) / NUM - 0.5) < 0.02
    assert abs(sum(not vote.value for vote in given) / len(given) - 0.10) < 0.01


def test_an_unsatisfied_user_votes_down_but_for_the_flips():
    given = [vote for vote in votes(satisfied=False) if vote]
    assert abs(sum(vote.value for vote in given) / len(given) - 0.10) < 0.01


def test_delays_have_their_median_a_long_tail_and_the_late_and_expired_ones_their_windows():
    given = [vote for vote in votes() if vote]
    normal = [vote.delay_s for vote in given if vote.habit == "normal"]
    assert abs(statistics.median(normal) - 3.0) < 0.2
    assert max(normal) > 15.0
    late = [vote.delay_s for vote in given if vote.habit == "late"]
    assert late and all(8.0 < delay < 90.0 for delay in late)
    expired = [vote.delay_s for vote in given if vote.habit == "expired"]
    assert expired and all(delay > 90.0 for delay in expired)


def test_some_votes_are_doubled_and_some_taken_back():
    given = [vote for vote in votes() if vote]
    assert abs(sum(vote.num_sends == 2 for vote in given) / len(given) - 0.03) < 0.01
    assert abs(sum(vote.retract_after_s is not None for vote in given) / len(given) - 0.02) < 0.01


def test_early_votes_are_rare_and_immediate():
    rng = random.Random(7)
    early = [vote for vote in (plan_early_vote(rng, Habits()) for _ in range(NUM)) if vote]
    assert abs(len(early) / NUM - 0.02) < 0.005
    assert {(vote.habit, vote.delay_s) for vote in early} == {("early", 0.0)}


def test_most_questions_come_from_a_new_user():
    users = Users(random.Random(7), repeat_share=0.1)
    names = [users.next() for _ in range(2000)]
    assert 0.85 < len(set(names)) / len(names) < 0.95


def test_malformed_votes_differ_from_each_other():
    bodies = malformed_votes("inf_0000_" + "0" * 32)
    assert len({str(body) for body in bodies}) == len(bodies) == 4
