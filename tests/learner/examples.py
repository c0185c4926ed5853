"""Samples and a tiny session for the learner's tests."""

import random
from pathlib import Path

from learner.config import LearnerConfig
from rewards.samples import Sample
from tests.tiny_model import make_tiny_model

TEXT = "the capital of france is paris and the river is the seine "


def sample(number: int, **changes) -> Sample:
    """Return a plausible sample; log-probs are made up, so a test that steps must replace them or widen the masks."""
    rng = random.Random(number)
    completion = [rng.randrange(256) for _ in range(rng.randrange(3, 12))]
    values = {
        "sample_id": f"inf_0000_{number:032x}@0",
        "inference_id": f"inf_0000_{number:032x}",
        "revision": 0,
        "kind": "full",
        "tenant": "t",
        "app": "a",
        "function": "f",
        "episode_id": f"ep_{number}",
        "actor": f"user{number}",
        "policy_version": "v000000",
        "arm": "champion",
        "prompt_ids": [1, 2, 3, 4, 5, 6] + [rng.randrange(256) for _ in range(rng.randrange(1, 5))],
        "completion_ids": completion,
        "logprobs": [-5.5] * len(completion),
        "temperature": 0.8,
        "top_p": 1.0,
        "finish_reason": "stop",
        "reward": rng.choice([-1.0, 1.0]),
        "confidence": 1.0,
        "baseline": 0.0,
        "expected_success": 0.5,
        "components": {"thumbs": 1.0},
        "spec_version": "s1",
        "served_at": float(number),
        "created_at": float(number),
    }
    return Sample(**(values | changes))


def tiny_config(**changes) -> LearnerConfig:
    """Return a configuration whose masks let made-up log-probs through."""
    values = {
        "lora_rank": 4,
        "learning_rate": 1e-2,
        "batch_samples": 8,
        "compute_share": 1.0,
        "min_batch_samples": 2,
        "micro_batch_tokens": 64,
        "max_completion_tokens": 16,
        "objective": "tis",
        "trust_region": 1.0,
        "veto_ratio": 0.0,
        "min_ess": 0.0,
        "max_actor_share": 1.0,
        "publish_every_steps": 2,
        "publish_max_kl": 10.0,
        "num_threads": 1,
    }
    return LearnerConfig(**(values | changes))


def tiny_session(folder: Path, config: LearnerConfig | None = None, point=lambda name: None):
    """Open a session in a folder, with a tiny random model beside it."""
    from learner.engine import Engine
    from learner.session import Session

    config = config or tiny_config()
    model = folder / "model"
    if not model.exists():
        make_tiny_model(model)
    engine = Engine(config, str(model))
    return Session(config, engine, folder / "state", model, "hash", lambda text: list(text.encode())[:200], point)
