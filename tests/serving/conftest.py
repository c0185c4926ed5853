"""Fixtures of the serving room."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.controller_bench import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    one = Bench(tmp_path)
    yield one
    one.close()
