"""Weights on disk: which model folder, which tensors, are they finite. Headers and bit patterns only, memory bounded.

Reads safetensors itself (8 bytes of length, a JSON header, raw values), so it needs neither torch nor safetensors.
"""

import hashlib
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from learner.candidate import Manifest

_BLOCK_BYTES = 16 << 20
_EXPONENTS = {"F32": (np.uint32, 0x7F800000), "BF16": (np.uint16, 0x7F80), "F16": (np.uint16, 0x7C00),
              "F64": (np.uint64, 0x7FF0000000000000)}  # fmt: skip


class Tensor(NamedTuple):
    """Where one tensor lies in its file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file; ValueError when it is none."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if not 2 <= size <= 100 << 20:
                raise ValueError(f"{path}: not a safetensors file (header of {size} bytes)")
            header = msgspec.json.decode(file.read(size))
        tensors = {}
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = entry["data_offsets"]
                tensors[name] = Tensor(entry["dtype"], tuple(entry["shape"]), 8 + size + start, 8 + size + end)
    except (OSError, msgspec.MsgspecError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a readable safetensors file: {error!r}") from error
    file_size = path.stat().st_size
    if any(tensor.end > file_size for tensor in tensors.values()):
        raise ValueError(f"{path}: shorter than its header says")
    return tensors


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return tensor name -> shape over all safetensors files of a folder."""
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= {name: tensor.shape for name, tensor in read_header(path).items()}
    return found


def find_non_finite(folder: Path) -> list[str]:
    """Return the tensors that hold a NaN or an infinity, judged by the exponent bits."""
    bad = []
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            for name, tensor in read_header(path).items():
                if tensor.dtype not in _EXPONENTS:
                    continue
                kind, exponent = _EXPONENTS[tensor.dtype]
                file.seek(tensor.start)
                remaining = tensor.end - tensor.start
                while remaining > 0:
                    block = file.read(min(_BLOCK_BYTES, remaining))
                    remaining -= len(block)
                    values = np.frombuffer(block, dtype=kind)
                    if bool(np.any((values & kind(exponent)) == exponent)):
                        bad.append(name)
                        break
    return bad


def digest(manifest: Manifest) -> str:
    """Return 16 hex digits that identify the weights: the safetensors files' names and hashes."""
    files = sorted((file.name, file.sha256) for file in manifest.files if file.name.endswith(".safetensors"))
    return hashlib.sha256(msgspec.json.encode(files)).hexdigest()[:16]


def model_folder(model: str) -> Path:
    """Return the local folder of a model; ValueError if a Hugging Face id was never downloaded."""
    if Path(model).is_dir():
        return Path(model).resolve()
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except Exception as error:  # policy: whatever the hub's client raises, the answer is the same
        raise ValueError(
            f"run.model = {model}: not a folder and not in the local Hugging Face cache: {error}"
        ) from error
