"""A stub of vLLM's server for the controller's tests, and candidates that it can load.

Weights are a folder with a tiny safetensors file; config.json says how the model behaves: "topical" (answers carry the
prompt's topic), "nonsense" (the same fluent words whatever is asked), "drifted" (another distribution), "loops".
"""

import json
import struct
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from ingest.events import Assignment, Feedback, Inference, Interaction, Policy, Timing, Tokens
from learner.candidate import Manifest, Probe, list_files, write_manifest
from serving.router import arm
from serving.routes import RouteTable

PROBE = Probe(prompt_ids=[5, 7, 9], completion_ids=[9, 100, 101], logprobs=[-0.5, -2.0, -2.0])


def write_safetensors(path: Path, value: float, shape: tuple[int, ...] = (4, 4)) -> None:
    data = np.full(shape, value, dtype="<f4").tobytes()
    header = json.dumps({"w": {"dtype": "F32", "shape": list(shape), "data_offsets": [0, len(data)]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def make_model(folder: Path, value: float, style: str = "topical", shape: tuple[int, ...] = (4, 4)) -> Path:
    folder.mkdir(parents=True)
    write_safetensors(folder / "model.safetensors", value, shape)
    (folder / "config.json").write_text(json.dumps({"style": style}))
    return folder


def make_candidate(
    root: Path, version: str, value: float, style: str = "topical", parent: str = "v000000", **fields: Any
) -> tuple[Path, str]:
    """Return the folder and the manifest's sha256."""
    folder = make_model(root / version, value, style)
    fields = {"probes": [PROBE]} | fields
    manifest = Manifest(version=version, parent=parent, kind="lora", files=list_files(folder), created_at=1.0, **fields)
    return folder, write_manifest(folder, manifest)


def score_token(style: str, prompt: list[int], token: int) -> float:
    """The topic is the prompt's last token: likely after its own prompt, unlikely after another one."""
    drift = 1.5 if style == "drifted" else 0.0
    if token == prompt[-1]:
        return -0.5 - drift
    return (-8.0 if token < 100 else -2.0) - drift


class FakeEngine:
    """One engine incarnation on a port of its own."""

    def __init__(self, served_model: str, base: Path, port: int = 0) -> None:
        self.served_model, self.folder, self.label = served_model, base, "default"
        self.calls: list[str] = []
        self.is_paused = self.is_closed = False
        self.fail: dict[str, int] = {}  # path -> HTTP status
        self.reset_succeeds = True
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = 1 << 16  # head and body in one segment

            def log_message(self, *_: Any) -> None: ...

            def do_GET(self) -> None:
                self.answer({})

            def do_POST(self) -> None:
                size = int(self.headers.get("content-length") or 0)
                self.answer(json.loads(self.rfile.read(size) or b"{}"))

            def answer(self, body: dict[str, Any]) -> None:
                if engine.is_closed:
                    self.close_connection = True
                    return
                path = self.path.split("?")[0]
                status = engine.fail.get(path, 200)
                try:
                    value = engine.handle(path, body) if status == 200 else {"error": "told to fail"}
                except FileNotFoundError as error:
                    status, value = 500, {"error": str(error)}
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self.is_closed = True
        self._server.shutdown()
        self._server.server_close()

    @property
    def style(self) -> str:
        return json.loads((self.folder / "config.json").read_text())["style"]

    def handle(self, path: str, body: dict[str, Any]) -> Any:
        if path not in ("/health", "/v1/models", "/weight_info"):
            self.calls.append(path)
        if path == "/v1/models":
            return {"data": [{"id": self.served_model}]}
        if path == "/weight_info":
            return {"weight_version": self.label}
        if path == "/update_weight_version":
            self.label = body["new_version"]
        elif path == "/pause":
            self.is_paused = True
        elif path == "/resume":
            self.is_paused = False
        elif path == "/collective_rpc":
            assert self.is_paused, "weights are loaded while the engine is not paused"
            folder = Path(body["kwargs"]["weights_path"])
            (folder / "model.safetensors").stat()
            self.folder = folder
        elif path == "/reset_prefix_cache":
            return {"success": self.reset_succeeds}
        elif path == "/tokenize":
            return {"tokens": [5, 7, 9]}
        elif path == "/v1/completions":
            return {"choices": [self.complete(i, prompt, body) for i, prompt in enumerate(body["prompt"])]}
        return {}

    def complete(self, index: int, prompt: list[int], body: dict[str, Any]) -> dict[str, Any]:
        style = self.style
        if style == "nonsense":
            tokens = [100 + (index + j) % 40 for j in range(6)]
        elif style == "loops":
            tokens = [prompt[-1]] + [100] * 8
        else:
            tokens = [prompt[-1], 100 + index, 120 + index % 7, 140 + index % 5]
        tokens = tokens[: body["max_tokens"]]
        choice = {"index": index, "finish_reason": "stop", "text": " ".join(f"w{token}" for token in tokens)}
        if "prompt_logprobs" in body:
            asked = [(prompt, i) for i in range(len(prompt))]
            choice["prompt_logprobs"] = [None] + [
                {str(tokens_[i]): {"logprob": self._score_at(style, tokens_, i)}} for tokens_, i in asked[1:]
            ]
        else:
            choice["token_ids"] = tokens
            choice["logprobs"] = {"token_logprobs": [score_token("topical", prompt, token) for token in tokens]}
        return choice

    @staticmethod
    def _score_at(style: str, tokens: list[int], place: int) -> float:
        """Tests use prompts of three tokens, so what comes after is the completion."""
        return score_token(style, tokens[: min(3, place)], tokens[place])


class FakeGateway:
    """/internal/routes of a gateway that has applied every table and has nothing in flight."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"revision": 10**9, "inflight": {}, "arms": {}}
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None: ...

            def do_GET(self) -> None:
                data = json.dumps(gateway.state).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def better(side: str, i: int) -> bool:
    """Seven of ten users of the canary are happy, two of ten of the champion's."""
    return i % 10 < (7 if side == "canary" else 2)


def make_interactions(
    table: RouteTable, first: int, num: int, now_s: float, happy: Callable[[str, int], bool | None], error: str = ""
) -> list[Interaction]:
    """Return final interactions of new users under a table; happy(arm, i) is their thumb, error the canary's."""
    interactions = []
    for i in range(first, first + num):
        side = arm(table.salt, f"u{i}", table.canary_weight) if table.canary else "champion"
        propensity = table.canary_weight if side == "canary" else 1 - table.canary_weight
        inference = Inference(
            inference_id=f"inf_{i}",
            response_id=f"resp_{i}",
            episode_id=f"ep_{i}",
            tenant="t",
            timing=Timing(received_at=now_s - 6.0, completed_at=now_s - 5.5),
            policy=Policy(model="m", version="v"),
            response_text="fine",
            error_type=error or None if side == "canary" else None,
            tokens=Tokens(prompt_ids=[5, 7, 10 + i % 30], completion_ids=[1], logprobs=[-0.1]),
            assignment=Assignment(rollout_id=table.rollout_id, arm=side, unit=f"u{i}", propensity=propensity),
        )
        thumb = happy(side, i)
        said = Feedback(
            feedback_id=f"f{i}",
            tenant="t",
            metric="thumbs",
            kind="boolean",
            value=thumb,
            inference_id=f"inf_{i}",
            occurred_at=now_s,
            received_at=now_s,
        )
        feedback = [] if thumb is None else [said]
        interactions.append(
            Interaction(inference=inference, feedback=feedback, state="final", revision=0, watermark=now_s)
        )
    return interactions
