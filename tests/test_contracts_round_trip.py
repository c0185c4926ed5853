"""Every contract struct survives the wire, ignores unknown fields, and names the field that is wrong."""

import json
from typing import Any, get_type_hints

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ingest.events import TYPES, Feedback, Source, decode, encode
from ingest.ids import inference_id, inference_ids_of, parse, response_id, route_of, uuid7_hex
from learner.candidate import CandidateEvent, Manifest, StepRecord, version_name, version_number
from rewards.samples import Sample
from serving.routes import RouteTable

CONTRACTS = [*TYPES.values(), Sample, Manifest, CandidateEvent, StepRecord, RouteTable]

finite = st.floats(allow_nan=False, allow_infinity=False)
integers = st.integers(-(2**53), 2**53)
scalars = st.none() | st.booleans() | integers | finite | st.text(max_size=8)
anything = st.recursive(scalars, lambda inner: st.lists(inner, max_size=2), max_leaves=4)


def strategy_of(kind: Any) -> st.SearchStrategy:
    """Return a strategy for a struct or a field type of the contracts."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = get_type_hints(kind)
        fields = {name: strategy_of(hints[name]) for name in kind.__struct_fields__}
        return st.fixed_dictionaries(fields).map(lambda values: kind(**values))
    origin, args = getattr(kind, "__origin__", None), getattr(kind, "__args__", ())
    if kind in (Any, float, int):
        return {Any: anything, float: finite, int: integers}[kind]
    if origin is list:
        return st.lists(strategy_of(args[0]), max_size=3)
    if origin is dict:
        return st.dictionaries(st.text(max_size=5), strategy_of(args[1]), max_size=3)
    if str(kind).startswith("typing.Literal"):
        return st.sampled_from(args)
    if args:  # a union
        return st.one_of([strategy_of(arg) for arg in args])
    return st.none() if kind is type(None) else st.from_type(kind)


@pytest.mark.parametrize("kind", CONTRACTS, ids=lambda kind: kind.__name__)
def test_every_contract_survives_the_wire(kind: type) -> None:
    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(strategy_of(kind))
    def round_trip(event: msgspec.Struct) -> None:
        assert encode(decode(encode(event), kind)) == encode(event)

    round_trip()


@pytest.mark.parametrize("kind", CONTRACTS, ids=lambda kind: kind.__name__)
def test_a_missing_field_is_named(kind: type) -> None:
    with pytest.raises(ValueError, match=rf"not a valid {kind.__name__}: .*missing required field"):
        decode(b"{}", kind)


def feedback(**fields: Any) -> Feedback:
    plain = {"feedback_id": "f", "tenant": "t", "metric": "m", "kind": "boolean"}
    return Feedback(**{**plain, "occurred_at": 0.0, "received_at": 0.0, **fields})


def test_unknown_fields_are_ignored_and_mistyped_ones_named() -> None:
    event = feedback(inference_id="inf_0000_" + "0" * 32, value=True, source=Source(id="u"))
    wire = json.loads(encode(event)) | {"from_the_future": [1]}
    assert decode(json.dumps(wire).encode(), Feedback) == event
    with pytest.raises(ValueError, match="occurred_at"):
        decode(json.dumps(wire | {"occurred_at": "soon"}).encode(), Feedback)


def test_feedback_must_name_exactly_one_target() -> None:
    assert feedback(episode_id="e").target() == ("episode_id", "e")
    for targets in ({}, {"episode_id": "e", "inference_id": "i"}):
        with pytest.raises(ValueError, match="exactly one"):
            feedback(**targets).target()


@given(st.text(max_size=20), st.integers(0, 2**48 - 1), st.binary(min_size=10, max_size=10), st.integers(0, 9999))
def test_ids_carry_the_route_of_their_episode(episode: str, unix_ms: int, noise: bytes, choice: int) -> None:
    route, uuid_hex = route_of(episode), uuid7_hex(unix_ms, noise)
    assert parse(inference_id(route, uuid_hex, choice)) == ("inf", route, uuid_hex, choice)
    assert int(uuid_hex[:12], 16) == unix_ms and uuid_hex[12] == "7" and uuid_hex[16] in "89ab"
    both = [inference_id(route, uuid_hex), inference_id(route, uuid_hex, 1)]
    assert inference_ids_of(response_id(route, uuid_hex), 2) == both


@pytest.mark.parametrize("bad", ["", "inf_", "inf_12_" + "0" * 32, "chatcmpl-1", "resp_0000_" + "0" * 32 + "-1"])
def test_an_id_that_is_not_ours_is_refused_with_what_was_expected(bad: str) -> None:
    with pytest.raises(ValueError, match="id"):
        parse(bad)


def test_versions_count_up_and_refuse_anything_else() -> None:
    assert version_number(version_name(12)) == 12
    with pytest.raises(ValueError, match="v000003"):
        version_number("latest")
