"""The demo's client against a gateway of our own."""

import asyncio
from contextlib import asynccontextmanager

from aiohttp import web

from deploy.demo_client import Client, read_journal
from deploy.demo_questions import Question
from deploy.demo_traffic import Traffic
from deploy.demo_users import Habits, Windows
from deploy.reconcile import seen_by
from tests.deploy.fake_gateway import FakeGateway

OTTERS = Question("What do otters eat?", "animals", "otters")
WINDOWS = Windows(observation_s=0.2, late_s=0.4)
QUICK = Habits(median_delay_s=0.02)


@asynccontextmanager
async def serving(gateway, tmp_path):
    runner = web.AppRunner(gateway.app())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        async with Client(f"http://127.0.0.1:{port}", "headrace", tmp_path / "demo") as client:
            yield client
    finally:
        await runner.cleanup()


async def run_traffic(client, habits, seconds=0.5, concurrency=8):
    traffic = Traffic(client, [OTTERS], WINDOWS, seed=3, habits=habits)
    traffic.concurrency = concurrency
    loop = asyncio.create_task(traffic.run())
    await asyncio.sleep(seconds)
    traffic.stop()
    await loop
    await traffic.drain()
    return traffic


def test_streamed_and_plain_answers_are_read_alike_and_judged(tmp_path):
    async def story():
        async with serving(FakeGateway(), tmp_path) as client:
            return [await client.ask(OTTERS, "ann", "traffic", streamed) for streamed in (False, True)]

    plain, streamed = asyncio.run(story())
    assert plain.text == streamed.text == "Otters eat fish and crabs from the river."
    assert (plain.satisfied, streamed.satisfied) == (True, True)
    assert (plain.version, streamed.finish_reason) == ("v000000", "stop")
    assert plain.inference_id != streamed.inference_id


def test_questions_without_consent_say_so(tmp_path):
    gateway = FakeGateway()

    async def story():
        async with serving(gateway, tmp_path) as client:
            await client.ask(OTTERS, "ann", "base", consent=False)
            await client.ask(OTTERS, "ann", "traffic")

    asyncio.run(story())
    assert [headers.get("x-headrace-consent") for headers in gateway.request_headers] == ["none", None]


def test_a_failed_request_and_a_broken_stream_are_errors(tmp_path):
    gateway = FakeGateway()
    gateway.fail_next = gateway.break_next = 1

    async def story():
        async with serving(gateway, tmp_path) as client:
            return [await client.ask(OTTERS, "ann", "traffic", streamed) for streamed in (False, True, True)]

    failed, broken, sound = asyncio.run(story())
    assert failed.error.startswith("HTTP 503")
    assert broken.error == "stream ended without [DONE]"
    assert sound.error == ""


def test_a_vote_refused_with_503_is_sent_again_under_the_same_id(tmp_path):
    gateway = FakeGateway()
    gateway.fail_feedback = 1

    async def story():
        async with serving(gateway, tmp_path) as client:
            await run_traffic(client, QUICK._replace(vote_share=1.0, malformed_share=0.0), 0.1, concurrency=1)
            return client.votes

    votes = asyncio.run(story())
    assert gateway.fail_feedback == 0
    assert all(vote.num_accepted >= 1 and vote.status == 202 for vote in votes)


def test_an_early_vote_arrives_before_its_answer_is_complete(tmp_path):
    gateway = FakeGateway()

    async def story():
        async with serving(gateway, tmp_path) as client:
            await run_traffic(client, QUICK._replace(vote_share=1.0, early_share=1.0, malformed_share=0), 0.02, 1)

    asyncio.run(story())
    assert gateway.events[:3] == ["start", "feedback", "end"]


def test_malformed_votes_are_refused_and_counted(tmp_path):
    async def story():
        async with serving(FakeGateway(), tmp_path) as client:
            await run_traffic(client, QUICK._replace(malformed_share=1.0))
            return seen_by(client.answers, client.votes)

    seen = asyncio.run(story())
    assert seen.num_malformed > 5
    assert seen.num_malformed_accepted == 0


def test_the_journal_holds_what_the_client_remembers(tmp_path):
    async def story():
        async with serving(FakeGateway(), tmp_path) as client:
            await run_traffic(client, QUICK._replace(duplicate_share=0.5, retract_share=0.5, vote_share=0.9))
            return client

    client = asyncio.run(story())
    answers, votes = read_journal(tmp_path)
    assert seen_by(answers, votes) == seen_by(client.answers, client.votes)
    seen = seen_by(answers, votes)
    assert seen.retracted and seen.retracted <= seen.accepted.keys()
    assert 2 in seen.accepted.values()


def test_votes_that_wait_for_a_window_go_unsent_once_the_demo_closes(tmp_path):
    async def story():
        async with serving(FakeGateway(), tmp_path) as client:
            habits = QUICK._replace(vote_share=1.0, expired_share=1.0, early_share=0.0, malformed_share=0.0)
            traffic = Traffic(client, [OTTERS], Windows(8.0, 900.0), seed=3, habits=habits)
            traffic.concurrency = 2
            loop = asyncio.create_task(traffic.run())
            await asyncio.sleep(0.2)
            traffic.stop()
            await loop
            await traffic.drain(with_votes=False)
            assert traffic.num_votes_waiting > 0
            traffic.close_late_votes()
            await asyncio.wait_for(traffic.drain(), 5)
            return client.votes

    assert asyncio.run(story()) == []
