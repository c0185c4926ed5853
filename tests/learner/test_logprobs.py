"""Chunked completion log-probs equal the model's own, with and without the shared prefix."""

from pathlib import Path

import pytest
import torch

from learner.logprobs import Row, completion_logprobs, micro_batches, pack, shared_prefix_length
from tests.tiny_model import make_tiny_model

ROWS = [
    Row([9, 8, 7, 6, 5, 1], [3, 4, 5], 0.8),
    Row([9, 8, 7, 6, 5, 2, 2], [6, 6, 7, 1, 9], 1.0),
    Row([9, 8, 7, 6, 5, 3], [200], 0.5),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from transformers import AutoModelForCausalLM

    folder: Path = make_tiny_model(tmp_path_factory.mktemp("model"))
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")


def plain_logprobs(model, rows: list[Row]) -> torch.Tensor:
    parts = []
    for row in rows:
        logits = model(torch.tensor([row.prompt_ids + row.completion_ids])).logits[0] / row.temperature
        first = len(row.prompt_ids) - 1
        scored = torch.log_softmax(logits[first : first + len(row.completion_ids)], -1)
        parts.append(scored.gather(1, torch.tensor(row.completion_ids)[:, None])[:, 0])
    return torch.cat(parts)


def body_gradient(model) -> torch.Tensor:
    return model.model.layers[0].mlp.up_proj.weight.grad.clone()


@pytest.mark.parametrize("share_prefix", [False, True])
@pytest.mark.parametrize("is_head_frozen", [False, True])
def test_values_and_gradients_equal_the_full_softmax(model, share_prefix, is_head_frozen):
    weights = torch.arange(1.0, 10.0)
    model.get_output_embeddings().weight.requires_grad_(not is_head_frozen)
    model.zero_grad()
    expected = plain_logprobs(model, ROWS)
    (expected * weights).sum().backward()
    expected_gradient = body_gradient(model)
    model.zero_grad()
    packed = pack(ROWS, share_prefix)
    assert (packed.prefix_1P is not None) == share_prefix
    ours = completion_logprobs(model.model, model.lm_head, packed, chunk_tokens=2)
    (ours * weights).sum().backward()
    assert torch.allclose(ours, expected, atol=1e-5)
    assert torch.allclose(body_gradient(model), expected_gradient, atol=1e-4)
    model.get_output_embeddings().weight.requires_grad_(True)


def test_shared_prefix_leaves_one_prompt_token_to_each_row():
    assert shared_prefix_length(ROWS) == 5
    assert shared_prefix_length([ROWS[0], ROWS[0]]) == 5
    assert shared_prefix_length([Row([1, 2], [3], 1.0), Row([4, 2], [3], 1.0)]) == 0
    assert shared_prefix_length([Row([1], [3], 1.0), Row([1, 2], [3], 1.0)]) == 0


def test_micro_batches_hold_each_row_once_within_the_budget():
    lengths = [10, 3, 99, 40, 41, 3, 8]
    groups = micro_batches(lengths, 100)
    assert sorted(i for group in groups for i in group) == list(range(7))
    assert groups[0] == [2]
    assert all(max(lengths[i] for i in group) * len(group) <= 100 for group in groups)
    assert micro_batches([500], 100) == [[0]]
