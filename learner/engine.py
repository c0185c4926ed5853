"""The only door to DeepSpeed and peft: the model that learns, its optimiser, and the champion it is anchored to.

Owns the model in memory. Takes packed micro-batches and losses, emits log-probs, applies or discards gradients, saves and
loads its state. A process of its own (world size 1, gloo) unless a launcher set RANK and WORLD_SIZE.
Promises: a discarded step leaves weights and optimiser untouched; the champion's weights never change under training.
"""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from learner.config import LearnerConfig
from learner.logprobs import Packed, Row, completion_logprobs, pack
from learner.loss import Sums

TRAINABLE = "trainable.safetensors"


def choose_dtype(name: str) -> torch.dtype:
    """Resolve auto: bfloat16 where the hardware computes in it, else float32."""
    if name != "auto":
        return getattr(torch, name)
    if torch.cuda.is_available():
        return torch.bfloat16
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return torch.float32
    return torch.bfloat16 if "avx512_bf16" in flags or "amx_bf16" in flags else torch.float32


class PolicyModel(nn.Module):
    """A causal language model whose forward gives completion log-probs (N,)."""

    def __init__(self, model: Any, chunk_tokens: int) -> None:
        super().__init__()
        self.model = model
        self._chunk_tokens = chunk_tokens

    def forward(self, packed: Packed) -> torch.Tensor:
        inner = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        return completion_logprobs(inner.get_decoder(), inner.get_output_embeddings(), packed, self._chunk_tokens)


def load_model(folder: str, dtype: torch.dtype) -> Any:
    """Load a causal language model; ValueError when there is none."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"run.model = {folder!r} cannot be loaded: {error}; name a folder or a Hugging Face id"
        ) from error
    model.config.use_cache = False
    return model


def add_adapters(model: Any, config: LearnerConfig) -> Any:
    """Freeze the model and put LoRA adapters on the configured layers; ValueError if no layer has such a name."""
    from peft import LoraConfig, get_peft_model

    num_layers = model.config.num_hidden_layers
    layers = list(range(num_layers - config.lora_last_layers, num_layers)) if config.lora_last_layers else None
    if config.lora_last_layers > num_layers:
        raise ValueError(f"learner.lora_last_layers = {config.lora_last_layers}, but the model has {num_layers} layers")
    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,  # pyright: ignore[reportArgumentType] peft divides it, floats are fine
        target_modules=list(config.lora_targets),
        layers_to_transform=layers,
        task_type="CAUSAL_LM",
    )
    try:
        return get_peft_model(model, lora)
    except ValueError as error:
        raise ValueError(f"learner.lora_targets = {config.lora_targets} does not fit this model: {error}") from error


def check_forward(policy: PolicyModel) -> None:
    """ValueError if our log-probs differ from the model's own logits (a soft cap or scale after the output layer)."""
    vocabulary = policy.model.get_input_embeddings().weight.shape[0]
    ids = [(7 + 13 * i) % vocabulary for i in range(8)]
    device = next(policy.model.parameters()).device
    with torch.no_grad():
        ours = policy(pack([Row(ids[:4], ids[4:], 1.0)], False, device))
        logits = policy.model(input_ids=torch.tensor([ids], device=device)).logits[0, 3:7].float()
        theirs = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[4:], device=device)[:, None])[:, 0]
    if not torch.allclose(ours, theirs, atol=0.05):
        raise ValueError("this model changes its logits after the output layer; the learner cannot train it yet")


