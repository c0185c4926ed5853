"""Routes (contract): which engine answers for which arm. Key "routes" on the control topic; the top revision wins."""

from typing import Literal

import msgspec

ROUTES_KEY = "routes"
ROUTES_TYPE = "llm.routes.v1"


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One engine incarnation that may answer.

    served_model is a name fresh for each engine start: an engine that was restarted, and so holds other weights, does
    not know the name and refuses, instead of answering under the wrong version.
    """

    arm: Literal["champion", "canary", "standby"]
    version: str
    engine: str  # blue | green
    url: str  # http://127.0.0.1:8101
    served_model: str
    weights_digest: str = ""


class RouteTable(msgspec.Struct, frozen=True, kw_only=True):
    """The whole truth for gateways. Standby is the previous champion, still loaded: where a rollback goes."""

    revision: int
    at: float
    author: str  # controller | operator
    champion: Route | None
    canary: Route | None = None
    standby: Route | None = None
    canary_weight: float = 0.0
    rollout_id: str = ""
    salt: str = ""
    frozen: bool = False  # promotions are frozen
    reason: str = ""
