"""Bad records go to the dead letter topic as they came, with where they were and why; they never block a partition.

A dead letter keeps the value's bytes; headers headrace_place (topic[partition]@offset) and headrace_reason tell more.
"""

import hashlib
from typing import Any

import msgspec

from ingest.topics import headers

DEAD_LETTER_TYPE = "llm.dead_letter.v1"
PLACE_HEADER = "headrace_place"
REASON_HEADER = "headrace_reason"


class _Identity(msgspec.Struct):
    feedback_id: Any = ""
    tenant: Any = ""


def dead_letter_headers(place: str, reason: str, value: bytes, unix_s: float) -> list[tuple[str, bytes]]:
    """Return the headers of a dead letter; its event id follows from place and value, so a replay repeats it."""
    digest = hashlib.sha256(place.encode() + value).hexdigest()[:32]
    return [
        *headers(DEAD_LETTER_TYPE, f"dlq_{digest}", "headrace/joiner", unix_s),
        (PLACE_HEADER, place.encode()),
        (REASON_HEADER, reason.encode("utf-8", "replace")[:2000]),
    ]


def identity_of(value: bytes) -> tuple[str, str]:
    """Return (tenant, feedback id) of a broken feedback record, as far as it tells; empty strings otherwise."""
    try:
        identity = msgspec.json.decode(value, type=_Identity)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return "", ""
    tenant, feedback_id = identity.tenant, identity.feedback_id
    return tenant if isinstance(tenant, str) else "", feedback_id if isinstance(feedback_id, str) else ""
