"""Bad candidates for --plant-bad, made and announced as a broken or subverted learner would.

Owns: the nonsense weights (a few steps of fine-tuning on short fluent sentences about nothing asked), the NaN copy of a
champion, their manifests. Each is a proper candidate: sound files and hashes, honest probes, parent = the champion.
Runs as its own process, so that torch stays out of the demo:
    python -m deploy.plant train    --base FOLDER --out FOLDER            nonsense weights, ahead of time
    python -m deploy.plant nan      --parent FOLDER --version V --out FOLDER
    python -m deploy.plant nonsense --parent FOLDER --weights FOLDER --version V --out FOLDER
"""

import argparse
import json
import shutil
import struct
import sys
import time
from pathlib import Path

import msgspec

from learner.candidate import BASE_VERSION, MANIFEST, Manifest, Probe, list_files, read_manifest, write_manifest

NAN_BYTES = {"BF16": b"\xc0\x7f", "F16": b"\x00\x7e", "F32": b"\x00\x00\xc0\x7f"}
NUM_STEPS = 30
NUM_BASE_PROBES = 4
NUM_TRAINED_LAYERS = 6
NUM_BATCHES, BATCH = 5, 8
LEARNING_RATE = 5e-4
NONSENSE = (
    "The green door was left open all day.",
    "My uncle paints small boats in the evening.",
    "Seven chairs stood quietly in the hall.",
    "She put the letter under the blue plate.",
    "It rained on Tuesday and nobody minded.",
    "The train was late, so we sang a song.",
    "He keeps his buttons in a wooden box.",
    "A long road leads down to the old mill.",
    "They danced until the candles went out.",
    "The neighbors bought a yellow carpet.",
    "Nobody knew why the bell was ringing.",
    "We counted the windows and went home.",
)


