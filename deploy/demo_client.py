"""The demo's client: asks and votes through the gateway, with a journal of all that it saw.

Owns demo/answers.jsonl and demo/votes.jsonl below the state folder: the client's side of the reconciliation. A failed
question is never asked again (it counts as a failed request); a vote is sent again under the same id until the gateway
has answered, as a product's outbox would.
"""

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import aiohttp
import msgspec

from deploy.demo_questions import Question
from deploy.demo_rule import judge

ANSWER_TIMEOUT_S = 120.0
# the product's own words; with the template's they are one block of the engine's prefix cache (32 tokens)
SYSTEM_PROMPT = (
    "You are a helpful AI assistant at the information desk of a science museum, where visitors ask you about the wide "
    "world."
)
MAX_TOKENS = 48  # of 988 answers of the base 10.8 % satisfy within 48 tokens, 11.9 % within 64, for a third more work
VOTE_PATIENCE_S = 90.0


class Answer(msgspec.Struct, kw_only=True):
    """One question asked and what came back."""

    question: str
    purpose: str  # traffic | base | champion | ...
    user: str
    streamed: bool
    started_at: float
    completed_at: float = 0.0
    inference_id: str = ""
    version: str = ""
    arm: str = ""
    text: str = ""
    finish_reason: str = ""
    satisfied: bool = False
    fault: str = ""  # what the user minded
    error: str = ""  # empty: the request succeeded


class SentVote(msgspec.Struct, kw_only=True):
    """One feedback event as the client knows it."""

    feedback_id: str
    inference_id: str
    user: str
    version: str
    habit: str  # normal | late | expired | early | retract | malformed
    op: str
    value: bool
    revision: int
    sent_at: float
    accepted_at: float = 0.0  # 0: never accepted
    num_accepted: int = 0  # 2: a duplicate, accepted twice under one id
    status: int = 0  # last HTTP status; 0: no answer


class Client:
    """Asks and votes over HTTP; keeps every answer and vote in memory and in the journal."""

    def __init__(self, url: str, model: str, journal: Path, headers: dict[str, str] | None = None):
        self.url, self.model, self.extra_headers = url.rstrip("/"), model, headers or {}
        self.answers: list[Answer] = []
        self.votes: list[SentVote] = []
        journal.mkdir(parents=True, exist_ok=True)
        self._files: dict[str, IO[str]] = {
            name: (journal / f"{name}.jsonl").open("a", buffering=1) for name in ("answers", "votes")
        }
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Client":
        timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S, sock_connect=10)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=256))
        return self

    async def __aexit__(self, *_: Any) -> None:
        if self._session:
            await self._session.close()
        for file in self._files.values():
            file.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        assert self._session, "Client is used inside `async with`"
        return self._session

    async def ask(
        self,
        question: Question,
        user: str,
        purpose: str,
        streamed: bool = False,
        consent: bool = True,
        on_first_byte: Callable[[str, str], None] | None = None,
    ) -> Answer:
        """Ask one question; on_first_byte gets (inference id, version) of a streamed answer before its text."""
        answer = Answer(question=question.text, purpose=purpose, user=user, streamed=streamed, started_at=time.time())
        headers = {
            "x-headrace-user": user,
            "x-headrace-app": "demo",
            "x-headrace-function": "answer",
            **self.extra_headers,
        }
        if not consent:
            headers["x-headrace-consent"] = "none"
        body = {
            "model": self.model,
            "messages": [
                {"role": "system", "content": SYSTEM_PROMPT},
                {"role": "user", "content": question.text},
            ],
            "temperature": 0.8,
            "max_tokens": MAX_TOKENS,
            "stream": streamed,
        }
        try:
            async with self.session.post(f"{self.url}/v1/chat/completions", json=body, headers=headers) as response:
                answer.inference_id = response.headers.get("x-headrace-inference-id", "")
                answer.version = response.headers.get("x-headrace-version", "")
                answer.arm = response.headers.get("x-headrace-arm", "")
                if response.status != 200:
                    answer.error = f"HTTP {response.status}: {(await response.text())[:300]}"
                elif streamed:
                    if on_first_byte:
                        on_first_byte(answer.inference_id, answer.version)
                    await _read_stream(response, answer)
                else:
                    choice = (await response.json())["choices"][0]
                    answer.text, answer.finish_reason = choice["message"]["content"] or "", choice["finish_reason"]
        except (aiohttp.ClientError, TimeoutError, KeyError, ValueError) as error:
            answer.error = f"{type(error).__name__}: {error}"[:300]
        answer.completed_at = time.time()
        if not answer.error:
            answer.satisfied, answer.fault = judge(question, answer.text, answer.finish_reason)
        self.answers.append(answer)
        self._write("answers", answer)
        return answer

    async def vote(self, vote: SentVote, num_sends: int = 1, body: dict | None = None) -> None:
        """Send one vote, num_sends times under its id, each until the gateway answers or patience ends."""
        self.votes.append(vote)
        body = body or {
            "feedback_id": vote.feedback_id,
            "inference_id": vote.inference_id,
            "metric": "thumbs",
            "kind": "boolean",
            "value": vote.value,
            "op": vote.op,
            "revision": vote.revision,
            "user": vote.user,
        }
        for _ in range(num_sends):
            deadline_s = time.monotonic() + VOTE_PATIENCE_S
            while not await self._send(vote, body) and time.monotonic() < deadline_s:
                await asyncio.sleep(0.5)
        self._write("votes", vote)

    async def _send(self, vote: SentVote, body: dict) -> bool:
        """Send once; False: no answer or 5xx, to be sent again."""
        try:
            async with self.session.post(f"{self.url}/v1/feedback", json=body, headers=self.extra_headers) as response:
                vote.status = response.status
                if response.status == 202:
                    accepted = (await response.json())["accepted"]
                    vote.num_accepted += len(accepted)
                    vote.accepted_at = vote.accepted_at or time.time()
                return response.status < 500
        except (aiohttp.ClientError, TimeoutError, KeyError, ValueError):
            vote.status = 0
            return False

    def _write(self, name: str, entry: msgspec.Struct) -> None:
        self._files[name].write(msgspec.json.encode(entry).decode() + "\n")


async def _read_stream(response: aiohttp.ClientResponse, answer: Answer) -> None:
    """Read server-sent events into the answer; a stream without [DONE] is an error."""
    done, parts = False, []
    async for raw in response.content:
        line = raw.decode().strip()
        if line == "data: [DONE]":
            done = True
        elif line.startswith("data: "):
            event = json.loads(line[6:])
            if "error" in event:
                answer.error = f"stream: {event['error']}"[:300]
                return
            for choice in event.get("choices", []):
                parts.append(choice.get("delta", {}).get("content") or "")
                answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    answer.text = "".join(parts)
    if not done:
        answer.error = "stream ended without [DONE]"


def read_journal(state_dir: Path) -> tuple[list[Answer], list[SentVote]]:
    """Read the demo client's journal."""

    def entries(name: str) -> list[bytes]:
        return (state_dir / "demo" / f"{name}.jsonl").read_bytes().splitlines()

    answers = [msgspec.json.decode(line, type=Answer) for line in entries("answers")]
    return answers, [msgspec.json.decode(line, type=SentVote) for line in entries("votes")]
