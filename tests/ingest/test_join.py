"""The join against an independent oracle, and its rules one by one."""

import sqlite3
from collections import defaultdict

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.events import Feedback, Inference, Interaction, Policy, Timing, decode, encode
from ingest.ids import inference_id, response_id
from ingest.join import Arrival, Join, Windows
from ingest.state import SCHEMA, JoinState, read_counts

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


# The oracle


def oracle(arrivals: list) -> tuple[dict, dict]:
    """Compute in one batch, from all arrivals, what each inference ends with and each feedback's disposition."""
    inferences = list({a.inference_id: a for a in arrivals if isinstance(a, Inference)}.values())
    first_at = {}
    for position, a in enumerate(arrivals):
        first_at.setdefault(encode(a), position)
    by_id = {i.inference_id: i for i in inferences}
    revisions: dict[tuple[str, str], dict[int, Feedback]] = defaultdict(dict)
    for a in sorted(
        {encode(a): a for a in arrivals if isinstance(a, Feedback)}.values(), key=lambda a: first_at[encode(a)]
    ):
        revisions[a.tenant, a.feedback_id].setdefault(2 * a.revision + (a.op == "retract"), a)
    ends: dict[str, dict[str, Feedback]] = defaultdict(dict)
    dispositions = {}
    for (tenant, feedback_id), ranked in revisions.items():
        episode_choice: dict[str, str] = {}
        statuses = []
        winner = None
        resolved = {}
        for rank, f in sorted(ranked.items(), key=lambda item: first_at[encode(item[1])]):
            field, target = f.target()
            if field == "inference_id":
                targets = [by_id[target]] if target in by_id else []
            elif field == "response_id":
                targets = [i for i in inferences if i.response_id == target]
            else:
                same = [i for i in inferences if i.episode_id == target and i.tenant == tenant]
                if target not in episode_choice and same:
                    known = [i for i in same if first_at[encode(i)] < first_at[encode(f)]]
                    chosen = (
                        max(known, key=lambda i: (i.timing.completed_at, i.inference_id))
                        if known
                        else min(same, key=lambda i: first_at[encode(i)])
                    )
                    episode_choice[target] = chosen.inference_id
                targets = [by_id[episode_choice[target]]] if same else []
            resolved[rank] = (f, targets)
        for _, (f, targets) in sorted(resolved.items(), reverse=True):
            if not targets:
                statuses.append("expired")  # no inference came until the end
            elif any(t.tenant != tenant for t in targets):
                statuses.append("quarantined")
            elif not (in_time := [t for t in targets if f.received_at <= t.timing.completed_at + WINDOWS.late_s]):
                statuses.append("expired")
            else:
                winner = f
                for t in in_time:
                    ends[t.inference_id][feedback_id] = f
                break
        if winner:
            dispositions[feedback_id] = "retracted" if winner.op == "retract" else "applied"
        else:
            dispositions[feedback_id] = "expired" if "expired" in statuses else "quarantined"
    return {i: ends.get(i, {}) for i in by_id}, dispositions


@st.composite
def histories(draw) -> list:
    """Return arrivals in random order: choices, tenants, duplicates, lateness, revisions, retractions."""
    number = draw(st.integers(1, 6))
    inferences = []
    for n in range(number):
        at = draw(st.sampled_from([100.0, 105.0, 130.0, 200.0]))
        tenant = draw(st.sampled_from("aaab"))
        group = draw(st.sampled_from([None, None, 1]))
        if group and any(i.response_id.endswith(f"{1001:032x}") and i.tenant != tenant for i in inferences):
            group = None
        inferences.append(answer(n, at + n / 8, tenant, draw(st.sampled_from("ef")), n if group else 0, group))
    targets = [{"inference_id": i.inference_id} for i in inferences] + [
        {"response_id": i.response_id} for i in inferences
    ]
    targets += [{"episode_id": e} for e in "efg"] + [{"inference_id": inference_id("00aa", "f" * 32)}]
    feedback = [
        vote(
            f"{tenant}{draw(st.integers(0, 4))}",
            draw(st.floats(90.0, 350.0)),
            tenant,
            float(n),
            revision=draw(st.integers(0, 2)),
            op=draw(st.sampled_from(["upsert", "upsert", "retract"])),
            **draw(st.sampled_from(targets)),
        )
        for n in range(draw(st.integers(0, 10)))
        for tenant in [draw(st.sampled_from("aaab"))]
    ]
    unique = {(f.tenant, f.feedback_id, f.revision, f.op): f for f in feedback}
    events = inferences + list(unique.values())
    events += draw(st.lists(st.sampled_from(events), max_size=4))
    return draw(st.permutations(events))


