"""The join ends as an independent batch computation says, whatever the order, the repeats and the batches."""

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.events import Feedback, Inference, encode
from ingest.ids import inference_id
from ingest.state import read_counts
from tests.ingest.join_harness import END, NO_ORPHANS, WINDOWS, Harness, answer, vote


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
