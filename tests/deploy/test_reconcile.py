"""Reconciliation by id: sound books pass, and each kind of loss or doubling fails and is named."""

import pytest

from deploy.reconcile import Held, Seen, reconcile, table_lines
from learner.candidate import StepRecord


def step(number, *sample_ids, dropped=None):
    return StepRecord(
        step=number,
        lineage="a",
        based_on="v000000",
        next_version="v000001",
        sample_ids=list(sample_ids),
        dropped=dropped or {},
    )


def books():
    """Four answers (one private), three votes (one doubled, one retracted), two samples of which one is used."""
    seen = Seen(
        answered={"i1", "i2", "i3", "i4"},
        interrupted=set(),
        num_failed_unnamed=0,
        private={"i4"},
        accepted={"f1": 1, "f2": 2, "f3": 1, "f4": 1},
        uncertain=set(),
        retracted={"f3"},
        num_malformed=2,
        num_malformed_accepted=0,
    )
    held = Held(
        archived=["i1", "i2", "i3", "i4"],
        final=["i1", "i2", "i3", "i4"],
        revisions=["i1@0", "i2@0", "i2@1", "i3@0", "i4@0"],
        dispositions={"f1": "applied", "f2": "applied", "f3": "retracted", "f4": "expired"},
        counted=["i1/f1", "i2/f2"],
        dead_letters=[],
        samples={"i1@0": "i1", "i2@0": "i2", "i2@1": "i2"},
        sample_ids=["i1@0", "i2@0", "i2@1"],
        surviving=[step(1, "i1@0", dropped={"i2@0": "stale"})],
        all_steps=[step(1, "i1@0", dropped={"i2@0": "stale"})],
    )
    return seen, held


def failing(seen, held):
    return {check.name: check.differing for check in reconcile(seen, held) if not check.ok}


def test_sound_books_pass_every_check():
    seen, held = books()
    checks = reconcile(seen, held)
    assert [check.name for check in checks if not check.ok] == []
    assert len(checks) == 14
    notes = {check.name: check.note for check in checks}
    assert notes["feedback accepted = settled"] == "2 applied, 1 expired, 1 retracted"
    assert notes["samples used = emitted ones"] == "3: 1 consumed, 1 dropped, 1 pending"


@pytest.mark.parametrize(
    ("side", "change", "check", "named"),
    [
        ("held", {"archived": ["i1", "i2", "i3"]}, "answers served = archived", "i4 not archived"),
        ("held", {"archived": ["i1", "i2", "i3", "i4", "i9"]}, "answers served = archived", "i9 no client saw"),
        ("held", {"archived": ["i1", "i1", "i2", "i3", "i4"]}, "archived once each", "i1 x2"),
        ("held", {"final": ["i1", "i2", "i3"]}, "archived = joined as final", "i4 not joined"),
        ("held", {"final": ["i1", "i2", "i3", "i4", "i4"]}, "joined once each, revisions distinct", "i4 x2"),
        ("held", {"dispositions": {"f1": "applied"}}, "feedback accepted = settled", "f2 has no disposition"),
        (
            "held",
            {"dispositions": {"f1": "pending", "f2": "applied", "f3": "retracted", "f4": "expired"}},
            "feedback accepted = settled",
            "f1 pending",
        ),
        ("held", {"counted": ["i1/f1", "i1/f1"]}, "feedback counted once", "i1/f1 x2"),
        ("held", {"counted": ["i1/f1", "i3/f3"]}, "retracted feedback not counted", "f3"),
        (
            "held",
            {"dead_letters": ["feedback.v1[0]@7 bad"]},
            "dead letters are quarantined feedback",
            "feedback.v1[0]@7 bad",
        ),
        ("seen", {"num_malformed_accepted": 1}, "malformed feedback refused", "1 accepted"),
        ("held", {"sample_ids": ["i1@0", "i1@0"]}, "samples emitted once each", "i1@0 x2"),
        ("held", {"samples": {"i4@0": "i4"}}, "no sample without consent", "i4"),
        ("held", {"surviving": [step(1, "i1@0"), step(2, "i1@0")]}, "no sample in two surviving steps", "i1@0 x2"),
        ("held", {"all_steps": [step(1, "i7@0")]}, "samples used = emitted ones", "i7@0"),
    ],
)
def test_each_loss_and_doubling_fails_and_is_named(side, change, check, named):
    seen, held = books()
    seen, held = (seen._replace(**change), held) if side == "seen" else (seen, held._replace(**change))
    assert named in failing(seen, held)[check]


def test_a_dead_lineage_may_share_samples_with_the_surviving_one():
    seen, held = books()
    assert failing(seen, held._replace(all_steps=[*held.all_steps, step(1, "i1@0")])) == {}


def test_an_answer_cut_by_a_kill_may_be_archived_or_not():
    seen, held = books()
    assert failing(seen._replace(interrupted={"i8"}), held) == {}
    assert (
        failing(
            seen._replace(num_failed_unnamed=1),
            held._replace(archived=[*held.archived, "i9"], final=[*held.final, "i9"]),
        )
        == {}
    )


def test_feedback_whose_answer_never_came_may_be_held_or_not():
    seen, held = books()
    more = {**held.dispositions, "f9": "applied"}
    assert failing(seen._replace(uncertain={"f9"}), held._replace(dispositions=more)) == {}
    assert failing(seen, held._replace(dispositions=more)) == {"feedback accepted = settled": ["f9 no client sent"]}


def test_at_most_ten_ids_are_listed():
    seen, held = books()
    lines = table_lines(reconcile(seen._replace(answered={f"x{number:02d}" for number in range(14)}), held))
    assert sum("not archived" in line for line in lines) == 10
    assert any("and 8 more" in line for line in lines)