@settings(max_examples=150, deadline=None)
@given(histories(), st.integers(1, 5))
def test_join_ends_as_a_batch_computation_says(arrivals, batch_size) -> None:
    harness = Harness(NO_ORPHANS)
    for start in range(0, len(arrivals), batch_size):
        harness.feed(*arrivals[start : start + batch_size])
    harness.wait_until(END)
    harness.windows = WINDOWS
    harness.wait_until(END)
    expected, dispositions = oracle(arrivals)
    by_id = defaultdict(list)
    for interaction in harness.emitted:
        by_id[interaction.interaction_id].append(interaction)
    assert by_id.keys() == expected.keys()
    for key, revisions in by_id.items():
        assert [r.revision for r in revisions] == list(range(len(revisions)))
        assert [r.state for r in revisions] == ["final"] + ["correction"] * (len(revisions) - 1)
        kept = {f.feedback_id: f for f in revisions[-1].feedback}
        assert kept == {k: f for k, f in expected[key].items() if f.op == "upsert"}
        assert set(revisions[-1].retracted_ids) == {k for k, f in expected[key].items() if f.op == "retract"}
    assert harness.dispositions() == dispositions
    counts = read_counts(harness.connection)
    assert counts["inferences"] == counts["joined"] == len(expected)
    assert counts["open_windows"] == 0


# The rules


def test_window_closes_by_event_time_with_and_without_feedback() -> None:
    harness = Harness()
    first, second = answer(1, 100.0), answer(2, 101.0)
    assert harness.feed(first, second, vote("f1", 105.0, inference_id=first.inference_id)) == []
    assert harness.wait_until(109.9) == []
    closed = harness.wait_until(111.0)
    assert [(c.interaction_id, c.state, ids_of(c)) for c in closed] == [
        (first.inference_id, "final", ["f1"]),
        (second.inference_id, "final", []),
    ]
    assert closed[0].source_offsets == {"inference.v1[0]": 1}
    assert closed[0].inference == first


def test_topic_read_ahead_of_the_other_closes_no_window_early() -> None:
    harness = Harness()
    early, late = answer(1, 100.0), answer(2, 500.0)
    assert harness.feed(early, late) == []  # inference topic far ahead, feedback topic not read yet
    closed = harness.feed(vote("f1", 104.0, inference_id=early.inference_id), vote("f2", 300.0, episode_id="none"))
    assert [(c.interaction_id, ids_of(c)) for c in closed] == [(early.inference_id, ["f1"])]


def test_feedback_before_its_inference_waits_and_then_expires() -> None:
    harness = Harness()
    one = answer(1, 100.0)
    harness.feed(vote("f1", 100.5, inference_id=one.inference_id))
    assert harness.dispositions() == {"f1": "pending"}
    harness.feed(one)
    assert harness.dispositions() == {"f1": "applied"}
    harness.feed(vote("f2", 101.0, inference_id=inference_id("00aa", "f" * 32)))
    harness.wait_until(120.9)
    assert harness.dispositions()["f2"] == "pending"
    harness.wait_until(121.1)
    assert harness.dispositions()["f2"] == "expired"


def test_late_feedback_corrects_and_too_late_feedback_expires() -> None:
    harness = Harness()
    one = answer(1, 100.0)
    harness.feed(one)
    harness.wait_until(111.0)
    (correction,) = harness.feed(vote("f1", 199.0, inference_id=one.inference_id))
    assert (correction.state, correction.revision, ids_of(correction)) == ("correction", 1, ["f1"])
    assert harness.feed(vote("f2", 200.1, inference_id=one.inference_id)) == []
    assert harness.dispositions() == {"f1": "applied", "f2": "expired"}


def test_retraction_wins_over_its_upsert_in_either_order() -> None:
    one = answer(1, 100.0)
    upsert = vote("f1", 101.0, inference_id=one.inference_id)
    retract = vote("f1", 102.0, inference_id=one.inference_id, op="retract")
    for order in ([upsert, retract], [retract, upsert]):
        harness = Harness()
        harness.feed(one, *order)
        (final,) = harness.wait_until(111.0)
        assert (ids_of(final), final.retracted_ids) == ([], ["f1"])
        assert harness.dispositions() == {"f1": "retracted"}


