"""A real vLLM engine and the OpenAI client: through the gateway nothing changes but the ids."""

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from serving.routes import Route
from tests.serving.stand import Stand, stand
from tests.tiny_model import make_tiny_model

SERVED = "tiny-real-1"
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "2",
}
pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a vLLM server with a tiny random model."""
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    log = folder / "vllm.log"
    arguments = f"--host 127.0.0.1 --port {port} --dtype float32 --enforce-eager --max-model-len 512 --max-num-seqs 16"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), *arguments.split()]
    command += ["--logprobs-mode", "processed_logprobs", "--generation-config", "vllm", "--served-model-name", SERVED]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **ENVIRONMENT})
    try:
        wait_healthy(url, process, log)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def wait_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-2000:]
        try:
            urllib.request.urlopen(f"{url}/health", timeout=2).close()
            return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"no healthy engine: {log.read_text()[-2000:]}")


@pytest.fixture
def gateway(engine: str) -> Iterator[Stand]:
    with stand() as opened:
        route = Route(arm="champion", version="v000003", engine="blue", url=engine, served_model=SERVED)
        opened.apply(champion=route)
        yield opened


def clients(engine: str, gateway: Stand) -> tuple[tuple[openai.OpenAI, str], tuple[openai.OpenAI, str]]:
    """Return (client, model) of the engine itself and of the gateway."""
    direct = openai.OpenAI(base_url=f"{engine}/v1", api_key="none", max_retries=0)
    through = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)
    return (direct, SERVED), (through, "headrace")


def content(answer: Any) -> dict[str, Any]:
    return answer.model_dump(exclude={"id", "created", "model"})


ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Tell me"}],
    "max_tokens": 20,
    "temperature": 0.9,
    "seed": 11,
}


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"n": 3},
        {"logprobs": True, "top_logprobs": 3},
        {"stop": ["e", "a"]},
        {"extra_body": {"return_token_ids": True}},
    ],
    ids=["plain", "n3", "logprobs", "stop", "token_ids"],
)
def test_a_chat_answer_equals_the_engines(engine: str, gateway: Stand, extra: dict[str, Any]) -> None:
    (direct, served), (through, name) = clients(engine, gateway)
    expected = direct.chat.completions.create(model=served, **ASKED, **extra)
    answer = through.chat.completions.create(model=name, **ASKED, **extra)
    assert content(answer) == content(expected)
    assert answer.id.startswith("resp_") and answer.model == "headrace"
    assert len(gateway.publisher.inferences()) == extra.get("n", 1)


def test_streamed_chunks_add_up_to_the_engines_answer(engine: str, gateway: Stand) -> None:
    (direct, served), (through, name) = clients(engine, gateway)

    def chunks(client: openai.OpenAI, model: str) -> list[dict[str, Any]]:
        options: Any = {"stream": True, "stream_options": {"include_usage": True}}
        return [content(chunk) for chunk in client.chat.completions.create(model=model, **ASKED, **options)]

    def merged(all_chunks: list[dict[str, Any]]) -> tuple[str, Any]:
        deltas = [choice["delta"]["content"] or "" for chunk in all_chunks for choice in chunk["choices"]]
        return "".join(deltas), all_chunks[-1]["usage"]

    expected, answer = chunks(direct, served), chunks(through, name)
    assert merged(answer) == merged(expected)
    assert all(choice["logprobs"] is None for chunk in answer for choice in chunk["choices"])


def test_completions_equal_the_engines(engine: str, gateway: Stand) -> None:
    (direct, served), (through, name) = clients(engine, gateway)
    asked: dict[str, Any] = {"prompt": ["Once", "Twice"], "n": 2, "max_tokens": 10, "seed": 5, "echo": False}
    assert content(through.completions.create(model=name, **asked)) == content(
        direct.completions.create(model=served, **asked)
    )
    assert [one.choice_index for one in gateway.publisher.inferences()] == [0, 1, 2, 3]


def test_the_recorded_tokens_are_what_the_engine_returned(engine: str, gateway: Stand) -> None:
    (direct, served), (through, name) = clients(engine, gateway)
    raw = direct.chat.completions.create(model=served, **ASKED, logprobs=True, extra_body={"return_token_ids": True})
    through.chat.completions.create(model=name, **ASKED)
    list(through.chat.completions.create(model=name, **ASKED, stream=True))
    whole, streamed = (one.tokens for one in gateway.publisher.inferences())
    assert whole is not None and streamed is not None
    dumped = raw.model_dump()
    assert whole.prompt_ids == streamed.prompt_ids == dumped["prompt_token_ids"]
    assert whole.completion_ids == streamed.completion_ids == dumped["choices"][0]["token_ids"]
    expected = [entry["logprob"] for entry in dumped["choices"][0]["logprobs"]["content"]]
    assert whole.logprobs == pytest.approx(expected, abs=1e-5)
    assert streamed.logprobs == pytest.approx(expected, abs=1e-5)
    assert {span.version for span in whole.weight_spans} == {"v000003"}


def test_the_record_is_of_the_processed_distribution(engine: str, gateway: Stand) -> None:
    """A low temperature sharpens mu: the recorded log-probs must be of the distribution that was sampled from."""
    _, (through, name) = clients(engine, gateway)
    for temperature in (0.1, 1.0):
        through.chat.completions.create(model=name, **{**ASKED, "temperature": temperature, "n": 8})
    means = []
    inferences = gateway.publisher.inferences()
    for group in (inferences[:8], inferences[8:]):
        values = [value for one in group if one.tokens for value in one.tokens.logprobs]
        means.append(sum(values) / len(values))
    assert means[0] > means[1] + 1.0
    assert all(one.untrainable is None for one in inferences)


def test_an_unknown_incarnation_is_refused_by_the_engine(engine: str, gateway: Stand) -> None:
    gateway.apply(
        canary=Route(arm="canary", version="v000004", engine="green", url=engine, served_model="tiny-old"),
        champion=Route(arm="champion", version="v000003", engine="blue", url=engine, served_model=SERVED),
        canary_weight=1.0,
    )
    _, (through, name) = clients(engine, gateway)
    answer = through.chat.completions.with_raw_response.create(model=name, **ASKED)
    assert answer.headers["x-headrace-version"] == "v000003"


def test_an_engines_refusal_is_an_openai_error(engine: str, gateway: Stand) -> None:
    _, (through, name) = clients(engine, gateway)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        through.chat.completions.create(model=name, **{**ASKED, "temperature": -1})
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        through.chat.completions.create(model="other", **ASKED)
