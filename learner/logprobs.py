"""Log-probs of completion tokens: chunked, completion-only, at the request's temperature.

Owns packing rows to tensors and the chunked log-softmax. Never makes a full (tokens, vocabulary) tensor. The beginning
that all prompts of a micro-batch share (system prompt, template) is computed once, exactly: its keys and values are
expanded over the batch and gradients flow back through them.
Shapes: B rows, P shared tokens, T padded tokens after them, N completion tokens, C a chunk, H hidden, V vocabulary.
"""

from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

MIN_SHARED_TOKENS = 4


class Row(NamedTuple):
    """One sequence whose completion is to be scored."""

    prompt_ids: list[int]
    completion_ids: list[int]
    temperature: float


class Packed(NamedTuple):
    """Rows as tensors, right-padded. Completion tokens are flat, row by row, in order."""

    prefix_1P: torch.Tensor | None
    tokens_BT: torch.Tensor
    row_N: torch.Tensor
    column_N: torch.Tensor  # of the position that predicts the token
    target_N: torch.Tensor
    temperature_N: torch.Tensor


def shared_prefix_length(rows: list[Row]) -> int:
    """Return how many tokens all prompts begin with, at least one token of each prompt left over."""
    first = rows[0].prompt_ids
    length = min(len(row.prompt_ids) for row in rows) - 1
    for row in rows[1:]:
        for at in range(length):
            if row.prompt_ids[at] != first[at]:
                length = at
                break
    return max(0, length)


def pack(rows: list[Row], share_prefix: bool, device: torch.device | str = "cpu") -> Packed:
    """Pack rows; each needs one prompt token and one completion token at least."""
    skip = shared_prefix_length(rows) if share_prefix and len(rows) > 1 else 0
    skip = skip if skip >= MIN_SHARED_TOKENS else 0
    width = max(len(row.prompt_ids) - skip + len(row.completion_ids) - 1 for row in rows)
    tokens_BT = torch.zeros(len(rows), width, dtype=torch.long)
    row_N, column_N, target_N, temperature_N = [], [], [], []
    for index, row in enumerate(rows):
        ids = row.prompt_ids[skip:] + row.completion_ids[:-1]
        tokens_BT[index, : len(ids)] = torch.tensor(ids)
        first = len(row.prompt_ids) - skip - 1
        num = len(row.completion_ids)
        row_N += [index] * num
        column_N += range(first, first + num)
        target_N += row.completion_ids
        temperature_N += [row.temperature] * num
    prefix = torch.tensor([rows[0].prompt_ids[:skip]]).to(device) if skip else None
    return Packed(
        prefix,
        tokens_BT.to(device),
        torch.tensor(row_N).to(device),
        torch.tensor(column_N).to(device),
        torch.tensor(target_N).to(device),
        torch.tensor(temperature_N, dtype=torch.float32).to(device),
    )


def hidden_states(decoder: Any, packed: Packed) -> torch.Tensor:
    """Return hidden states (N, H) of the positions that predict completion tokens."""
    if packed.prefix_1P is None:
        # no mask: padding is on the right, where a causal model's real tokens do not look
        hidden_BTH = decoder(input_ids=packed.tokens_BT, use_cache=False).last_hidden_state
    else:
        cache = decoder(input_ids=packed.prefix_1P, use_cache=True).past_key_values
        cache.batch_repeat_interleave(packed.tokens_BT.shape[0])
        hidden_BTH = decoder(input_ids=packed.tokens_BT, past_key_values=cache, use_cache=True).last_hidden_state
    return hidden_BTH[packed.row_N, packed.column_N]


class _FrozenHead(torch.autograd.Function):
    """Log-probs under a frozen output matrix; keeps the gradient (C, H) instead of logits (C, V).

    d log p(y) / dh = (W_y - softmax(hW') W) / temperature, computed while the logits are there.
    """

    @staticmethod
    def forward(ctx: Any, hidden_CH: torch.Tensor, weight_VH: torch.Tensor, target_C, temperature_C) -> torch.Tensor:
        logits_CV = (hidden_CH @ weight_VH.t()).float().div_(temperature_C[:, None])
        picked_C = logits_CV.gather(1, target_C[:, None])[:, 0]
        total_C = torch.logsumexp(logits_CV, 1)
        if ctx.needs_input_grad[0]:
            probs_CV = logits_CV.sub_(total_C[:, None]).exp_().to(hidden_CH.dtype)
            slope_CH = (weight_VH[target_C] - probs_CV @ weight_VH) / temperature_C[:, None].to(hidden_CH.dtype)
            ctx.save_for_backward(slope_CH)
        return picked_C - total_C

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple:
        (slope_CH,) = ctx.saved_tensors
        return grads[0][:, None].to(slope_CH.dtype) * slope_CH, None, None, None


def _plain_head(hidden_CH, head, target_C, temperature_C) -> torch.Tensor:
    logits_CV = head(hidden_CH).float() / temperature_C[:, None]
    return logits_CV.gather(1, target_C[:, None])[:, 0] - torch.logsumexp(logits_CV, 1)


def completion_logprobs(decoder: Any, head: torch.nn.Module, packed: Packed, chunk_tokens: int) -> torch.Tensor:
    """Return log-probs (N,) in float32 of the completion tokens at their temperatures."""
    hidden_NH = hidden_states(decoder, packed)
    weight = getattr(head, "weight", None)
    frozen = isinstance(weight, torch.Tensor) and not weight.requires_grad and getattr(head, "bias", None) is None
    parts = []
    for start in range(0, hidden_NH.shape[0], chunk_tokens):
        piece = slice(start, start + chunk_tokens)
        inputs = hidden_NH[piece], packed.target_N[piece], packed.temperature_N[piece]
        if frozen:
            parts.append(_FrozenHead.apply(inputs[0], weight, inputs[1], inputs[2]))
        elif torch.is_grad_enabled():
            parts.append(checkpoint(_plain_head, inputs[0], head, inputs[1], inputs[2], use_reentrant=False))
        else:
            parts.append(_plain_head(inputs[0], head, inputs[1], inputs[2]))
    return torch.cat(parts)


def micro_batches(lengths: list[int], budget_tokens: int) -> list[list[int]]:
    """Split row indices into groups of similar length whose padded size stays within the budget (one row at least)."""
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if groups and lengths[groups[-1][0]] * (len(groups[-1]) + 1) <= budget_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups
