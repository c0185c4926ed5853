"""The demo's phases against a gateway of our own that starts to answer well after a promotion."""

import asyncio
import json

from aiohttp import web

from deploy import demo_run
from deploy.demo import main, parse
from deploy.demo_results import log_curves
from deploy.demo_run import Demo
from deploy.demo_stack import Stack, write_config
from deploy.demo_view import View
from ingest.events import encode
from learner.candidate import CandidateEvent
from serving.routes import Route, RouteTable
from tests.deploy.fake_gateway import FakeGateway

CONFIG = """
[run]
model = "no-such-model"
[kafka]
bootstrap_servers = "127.0.0.1:1"
[ingest]
observation_window_s = 0.2
late_window_s = 0.4
[mlflow]
tracking_uri = ""
[serving]
port = {port}
[deploy]
broker = "external"
mlflow = "off"
"""


class LivingStack(Stack):
    """A stack that is always alive: the test's gateway stands for it."""

    def check_alive(self):
        return None


def promote(demo, gateway, version, revision):
    route = Route(arm="champion", version=version, engine="blue", url="", served_model="")
    table = RouteTable(revision=revision, at=demo.started_at, author="controller", champion=route)
    demo.watch._take("routes", encode(table))
    event = CandidateEvent(version=version, state="promoted", at=demo.started_at + revision)
    if revision:
        demo.watch._take(f"candidate/{version}", encode(event))
    gateway.version = version
    gateway.answer = "It is a thing. " if not revision else "The {} is known to people from many small towns."


async def story(tmp_path, monkeypatch):
    gateway = FakeGateway()
    runner = web.AppRunner(gateway.app())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    template = tmp_path / "test.toml"
    template.write_text(CONFIG.format(port=runner.addresses[0][1]))
    options = parse(
        [
            f"--config={template}",
            f"--state-dir={tmp_path / 'state'}",
            "--minutes=1.04",
            "--questions=30",
            "--concurrency=6",
        ]
    )
    monkeypatch.setattr(demo_run, "DRAIN_PATIENCE_S", 1.0)
    stack = LivingStack(write_config(template, options.state_dir), options.state_dir)
    with View(live=False) as view:
        demo = Demo(options, stack, view)
        promote(demo, gateway, "v000000", 0)
        await demo.client.__aenter__()
        try:
            phase = asyncio.create_task(demo.traffic_phase())
            while not demo.base:
                await asyncio.sleep(0.02)
            promote(demo, gateway, "v000001", 1)
            promote(demo, gateway, "v000002", 2)
            await phase
            await demo.measure_phase()
            await demo.drain_phase()
            log_curves(demo)
        finally:
            await demo.close()
            await runner.cleanup()
    return demo, await demo.report()


def test_every_phase_runs_and_each_criterion_gets_its_figure(tmp_path, monkeypatch, capsys):
    demo, criteria = asyncio.run(story(tmp_path, monkeypatch))
    by_name = {criterion.name: criterion for criterion in criteria}
    assert by_name["at least 2 promotions by the gate"].ok
    assert by_name["no failed client request"].ok
    assert not by_name["reconciliation by id"].ok  # nothing was archived here
    assert "answers served = archived" in by_name["reconciliation by id"].figure
    assert len(demo.base) == len(demo.champion) == 30
    assert {answer.version for answer in demo.champion.values()} == {"v000002"}
    folder = tmp_path / "state" / "demo"
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    document = json.loads((folder / "summary.json").read_text())
    assert document["ok"] is False
    assert [entry["version"] for entry in document["promotions"]] == ["v000001", "v000002"]
    printed = capsys.readouterr().out
    assert "Did it learn?" in printed and "Reconciliation by id" in printed


def test_an_earlier_demo_is_not_overwritten(tmp_path, capsys):
    (tmp_path / "demo").mkdir()
    assert main([f"--state-dir={tmp_path}"]) == 2
    assert "holds an earlier demo" in capsys.readouterr().err


def test_users_pause_while_the_learner_trains_and_hurry_for_a_canary():
    def wanted(backlog, is_training=False, in_gates=False, has_canary=False, takes_turns=True):
        return demo_run.wanted_pace(24, backlog, 64, is_training, in_gates, has_canary, takes_turns)

    assert wanted(63) == (24, 0.5)
    assert wanted(64) == (1, 10.0)
    assert wanted(0, is_training=True) == (1, 10.0)
    assert wanted(500, has_canary=True) == (24, 0.5)
    assert wanted(0, is_training=True, has_canary=True) == (12, 0.5)
    assert wanted(100, is_training=True, takes_turns=False) == (24, 0.5)
    assert wanted(128, is_training=True, takes_turns=False) == (6, 0.5)
    assert wanted(0, in_gates=True, takes_turns=False) == (6, 0.5)
    assert wanted(500, in_gates=True, has_canary=True, takes_turns=False) == (24, 0.5)


def test_learner_and_engine_share_cores_unless_each_has_its_own():
    assert demo_run.shares_cores(2, 0, 0)
    assert demo_run.shares_cores(2, 1, 2)
    assert not demo_run.shares_cores(2, 1, 1)
    assert not demo_run.shares_cores(32, 0, 0)
