"""What the fate of candidates means for the learner (pure).

Takes the latest event of each candidate and the learner's state. Emits: which version is champion, whether the learner
has to return to it, which of its candidates are undecided, which still have to be announced.
"""

from typing import Literal, NamedTuple

from learner.candidate import BASE_VERSION, CandidateEvent, version_number
from learner.checkpoints import LearnerState

_BAD = ("rejected", "rolled_back")
_UNDECIDED = ("proposed", "shadow", "canary")


class Decision(NamedTuple):
    """keep: nothing changes; anchor: the KL is to a new champion; return: start again from the champion's weights."""

    action: Literal["keep", "anchor", "return"]
    champion: str
    reason: str = ""


def champion_of(events: dict[str, CandidateEvent], exports: dict[str, int]) -> str:
    """Return the version promoted last and not rolled back, of those whose weights this learner has; else the base."""
    promoted = [event for event in events.values() if event.state == "promoted" and event.version in exports]
    return max(promoted, key=lambda event: (event.at, event.version)).version if promoted else BASE_VERSION


def decide(events: dict[str, CandidateEvent], state: LearnerState) -> Decision:
    """Return what the learner has to do; doing it and asking again gives keep."""
    champion = champion_of(events, state.exports)
    if champion not in state.versions:
        return Decision("return", champion, f"champion {champion} is not of lineage {state.lineage}")
    later = state.versions[state.versions.index(champion) + 1 :]
    for version in later:
        if version in events and events[version].state in _BAD:
            return Decision("return", champion, f"{version} was {events[version].state}: {events[version].reason}")
    if champion != state.champion:
        return Decision("anchor", champion, f"{champion} was promoted")
    return Decision("keep", champion)


def undecided(events: dict[str, CandidateEvent], versions: list[str]) -> list[str]:
    """Return the exports without a final word."""
    return [
        version
        for version in versions
        if version != BASE_VERSION and (version not in events or events[version].state in _UNDECIDED)
    ]


def next_version_number(events: dict[str, CandidateEvent], on_disk: list[str], state: LearnerState) -> int:
    """Return a number that no candidate ever had, whoever made it."""
    taken = [version_number(version) for version in (*events, *on_disk)]
    return max([state.next_version, *(number + 1 for number in taken)])


def after_return(current: LearnerState, champion_state: LearnerState, champion: str) -> LearnerState:
    """Return the state of a new lineage: weights' past from the champion's checkpoint, counters from now.

    Offsets, buffer and consumed ids go back with the weights: samples used since are read again and used again.
    """
    champion_state.serial = current.serial
    champion_state.step = current.step
    champion_state.num_lineages = current.num_lineages + 1
    champion_state.lineage = f"l{champion_state.num_lineages:04d}"
    champion_state.based_on = champion
    champion_state.exports = current.exports
    champion_state.next_version = current.next_version
    champion_state.steps_since_export = 0
    champion_state.attempts = {}
    champion_state.last_record = current.last_record
    anchor(champion_state, champion)
    return champion_state


def anchor(state: LearnerState, champion: str) -> None:
    """Make a version of this lineage its champion; later promotions of a rolled back past are forgotten."""
    state.champion = champion
    order = {version: at for at, version in enumerate(state.versions)}
    earlier = [v for v in state.promoted if order.get(v, len(order)) < order[champion]]
    state.promoted = [*earlier, champion]


def serials_to_keep(events: dict[str, CandidateEvent], state: LearnerState) -> set[int]:
    """Return the checkpoints that may have to be returned to: base, champions of this lineage, undecided candidates."""
    champions = [*state.promoted[-3:], state.champion, BASE_VERSION]
    open_versions = undecided(events, [v for v in state.exports if v in events or v in state.versions])
    return {state.exports[v] for v in {*champions, *open_versions} if v in state.exports}
