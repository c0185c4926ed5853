"""The controller's slow work, off its loop: look at a candidate, load a version, ask the offline gates' questions.

Takes plain values and returns plain results; touches no state of the controller. One job at a time, in one thread.
"""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from learner.candidate import MANIFEST, Manifest, check_files, list_files, read_manifest
from serving import weights
from serving.engine_client import Answer, EngineClient, EngineError
from serving.gate_config import GateConfig
from serving.gates.offline import Answers, Check, check_answers, check_candidate_files, check_trust_region
from serving.plan import Engine, Job, Known
from serving.swap import Refused, SwapError, Version, drain, load

_NUM_PROBES = 4  # of the manifest's; each costs a prefill on an engine that waits for it
_SCORE_PROMPTS = 16  # prompts per call, so that one call stays short


class Result(NamedTuple):
    """How a job ended."""

    job: Job
    served_model: str = ""  # incarnation of the engine that was worked on
    is_loaded: bool = False
    digest: str = ""
    checks: tuple[Check, ...] = ()
    figures: Mapping[str, float] = MappingProxyType({})
    refused: str = ""  # the candidate is bad
    failed: str = ""  # the machinery failed; try again
    quarantine: bool = False


class ChampionAnswers(NamedTuple):
    """The champion's own answers to a set of probe prompts, kept until either changes."""

    champion: str
    prompts: list[list[int]]
    answers: Answers


def base_manifest(folder: Path) -> Manifest:
    """Return a manifest of the base model's files as they are."""
    files = [file for file in list_files(folder) if not file.name.startswith(".")]
    return Manifest(version="v000000", parent=None, kind="base", files=files, created_at=0.0)


def read_version(known: Known) -> Version:
    """Return what is to be loaded; ValueError if its folder is not what was announced."""
    folder = Path(known.folder)
    if not (folder / MANIFEST).is_file() and not known.manifest_sha256:
        if known.digest:
            return Version(known.version, folder, known.digest, [])  # the base, hashed once
        manifest = base_manifest(folder)
    else:
        manifest, sha256 = read_manifest(folder)
        if known.manifest_sha256 and sha256 != known.manifest_sha256:
            raise ValueError(f"{folder}/{MANIFEST} is not the one that was announced")
        if manifest.version != known.version:
            raise ValueError(f"{folder}/{MANIFEST} is of {manifest.version}, announced as {known.version}")
    return Version(known.version, folder, weights.digest(manifest), list(manifest.probes[:_NUM_PROBES]))


def inspect(job: Job, known: Known, champion: Known, parent_digest: str) -> Result:
    """Gate 1, without an engine."""
    try:
        version = read_version(known)
        manifest, _ = read_manifest(version.folder)
        problems = check_files(version.folder, manifest)
        found, expected = weights.shapes(version.folder), weights.shapes(Path(champion.folder))
        bad = weights.find_non_finite(version.folder)
    except (ValueError, OSError) as error:
        checks = [Check(name="manifest", outcome="FAIL", value=1.0, limit=0.0, detail=str(error))]
        return Result(job, checks=tuple(checks), refused=str(error))
    checks = check_candidate_files(problems, found, expected, bad, version.digest, parent_digest)
    failed = [f"{check.name}: {check.detail}" for check in checks if check.outcome != "PASS"]
    return Result(job, digest=version.digest, checks=tuple(checks), refused="; ".join(failed))


def put_into_engine(
    job: Job, known: Known, engine: Engine, reload: bool, revision: int, gateways: list[str], gate: GateConfig
) -> Result:
    """Drain the engine and load a version; every failure says whether the version or the machinery is to blame."""
    started = time.monotonic()
    reload_method = "reload_weights" if engine.is_attached else "reload_and_repack"
    client = EngineClient(engine.url, engine.served_model, gate.swap_timeout_s, reload_method)
    try:
        version = read_version(known)
        if revision >= 0:
            drain(engine.name, revision, gateways, gate.drain_deadline_s, time.sleep)
        figures = load(client, version, reload, gate.verify_bound)
    except ValueError as error:
        return Result(job, engine.served_model, refused=str(error))
    except Refused as error:
        return Result(job, engine.served_model, refused=str(error), quarantine=True)
    except SwapError as error:
        return Result(job, engine.served_model, failed=str(error), quarantine=True)
    finally:
        client.close()
    figures["total_s"] = time.monotonic() - started
    return Result(job, engine.served_model, is_loaded=True, digest=version.digest, figures=figures)


def ask_offline(
    loaded: Result, engine: Engine, champion: Engine, champion_version: str, prompts: list[list[int]],
    cached: ChampionAnswers | None, gate: GateConfig,
) -> tuple[Result, ChampionAnswers | None]:  # fmt: skip
    """Gates 2 and 6: the candidate answers logged prompts at temperature 1, the champion judges every token."""
    new = EngineClient(engine.url, engine.served_model, gate.swap_timeout_s)
    judge = EngineClient(champion.url, champion.served_model, gate.swap_timeout_s)
    try:
        if cached is None or cached.champion != champion_version:
            own = judge.sample(prompts, gate.probe_tokens, 1.0, seed=7)
            scores = [answer.logprobs for answer in own]  # sampled at temperature 1: these are its own log-probs
            cached = ChampionAnswers(champion_version, prompts, _judge(judge, prompts, own, scores))
        answers = new.sample(cached.prompts, gate.probe_tokens, 1.0, seed=7)
        scores = _score(judge, cached.prompts, [answer.token_ids for answer in answers])
        judged = _judge(judge, cached.prompts, answers, scores)
    except EngineError as error:
        return loaded._replace(failed=str(error)), cached
    finally:
        new.close()
        judge.close()
    new_logprobs = np.concatenate([np.asarray(answer.logprobs) for answer in answers])
    champion_logprobs = np.concatenate([np.asarray(score) for score in scores])
    checks = [check_trust_region(new_logprobs, champion_logprobs, gate)]
    checks += check_answers(judged, cached.answers, gate)
    failed = [
        f"{check.name} {check.value:.3f} (limit {check.limit:.3f})" for check in checks if check.outcome != "PASS"
    ]
    return loaded._replace(checks=tuple(checks), refused="; ".join(failed)), cached


def _judge(judge: EngineClient, prompts: list[list[int]], answers: list[Answer], own: list[list[float]]) -> Answers:
    """Return answers with their scores after their own prompt, which are given, and after the next one's."""
    other = _score(judge, [*prompts[1:], prompts[0]], [answer.token_ids for answer in answers])
    return Answers(
        texts=[answer.text for answer in answers],
        finish_reasons=[answer.finish_reason for answer in answers],
        own=[float(np.mean(score)) for score in own if score],
        other=[float(np.mean(score)) for score in other if score],
    )


def _score(judge: EngineClient, prompts: list[list[int]], tokens: list[list[int]]) -> list[list[float]]:
    scores = []
    for start in range(0, len(prompts), _SCORE_PROMPTS):
        part = slice(start, start + _SCORE_PROMPTS)
        scores += judge.score(prompts[part], tokens[part])
    return scores


def describe(checks: Sequence[Check]) -> dict[str, float]:
    """Return the checks as figures for events and metrics."""
    return {check.name: float(check.value) for check in checks if np.isfinite(check.value)}