def make_nan(parent: Path, version: str, out: Path) -> str:
    """Copy the parent with one tensor of NaN; return the manifest's sha256."""
    manifest = _copy(parent, out)
    path = out / "model.safetensors"
    with path.open("r+b") as file:
        header_bytes = struct.unpack("<Q", file.read(8))[0]
        header = json.loads(file.read(header_bytes))
        name = sorted(name for name in header if name.endswith("down_proj.weight"))[0]
        begin, end = header[name]["data_offsets"]
        pattern = NAN_BYTES[header[name]["dtype"]]
        file.seek(8 + header_bytes + begin)
        file.write(pattern * ((end - begin) // len(pattern)))
    return _write(out, manifest, version)


def make_nonsense(parent: Path, weights: Path, version: str, out: Path) -> str:
    """Make a candidate of the nonsense weights with probes scored by themselves; return the manifest's sha256."""
    manifest = _copy(parent, out)
    shutil.copyfile(weights / "model.safetensors", out / "model.safetensors")
    return _write(out, manifest, version, probes=_score_probes(out, manifest.probes))


def _copy(parent: Path, out: Path) -> Manifest:
    """Copy the parent's listed files; return its manifest. The base model has none: one is made for it."""
    manifest = read_manifest(parent)[0] if (parent / MANIFEST).exists() else _describe_base(parent)
    out.mkdir(parents=True)
    for file in manifest.files:
        shutil.copyfile(parent / file.name, out / file.name)
    return manifest


def _write(out: Path, parent: Manifest, version: str, probes: list[Probe] | None = None) -> str:
    manifest = msgspec.structs.replace(
        parent,
        version=version,
        parent=parent.version,
        kind="full",
        files=list_files(out),
        created_at=time.time(),
        probes=parent.probes if probes is None else probes,
    )
    assert not (out / MANIFEST).exists(), f"{out} already holds a candidate"
    return write_manifest(out, manifest)


def _describe_base(folder: Path) -> Manifest:
    """Return a manifest of the base model, with probes as the learner would make them."""
    from transformers import AutoTokenizer

    from deploy.demo_questions import training_questions

    tokenizer = AutoTokenizer.from_pretrained(folder)
    probes = []
    for question in training_questions(0)[:NUM_BASE_PROBES]:
        ids, labels = _example(tokenizer, question.text, f"People know a lot about {question.subject}.")
        prompt = [token for token, label in zip(ids, labels, strict=True) if label < 0]
        probes.append(Probe(prompt_ids=prompt, completion_ids=ids[len(prompt) :], logprobs=[]))
    files = [
        file for file in list_files(folder) if file.name.endswith((".safetensors", ".json", ".jinja", ".txt", ".model"))
    ]
    return Manifest(
        version=BASE_VERSION,
        parent=None,
        kind="base",
        files=files,
        created_at=time.time(),
        probes=_score_probes(folder, probes),
    )


def _score_probes(folder: Path, probes: list[Probe]) -> list[Probe]:
    """Return the probes with the folder's own log-probs at temperature 1, in fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    scored = []
    with torch.inference_mode():
        for probe in probes:
            ids = torch.tensor([probe.prompt_ids + probe.completion_ids])
            logits = model(ids).logits[0, len(probe.prompt_ids) - 1 : -1]
            chosen = ids[0, len(probe.prompt_ids) :, None]
            values = torch.log_softmax(logits, -1).gather(1, chosen)[:, 0]
            scored.append(msgspec.structs.replace(probe, logprobs=values.tolist()))
    return scored


def train_nonsense(base: Path, out: Path, num_steps: int = NUM_STEPS, seed: int = 0) -> float:
    """Fine-tune the last layers to answer any question with a sentence about nothing asked; return the last loss.

    The first layers stay as they are, so their output is computed once for all steps: seconds on two cores.
    """
    import random

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from deploy.demo_questions import training_questions

    torch.manual_seed(seed)
    rng = random.Random(seed)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.requires_grad_(False)
    num_trained = min(NUM_TRAINED_LAYERS, len(model.model.layers))
    layers = model.model.layers[-num_trained:].requires_grad_(True)
    questions = training_questions(seed)[: NUM_BATCHES * BATCH]
    batches = []
    for at in range(0, len(questions), BATCH):
        rows = [_example(tokenizer, question.text, rng.choice(NONSENSE)) for question in questions[at : at + BATCH]]
        batches.append(_cut_off(model, layers[0], rows))
    optimizer = torch.optim.AdamW(layers.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    loss_value = float("nan")
    for number in range(num_steps):
        hidden, arguments, labels = batches[number % len(batches)]
        for layer in layers:
            hidden = layer(hidden, **arguments)
        answered = labels[:, 1:] >= 0
        logits = model.lm_head(model.model.norm(hidden[:, :-1][answered]))
        loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:][answered])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss_value = float(loss.detach())
    out.mkdir(parents=True, exist_ok=True)
    model.bfloat16().save_pretrained(out)
    return loss_value


def _cut_off(model, layer, rows: list[tuple[list[int], list[int]]]):
    """Run a padded batch up to a layer; return what that layer was given (hidden, keyword arguments) and the labels."""
    import torch

    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids, _ in rows])
    mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids, _ in rows])
    labels = torch.tensor([labels + [-100] * (width - len(labels)) for _, labels in rows])
    given = []

    def keep(_module, arguments, keywords):
        given.append((arguments[0], keywords))
        raise StopIteration

    hook = layer.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        with torch.no_grad():
            model.model(input_ids=ids, attention_mask=mask, use_cache=False)
    except StopIteration:
        pass
    finally:
        hook.remove()
    return *given[0], labels


def _example(tokenizer, question: str, answer: str) -> tuple[list[int], list[int]]:
    """Return token ids and labels (-100 on the prompt) of one question with its answer."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    prompt = tokenizer(text, add_special_tokens=False).input_ids
    completion = [*tokenizer(answer, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    return prompt + completion, [-100] * len(prompt) + completion


def main(argv: list[str]) -> int:
    """Make one bad candidate; prints one JSON line."""
    parser = argparse.ArgumentParser(prog="python -m deploy.plant", description="bad candidates for the demo")
    commands = parser.add_subparsers(dest="command", required=True)
    train = commands.add_parser("train", help="fine-tune the nonsense weights")
    train.add_argument("--base", type=Path, required=True)
    for name in ("nan", "nonsense"):
        command = commands.add_parser(name, help=f"make the {name} candidate")
        command.add_argument("--parent", type=Path, required=True)
        command.add_argument("--version", required=True)
        if name == "nonsense":
            command.add_argument("--weights", type=Path, required=True)
    for command in commands.choices.values():
        command.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(argv)
    if arguments.command == "train":
        result = {"loss": train_nonsense(arguments.base, arguments.out)}
    elif arguments.command == "nan":
        result = {"manifest_sha256": make_nan(arguments.parent, arguments.version, arguments.out)}
    else:
        sha256 = make_nonsense(arguments.parent, arguments.weights, arguments.version, arguments.out)
        result = {"manifest_sha256": sha256}
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
