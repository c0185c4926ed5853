"""How a candidate lives: pure transitions of the controller's state, each with the words to be said about it.

Every function returns a Change: the new state and the candidate states to announce on the control topic.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from learner.candidate import BASE_VERSION, CandidateEvent
from learner.candidate import State as CandidateState
from serving.gate_config import GateConfig
from serving.gates import elond, ratchet
from serving.plan import Engine, Holding, Known, Rollout, State, Test, queue
from serving.routes import RouteTable


class Word(NamedTuple):
    """One announcement about one candidate."""

    version: str
    state: CandidateState
    reason: str
    figures: Mapping[str, float] = MappingProxyType({})
    author: str = "controller"


class Change(NamedTuple):
    """A new state and what is to be said."""

    state: State
    words: Sequence[Word] = ()


def set_known(held: State, version: str, **fields: object) -> State:
    """Return the state with some fields of one version changed."""
    known = msgspec.structs.replace(held.versions[version], **fields)
    return msgspec.structs.replace(held, versions={**held.versions, version: known})


def hear(state: State, event: CandidateEvent) -> State:
    """Take a candidate's event; only an unknown version is news, for we said the rest ourselves."""
    if event.version in state.versions or not event.folder:
        return state
    known = Known(
        version=event.version,
        folder=event.folder,
        manifest_sha256=event.manifest_sha256,
        parent=event.parent,
        proposed_at=event.at,
        state=event.state,
    )
    return msgspec.structs.replace(state, versions={**state.versions, event.version: known})


def shelve_older(state: State) -> Change:
    """Shelve every waiting version but the newest."""
    words = []
    for version in queue(state)[1:]:
        state = set_known(state, version, state="shelved")
        words.append(Word(version, "shelved", f"{queue(state)[0]} is newer"))
    return Change(state, words)


def refuse(state: State, version: str, reason: str, figures: Mapping[str, float]) -> Change:
    """The candidate is bad; no user has seen it."""
    state = set_known(state, version, state="rejected")
    state = msgspec.structs.replace(state, num_rejected=state.num_rejected + 1)
    return Change(state, [Word(version, "rejected", reason, figures)])


def set_aside(state: State, version: str, reason: str, figures: Mapping[str, float]) -> Change:
    """The candidate is not refused, and not to be exposed either."""
    return Change(set_known(state, version, state="shelved"), [Word(version, "shelved", reason, figures)])


def fail_attempt(state: State, version: str, reason: str, gate: GateConfig) -> Change:
    """The machinery failed under a candidate: try again, up to the limit."""
    attempts = state.versions[version].attempts + 1
    again = attempts < gate.max_attempts
    state = set_known(state, version, attempts=attempts, state="proposed" if again else "inconclusive")
    return Change(state, [Word(version, "inconclusive", reason + ("; it is tried once more" if again else ""))])


def hold(state: State, engine: Engine, version: str) -> State:
    """Note what an engine's incarnation holds; "" while nobody can tell."""
    holding = Holding(served_model=engine.served_model, version=version)
    return msgspec.structs.replace(state, holdings={**state.holdings, engine.name: holding})


def start_canary(state: State, version: str, engine: Engine, salt: str, now_s: float, gate: GateConfig) -> Change:
    """Expose a candidate that passed offline; its place in e-LOND is taken once, whatever restarts come."""
    tests = dict(state.tests)
    if version not in tests:
        index = len(tests) + 1
        tests[version] = Test(index=index, threshold=elond.threshold(index, state.num_promoted, gate.fdr))
    attempts = state.versions[version].attempts
    # Departure 1: a second attempt needs twice the E, for the mean over attempts is what e-LOND may be shown.
    threshold = tests[version].threshold * (attempts + 1)
    rollout = Rollout(
        id=f"{version}-{salt}", version=version, engine=engine.name, served_model=engine.served_model, salt=salt,
        started_at=now_s, stage=0, stage_started_at=now_s, weight=gate.weights[0], threshold=threshold,
    )  # fmt: skip
    state = msgspec.structs.replace(set_known(state, version, state="canary"), tests=tests, rollout=rollout)
    return Change(state, [Word(version, "canary", f"{gate.weights[0]:.0%} of units", {"threshold": threshold})])


