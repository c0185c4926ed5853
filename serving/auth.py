"""Keys, scopes, tenants, and pseudonyms of users.

Takes: a keys file (TOML or JSON) that holds only sha256 of keys, and the request's Authorization header.
Promises: tenant and scope come from the credential, never from a body; a raw user id is never kept.
"""

import contextlib
import hashlib
import hmac
import json
import logging
import os
import secrets
import tomllib
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, ValidationError

from ingest.config import StrictModel

Scope = Literal["infer", "feedback", "admin"]
SECRET_BYTES = 32
OPEN_SCOPES: frozenset[str] = frozenset(("infer", "feedback", "admin"))
log = logging.getLogger("headrace.gateway")


class Caller(NamedTuple):
    """Who a credential belongs to."""

    tenant: str
    scopes: frozenset[str]


class KeyEntry(StrictModel):
    """One [[keys]] entry."""

    sha256: str = Field(
        ..., pattern="^[0-9a-f]{64}$", description="sha256 of the key, in hex: printf %s KEY | sha256sum"
    )
    tenant: str = Field(..., pattern="^[A-Za-z0-9._-]{1,64}$")
    scopes: list[Scope] = Field(["infer", "feedback"], min_length=1)


class KeysFile(StrictModel):
    """The whole keys file."""

    keys: list[KeyEntry] = Field(..., min_length=1)


class Refused(Exception):
    """A credential that is missing, unknown or too weak; carries the HTTP status and how to fix it."""

    def __init__(self, status: int, message: str, how_to_fix: str):
        super().__init__(message)
        self.status, self.message, self.how_to_fix = status, message, how_to_fix


class Keys:
    """Callers by key. Without a keys file everyone is the tenant `default` with every scope."""

    def __init__(self, callers: dict[str, Caller] | None):
        self._callers = callers

    @property
    def is_open(self) -> bool:
        return self._callers is None

    def check(self, authorization: str | None, scope: Scope) -> Caller:
        """Return the caller behind an Authorization header; Refused unless it holds the scope."""
        if self._callers is None:
            return Caller("default", OPEN_SCOPES)
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Refused(401, "no API key", "send the header Authorization: Bearer KEY")
        caller = self._callers.get(hashlib.sha256(key.strip().encode()).hexdigest())
        if caller is None:
            raise Refused(401, "unknown API key", "use a key whose sha256 is in the gateway's keys file")
        if scope not in caller.scopes:
            held = ", ".join(sorted(caller.scopes))
            raise Refused(403, f"this key lacks the scope {scope}", f"it holds {held}; add {scope} to its entry")
        return caller


def load_keys(path: Path | None) -> Keys:
    """Read the keys file; ValueError says what is wrong with it. None means open."""
    if path is None:
        log.warning("keys=none access=open tenant=default hint='set serving.keys_file before others can reach this'")
        return Keys(None)
    try:
        text = path.read_text()
        document: Any = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        entries = KeysFile.model_validate(document).keys
    except OSError as error:
        raise ValueError(f"serving.keys_file {path} cannot be read: {error}") from error
    except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"serving.keys_file {path} is not valid: {error}") from error
    except ValidationError as error:
        where = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise ValueError(f"serving.keys_file {path}: {where}; it holds [[keys]] with sha256, tenant, scopes") from error
    return Keys({entry.sha256: Caller(entry.tenant, frozenset(entry.scopes)) for entry in entries})


def load_secret(path: Path) -> bytes:
    """Return the pseudonym key, created with mode 0600 when missing. Losing it breaks the link to past user_refs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(secrets.token_hex(SECRET_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):  # another gateway was first: its key holds
            os.link(temporary, path)
        temporary.unlink()
    try:
        secret = bytes.fromhex(path.read_text().strip())
    except (OSError, ValueError) as error:
        raise ValueError(f"pseudonym key {path} cannot be read: {error}; it holds 64 hex digits") from error
    if len(secret) < SECRET_BYTES:
        raise ValueError(f"pseudonym key {path} holds {len(secret)} bytes; {SECRET_BYTES} are needed (64 hex digits)")
    return secret


def pseudonym(secret: bytes, tenant: str, user: str) -> str:
    """Return the user_ref of a raw user id: HMAC-SHA256 under a key derived for the tenant, 32 hex digits."""
    tenant_key = hmac.digest(secret, tenant.encode(), "sha256")
    return hmac.new(tenant_key, user.encode(), "sha256").hexdigest()[:32]
