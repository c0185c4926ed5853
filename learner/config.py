"""Configuration of the learner (contract). Constants of the method have the defaults of METHODS.md, section 1."""

from typing import Literal

from pydantic import Field, field_validator

from ingest.config import StrictModel

OBJECTIVES = ("icepop", "tis")


def check_objective(name: str) -> None:
    """ValueError unless the objective exists."""
    if name not in OBJECTIVES:
        raise ValueError(
            f"objective = {name!r} does not exist; choose one of {', '.join(OBJECTIVES)} in [learner] "
            "(cispo, gspo, dppo, decoupled and kto for all samples are not built yet)"
        )


class LearnerConfig(StrictModel):
    """[learner]"""

    # what is trained
    kind: Literal["lora", "full"] = Field(
        "lora", description="lora: low-rank adapters, merged on export; full: all weights"
    )
    lora_rank: int = Field(16, ge=1, le=512)
    lora_alpha: float = Field(32.0, gt=0, description="adapters are scaled by lora_alpha / lora_rank")
    lora_targets: list[str] = Field(
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        min_length=1,
        description="names of the linear layers that get adapters",
    )
    lora_last_layers: int = Field(0, ge=0, description="adapters on the last so many layers only; 0: on all layers")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="of the computation; auto: float32 on a CPU without bf16 instructions, else bfloat16"
    )
    export_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    seed: int = 0

    # objective
    objective: str = Field("icepop", description="icepop | tis")
    mask_low: float = Field(0.2, gt=0, lt=1, description="icepop: tokens with a smaller ratio are masked")
    mask_high: float = Field(4.0, gt=1, description="icepop: tokens with a larger ratio are masked")
    fresh_mask_low: float = Field(0.5, gt=0, lt=1, description="the same for samples of the current champion (s = 0)")
    fresh_mask_high: float = Field(5.0, gt=1)
    tis_cap: float = Field(2.0, ge=1, description="tis: ratios are cut here")
    veto_ratio: float = Field(1e-4, ge=0, lt=1, description="a sequence with a smaller token ratio is dropped")
    trust_region: float = Field(
        0.2, gt=0, le=1, description="largest move of a token's probability along its advantage"
    )
    advantage_clip: float = Field(5.0, gt=0)
    max_completion_tokens: int = Field(
        512, ge=1, description="L_max, the constant denominator; longer ones are refused"
    )
    token_cost: float = Field(0.0, ge=0, description="lambda: reward taken from positive samples per L_max tokens")
    hindsight_weight: float = Field(0.1, ge=0, description="w_h of hindsight self-distillation")
    hindsight_tokens: int = Field(64, ge=1, description="a user's text is cut here before the teacher reads it")
    hindsight_share: float = Field(0.1, ge=0, le=1, description="largest share of a batch with a hindsight term")
    kto_beta: float = Field(0.1, gt=0, description="of the term for samples without log-probs")
    kto_weight: float = Field(1.0, ge=0)

    # KL to the champion
    kl_budget: float = Field(0.05, gt=0, description="nats per token that the learner may be away from the champion")
    beta: float = Field(5e-3, ge=0, description="first weight of the k2 term; adapts to the budget")
    beta_min: float = Field(1e-3, ge=0)
    beta_max: float = Field(0.2, ge=0)

    # optimisation
    learning_rate: float = Field(1e-4, gt=0, le=1)
    adam_betas: tuple[float, float] = (0.9, 0.95)
    gradient_clip: float = Field(1.0, gt=0)
    minibatches: int = Field(1, ge=1, description="optimiser updates that one step splits its batch into")
    passes: int = Field(1, ge=1, le=8, description="times that one step goes over its batch")
    zero_stage: int = Field(0, ge=0, le=2, description="DeepSpeed ZeRO stage")
    compute_share: float = Field(
        0.5, gt=0, le=1, description="of a batch that gradients are computed for, drawn by |advantage|, without bias"
    )
    micro_batch_tokens: int = Field(2048, ge=64, description="padded tokens of one forward and backward")
    logprob_chunk_tokens: int = Field(256, ge=1, description="completion tokens whose logits exist at a time")
    share_prefix: bool = Field(True, description="compute the prompt beginning that a micro-batch shares only once")
    gradient_checkpointing: bool = Field(False, description="less memory, one more forward")
    num_threads: int = Field(0, ge=0, description="CPU threads; 0: all cores")
    nice: int = Field(0, ge=0, le=19, description="let serving on the same cores go first")

    # batches
    batch_samples: int = Field(64, ge=2, description="samples of one step")
    min_batch_samples: int = Field(16, ge=2, description="N_min: with fewer usable samples no step is taken")
    max_wait_s: float = Field(600.0, gt=0, description="then a step takes what there is, from min_batch_samples on")
    max_pending_samples: int = Field(4096, ge=2, description="samples read ahead; then reading waits")
    max_staleness: int = Field(8, ge=0, description="published versions behind the champion; older samples are dropped")
    max_staleness_calm: int = Field(64, ge=0, description="the same while mean squared log-ratio is at most calm_m2")
    calm_m2: float = Field(0.04, ge=0)
    max_actor_share: float = Field(0.01, gt=0, le=1, description="of a batch; one sample is always allowed")
    max_attempts: int = Field(3, ge=1, description="skipped steps after which a sample is dropped")
    min_ess: float = Field(0.3, ge=0, le=1, description="step guard: effective share of the token weights")

    # publication
    publish_every_steps: int = Field(4, ge=1)
    max_pending_candidates: int = Field(1, ge=1, description="undecided candidates; more wait")
    max_steps_ahead: int = Field(
        4, ge=1, description="steps beyond an undecided candidate; then the learner waits for it"
    )
    publish_max_kl: float = Field(0.1, gt=0, description="nats per token; above it the learner publishes nothing")
    num_probes: int = Field(8, ge=1, le=64, description="token sequences in the manifest, to verify engines with")

    # durability
    keep_checkpoints: int = Field(3, ge=2, description="newest ones; those of champion and candidates stay as well")
    remember_samples: int = Field(
        200_000, ge=1000, description="consumed sample ids kept in a checkpoint, for duplicates"
    )

    @field_validator("objective")
    @classmethod
    def _objective_exists(cls, name: str) -> str:
        check_objective(name)
        return name
