"""vLLM's OpenAI server with its engine forked from the server's process, on a CPU.

vLLM spawns its engine core on a CPU, which imports everything a second time: 14 s of a start of 47 s here. A fork made
before any thread of torch exists needs none of it. Promises: the engine dies with its server, also when the server is
killed, so that the port and the memory are free for the next start. Executed by serving.engine; imported by nobody.
"""

import ctypes
import multiprocessing
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent is gone (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main() -> None:
    import vllm.v1.engine.utils as engine_utils

    os.register_at_fork(after_in_child=die_with_parent)
    setattr(engine_utils, "get_mp_context", lambda: multiprocessing.get_context("fork"))  # noqa: B010
    sys.argv[0] = "vllm"
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
