"""What the controller knows, and what follows from it: the route table and the next piece of work. Pure functions.

Owns State (one JSON value in controller.sqlite), desired_table() and next_job(). Promises: an engine is routed to only
for the version that its present incarnation is known to hold; an engine at work on a swap is in no table; a canary
never becomes the champion for want of one.
"""

from typing import Literal, NamedTuple

import msgspec

from learner.candidate import BASE_VERSION
from serving.routes import Route, RouteTable

JobKind = Literal["inspect", "prepare", "champion", "standby"]
QUEUED = ("proposed",)


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """One version that the controller has heard of."""

    version: str
    folder: str
    manifest_sha256: str = ""
    parent: str | None = None
    proposed_at: float = 0.0
    state: str = "proposed"
    digest: str = ""  # of the weights; empty until inspected
    attempts: int = 0


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine's incarnation holds; version "" while a swap may have left it half-loaded."""

    served_model: str
    version: str


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """The canary under way."""

    id: str
    version: str
    engine: str
    served_model: str
    salt: str
    started_at: float
    stage: int
    stage_started_at: float
    weight: float  # canary share of this stage
    threshold: float  # E that e-LOND asks
    verdict: str = "HOLD"  # the last one recorded


class Test(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate's place in e-LOND, taken once."""

    index: int
    threshold: float


class State(msgspec.Struct, frozen=True, kw_only=True):
    """Everything durable but the evidence and the decisions."""

    champion: str = BASE_VERSION
    champion_engine: str = ""
    previous: str | None = None  # the champion before: the standby
    versions: dict[str, Known] = {}
    holdings: dict[str, Holding] = {}
    rollout: Rollout | None = None
    tests: dict[str, Test] = {}
    deficits: list[float] = []  # of promotions since a human last approved
    frozen: str = ""  # why promotions are frozen
    table: RouteTable | None = None  # last published
    num_promoted: int = 0
    num_rejected: int = 0
    num_swaps: int = 0
    last_swap_s: float = 0.0


class Engine(NamedTuple):
    """One engine as the watch sees it."""

    name: str
    url: str
    served_model: str
    is_alive: bool
    is_attached: bool = False  # somebody else's server: its weights at start are not known


class Job(NamedTuple):
    """One piece of slow work, done beside the loop."""

    kind: JobKind
    version: str
    engine: str = ""


def held_version(state: State, engine: Engine) -> str | None:
    """Return the version an engine holds: None if it is away or unknown, the base for a fresh start of our own."""
    holding = state.holdings.get(engine.name)
    if not engine.is_alive:
        return None
    if holding is not None and holding.served_model == engine.served_model:
        return holding.version or None
    return None


def is_fresh(state: State, engine: Engine) -> bool:
    """Tell whether an engine of ours was just started, with the base model, and not touched since."""
    holding = state.holdings.get(engine.name)
    return not engine.is_attached and (holding is None or holding.served_model != engine.served_model)


def find_holder(state: State, engines: list[Engine], version: str | None, but: tuple[str, ...] = ()) -> Engine | None:
    """Return an engine that holds a version; the champion's own engine first."""
    holders = [e for e in engines if version and e.name not in but and held_version(state, e) == version]
    holders.sort(key=lambda engine: engine.name != state.champion_engine)
    return holders[0] if holders else None


def desired_table(state: State, engines: list[Engine], busy: str, now_s: float) -> RouteTable:
    """Return the table that should be in force, with the last revision kept; see needs_publishing()."""
    reason = "as decided"
    but = (busy,) if busy else ()
    rollout = state.rollout
    but_canary = (*but, rollout.engine) if rollout else but
    champion = find_holder(state, engines, state.champion, but_canary)
    champion_version = state.champion
    if champion is None and (champion := find_holder(state, engines, state.previous, but_canary)):
        champion_version = state.previous or ""
        reason = f"the champion's engine is away: {state.previous}, the champion before {state.champion}, answers"
    elif champion is None:
        reason = f"no engine holds the champion {state.champion}"
    taken = (*but_canary, champion.name) if champion else but_canary
    standby, standby_version = None, state.previous or state.champion
    if champion is not None and champion_version == state.champion:
        standby = find_holder(state, engines, standby_version, taken)
        if standby is None and (standby := find_holder(state, engines, state.champion, taken)):
            standby_version = state.champion
    canary = None
    if rollout is not None:
        candidate = next((engine for engine in engines if engine.name == rollout.engine), None)
        if candidate and candidate.served_model == rollout.served_model and candidate.is_alive:
            canary = _route(state, "canary", rollout.version, candidate)
    return RouteTable(
        revision=state.table.revision if state.table else 0,
        at=now_s,
        author="controller",
        champion=_route(state, "champion", champion_version, champion) if champion else None,
        canary=canary,
        standby=_route(state, "standby", standby_version, standby) if standby else None,
        canary_weight=rollout.weight if canary and rollout else 0.0,
        rollout_id=rollout.id if canary and rollout else "",
        salt=rollout.salt if canary and rollout else "",
        frozen=bool(state.frozen),
        reason=reason,
    )


def _route(state: State, arm: Literal["champion", "canary", "standby"], version: str, engine: Engine) -> Route:
    known = state.versions.get(version)
    return Route(arm=arm, version=version, engine=engine.name, url=engine.url, served_model=engine.served_model,
                 weights_digest=known.digest if known else "")  # fmt: skip


def needs_publishing(old: RouteTable | None, new: RouteTable) -> bool:
    """Tell whether two tables differ in more than who said so, when and why."""
    if old is None:
        return True
    same = {"revision": 0, "at": 0.0, "author": "", "reason": ""}
    return msgspec.structs.replace(old, **same) != msgspec.structs.replace(new, **same)


def queue(state: State) -> list[str]:
    """Return the versions that wait, newest first."""
    waiting = [known for known in state.versions.values() if known.state in QUEUED]
    return [known.version for known in sorted(waiting, key=lambda k: (k.proposed_at, k.version), reverse=True)]


def next_job(state: State, engines: list[Engine], can_probe: bool) -> Job | None:
    """Return the most urgent work: a champion that nobody holds, then a candidate, then a standby."""
    alive = [engine for engine in engines if engine.is_alive]
    champion = find_holder(state, engines, state.champion)
    if champion is None:
        return _champion_job(state, alive)
    if state.rollout is not None:
        return None
    others = [engine for engine in alive if engine.name != champion.name]
    waiting = queue(state)
    if waiting and not state.versions[waiting[0]].digest:
        return Job("inspect", waiting[0])
    if waiting and others and can_probe:
        return Job("prepare", waiting[0], others[0].name)
    useful = {state.previous, state.champion} - {None}
    idle = next((engine for engine in others if held_version(state, engine) not in useful), None)
    return Job("standby", state.previous or state.champion, idle.name) if idle else None


def _champion_job(state: State, alive: list[Engine]) -> Job | None:
    """Choose the engine for a champion that is nowhere: not the one where the champion before it answers meanwhile."""
    canary_engine = state.rollout.engine if state.rollout else ""
    stands_in = {state.previous} - {None}
    free = [e for e in alive if e.name != canary_engine and held_version(state, e) not in stands_in]
    free.sort(key=lambda engine: engine.name != state.champion_engine)
    return Job("champion", state.champion, free[0].name) if free else None
