"""One supervisor per state folder: a kernel lock that ends with its holder, with the holder's pid inside."""

import fcntl
import os
from pathlib import Path
from typing import IO


class Held(ValueError):
    """Another supervisor holds the state folder."""


def lock_path(state_dir: Path) -> Path:
    return state_dir / "supervise" / "lock"


def acquire(state_dir: Path) -> IO[str]:
    """Take the lock until the returned file is closed; Held names the process that has it."""
    path = lock_path(state_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        pid = holder(state_dir)
        file.close()
        raise Held(
            f"{state_dir} is in use by the supervisor with pid {pid}; stop it with `headrace down`, "
            "or give this one its own run.state_dir and ports"
        ) from error
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def holder(state_dir: Path) -> int | None:
    """Return the pid of the running supervisor, None when there is none."""
    try:
        with lock_path(state_dir).open("r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                text = file.read().strip()
                return int(text) if text.isdigit() else 0
    except OSError:
        return None
    return None
