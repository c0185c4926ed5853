"""Ids that carry their partition route, so that everything of one episode meets in one partition.

Owns the id grammar. A route is 4 hex digits of a 16-bit hash of the episode id and is the Kafka key.
    inference id   inf_<route>_<32 hex of a UUIDv7>[-<choice>]      choice 0 carries no suffix
    response id    resp_<route>_<the same 32 hex>                   one response, one or more choices
    episode id     chosen by the client, or ep_<32 hex>
Promises: feedback that names only an inference or response id still finds the partition; nothing is guessed.
"""

import hashlib
import re
from typing import NamedTuple

_ID = re.compile(r"(inf|resp)_([0-9a-f]{4})_([0-9a-f]{32})(?:-([1-9][0-9]{0,3}))?")


class RoutedId(NamedTuple):
    """A parsed inference or response id."""

    kind: str  # "inf" | "resp"
    route: str  # 4 hex digits
    uuid_hex: str  # 32 hex digits
    choice: int


def route_of(episode_id: str) -> str:
    """Return the 4 hex digit route of an episode id."""
    return hashlib.blake2b(episode_id.encode(), digest_size=2).hexdigest()


def uuid7_hex(unix_ms: int, random_bytes: bytes) -> str:
    """Return the 32 hex digits of a UUIDv7 from a time in ms and 10 random bytes (RFC 9562)."""
    if len(random_bytes) != 10:
        raise ValueError(f"uuid7_hex needs 10 random bytes, got {len(random_bytes)}")
    value = (unix_ms & ((1 << 48) - 1)) << 80 | int.from_bytes(random_bytes, "big")
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return f"{value:032x}"


def episode_id(uuid_hex: str) -> str:
    """Return the id of an episode that the client did not name."""
    return f"ep_{uuid_hex}"


def response_id(route: str, uuid_hex: str) -> str:
    """Return the id of one response."""
    return f"resp_{route}_{uuid_hex}"


def inference_id(route: str, uuid_hex: str, choice: int = 0) -> str:
    """Return the id of one choice of a response."""
    suffix = f"-{choice}" if choice else ""
    return f"inf_{route}_{uuid_hex}{suffix}"


def parse(routed_id: str) -> RoutedId:
    """Parse an inference or response id; ValueError says what is wrong with it."""
    match = _ID.fullmatch(routed_id)
    if not match:
        raise ValueError(
            f"{routed_id!r} is not a Headrace id: expected inf_<4 hex>_<32 hex>[-choice] or resp_<4 hex>_<32 hex>, "
            "as returned in the x-headrace-inference-id header or the response body's id"
        )
    kind, route, uuid_hex, choice = match.groups()
    if kind == "resp" and choice:
        raise ValueError(f"{routed_id!r}: a response id has no choice suffix")
    return RoutedId(kind, route, uuid_hex, int(choice or 0))


def inference_ids_of(response: str, num_choices: int) -> list[str]:
    """Return the inference ids of all choices of a response id."""
    parsed = parse(response)
    return [inference_id(parsed.route, parsed.uuid_hex, choice) for choice in range(num_choices)]
