"""Candidates: merge, write, hash, prove (safetensors only).

Order: 1. write weights, configuration and tokenizer into a temporary folder; 2. load them back and score the probes;
3. manifest; 4. fsync, rename. A folder with a manifest is complete: after a crash it is used as it is.
Promises: the probes' log-probs come from the files themselves, so they verify the engine that loads them.
"""

import json
import os
import shutil
import time
from pathlib import Path

import torch

from learner.candidate import MANIFEST, Manifest, Probe, list_files, read_manifest, write_manifest
from learner.logprobs import Row, completion_logprobs, micro_batches, pack
from learner.model import load_model

_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".pkl", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
PROBE_TOKENS = 64


def resolve_model(name: str) -> Path:
    """Return the folder of a model: a folder, or a Hugging Face id from the local cache or the hub."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, ignore_patterns=["*.bin", "*.gguf", "*.h5", "*.msgpack", "*.onnx"]))
    except Exception as error:
        raise ValueError(
            f"run.model = {name!r} is neither a folder nor a Hugging Face model that can be fetched ({error})"
        ) from error


def check_model_folder(folder: Path) -> None:
    """ValueError unless the folder holds configuration, weights and a tokenizer."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"run.model: {folder} has no config.json; name a folder saved by transformers")
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"run.model: {folder} has no *.safetensors weights; convert the model with save_pretrained")
    if not any(folder.glob("tokenizer*")):
        raise ValueError(f"run.model: {folder} has no tokenizer files")


@torch.no_grad()
def score_folder(folder: Path, rows: list[Row], budget_tokens: int = 4096) -> list[list[float]]:
    """Return log-probs of each row's completion under the model of a folder, in float32."""
    model = load_model(str(folder), torch.float32)
    model.eval()
    scored: list[list[float]] = [[] for _ in rows]
    lengths = [len(row.prompt_ids) + len(row.completion_ids) for row in rows]
    for group in micro_batches(lengths, budget_tokens):
        packed = pack([rows[i] for i in group], share_prefix=True)
        flat = completion_logprobs(model.get_decoder(), model.get_output_embeddings(), packed, 256)
        sizes = [len(rows[i].completion_ids) for i in group]
        for i, part in zip(group, torch.split(flat, sizes), strict=True):
            scored[i] = part.tolist()
    return scored


def write_weights(folder: Path, weights: dict[str, torch.Tensor], base: Path, dtype: torch.dtype) -> None:
    """Write a complete model: the base's configuration and tokenizer, and these weights."""
    from safetensors.torch import save_file

    for path in base.iterdir():
        if path.is_file() and not path.name.endswith(_NOT_COPIED) and not path.name.startswith("."):
            shutil.copyfile(path, folder / path.name)
    config = json.loads((folder / "config.json").read_text())
    config.pop("torch_dtype", None)
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    cast = {
        name: value.to("cpu", dtype if value.is_floating_point() else value.dtype).contiguous()
        for name, value in weights.items()
    }
    broken = [name for name, value in cast.items() if value.is_floating_point() and not value.isfinite().all()]
    if broken:
        raise ValueError(f"weights are not finite, nothing is exported: {', '.join(broken[:3])}")
    save_file(cast, folder / "model.safetensors", metadata={"format": "pt"})


def probe_rows(rows: list[Row], num_probes: int) -> list[Row]:
    """Take the first rows, cut short, at temperature 1."""
    return [Row(row.prompt_ids, row.completion_ids[:PROBE_TOKENS], 1.0) for row in rows[:num_probes]]


def write_candidate(
    final: Path, weights: dict[str, torch.Tensor], base: Path, dtype: torch.dtype, manifest: Manifest, rows: list[Row]
) -> Manifest:
    """Make the candidate's folder; the manifest comes without files, probes and time, and is returned with them."""
    temporary = final.parent / f".tmp-{final.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    write_weights(temporary, weights, base, dtype)  # 1
    scored = score_folder(temporary, rows)  # 2
    probes = [
        Probe(prompt_ids=row.prompt_ids, completion_ids=row.completion_ids, logprobs=logprobs)
        for row, logprobs in zip(rows, scored, strict=True)
    ]
    complete = {name: getattr(manifest, name) for name in manifest.__struct_fields__} | {
        "files": list_files(temporary),
        "probes": probes,
        "created_at": time.time(),
    }
    write_manifest(temporary, Manifest(**complete))  # 3
    for path in [*temporary.iterdir(), temporary]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    shutil.rmtree(final, ignore_errors=True)  # without a manifest, or we would not be here
    temporary.rename(final)  # 4
    return read_manifest(final)[0]


def is_complete(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()
