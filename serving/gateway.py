"""The gateway process: the OpenAI API in front of vLLM, feedback in, events out.

Takes: requests, and route tables from the control topic. Emits: Inference and Feedback events. Promises: serving never
waits for Kafka; a new table holds from the next request on; the admin listener is on loopback only.
Run: python -m serving.gateway CONFIG.toml
"""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
from starlette.applications import Starlette

from ingest.config import KafkaConfig, RunConfig, config_hash, load_table
from ingest.events import INFERENCE_TYPE, Inference, encode
from ingest.ids import route_of
from ingest.producer import Publisher
from ingest.status import write_status
from ingest.stream import ensure_topics
from ingest.topics import headers, topics
from serving.api import Gateway, admin_app, public_app
from serving.auth import load_keys, load_secret
from serving.config import ServingConfig
from serving.follow import follow_routes
from serving.relay import Means
from serving.switchboard import Switchboard

log = logging.getLogger("headrace.gateway")
SOURCE = "headrace/gateway"
ENGINE_KEEPALIVE_S = 4.0  # vLLM closes idle connections after 5 s; ours must go first


class InferenceLog:
    """Publishes Inference events, and counts what the status file tells."""

    def __init__(self, publisher: Publisher, topic: str):
        self._publisher, self._topic = publisher, topic
        self.counts: Counter[str] = Counter()
        self.versions: Counter[str] = Counter()
        self.untrainable: Counter[str] = Counter()

    def publish(self, inferences: list[Inference]) -> None:
        """Hand the events of one generation to the publisher, which never blocks."""
        for inference in inferences:
            about = headers(INFERENCE_TYPE, inference.inference_id, SOURCE, inference.timing.completed_at)
            self._publisher.publish(self._topic, route_of(inference.episode_id), encode(inference), about)
            self.counts["errors" if inference.error_type else "served"] += 1
            self.counts["cancelled"] += inference.finish_reason == "cancelled"
            self.versions[inference.policy.version] += 1
            if inference.untrainable:
                self.untrainable[inference.untrainable] += 1


def listen(host: str, port: int) -> socket.socket:
    """Bind a listener; ValueError says which address is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio sets TCP_NODELAY only then
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ValueError(f"cannot listen on {host}:{port} ({error}); free it or change port in [serving]") from error
    return listener


def open_listeners(config: ServingConfig) -> list[socket.socket]:
    """Open the public and the admin listener."""
    return [listen(config.host, config.port), listen("127.0.0.1", config.admin_port)]


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to us: there are two in one loop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(app: Starlette, drain_s: float) -> _Server:
    """Return a server that lets answers in flight end within drain_s at shutdown."""
    options: dict[str, Any] = {"log_config": None, "access_log": False, "lifespan": "off", "server_header": False}
    return _Server(uvicorn.Config(app, timeout_graceful_shutdown=max(1, round(drain_s)), **options))


@contextlib.asynccontextmanager
async def engine_session(config: ServingConfig) -> AsyncIterator[aiohttp.ClientSession]:
    """Open the pool of connections to engines."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=ENGINE_KEEPALIVE_S)
    timeout = aiohttp.ClientTimeout(total=config.request_timeout_s, sock_connect=config.connect_timeout_s)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=1 << 20) as session:
        yield session


async def report(state_dir: Path, gateway: Gateway, inferences: InferenceLog, publisher: Publisher) -> None:
    """Write the status file once a second."""
    while True:
        board = gateway.means.switchboard.describe()
        status = {"at": time.time(), "pid": os.getpid(), "revision": board["revision"], "arms": board["arms"]}
        status |= {"served": 0, "errors": 0, "cancelled": 0, **inferences.counts}
        status |= {"inflight": sum(board["inflight"].values()), "inflight_by_engine": board["inflight"]}
        status |= {"versions": dict(inferences.versions), "untrainable": dict(inferences.untrainable)}
        status |= {"feedback_accepted": 0, "feedback_refused": 0, **gateway.counts, "publisher": publisher.stats()}
        await asyncio.to_thread(write_status, state_dir, "gateway", status)
        await asyncio.sleep(1.0)


async def serve(
    run: RunConfig, kafka: KafkaConfig, config: ServingConfig, digest: str, listeners: list[socket.socket]
) -> None:
    """Run until SIGTERM or SIGINT, then let answers in flight end and send what is buffered."""
    loop, stop = asyncio.get_running_loop(), threading.Event()
    keys = load_keys(config.keys_file)
    secret = load_secret(config.pseudonym_file or run.state_dir / "serving" / "pseudonym.key")
    publisher = Publisher(kafka, SOURCE, run.state_dir / "serving" / "spool")
    inferences = InferenceLog(publisher, topics(kafka).inference)
    async with engine_session(config) as session:
        means = Means(session, Switchboard(), config, run.name, inferences.publish)
        gateway = Gateway(means, keys, secret, publisher, topics(kafka).feedback, digest)
        follower = follow_routes(kafka, lambda table: loop.call_soon_threadsafe(means.switchboard.apply, table), stop)
        servers = [make_server(app(gateway), config.drain_timeout_s) for app in (public_app, admin_app)]
        for signal_number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signal_number, lambda: [setattr(server, "should_exit", True) for server in servers])
        reporter = asyncio.create_task(report(run.state_dir, gateway, inferences, publisher))
        log.info("gateway=ready url=http://%s:%d config=%s", config.host, config.port, digest)
        await asyncio.gather(*(server.serve([at]) for server, at in zip(servers, listeners, strict=True)))
        reporter.cancel()
        stop.set()
        await asyncio.to_thread(follower.join, 5.0)
    await asyncio.to_thread(publisher.close, 5.0)
    log.info("gateway=stopped served=%d errors=%d", inferences.counts["served"], inferences.counts["errors"])


def main(argv: list[str]) -> int:
    """Load, check, serve; 2 when the configuration or the broker does not allow a start."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    if len(argv) != 1:
        print("usage: python -m serving.gateway CONFIG.toml", file=sys.stderr)
        return 2
    path = Path(argv[0])
    try:
        run = load_table(path, "run", RunConfig)
        kafka = load_table(path, "kafka", KafkaConfig)
        config = load_table(path, "serving", ServingConfig)
        for listener in open_listeners(config):  # a taken port is told before the broker is waited for
            listener.close()
        ensure_topics(kafka)
        run_loop(serve(run, kafka, config, config_hash(path), open_listeners(config)))
    except ValueError as error:
        print(f"gateway: {error}", file=sys.stderr)
        return 2
    return 0


def run_loop(coroutine: Any) -> None:
    """Run a coroutine on uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(coroutine)
    else:
        uvloop.run(coroutine)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
