"""The numbered steps of a swap on a stub engine: each one that fails leaves the version unserved."""

import pytest

from serving import swap
from serving.engine_client import EngineClient
from tests.serving.fake_engine import PROBE, FakeEngine, FakeGateway, make_model


@pytest.fixture
def engine(tmp_path):
    one = FakeEngine("blue-1", make_model(tmp_path / "base", 0.0))
    yield one
    one.close()


@pytest.fixture
def version(tmp_path):
    folder = make_model(tmp_path / "next", 1.0)
    return swap.Version("v000001", folder, "abcd", [PROBE])


def load(engine, version, reload=True):
    return swap.load(EngineClient(engine.url, engine.served_model), version, reload, 0.15)


def test_the_steps_come_in_their_order(engine, version):
    figures = load(engine, version)
    steps = [call for call in engine.calls if call != "/v1/completions"]
    assert steps == [
        "/pause",
        "/collective_rpc",
        "/reset_prefix_cache",
        "/update_weight_version",
        "/resume",
        "/tokenize",
    ]
    assert engine.folder == version.folder
    assert engine.label == "v000001:abcd"
    assert figures["logprob_difference"] == pytest.approx(0.0)


def test_a_fresh_engine_with_these_weights_is_verified_but_not_loaded(engine, version):
    load(engine, version, reload=False)
    assert "/collective_rpc" not in engine.calls
    assert engine.label == "v000001:abcd"


@pytest.mark.parametrize("path", ["/pause", "/collective_rpc", "/reset_prefix_cache", "/resume", "/v1/completions"])
def test_a_step_that_fails_fails_the_swap(engine, version, path):
    engine.fail[path] = 500
    with pytest.raises(swap.SwapError, match="HTTP 500"):
        load(engine, version)


def test_a_cache_that_says_it_was_not_reset_fails_the_swap(engine, version):
    engine.reset_succeeds = False
    with pytest.raises(swap.SwapError, match="not reset"):
        load(engine, version)


def test_other_log_probs_than_the_learners_refuse_the_version(engine, version):
    wrong = PROBE.__class__(prompt_ids=[5, 7, 9], completion_ids=[9], logprobs=[-3.0])
    with pytest.raises(swap.Refused, match="log-probs differ"):
        load(engine, version._replace(probes=[wrong]))


def test_one_token_over_and_over_refuses_the_version(engine, version, monkeypatch):
    monkeypatch.setattr(engine, "complete", lambda index, prompt, body: {
        "index": index, "token_ids": [4] * 12, "logprobs": {"token_logprobs": [-0.1] * 12}, "text": "a"})  # fmt: skip
    with pytest.raises(swap.Refused, match="the same one"):
        load(engine, version._replace(probes=[]))


def test_draining_waits_for_the_revision_and_for_what_is_in_flight():
    gateway = FakeGateway()
    try:
        states = [{"revision": 4, "inflight": {}}, {"revision": 5, "inflight": {"blue": 2}},
                  {"revision": 5, "inflight": {"blue": 0, "green": 7}}]  # fmt: skip
        gateway.state = states[0]
        waits = []

        def sleep(seconds: float) -> None:
            waits.append(seconds)
            gateway.state = states[len(waits)]

        assert swap.drain("blue", 5, [gateway.url], 10.0, sleep) == "drained"
        assert len(waits) == 2
        gateway.state = states[1]
        assert "2 in flight" in swap.drain("blue", 5, [gateway.url], 0.0, lambda _: None)
    finally:
        gateway.close()
    assert "does not answer" in swap.drain("blue", 5, [gateway.url], 0.0, lambda _: None)