def _set_process_environment() -> None:
    """DeepSpeed reads the launcher's variables; without a launcher this is a world of one."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if "RANK" in os.environ:
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def deepspeed_config(config: LearnerConfig, dtype: torch.dtype, world_size: int) -> dict[str, Any]:
    """Return DeepSpeed's configuration; the optimiser is torch's AdamW, which needs no compiled extension."""
    return {
        "train_batch_size": world_size,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # accumulation follows our micro-batches, see backward()
        "gradient_clipping": config.gradient_clip,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "zero_optimization": {"stage": config.zero_stage},
        "zero_allow_untested_optimizer": True,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": config.learning_rate,
                "betas": list(config.adam_betas),
                "weight_decay": 0.0,
                "torch_adam": True,
            },
        },
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }


class Engine:
    """The learning model. One per process."""

    def __init__(self, config: LearnerConfig, model_folder: str) -> None:
        _set_process_environment()
        import deepspeed

        deepspeed.logger.setLevel("ERROR")
        if os.environ["WORLD_SIZE"] == "1":  # its shared-memory reduce would be compiled now, and never used
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        if config.num_threads:
            torch.set_num_threads(config.num_threads)
        torch.manual_seed(config.seed)
        self._config = config
        self._dtype = choose_dtype(config.dtype)
        model = load_model(model_folder, self._dtype)
        if config.kind == "lora":
            model = add_adapters(model, config)
        if config.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        self.policy = PolicyModel(model, config.logprob_chunk_tokens)
        check_forward(self.policy)
        if not torch.distributed.is_initialized():
            deepspeed.init_distributed(
                dist_backend="nccl" if torch.cuda.is_available() else "gloo", auto_mpi_discovery=False, verbose=False
            )
        self.rank = torch.distributed.get_rank()
        self.world_size = torch.distributed.get_world_size()
        trainable = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        self._engine, *_ = deepspeed.initialize(
            model=self.policy,
            model_parameters=trainable,  # pyright: ignore[reportArgumentType] a list is accepted
            config=deepspeed_config(config, self._dtype, self.world_size),
        )
        self._optimizer: Any = self._engine.optimizer
        self._initial = self.trainable_state()
        self._champion = {name: value.clone() for name, value in self._initial.items()}
        self.policy.train()

    # log-probs

    def pack(self, rows: list[Row]) -> Packed:
        share = self._config.share_prefix and not self._config.gradient_checkpointing
        return pack(rows, share, self._engine.device)

    def train_logprobs(self, packed: Packed) -> torch.Tensor:
        """Log-probs under theta, with gradient."""
        return self._engine(packed)

    @torch.no_grad()
    def logprobs(self, packed: Packed) -> torch.Tensor:
        """Log-probs under theta, without gradient."""
        return self.policy(packed)

    @torch.no_grad()
    def champion_logprobs(self, packed: Packed) -> torch.Tensor:
        """Log-probs under the champion's weights."""
        with self._weights(self._champion):
            return self.policy(packed)

    @contextmanager
    def _weights(self, state: dict[str, torch.Tensor]) -> Iterator[None]:
        """Lend other trainable weights to the model."""
        parameters = dict(self._trainable())
        own = {name: parameter.data for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            parameter.data = state[name]
        try:
            yield
        finally:
            for name, parameter in parameters.items():
                parameter.data = own[name]

    # one step

    def backward(self, loss: torch.Tensor, is_last: bool) -> None:
        """Accumulate gradients; is_last: of this optimiser update (reduces over ranks)."""
        self._engine.set_gradient_accumulation_boundary(is_last)
        self._engine.backward(loss)

    def _gradients(self) -> list[torch.Tensor]:
        averaged = getattr(self._optimizer, "averaged_gradients", None)
        if averaged:
            return [gradient for group in averaged.values() if group is not None for gradient in group]
        return [parameter.grad for _, parameter in self._trainable() if parameter.grad is not None]

    def gradient_norm(self) -> float:
        """Return the norm before clipping; inf or nan tells that the step must be discarded."""
        squares = [gradient.detach().double().pow(2).sum() for gradient in self._gradients()]
        return float(torch.stack(squares).sum().sqrt()) if squares else 0.0

    def step(self) -> None:
        """Clip and apply the accumulated gradients."""
        self._engine.step()

    def discard(self) -> None:
        """Forget the accumulated gradients, as DeepSpeed does on an overflow."""
        for _, parameter in self._trainable():
            parameter.grad = None
        self._optimizer.zero_grad(set_to_none=True)
        if getattr(self._optimizer, "averaged_gradients", None):
            self._optimizer.averaged_gradients = {}

    # state

    def _trainable(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, p) for name, p in self.policy.named_parameters() if p.requires_grad]

    def trainable_state(self) -> dict[str, torch.Tensor]:
        """Return copies of the trained weights."""
        return {name: parameter.detach().clone() for name, parameter in self._trainable()}

    def load_trainable(self, state: dict[str, torch.Tensor]) -> None:
        """Replace the trained weights; ValueError when they are of another shape or configuration."""
        own = dict(self._trainable())
        if own.keys() != state.keys() or any(own[name].shape != state[name].shape for name in own):
            raise ValueError(
                "the checkpoint holds other trained weights than [learner] describes (kind, lora_rank, lora_targets, "
                "lora_last_layers or the model changed); restore the configuration or start with another state_dir"
            )
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(state[name])
        if hasattr(self._optimizer, "refresh_fp32_params"):
            self._optimizer.refresh_fp32_params()

    def initial_state(self) -> dict[str, torch.Tensor]:
        """Return the trained weights as they were before any step: the base model."""
        return self._initial

    def anchor_champion(self, state: dict[str, torch.Tensor]) -> None:
        """The KL is measured to these weights from now on."""
        self._champion = {name: value.to(self._engine.device, self._dtype).clone() for name, value in state.items()}

    def reset_optimizer(self) -> None:
        """Start with fresh moments."""
        inner = getattr(self._optimizer, "optimizer", self._optimizer)
        for moments in inner.state.values():
            for value in moments.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()

    def save(self, folder: Path) -> None:
        """Write weights, optimiser and DeepSpeed's own counters; every rank calls it."""
        self._engine.save_checkpoint(str(folder), tag="engine", exclude_frozen_parameters=True)

    def load(self, folder: Path) -> None:
        """Read what save wrote, this rank's part."""
        self._engine.load_checkpoint(str(folder), tag="engine", load_module_strict=False)

    def broadcast(self, make: Callable[[], Any]) -> Any:
        """Let rank 0 decide and every rank know; with one process it costs nothing."""
        if self.world_size == 1:
            return make()
        box = [make() if self.rank == 0 else None]
        torch.distributed.broadcast_object_list(box, src=0)
        return box[0]

    def add_over_ranks(self, sums: Sums) -> Sums:
        """Add the sums of all ranks."""
        if self.world_size == 1:
            return sums
        values = torch.tensor(list(vars(sums).values()), dtype=torch.float64, device=self._engine.device)
        torch.distributed.all_reduce(values)
        return Sums(*values.tolist())

    def merged_weights(self) -> dict[str, torch.Tensor]:
        """Return the complete model's weights, adapters merged in; the learning model stays as it is."""
        from learner.export import merge

        return merge(self.policy.model, self._config.kind)
