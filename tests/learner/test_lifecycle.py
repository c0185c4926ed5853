"""What the fate of candidates means for the learner."""

from learner.candidate import CandidateEvent
from learner.checkpoints import LearnerState
from learner.lifecycle import after_return, anchor, decide, next_version_number, serials_to_keep, undecided


def event(version: str, state: str, at: float = 1.0) -> CandidateEvent:
    return CandidateEvent(version=version, state=state, at=at)  # pyright: ignore[reportArgumentType]


def events(*items: CandidateEvent) -> dict[str, CandidateEvent]:
    return {item.version: item for item in items}


def state(**changes) -> LearnerState:
    values = {
        "versions": ["v000000", "v000001", "v000002"],
        "exports": {"v000000": 1, "v000001": 4, "v000002": 9},
        "champion": "v000001",
        "promoted": ["v000000", "v000001"],
    }
    return LearnerState(**(values | changes))


def test_nothing_changes_while_a_candidate_is_on_trial():
    told = events(event("v000001", "promoted"), event("v000002", "canary", 2))
    assert decide(told, state()).action == "keep"


def test_a_promoted_candidate_becomes_the_anchor():
    told = events(event("v000001", "promoted"), event("v000002", "promoted", 2))
    decision = decide(told, state())
    assert (decision.action, decision.champion) == ("anchor", "v000002")
    after = state()
    anchor(after, "v000002")
    assert after.promoted == ["v000000", "v000001", "v000002"]
    assert decide(told, after).action == "keep"


def test_a_rejected_candidate_sends_the_learner_back_to_the_champion():
    told = events(event("v000001", "promoted"), event("v000002", "rejected", 2))
    decision = decide(told, state())
    assert (decision.action, decision.champion) == ("return", "v000001")


def test_a_champion_that_is_rolled_back_gives_way_to_the_one_before():
    told = events(event("v000001", "promoted"), event("v000002", "rolled_back", 3))
    decision = decide(told, state(champion="v000002", promoted=["v000000", "v000001", "v000002"]))
    assert (decision.action, decision.champion) == ("return", "v000001")
    all_gone = events(event("v000001", "rolled_back", 4), event("v000002", "rolled_back", 3))
    assert decide(all_gone, state()).champion == "v000000"


def test_shelved_and_inconclusive_candidates_are_decided_but_not_bad():
    for fate in ("shelved", "inconclusive"):
        told = events(event("v000001", "promoted"), event("v000002", fate, 2))
        assert decide(told, state()).action == "keep"
        assert undecided(told, state().versions) == []


def test_a_candidate_that_somebody_else_planted_never_becomes_champion_here():
    told = events(event("v000001", "promoted"), event("v000007", "promoted", 9))
    assert decide(told, state()).action == "keep"


def test_after_a_return_the_past_is_the_champions_and_numbers_go_on():
    current = state(step=9, head_step=9, num_lineages=1, offsets={"0": 90}, consumed=["a", "b"], next_version=3)
    past = LearnerState(step=4, head_step=4, offsets={"0": 40}, consumed=["a"], versions=["v000000", "v000001"])
    after = after_return(current, past, "v000001")
    assert (after.step, after.head_step, after.lineage, after.based_on) == (9, 4, "l0002", "v000001")
    assert (after.offsets, after.consumed, after.next_version) == ({"0": 40}, ["a"], 3)
    anchor(after, "v000001")
    told = events(event("v000001", "promoted"), event("v000002", "rejected", 2))
    assert decide(told, after).action == "keep"


def test_a_version_number_is_never_used_twice():
    told = events(event("v000900", "rejected"))
    assert next_version_number(told, ["v000903"], state(next_version=3)) == 904
    assert next_version_number({}, [], state(next_version=3)) == 3


def test_checkpoints_of_base_champions_and_open_candidates_are_kept():
    told = events(event("v000001", "promoted"), event("v000002", "canary", 2))
    assert serials_to_keep(told, state()) == {1, 4, 9}
    told["v000002"] = event("v000002", "shelved", 3)
    assert serials_to_keep(told, state()) == {1, 4}
