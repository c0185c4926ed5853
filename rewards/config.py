"""Configuration of the rewards room (contract)."""

from pathlib import Path

from pydantic import Field

from ingest.config import StrictModel


class RewardsConfig(StrictModel):
    """[rewards]"""

    spec: Path | None = Field(
        None, description="reward specification, relative to this configuration file; unset: deploy/reward_spec.toml"
    )
    baseline_decay: float = Field(
        0.98,
        gt=0,
        lt=1,
        description="weight of the past at each update of a tracker key; 0.98 remembers about 50 samples",
    )
    baseline_prior_weight: float = Field(8.0, gt=0, description="n_0: samples that a parent's value counts for")
    baseline_prior: float = Field(0.0, ge=-1, le=1, description="expected reward before any sample")
    prior_success: float = Field(0.5, ge=0, le=1, description="probability of a positive reward before any sample")
    poll_records: int = Field(500, ge=1, description="interactions per transaction")


def spec_path(config: RewardsConfig, config_path: Path) -> Path:
    """Return where the reward specification of this deployment lies."""
    if config.spec is None:
        return Path(__file__).parent.parent / "deploy" / "reward_spec.toml"
    return config.spec if config.spec.is_absolute() else config_path.parent / config.spec
