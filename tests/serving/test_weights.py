"""Safetensors read by hand, against the library."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from learner.candidate import CandidateFile, Manifest
from serving import weights


def test_shapes_equal_the_librarys(tmp_path):
    save_file({"a": np.zeros((3, 5), np.float32), "b": np.ones(7, np.float16)}, tmp_path / "model.safetensors")
    assert weights.shapes(tmp_path) == {"a": (3, 5), "b": (7,)}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_a_single_bad_value_is_found_in_every_float_type(tmp_path, dtype, value):
    import torch
    from safetensors.torch import save_file as save_torch

    tensor = torch.full((1000,), 3.0e4, dtype=getattr(torch, dtype))
    save_torch({"good": tensor, "bad": tensor.clone().index_fill_(0, torch.tensor([999]), float(value))},
               tmp_path / "model.safetensors")  # fmt: skip
    assert weights.find_non_finite(tmp_path) == ["bad"]


def test_a_file_that_is_no_safetensors_or_cut_short_is_told(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x80\x02not weights")
    with pytest.raises(ValueError, match="not a"):
        weights.read_header(path)
    save_file({"a": np.zeros((64, 64), np.float32)}, path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match="shorter"):
        weights.read_header(path)


def test_the_digest_is_of_the_weights_and_not_of_the_version():
    def manifest(version: str, sha256: str) -> Manifest:
        file = CandidateFile(name="model.safetensors", sha256=sha256, num_bytes=1)
        other = CandidateFile(name="config.json", sha256=version, num_bytes=1)
        return Manifest(version=version, parent=None, kind="lora", files=[file, other], created_at=0.0)

    assert weights.digest(manifest("v000001", "aa")) == weights.digest(manifest("v000002", "aa"))
    assert weights.digest(manifest("v000001", "aa")) != weights.digest(manifest("v000001", "bb"))


def test_a_model_that_is_nowhere_is_told(tmp_path):
    with pytest.raises(ValueError, match="not a folder"):
        weights.model_folder("nobody/no-such-model-at-all")
