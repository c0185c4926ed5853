"""The only door to DeepSpeed: the model that learns, its optimiser, and the champion that it is anchored to.

Owns the model in memory. Takes packed micro-batches and losses, emits log-probs, applies or discards gradients, saves
and loads its state. A process of its own (world size 1, gloo) unless a launcher set RANK and WORLD_SIZE.
Promises: a discarded step leaves weights and optimiser untouched; the champion's weights never change under training.
"""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from learner.config import LearnerConfig
from learner.logprobs import Packed, Row, pack
from learner.loss import Sums
from learner.model import PolicyModel, add_adapters, check_forward, choose_dtype, load_model

TRAINABLE = "trainable.safetensors"


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of mallopt(3)


def _keep_freed_memory() -> None:
    """Let glibc keep what tensors leave: giving it to the kernel and taking it anew was a fifth of a step's time."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


def _set_process_environment() -> None:
    """DeepSpeed reads the launcher's variables; without a launcher this is a world of one."""
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if "RANK" in os.environ:
        return
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def _join_ranks(backend: str) -> None:
    """Meet the other ranks; a world of one meets in its own memory, so that no port can be taken."""
    import deepspeed

    if torch.distributed.is_initialized():
        return
    if os.environ["WORLD_SIZE"] == "1":
        store = torch.distributed.HashStore()  # pyright: ignore[reportPrivateImportUsage] documented, not in __all__
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)


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
        _keep_freed_memory()
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
        _join_ranks("nccl" if torch.cuda.is_available() else "gloo")
        self.rank = torch.distributed.get_rank()
        self.world_size = torch.distributed.get_world_size()
        trainable = [parameter for parameter in self.policy.parameters() if parameter.requires_grad]
        self._engine, *_ = deepspeed.initialize(
            model=self.policy,
            model_parameters=trainable,  # pyright: ignore[reportArgumentType] a list is accepted
            config=deepspeed_config(config, self._dtype, self.world_size),
        )
        self._optimizer: Any = self._engine.optimizer
        self.reset_optimizer()  # without ZeRO, DeepSpeed's bf16 optimiser took a step with zero gradients just now
        self._device = next(self.policy.parameters()).device
        self._initial = self.trainable_state()
        self._champion = {name: value.clone() for name, value in self._initial.items()}
        self.policy.train()

    # log-probs

    def pack(self, rows: list[Row]) -> Packed:
        share = self._config.share_prefix and not self._config.gradient_checkpointing
        return pack(rows, share, self._device)

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
        self._champion = {name: value.to(self._device, self._dtype).clone() for name, value in state.items()}

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
        values = torch.tensor(list(vars(sums).values()), dtype=torch.float64, device=self._device)
        torch.distributed.all_reduce(values)
        return Sums(*values.tolist())
