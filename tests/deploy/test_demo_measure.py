"""Measuring on held-out questions: who is asked again, the paired interval, the quality guard."""

import asyncio

import pytest

from deploy.demo_client import Answer
from deploy.demo_measure import ask_held_out, paired_gain, quality_guard
from deploy.demo_questions import Question
from tests.deploy.fake_gateway import FakeGateway
from tests.deploy.test_demo_traffic import serving

QUESTIONS = [Question(f"What is thing{number}?", "things", f"thing{number}") for number in range(40)]


def answer(question, satisfied, text=None):
    text = text if text is not None else f"{question.subject} is a small grey box made from iron."
    return Answer(
        question=question.text,
        purpose="base",
        user="ann",
        streamed=False,
        started_at=0.0,
        text=text,
        satisfied=satisfied,
    )


def side(num_satisfied, text=None):
    return {q.text: answer(q, number < num_satisfied, text) for number, q in enumerate(QUESTIONS)}


def test_the_gain_is_paired_and_its_interval_holds_it():
    gain = paired_gain(side(4), side(30))
    assert (gain.base, gain.champion, gain.num_questions) == (0.1, 0.75, 40)
    assert gain.difference == pytest.approx(0.65)
    assert 0.45 < gain.low < 0.65 < gain.high < 0.85
    assert gain == paired_gain(side(4), side(30))


def test_no_change_gives_an_interval_of_nothing():
    gain = paired_gain(side(10), side(10))
    assert (gain.difference, gain.low, gain.high) == (0.0, 0.0, 0.0)


def test_only_questions_that_both_answered_count():
    few = dict(list(side(40).items())[:5])
    assert paired_gain(side(4), few).num_questions == 5
    with pytest.raises(ValueError, match="no held-out question"):
        paired_gain(side(4), {})


def test_loops_off_topic_and_unlikely_answers_are_not_sound():
    likely = {question.text: -1.0 - number / 100 for number, question in enumerate(QUESTIONS)}
    sound = quality_guard(QUESTIONS, side(0), side(0), (likely, likely))
    assert (sound.base, sound.champion) == (0.95, 0.95)  # the floor is the base's own 5 % quantile
    off_topic = quality_guard(QUESTIONS, side(0), side(0, "The green door was left open all day."), (likely, likely))
    assert (off_topic.champion, off_topic.on_topic) == (0.0, (1.0, 0.0))
    loop = " ".join(question.subject for question in QUESTIONS[:1] * 12)
    assert quality_guard(QUESTIONS, side(0), side(0, loop), (likely, likely)).no_loop == (1.0, 0.0)
    salad = quality_guard(QUESTIONS, side(0), side(0), (likely, dict.fromkeys(likely, -6.0)))
    assert (salad.champion, salad.fluent) == (0.0, (0.95, 0.0))
    assert salad.mean_logprob == pytest.approx((-1.195, -6.0))


def test_answers_of_the_canary_and_of_a_former_champion_are_asked_again(tmp_path):
    gateway = FakeGateway()

    def champion_now():
        asked = len(gateway.requests)
        gateway.version = "v000002" if asked > 50 else "v000001" if asked % 3 else "v000009"
        return "v000002" if asked > 50 else "v000001"

    async def story():
        async with serving(gateway, tmp_path) as client:
            return await ask_held_out(client, QUESTIONS, "champion", champion_now, concurrency=1), client

    kept, client = asyncio.run(story())
    assert kept.keys() == {question.text for question in QUESTIONS}
    assert {answer.version for answer in kept.values()} == {"v000002"}
    assert len(client.answers) > 80
    assert all(headers["x-headrace-consent"] == "none" for headers in gateway.request_headers)