def test_retraction_after_the_window_emits_a_correction_without_it() -> None:
    harness = Harness()
    one = answer(1, 100.0)
    harness.feed(one, vote("f1", 101.0, inference_id=one.inference_id))
    harness.wait_until(111.0)
    (correction,) = harness.feed(vote("f1", 150.0, inference_id=one.inference_id, op="retract", revision=1))
    assert (correction.revision, ids_of(correction), correction.retracted_ids) == (1, [], ["f1"])


def test_feedback_of_another_tenant_is_quarantined_and_never_shown() -> None:
    harness = Harness()
    one = answer(1, 100.0, tenant="a")
    harness.feed(one, vote("f1", 101.0, tenant="b", inference_id=one.inference_id))
    (final,) = harness.wait_until(111.0)
    assert final.feedback == []
    assert harness.dispositions() == {"f1": "quarantined"}
    assert "another tenant" in harness.letters[0]


def test_another_tenant_cannot_retract_a_feedback_by_its_id() -> None:
    harness = Harness()
    one = answer(1, 100.0, tenant="a")
    harness.feed(one, vote("f1", 101.0, tenant="a", inference_id=one.inference_id))
    harness.feed(vote("f1", 102.0, tenant="b", inference_id=one.inference_id, op="retract", revision=9))
    (final,) = harness.wait_until(111.0)
    assert ids_of(final) == ["f1"]


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ({"trace_id": "t"}, "cannot be routed"),
        ({"inference_id": "nonsense"}, "not a Headrace id"),
        ({"inference_id": response_id("00aa", "1" * 32)}, "not of the kind"),
        ({}, "exactly one"),
        ({"episode_id": "e", "trace_id": "t"}, "exactly one"),
        ({"episode_id": "e", "revision": -1}, "revision -1"),
    ],
)
def test_unroutable_feedback_is_quarantined_with_a_reason(target, reason) -> None:
    harness = Harness()
    harness.feed(vote("f1", 101.0, **target))
    assert harness.dispositions() == {"f1": "quarantined"}
    assert reason in harness.letters[0]


def test_event_dated_in_the_future_moves_no_watermark() -> None:
    harness = Harness()
    harness.feed(answer(1, 200.0), vote("f1", 106.0, episode_id="e"), now_s=100.0)
    assert len(harness.letters) == 2
    assert harness.dispositions() == {"f1": "quarantined"}
    assert Join(JoinState(harness.connection), WINDOWS, TOPICS).watermark(0) == 0.0


def test_same_event_twice_counts_once_also_under_another_event_id() -> None:
    harness = Harness()
    one = answer(1, 100.0)
    feedback = vote("f1", 101.0, inference_id=one.inference_id)
    harness.feed(one, one, feedback)
    harness.feed(one, key="other/1")
    harness.feed(feedback, key="other/2")
    (final,) = harness.wait_until(111.0)
    assert ids_of(final) == ["f1"]
    assert read_counts(harness.connection)["duplicates"] == 3


def test_failed_request_is_emitted_as_final_too() -> None:
    harness = Harness()
    failed = msgspec.structs.replace(answer(1, 100.0), error_type="timeout", timing=Timing(received_at=100.0))
    harness.feed(failed)
    (final,) = harness.wait_until(111.0)
    assert (final.inference.error_type, final.state) == ("timeout", "final")


def test_closed_windows_are_forgotten_after_the_late_window_and_dispositions_stay() -> None:
    harness = Harness()
    one = answer(1, 100.0)
    harness.feed(one, vote("f1", 101.0, inference_id=one.inference_id))
    harness.wait_until(300.0)
    join = Join(JoinState(harness.connection), WINDOWS, TOPICS)
    join.evict(1, 300.0)
    for table in ("inferences", "links", "revisions"):
        assert harness.connection.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)
    assert harness.dispositions() == {"f1": "applied"}
    harness.feed(vote("f1", 299.0, inference_id=one.inference_id, revision=1))
    harness.wait_until(400.0)
    assert harness.dispositions() == {"f1": "applied"}
