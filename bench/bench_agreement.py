"""A/A of engine and learner: the same weights, the same tokens, how far apart are their log-probs?

Starts one vLLM engine on the model, samples answers at each temperature, scores the very tokens with the learner's
forward pass, and prints log rho = log p_learner - log p_engine as JSON. Exit status 1 if |mean log rho| >= 0.01.
"""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from deploy.demo_client import MAX_TOKENS, SYSTEM_PROMPT
from deploy.demo_questions import held_out_questions
from learner.export import score_folder
from learner.logprobs import Row
from serving.engine import read_incarnation
from serving.engine_client import EngineClient

BOUND = 0.01
PATIENCE_S = 300.0
BATCH = 32  # prompts of one call


def tokenized(model: Path, num_prompts: int) -> list[list[int]]:
    """Return the demo's held-out questions as token ids under the model's own template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = []
    for question in held_out_questions(num_prompts):
        messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": question.text}]
        prompts.append(list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)))
    return prompts


def start_engine(model: Path, folder: Path) -> tuple[subprocess.Popen, EngineClient]:
    """Start an engine as the supervisor does; RuntimeError with its last words if it does not come up."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = folder / "engine.toml"
    config.write_text(
        f'[run]\nstate_dir = "{folder}"\nmodel = "{model}"\n[serving]\nmax_model_len = 512\n'
        f"engines = {{ blue = {port}, green = {port + 1} }}\n"
    )
    log = (folder / "engine.log").open("wb")
    command = [sys.executable, "-m", "serving.engine", str(config), "--name", "blue"]
    process = subprocess.Popen(command, stdout=log, stderr=log)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and process.poll() is None:
        incarnation = read_incarnation(folder, "blue")
        if incarnation:
            client = EngineClient(incarnation.url, incarnation.served_model)
            if client.is_healthy():
                return process, client
        time.sleep(0.5)
    process.terminate()
    raise RuntimeError("the engine did not come up:\n" + (folder / "engine.log").read_text(errors="replace")[-2000:])


def compare(client: EngineClient, model: Path, prompts: list[list[int]], temperature: float) -> dict:
    """Sample one answer per prompt; return statistics of log rho over its tokens."""
    answers = []
    for start in range(0, len(prompts), BATCH):
        answers += client.sample(prompts[start : start + BATCH], MAX_TOKENS, temperature, seed=11)
    rows = [Row(prompt, answer.token_ids, temperature) for prompt, answer in zip(prompts, answers, strict=True)]
    learner = np.concatenate([np.asarray(scores) for scores in score_folder(model, rows)])
    log_rho = learner - np.concatenate([np.asarray(answer.logprobs) for answer in answers])
    return {
        "temperature": temperature,
        "num_answers": len(answers),
        "num_tokens": len(log_rho),
        "mean_log_rho": float(log_rho.mean()),
        "mean_abs_log_rho": float(np.abs(log_rho).mean()),
        "max_abs_log_rho": float(np.abs(log_rho).max()),
        "ok": bool(abs(log_rho.mean()) < BOUND),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m-instruct"))
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.7, 1.0])
    arguments = parser.parse_args()
    if not (arguments.model / "config.json").is_file():
        print(f"bench_agreement: no model in {arguments.model}; `make model` gets it, or name one with --model")
        return 2
    model = arguments.model.resolve()
    with tempfile.TemporaryDirectory() as folder:
        process, client = start_engine(model, Path(folder))
        try:
            prompts = tokenized(model, arguments.prompts)
            results = [compare(client, model, prompts, temperature) for temperature in arguments.temperatures]
        finally:
            client.close()
            process.terminate()
            process.wait(30)
    print(json.dumps({"benchmark": "agreement", "model": model.name, "results": results}, indent=1))
    return 0 if all(result["ok"] for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
