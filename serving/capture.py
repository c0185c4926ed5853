"""Engine answer -> what the client gets, and Inference events.

Takes: vLLM's answers with token ids and log-probs, whole or in chunks. Emits: the answer as the client asked for it,
and what one Inference per choice holds. Promises: token ids and log-probs are the engine's own, never padded, never
re-tokenised.
"""

import json
import math
from dataclasses import dataclass, field
from typing import Any

from ingest.events import Tokens, ToolCall, WeightSpan
from serving.sampling import Api

IMPOSSIBLE_LOGPROB = -9998.0  # vLLM writes -9999 where it has none


@dataclass
class Choice:
    """What one choice has said so far."""

    prompt_ids: list[int] = field(default_factory=list)
    completion_ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    tools: dict[int, dict[str, str]] = field(default_factory=dict)
    finish_reason: str = ""

    def tool_calls(self) -> list[ToolCall]:
        """Return the tool calls, each with whether its arguments are a JSON object."""
        return [
            ToolCall(name=tool["name"], arguments=tool["arguments"], parsed=is_json_object(tool["arguments"]))
            for _, tool in sorted(self.tools.items())
        ]

    def tokens(self, version: str) -> tuple[Tokens | None, str | None]:
        """Return the tokens under the version that generated them all, and why they cannot be trained on."""
        if not self.completion_ids or not self.prompt_ids:
            return None, "no_tokens"
        reason = None
        if len(self.logprobs) != len(self.completion_ids):
            reason = "length_mismatch"
        elif any(value is None or not IMPOSSIBLE_LOGPROB < value <= 1e-6 for value in self.logprobs):
            reason = "impossible_logprob"  # none given, not a number, or no possible token
        span = WeightSpan(start=0, end=len(self.completion_ids), version=version)
        values = [value for value in self.logprobs if value is not None and math.isfinite(value)]
        return (
            Tokens(
                prompt_ids=self.prompt_ids, completion_ids=self.completion_ids, logprobs=values, weight_spans=[span]
            ),
            reason,
        )


def is_json_object(text: str) -> bool:
    """Return whether a text is one JSON object."""
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


class Capture:
    """Reads an answer as it passes, and takes out what the client did not ask for."""

    def __init__(self, api: Api, num_choices: int, keep_logprobs: bool, keep_token_ids: bool):
        self.choices = [Choice() for _ in range(num_choices)]
        self.error_type: str | None = None
        self._api = api
        self._keep_logprobs = keep_logprobs
        self._keep_token_ids = keep_token_ids

    def pass_answer(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Read a whole answer or one chunk of it, and return it as the client asked for it (changed in place)."""
        if isinstance(answer.get("error"), dict):
            self.error_type = str(answer["error"].get("type") or "engine_error")
            return answer
        shared_prompt = answer.get("prompt_token_ids")
        for part in answer.get("choices") or []:
            index = part.get("index", 0)
            if 0 <= index < len(self.choices):
                self._read(self.choices[index], part, shared_prompt)
            self._strip(part)
        if not self._keep_token_ids and shared_prompt is not None:
            answer["prompt_token_ids"] = None
        return answer

    def _read(self, choice: Choice, part: dict[str, Any], shared_prompt: list[int] | None) -> None:
        choice.prompt_ids = part.get("prompt_token_ids") or shared_prompt or choice.prompt_ids
        choice.completion_ids += part.get("token_ids") or []
        choice.finish_reason = part.get("finish_reason") or choice.finish_reason
        logprobs = part.get("logprobs") or {}
        if self._api == "completions":
            choice.logprobs += logprobs.get("token_logprobs") or []
            choice.text.append(part.get("text") or "")
            return
        choice.logprobs += [entry["logprob"] for entry in logprobs.get("content") or []]
        message = part.get("message") or part.get("delta") or {}
        choice.text.append(message.get("content") or "")
        for position, call in enumerate(message.get("tool_calls") or []):
            tool = choice.tools.setdefault(call.get("index", position), {"name": "", "arguments": ""})
            function = call.get("function") or {}
            tool["name"] += function.get("name") or ""
            tool["arguments"] += function.get("arguments") or ""

    def _strip(self, part: dict[str, Any]) -> None:
        """Set to null what was only ours; the engine itself writes null there when it is not asked."""
        if not self._keep_logprobs and "logprobs" in part:
            part["logprobs"] = None
        if not self._keep_token_ids:
            for key in ("token_ids", "prompt_token_ids"):
                if key in part:
                    part[key] = None

    def is_only_ours(self, chunk: dict[str, Any]) -> bool:
        """Return whether the engine sent a (stripped) chunk only because token ids were asked for.

        With a tool or reasoning parser vLLM holds text back; unasked it sends nothing for such a token.
        """
        parts = chunk.get("choices") or []
        return (
            bool(parts)
            and not (self._keep_logprobs or self._keep_token_ids)
            and all(part.get("delta") == {} and part.get("finish_reason") is None for part in parts)
        )
