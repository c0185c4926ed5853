"""Every contract struct survives Arrow."""

import msgspec
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ingest.arrow import arrow_schema, from_table, to_table
from ingest.events import encode
from tests.test_contracts_round_trip import CONTRACTS, strategy_of


@pytest.mark.parametrize("kind", CONTRACTS, ids=lambda kind: kind.__name__)
def test_every_contract_survives_arrow(kind: type[msgspec.Struct]) -> None:
    @settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(strategy_of(kind), max_size=3))
    def round_trip(events: list[msgspec.Struct]) -> None:
        table = to_table(events, kind)
        assert table.schema == arrow_schema(kind)
        assert [encode(event) for event in from_table(table, kind)] == [encode(event) for event in events]

    round_trip()


def test_nested_fields_are_typed_and_free_ones_are_json() -> None:
    from ingest.events import Feedback, Inference

    schema = arrow_schema(Inference)
    assert schema.field("tokens").type.field("completion_ids").type == pa.list_(pa.int64())
    assert schema.field("tool_calls").type.value_type.field("parsed").type == pa.bool_()
    assert schema.field("request").type == pa.string()
    assert arrow_schema(Feedback).field("value").type == pa.string()
