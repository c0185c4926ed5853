"""Record a real vLLM server's answers for the stub engine: python -m tests.serving.record_answers URL MODEL.

Each case is asked twice, as a client would and as the gateway does, so that the tests can compare the two.
Writes tests/serving/vllm_answers.json.
"""

import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ANSWERS = Path(__file__).with_name("vllm_answers.json")
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12, "seed": 7, "temperature": 0.8}
TEXT = {"prompt": "Once upon", "max_tokens": 12, "seed": 7, "temperature": 0.8}
NAMED = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}, "max_tokens": 60}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("chat/completions", CHAT),
    "chat_stream": ("chat/completions", {**CHAT, "stream": True}),
    "chat_stream_usage": ("chat/completions", {**CHAT, **USAGE}),
    "chat_n2": ("chat/completions", {**CHAT, "n": 2}),
    "chat_n3_stream": ("chat/completions", {**CHAT, "n": 3, "stream": True}),
    "chat_logprobs": ("chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}),
    "chat_logprobs_stream": ("chat/completions", {**CHAT, "logprobs": True, "stream": True}),
    "chat_token_ids": ("chat/completions", {**CHAT, "return_token_ids": True}),
    "chat_tool": ("chat/completions", {**CHAT, **NAMED}),
    "chat_tool_stream": ("chat/completions", {**CHAT, **NAMED, "stream": True}),
    "chat_bad": ("chat/completions", {**CHAT, "temperature": -3}),
    "chat_top_logprobs_alone": ("chat/completions", {**CHAT, "top_logprobs": 2}),
    "text": ("completions", TEXT),
    "text_stream": ("completions", {**TEXT, "stream": True}),
    "text_stream_usage": ("completions", {**TEXT, **USAGE}),
    "text_n2": ("completions", {**TEXT, "n": 2}),
    "text_two_prompts_stream": ("completions", {**TEXT, "prompt": ["Once", "Twice"], "n": 2, "stream": True}),
    "text_logprobs": ("completions", {**TEXT, "logprobs": 2}),
    "text_echo": ("completions", {**TEXT, "echo": True}),
    "wrong_model": ("chat/completions", {**CHAT, "model": "gone"}),
}


def ask(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return status, content type and text of one answer."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{url}/v1/{path}", data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return {"status": answer.status, "type": answer.headers["content-type"], "text": answer.read().decode()}
    except urllib.error.HTTPError as answer:
        return {"status": answer.code, "type": answer.headers["content-type"], "text": answer.read().decode()}


def main(url: str, model: str) -> None:
    from serving.sampling import instrument

    recorded = {}
    for name, (path, asked) in CASES.items():
        body = {"model": model, **asked}
        sent = instrument("completions" if path == "completions" else "chat.completions", body)
        recorded[name] = {"path": path, "body": asked, "plain": ask(url, path, body), "captured": ask(url, path, sent)}
    ANSWERS.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
