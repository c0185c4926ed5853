"""The controller's decisions: bootstrap, promotion, rollback, refusals."""

import pytest

from tests.serving.controller_bench import worse
from tests.serving.fake_engine import better


def test_the_base_model_is_served_without_a_gate_and_without_loading_it(bench):
    bench.serve_base()
    assert bench.served_by() == ("v000000", None, "v000000")
    assert all("/collective_rpc" not in engine.calls for engine in bench.engines.values())
    assert all(engine.label.startswith("v000000:") for engine in bench.engines.values())


def test_a_better_candidate_is_promoted_and_the_champion_stays_as_standby(bench):
    bench.serve_base()
    bench.reach_canary("v000001")
    assert bench.served_by() == ("v000000", "v000001", None)
    assert bench.table.canary_weight == 0.5
    for _ in range(25):
        bench.step(bench.ask(8, better))
    assert ("v000001", "promoted") in bench.said()
    assert bench.served_by() == ("v000001", None, "v000000")
    assert [state for _, state in bench.said()] == ["shadow", "canary", "promoted"]
    assert bench.conductor.state.num_promoted == 1


def test_a_worse_candidate_is_rolled_back_and_no_weights_are_loaded_for_the_champion(bench):
    bench.serve_base()
    bench.reach_canary("v000001")
    champion = bench.engines[bench.table.champion.engine]
    calls = len(champion.calls)
    for _ in range(25):
        bench.step(bench.ask(8, worse))
        if bench.table.canary is None:
            break
    assert bench.said()[-1] == ("v000001", "rolled_back")
    assert bench.served_by()[:2] == ("v000000", None)
    assert len(champion.calls) == calls
    bench.until(lambda: bench.served_by()[2] == "v000000")  # and the idle engine gets a sane version again


def test_canary_errors_beside_a_clean_champion_roll_back(bench):
    bench.serve_base()
    bench.reach_canary("v000001")
    for _ in range(5):
        bench.step(bench.ask(8, lambda *_: None, error="engine_error"))
    assert bench.said()[-1] == ("v000001", "rolled_back")
    assert "errors" in bench.reason("v000001", "rolled_back")


def test_five_failures_in_a_row_end_the_canary_at_once(bench):
    bench.serve_base()
    bench.reach_canary("v000001")
    bench.gateway.state["arms"] = {"canary": {"failures_in_a_row": 5}}
    bench.step()
    assert bench.said()[-1] == ("v000001", "rolled_back")
    assert bench.table.canary is None


@pytest.mark.parametrize(
    ("style", "fails"), [("nonsense", "topic"), ("loops", "loops"), ("drifted", "log-probs differ from the learner's")]
)
def test_a_degenerate_candidate_never_meets_a_user(bench, style, fails):
    bench.serve_base()
    bench.propose("v000001", 1.0, style)
    bench.until(lambda: ("v000001", "rejected") in bench.said())
    assert fails in bench.reason("v000001", "rejected")
    assert ("v000001", "canary") not in bench.said()


def test_nan_weights_another_hash_and_equal_weights_are_refused_without_touching_an_engine(bench):
    bench.serve_base()
    calls = {name: len(engine.calls) for name, engine in bench.engines.items()}
    bench.propose("v000001", float("nan"))
    bench.until(lambda: ("v000001", "rejected") in bench.said())
    folder = bench.propose("v000002", 2.0)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-1] + b"\x01")
    bench.until(lambda: ("v000002", "rejected") in bench.said() or bench.conductor.state.rollout is not None)
    bench.propose("v000003", 0.0)
    bench.until(lambda: ("v000003", "rejected") in bench.said())
    assert "finite" in bench.reason("v000001", "rejected")
    assert "sha256" in bench.reason("v000002", "rejected")
    assert "equal the parent" in bench.reason("v000003", "rejected")
    assert calls == {name: len(engine.calls) for name, engine in bench.engines.items()}


def test_the_newest_candidate_wins_and_older_ones_are_shelved(bench):
    bench.serve_base()
    bench.reach_canary("v000001")
    bench.propose("v000002", 2.0)
    bench.propose("v000003", 3.0)
    for _ in range(25):
        bench.step(bench.ask(8, better))
    bench.until(lambda: bench.conductor.state.rollout is not None)
    assert ("v000002", "shelved") in bench.said()
    assert bench.conductor.state.rollout.version == "v000003"