def advance(state: State, now_s: float, gate: GateConfig) -> Change:
    """Let the canary have its next share; it only grows."""
    rollout = state.rollout
    assert rollout is not None, "no canary to advance"
    stage = rollout.stage + 1
    rollout = msgspec.structs.replace(rollout, stage=stage, stage_started_at=now_s, weight=gate.weights[stage])
    state = msgspec.structs.replace(state, rollout=rollout)
    return Change(state, [Word(rollout.version, "canary", f"{rollout.weight:.0%} of units")])


def promote(state: State, bound: float, reason: str, figures: Mapping[str, float], gate: GateConfig) -> Change:
    """The canary becomes the champion; the champion stays loaded as the standby."""
    rollout = state.rollout
    assert rollout is not None, "no canary to promote"
    deficits = [*state.deficits, ratchet.deficit(bound)]
    frozen = state.frozen
    if not frozen and ratchet.is_breached(deficits, gate.ratchet_budget):
        frozen = f"ratchet: promotions may have lost {sum(deficits):.3f}, budget {gate.ratchet_budget}"
    state = msgspec.structs.replace(
        set_known(state, rollout.version, state="promoted"),
        champion=rollout.version, champion_engine=rollout.engine, previous=state.champion, rollout=None,
        deficits=deficits, frozen=frozen, num_promoted=state.num_promoted + 1,
    )  # fmt: skip
    return Change(state, [Word(rollout.version, "promoted", reason, {**figures, "lower_bound": bound})])


def end_canary(
    state: State, end_state: CandidateState, reason: str, figures: Mapping[str, float], author: str
) -> Change:
    """Take the canary's traffic away; its engine is idle, with weights that nobody is routed to."""
    rollout = state.rollout
    assert rollout is not None, "no canary to end"
    num_rejected = state.num_rejected + (end_state == "rolled_back")
    state = msgspec.structs.replace(
        set_known(state, rollout.version, state=end_state), rollout=None, num_rejected=num_rejected
    )
    return Change(state, [Word(rollout.version, end_state, reason, figures, author)])


def invalidate(state: State, reason: str, gate: GateConfig) -> Change:
    """End a canary that says nothing about its candidate; it may be tried once more."""
    assert state.rollout is not None, "no canary to invalidate"
    version = state.rollout.version
    return fail_attempt(msgspec.structs.replace(state, rollout=None), version, reason, gate)


def adopt(state: State, table: RouteTable) -> Change:
    """Take over an operator's table: gateways already follow it. Unfreezing or approving refills the budget."""
    words: Sequence[Word] = ()
    was_frozen, reason = bool(state.frozen), table.reason or "operator"
    rollout, chosen = state.rollout, table.champion.version if table.champion else state.champion
    if rollout is not None and chosen == rollout.version:
        state, words = promote_by_hand(state, reason)
    elif rollout is not None and (table.canary is None or table.canary_weight == 0 or chosen != state.champion):
        state, words = end_canary(state, "rolled_back", reason, {}, "operator")
    if chosen != state.champion:
        if state.champion in state.versions and state.champion != BASE_VERSION:
            words = [*words, Word(state.champion, "rolled_back", reason, {}, "operator")]
            state = set_known(state, state.champion, state="rolled_back")
        engine = table.champion.engine if table.champion else ""
        state = msgspec.structs.replace(state, champion=chosen, champion_engine=engine, previous=None)
    if was_frozen and not table.frozen:
        state = msgspec.structs.replace(state, frozen="", deficits=[])
    elif table.frozen and not was_frozen:
        state = msgspec.structs.replace(state, frozen=reason)
    return Change(msgspec.structs.replace(state, table=table), words)


def promote_by_hand(state: State, reason: str) -> Change:
    """An operator chose the canary: a human approval, so the ratchet's budget starts anew."""
    rollout = state.rollout
    assert rollout is not None, "no canary to approve"
    state = msgspec.structs.replace(
        set_known(state, rollout.version, state="promoted"),
        champion=rollout.version, champion_engine=rollout.engine, previous=state.champion, rollout=None,
        deficits=[], frozen="", num_promoted=state.num_promoted + 1,
    )  # fmt: skip
    return Change(state, [Word(rollout.version, "promoted", reason, {}, "operator")])
