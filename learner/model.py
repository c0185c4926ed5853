"""The model that learns: loaded by transformers, adapters by peft (its only door), log-probs as its forward."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from learner.config import LearnerConfig
from learner.logprobs import Packed, Row, completion_logprobs, pack


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


@torch.no_grad()
def merge(model: Any, kind: str) -> dict[str, torch.Tensor]:
    """Return the complete model's weights under its own names, adapters added in float32."""
    inner = model.get_base_model() if kind == "lora" else model
    deltas = {}
    if kind == "lora":
        from peft.tuners.lora import LoraLayer

        for name, module in inner.named_modules():
            if isinstance(module, LoraLayer):
                deltas[f"{name}.weight"] = module.get_delta_weight("default").float()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    tied = inner.config.tie_word_embeddings
    weights = {}
    for name, value in inner.state_dict().items():
        if ".lora_" in name or (tied and name == "lm_head.weight"):
            continue
        plain = name.replace(".base_layer.", ".")
        weights[plain] = value.float() + deltas[plain] if plain in deltas else value
    return weights
