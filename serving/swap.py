"""Putting a version into an idle engine, in numbered steps; a half-loaded engine never serves.

    1. cordon: the caller has published a table without the engine; drain: wait until no gateway has it in flight
    2. check the candidate: manifest hash, files, shapes, finite weights (candidates only)
    3. pause, so that the engine takes no step while weights change
    4. load in place
    5. reset the prefix cache and check the answer
    6. commit the version label, by which a restarted engine is recognised
    7. resume
    8. verify: teacher-forced log-probs against the learner's, warm answer equal to cold, finite, no repeated token
The caller publishes the route (uncordon) last. Any SwapError quarantines the engine: it is restarted
with the base model and loaded anew.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np

from learner.candidate import Probe
from serving.engine_client import EngineClient, EngineError, NotFinite

logger = logging.getLogger("serving.swap")

_PROMPT = "The capital of France is a city on the river Seine. The sky is blue because"
_WARM_TOKENS = 160  # more than one block of the prefix cache: 32 tokens in our CPU engines, 128 in vLLM's default
_SAMPLE_TOKENS = 12


class SwapError(Exception):
    """The engine failed during the swap and cannot be trusted."""


class Refused(SwapError):
    """The engine works, but what it computes with this version is wrong."""


class Version(NamedTuple):
    """What is to be loaded."""

    version: str
    folder: Path
    digest: str
    probes: list[Probe]

    @property
    def label(self) -> str:
        return f"{self.version}:{self.digest}"


def drain(engine: str, revision: int, gateways: list[str], deadline_s: float, sleep: Callable[[float], None]) -> str:
    """Wait until every gateway has the table `revision` and nothing in flight on the engine; return how it ended.

    A gateway that cannot be asked is waited for too: at the deadline the swap goes on, for the pause waits once more.
    """
    end = time.monotonic() + deadline_s
    waiting = ""
    while True:
        waiting = next(filter(None, (_is_busy(url, engine, revision) for url in gateways)), "")
        if not waiting:
            return "drained"
        if time.monotonic() >= end:
            logger.warning("drain_deadline engine=%s waiting=%s", engine, waiting)
            return waiting
        sleep(0.1)


def _is_busy(gateway: str, engine: str, revision: int) -> str:
    state = read_gateway(gateway)
    if state is None:
        return f"{gateway} does not answer"
    if state.get("revision", -1) < revision:
        return f"{gateway} has revision {state.get('revision')}"
    inflight = state.get("inflight", {}).get(engine, 0)
    return f"{gateway} has {inflight} in flight" if inflight else ""


_http = httpx.Client(timeout=2.0, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0))


def read_gateway(url: str) -> dict | None:
    """Return /internal/routes of one gateway, or None when it does not answer."""
    try:
        reply = _http.get(f"{url}/internal/routes")
        return reply.json() if reply.status_code == 200 else None
    except (httpx.HTTPError, ValueError):
        return None


def load(client: EngineClient, version: Version, reload: bool, bound: float) -> dict[str, float]:
    """Steps 3 to 8 on a drained engine; returns what was measured. SwapError: quarantine the engine.

    reload=False: the engine was just started with these very weights.
    """
    started = time.monotonic()
    try:
        client.pause()  # 3
        if reload:
            client.reload_weights(str(version.folder))  # 4
        client.reset_prefix_cache()  # 5
        client.set_weight_label(version.label)  # 6
        client.resume()  # 7
        load_s = time.monotonic() - started
        figures = verify(client, version.probes, bound, reload)  # 8
    except NotFinite as error:
        raise Refused(f"{version.version}: {error}") from error
    except EngineError as error:
        raise SwapError(f"{version.version}: {error}") from error
    figures |= {"reloaded": float(reload), "load_s": load_s, "swap_s": time.monotonic() - started}
    logger.info("swap version=%s engine=%s %s", version.version, client.url,
                " ".join(f"{key}={value:.4f}" for key, value in figures.items()))  # fmt: skip
    return figures


def verify(client: EngineClient, probes: list[Probe], bound: float, was_reloaded: bool = True) -> dict[str, float]:
    """Step 8; Refused says which check failed. EngineClient refuses log-probs that are not finite."""
    difference = 0.0
    if probes:
        scores = client.score([probe.prompt_ids for probe in probes], [probe.completion_ids for probe in probes])
        pairs = [np.abs(np.asarray(s) - np.asarray(p.logprobs)) for s, p in zip(scores, probes, strict=True)]
        difference = float(np.concatenate(pairs).mean())
        if not difference <= bound:
            raise Refused(f"log-probs differ from the learner's by {difference:.3f} nats on average, over {bound}")
    prompt = client.tokenize(_PROMPT)
    if was_reloaded:
        _check_warm(client, prompt)
    share = _most_common_token_share(client, [probe.prompt_ids for probe in probes[:2]] or [prompt])
    if share > 0.9:
        raise Refused(f"{share:.0%} of sampled tokens are the same one")
    return {"logprob_difference": difference, "same_token_share": share}


def _check_warm(client: EngineClient, prompt: list[int]) -> None:
    """A prompt that the cache knew before the swap must be answered as without a cache: else old keys are in use.

    The prompt is the same in every swap, so what an earlier one left in the cache would be met here.
    """
    long_prompt = (prompt * (_WARM_TOKENS // len(prompt) + 1))[:_WARM_TOKENS]
    warm = client.sample([long_prompt], 1, 0.0)[0]
    cold = client.sample([long_prompt], 1, 0.0, cache_salt=f"cold-{time.monotonic_ns()}")[0]
    if abs(warm.logprobs[0] - cold.logprobs[0]) > 0.05:
        raise Refused(f"warm answer {warm.logprobs[0]:.3f} differs from cold {cold.logprobs[0]:.3f}: stale cache")


def _most_common_token_share(client: EngineClient, prompts: list[list[int]]) -> float:
    answers = client.sample(prompts, _SAMPLE_TOKENS, 1.0, seed=1)
    tokens = [token for answer in answers for token in answer.token_ids]
    if len(tokens) < 8:
        return 0.0  # short answers repeat nothing
    return max(tokens.count(token) for token in set(tokens)) / len(tokens)
