"""The door to a running vLLM server: health, swap calls, samples and teacher-forced log-probs.

Promises: every call has a deadline, and an answer that does not say success raises EngineError.
"""

import math
from typing import Any, NamedTuple

import httpx


class EngineError(Exception):
    """The engine is away, refused, or answered something that cannot be right."""


class NotFinite(EngineError):
    """The engine answered a log-prob that is NaN or infinite."""


class Answer(NamedTuple):
    """One sampled completion."""

    token_ids: list[int]
    logprobs: list[float]  # nats, of the processed distribution
    text: str
    finish_reason: str


class EngineClient:
    """One vLLM server; usable from one thread at a time."""

    def __init__(
        self, url: str, served_model: str, timeout_s: float = 120.0, reload_method: str = "reload_weights"
    ) -> None:
        self._reload_method = reload_method
        self.url = url
        self.served_model = served_model
        self._timeout_s = timeout_s
        self._http = httpx.Client(
            base_url=url, timeout=timeout_s, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0)
        )

    def close(self) -> None:
        self._http.close()

    def _call(self, method: str, path: str, timeout_s: float | None = None, **options: Any) -> Any:
        try:
            reply = self._http.request(method, path, timeout=timeout_s or self._timeout_s, **options)
        except httpx.HTTPError as error:
            raise EngineError(f"{self.url}{path}: {error!r}") from error
        if reply.status_code != 200:
            raise EngineError(f"{self.url}{path}: HTTP {reply.status_code}: {reply.text[:300]}")
        try:
            return reply.json() if reply.content else {}
        except ValueError as error:
            raise EngineError(f"{self.url}{path}: not JSON: {reply.text[:200]}") from error

    def is_healthy(self, timeout_s: float = 2.0) -> bool:
        """Tell whether the server answers /health and knows the served model's name."""
        try:
            self._call("GET", "/health", timeout_s)
            names = [model["id"] for model in self._call("GET", "/v1/models", timeout_s)["data"]]
        except (EngineError, KeyError, TypeError):
            return False
        return self.served_model in names

    def weight_label(self, timeout_s: float = 2.0) -> str:
        """Return the label that set_weight_label left; a restarted engine has another one."""
        return str(self._call("GET", "/weight_info", timeout_s).get("weight_version"))

    def set_weight_label(self, label: str) -> None:
        self._call("POST", "/update_weight_version", json={"new_version": label})
        if (found := self.weight_label()) != label:
            raise EngineError(f"{self.url}: weight label is {found!r} after setting {label!r}")

    def pause(self) -> None:
        """Let requests in flight finish, then take no more steps."""
        self._call("POST", "/pause", params={"mode": "wait"})

    def resume(self) -> None:
        self._call("POST", "/resume")

    def reload_weights(self, folder: str) -> None:
        """Load a folder's safetensors in place; by our worker extension where the server was started with it."""
        body = {"method": self._reload_method, "kwargs": {"weights_path": folder}}
        self._call("POST", "/collective_rpc", json=body)

    def reset_prefix_cache(self) -> None:
        """Forget all cached keys and values; EngineError if the engine says it did not."""
        answer = self._call("POST", "/reset_prefix_cache")
        if answer.get("success") is not True:
            raise EngineError(f"{self.url}: the prefix cache was not reset: {answer}")

    def tokenize(self, prompt: str) -> list[int]:
        return self._call("POST", "/tokenize", json={"model": self.served_model, "prompt": prompt})["tokens"]

    def _complete(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        answer = self._call("POST", "/v1/completions", json={"model": self.served_model, **body})
        choices = sorted(answer.get("choices", []), key=lambda choice: choice["index"])
        if len(choices) != len(body["prompt"]):
            raise EngineError(f"{self.url}: {len(choices)} choices for {len(body['prompt'])} prompts")
        return choices

    def sample(
        self, prompts: list[list[int]], max_tokens: int, temperature: float, seed: int = 0, cache_salt: str = ""
    ) -> list[Answer]:
        """Sample one completion of each prompt; a cache_salt keeps the prefix cache of others out."""
        body = {"prompt": prompts, "max_tokens": max_tokens, "temperature": temperature, "top_p": 1.0, "seed": seed,
                "logprobs": 0, "return_token_ids": True}  # fmt: skip
        if cache_salt:
            body["cache_salt"] = cache_salt
        return [_answer(choice, self.url) for choice in self._complete(body)]

    def score(self, prompts: list[list[int]], completions: list[list[int]]) -> list[list[float]]:
        """Return the log-probs at temperature 1 of each completion's tokens after its prompt (teacher-forced)."""
        token_ids = [[*p, *c] for p, c in zip(prompts, completions, strict=True)]
        body = {"prompt": token_ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        scores = []
        for choice, prompt, tokens in zip(self._complete(body), prompts, token_ids, strict=True):
            entries = choice.get("prompt_logprobs") or []
            if len(entries) != len(tokens):
                raise EngineError(f"{self.url}: {len(entries)} prompt log-probs for {len(tokens)} tokens")
            pairs = zip(entries[len(prompt) :], tokens[len(prompt) :], strict=True)
            scores.append([_finite(entry[str(token)]["logprob"], self.url) for entry, token in pairs])
        return scores


def _finite(value: float | None, url: str) -> float:
    if value is None or not math.isfinite(value):
        raise NotFinite(f"{url}: a log-prob is {value}")
    return float(value)


def _answer(choice: dict[str, Any], url: str) -> Answer:
    token_ids = choice.get("token_ids") or []
    logprobs = [_finite(value, url) for value in (choice.get("logprobs") or {}).get("token_logprobs") or []]
    if len(token_ids) != len(logprobs):
        raise EngineError(f"{url}: {len(token_ids)} tokens with {len(logprobs)} log-probs")
    return Answer(token_ids, logprobs, choice.get("text", ""), choice.get("finish_reason") or "")
