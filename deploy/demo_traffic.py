"""The demo's traffic: a closed loop of simulated users who ask, read, vote later or never, and think.

Carries out the plans of deploy/demo_users.py through the client. Concurrency may change at any time.
"""

import asyncio
import contextlib
import random
import time
import uuid
from typing import Any

import msgspec

from deploy.demo_client import Answer, Client, SentVote
from deploy.demo_questions import Question
from deploy.demo_users import Habits, Users, Vote, Windows, malformed_votes, plan_early_vote, plan_vote


class Traffic:
    """A closed loop of users: each asks, reads, thinks, and the next one comes. Concurrency may change at any time."""

    def __init__(
        self, client: Client, questions: list[Question], windows: Windows, seed: int, habits: Habits | None = None
    ):
        self.client, self.questions, self.windows = client, questions, windows
        self.habits = habits or Habits()
        self.rng = random.Random(seed)
        self.users = Users(self.rng, self.habits.repeat_share)
        self.concurrency = 0
        self.pause_s = 0.5  # mean, after an answer
        self.num_asked = 0
        self._askers: set[asyncio.Task] = set()
        self._votes: set[asyncio.Task] = set()
        self._stopped = False
        self._closing = asyncio.Event()

    async def run(self) -> None:
        """Keep `concurrency` questions open until stop(); cancelling is safe."""
        while not self._stopped:
            while len(self._askers) < self.concurrency:
                self._start(self._askers, self._one_user())
            await asyncio.sleep(0.05)

    def stop(self) -> None:
        self._stopped = True

    def close_late_votes(self) -> None:
        """Let the votes that wait for a window to pass go unsent; the others still come."""
        self._closing.set()

    async def drain(self, with_votes: bool = True) -> None:
        """Wait for the open questions and, if asked, for every planned vote."""
        while self._askers:
            await asyncio.gather(*self._askers, return_exceptions=True)
        while with_votes and self._votes:
            await asyncio.gather(*self._votes, return_exceptions=True)

    @property
    def tasks(self) -> list[asyncio.Task]:
        return [*self._askers, *self._votes]

    @property
    def num_open(self) -> int:
        return len(self._askers)

    @property
    def num_votes_waiting(self) -> int:
        return len(self._votes)

    def _start(self, tasks: set[asyncio.Task], work: Any) -> None:
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _one_user(self) -> None:
        rng = self.rng
        question = self.questions[self.num_asked % len(self.questions)]
        self.num_asked += 1
        user = self.users.next()
        early = plan_early_vote(rng, self.habits)
        streamed = early is not None or rng.random() < 0.5

        def vote_early(inference_id: str, version: str) -> None:
            if early:
                self._start(self._votes, self._carry_out(early, user, inference_id, version))

        answer = await self.client.ask(question, user, "traffic", streamed, on_first_byte=vote_early)
        if answer.error:
            await asyncio.sleep(0.5)
            return
        vote = None if early else plan_vote(rng, self.habits, self.windows, answer.satisfied)
        if vote:
            self._start(self._votes, self._carry_out(vote, user, answer.inference_id, answer.version))
        if rng.random() < self.habits.malformed_share:
            self._start(self._votes, self._send_malformed(answer))
        await self._think()

    async def _think(self) -> None:
        """Pause as a user does; a shorter pause_s set meanwhile ends a pause that began longer."""
        began, share = time.monotonic(), self.rng.expovariate(1.0)
        while not self._stopped and time.monotonic() - began < share * self.pause_s:
            await asyncio.sleep(0.1)

    async def _carry_out(self, vote: Vote, user: str, inference_id: str, version: str) -> None:
        """Wait as the user does, send the vote, and perhaps take it back."""
        if vote.habit in ("late", "expired"):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), vote.delay_s)
                return
        else:
            await asyncio.sleep(vote.delay_s)
        sent = SentVote(
            feedback_id=f"fb_{uuid.uuid4().hex}",
            inference_id=inference_id,
            user=user,
            version=version,
            habit=vote.habit,
            op="upsert",
            value=vote.value,
            revision=0,
            sent_at=time.time(),
        )
        await self.client.vote(sent, vote.num_sends)
        if vote.retract_after_s is not None:
            await asyncio.sleep(vote.retract_after_s)
            taken_back = msgspec.structs.replace(
                sent, habit="retract", op="retract", revision=1, sent_at=time.time(), accepted_at=0.0, num_accepted=0
            )
            await self.client.vote(taken_back)

    async def _send_malformed(self, answer: Answer) -> None:
        body = self.rng.choice(malformed_votes(answer.inference_id))
        vote = SentVote(
            feedback_id="",
            inference_id=answer.inference_id,
            user=answer.user,
            version=answer.version,
            habit="malformed",
            op="upsert",
            value=True,
            revision=0,
            sent_at=time.time(),
        )
        await self.client.vote(vote, body=body)
