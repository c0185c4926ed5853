"""Configuration of the gates and the canary (contract): table [serving.gate]. Defaults are for production traffic."""

from pydantic import Field, model_validator

from ingest.config import StrictModel


class GateConfig(StrictModel):
    """[serving.gate]"""

    auto_promote: bool = Field(True, description="false: a passed canary waits for an operator (AWAIT_APPROVAL)")
    observe: bool = Field(False, description="true: decide and log, change nothing; no canary sees a user")
    primary_metric: str = Field("thumbs", description="feedback metric that a unit's outcome is")
    primary_low: float = Field(0.0, description="a numeric value of the metric that maps to 0")
    primary_high: float = Field(1.0, description="and the one that maps to 1")

    delta: float = Field(0.03, gt=0, lt=0.5, description="a loss of outcome below this may be promoted")
    weights: list[float] = Field([0.01, 0.05, 0.20], min_length=1, description="canary share, stage by stage")
    stage_units: list[int] = Field(
        [50, 200], description="canary units with an outcome that end each stage but the last"
    )
    n_min: int = Field(200, ge=1, description="canary units with an outcome before a promotion")
    maturity_s: float = Field(1800.0, ge=0, description="M: an outcome counts this long after its answer")
    settle_s: float = Field(
        120.0, ge=0, description="units this old are known in both arms, however slow their answers"
    )
    soak_s: float = Field(1800.0, ge=0, description="shortest canary")
    t_max_s: float = Field(86400.0, gt=0, description="longest canary, then INCONCLUSIVE")
    yield_to_newer: bool = Field(
        False,
        description="past n_min and soak, not halfway: end when a newer one waits; small gains are then never found",
    )
    stale_s: float = Field(900.0, gt=0, description="no interaction for so long: INVALID")
    fdr: float = Field(0.10, gt=0, lt=1, description="share of false promotions, over all candidates (e-LOND)")
    rollback_alpha: float = Field(
        0.01, gt=0, lt=1, description="false rollback of an equal canary, all metrics together"
    )
    mismatch_alpha: float = Field(0.001, gt=0, lt=1, description="false alarm of the sample-ratio check")
    latency_s: float = Field(0.0, ge=0, description="answers slower than this are counted; 0: not checked")
    breaker_failures: int = Field(5, ge=1, description="failures in a row on the canary that end it at once")
    ratchet_budget: float = Field(
        0.05, ge=0, description="outcome that promotions may have lost since a human approved"
    )
    ratchet_alpha: float = Field(0.05, gt=0, lt=1, description="level of the lower bound that is charged")
    max_attempts: int = Field(2, ge=1, description="canaries of one candidate, when an engine fails under it")

    kl_limit: float = Field(0.05, gt=0, description="mean KL(new || champion) per token, nats")
    probe_prompts: int = Field(24, ge=4, description="logged prompts that the offline gates ask")
    probe_min_prompts: int = Field(8, ge=2, description="fewer than this many logged prompts: wait")
    probe_tokens: int = Field(48, ge=4, description="longest answer in the offline gates")
    probe_prompt_tokens: int = Field(400, ge=8, description="longer prompts are not used as probes")
    prompts_kept: int = Field(256, ge=8, description="recent consented prompts that probes are drawn from")
    share_tolerance: float = Field(
        0.25, gt=0, description="rise allowed in the share of empty, looping, refusing answers"
    )
    truncation_tolerance: float = Field(0.40, gt=0, description="rise allowed in the share of answers cut off")
    distinct_ratio: float = Field(0.5, ge=0, description="least distinct-2 against the champion's")
    fluency_drop: float = Field(1.5, gt=0, description="nats per token that answers may lose under the champion")
    topic_ratio: float = Field(
        0.5, ge=0, description="least share of the champion's lift of an answer by its own prompt"
    )

    verify_bound: float = Field(0.15, gt=0, description="mean |log p difference| of engine and learner on the probes")
    drain_deadline_s: float = Field(30.0, gt=0, description="requests in flight may keep a swap waiting this long")
    swap_timeout_s: float = Field(120.0, gt=0, description="one call of a swap, at most")

    @model_validator(mode="after")
    def _stages(self) -> "GateConfig":
        if len(self.stage_units) != len(self.weights) - 1:
            raise ValueError(f"stage_units needs {len(self.weights) - 1} entries, one less than weights")
        if any(not 0 < w <= 0.5 for w in self.weights) or sorted(self.weights) != self.weights:
            raise ValueError("weights must grow and lie in (0, 0.5]")
        return self
