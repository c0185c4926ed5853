"""The join over a database in memory, and events to feed it."""

import sqlite3

from ingest.events import Feedback, Inference, Interaction, Policy, Timing, decode, encode
from ingest.ids import inference_id, response_id
from ingest.join import Arrival, Join, Windows
from ingest.state import SCHEMA, JoinState

TOPICS = ("inference.v1", "feedback.v1")
WINDOWS = Windows(observation_s=10.0, late_s=100.0, orphan_s=20.0, max_future_s=5.0)
NO_ORPHANS = WINDOWS._replace(orphan_s=1e9)
END = 1e6
HEX = "0" * 31


def answer(number: int, at: float, tenant: str = "a", episode: str = "e", choice: int = 0, group: int | None = None):
    uuid_hex = f"{number if group is None else 1000 + group:032x}"
    return Inference(
        inference_id=inference_id("00aa", uuid_hex, choice),
        response_id=response_id("00aa", uuid_hex),
        episode_id=episode,
        tenant=tenant,
        timing=Timing(received_at=at - 1, completed_at=at),
        policy=Policy(model="m", version="v000000"),
        choice_index=choice,
    )


def vote(feedback_id: str, at: float, tenant: str = "a", value: float = 1.0, **more) -> Feedback:
    return Feedback(
        feedback_id=feedback_id,
        tenant=tenant,
        metric="thumb",
        kind="numeric",
        occurred_at=at,
        received_at=at,
        value=value,
        **more,
    )


class Harness:
    """A join over a database in memory; each feed() is one transaction."""

    def __init__(self, windows: Windows = WINDOWS) -> None:
        self.connection = sqlite3.connect(":memory:")
        self.connection.executescript(SCHEMA)
        self.windows = windows
        self.emitted: list[Interaction] = []
        self.letters: list[str] = []
        self._offset = 0

    def feed(self, *events, now_s: float = END, caught_up: bool = False, key: str | None = None) -> list[Interaction]:
        join = Join(JoinState(self.connection), self.windows, TOPICS)
        for event in events:
            self._offset += 1
            topic = TOPICS[isinstance(event, Feedback)]
            event_key = key or f"s/{hash(encode(event))}"
            arrival = Arrival(topic, 0, self._offset, "00aa", event_key, encode(event))
            (join.on_feedback if isinstance(event, Feedback) else join.on_inference)(arrival, event, now_s)
        join.advance({(topic, 0) for topic in TOPICS} if caught_up else set(), 1, now_s)
        emissions, letters = join.take()
        new = [decode(emission.value, Interaction) for emission in emissions]
        self.emitted += new
        self.letters += [letter.reason for letter in letters]
        return new

    def wait_until(self, now_s: float) -> list[Interaction]:
        return self.feed(now_s=now_s, caught_up=True)

    def dispositions(self) -> dict[str, str]:
        return dict(self.connection.execute("SELECT feedback_id, disposition FROM dispositions").fetchall())


def ids_of(interaction: Interaction) -> list[str]:
    return [feedback.feedback_id for feedback in interaction.feedback]
