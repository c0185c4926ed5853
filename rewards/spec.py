"""The declared reward: one table per metric, a reward for every terminal outcome, the token cost.

Owns the reward specification (TOML). Takes a path. Emits a frozen RewardSpec with the hash of its resolved content.
Promises: a specification with an unknown key, kind or an impossible number never loads; the message says how to fix it.
"""

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError, model_validator

from ingest.config import StrictModel, read_toml

MetricKind = Literal["boolean", "numeric", "categorical", "outcome", "demonstration", "comment"]
Reducer = Literal["latest", "earliest", "mean", "sum", "min", "max"]
Direction = Literal["higher_is_better", "lower_is_better"]
Unit = Annotated[float, Field(ge=-1, le=1)]
Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_.-]{0,63}$")]
TOKEN_COST = "token_cost"  # its component name, so no metric may carry it


class Metric(StrictModel):
    """[metrics.NAME]: how feedback of one name becomes a value in [-1, 1]."""

    kind: MetricKind
    direction: Direction = "higher_is_better"
    weight: float = Field(..., gt=0, le=10, description="factor of the value in the sum")
    confidence: float = Field(1.0, gt=0, le=1)
    window_s: float | None = Field(None, gt=0, description="after the answer; later feedback is ignored")
    reducer: Reducer = "latest"
    missing: Literal["mask", "default"] = "mask"
    default_value: float | None = Field(None, ge=-1, le=1, description="value of a shown answer without a vote")
    default_confidence: float = Field(0.3, gt=0, le=1)
    low: float | None = Field(None, allow_inf_nan=False, description="numeric: maps to -1")
    high: float | None = Field(None, allow_inf_nan=False, description="numeric: maps to +1")
    values: dict[str, Unit] = Field(default_factory=dict, description="label -> value")
    flip_to_positive: float = Field(0.0, ge=0, lt=1, description="share of bad answers seen as good")
    flip_to_negative: float = Field(0.0, ge=0, lt=1, description="share of good answers seen as bad")

    @model_validator(mode="after")
    def _check(self) -> "Metric":
        if self.kind == "numeric" and (self.low is None or self.high is None or not self.low < self.high):
            raise ValueError("a numeric metric needs low < high, the numbers that mean -1 and +1")
        if self.kind != "numeric" and (self.low is not None or self.high is not None):
            raise ValueError(f"low and high belong to numeric metrics; remove them or set kind from {self.kind!r}")
        if self.kind == "categorical" and not self.values:
            raise ValueError("a categorical metric needs values, such as values = { good = 1.0, bad = -1.0 }")
        if self.values and self.kind in ("numeric", "comment", "demonstration"):
            raise ValueError(
                f"values belong to boolean, categorical and outcome metrics; remove them from {self.kind!r}"
            )
        if self.kind == "boolean" and self.values and set(self.values) != {"true", "false"}:
            raise ValueError("values of a boolean metric need exactly the keys true and false")
        if self.missing == "default" and self.default_value is None:
            raise ValueError('missing = "default" needs default_value, the value in [-1, 1] of no vote')
        if self.missing == "mask" and self.default_value is not None:
            raise ValueError('default_value needs missing = "default"; set it, or remove default_value')
        if self.flip_to_positive + self.flip_to_negative >= 1:
            raise ValueError("flip_to_positive + flip_to_negative must stay below 1: such labels say nothing")
        return self


class Outcomes(StrictModel):
    """[outcomes]: the reward of every terminal failure; all are required."""

    error: Unit
    invalid_tool_call: Unit
    empty: Unit
    truncated: Unit
    refusal: Unit
    clarification: Unit


class TokenCost(StrictModel):
    """[token_cost]: positive rewards lose lambda * tokens / max_tokens * expected success."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_by_name=True, validate_by_alias=True)

    weight: float = Field(0.0, ge=0, le=2, alias="lambda")
    max_tokens: int = Field(1024, ge=1)


class RewardSpec(StrictModel):
    """The whole specification."""

    metrics: dict[Name, Metric] = Field(..., min_length=1)
    outcomes: Outcomes
    token_cost: TokenCost = Field(default_factory=lambda: TokenCost.model_validate({}))

    @model_validator(mode="after")
    def _check(self) -> "RewardSpec":
        taken = [name for name in self.metrics if name == TOKEN_COST or name.startswith("outcome.")]
        if taken:
            raise ValueError(f"metric name {taken[0]!r} is taken by Headrace; rename it")
        return self

    @cached_property
    def version(self) -> str:
        """12 hex digits of the resolved content: defaults written out or left out give the same version."""
        resolved = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.sha256(resolved.encode()).hexdigest()[:12]


def load_spec(path: Path) -> RewardSpec:
    """Read and check a specification; ValueError names file, table, key and fix, one line per problem."""
    try:
        return RewardSpec.model_validate(read_toml(path))
    except ValidationError as error:
        raise ValueError("\n".join(f"{path}: {_explain(dict(problem))}" for problem in error.errors())) from error


def _explain(problem: dict[str, Any]) -> str:
    """Return what is wrong and how to fix it, for one problem that pydantic found."""
    loc = tuple(str(part) for part in problem["loc"] if part != "[key]")
    where = "[" + ".".join(loc[:-1]) + "] " + loc[-1] if len(loc) > 1 else f"[{'.'.join(loc)}]" if loc else "the file"
    if problem["type"] == "extra_forbidden":
        return f"{where} is not known here; known: {', '.join(_known_keys(loc))}"
    if problem["type"] == "missing":
        needed = "set it" if len(loc) > 1 else "add this table; deploy/reward_spec.toml has an example"
        return f"{where} is missing; {needed}"
    if problem["type"] == "literal_error":
        return f"{where} = {problem['input']!r} is not known; use {problem['ctx']['expected']}"
    if problem["type"] == "value_error":
        table = f"[{'.'.join(loc)}]" if loc else "the file"
        return f"{table}: {problem['ctx']['error']!s}"
    return f"{where} = {problem['input']!r}: {problem['msg']}"


def _known_keys(loc: tuple[str, ...]) -> list[str]:
    """Return the keys that the table of an unknown key may hold."""
    models = {"metrics": Metric, "outcomes": Outcomes, "token_cost": TokenCost}
    model = models[loc[0]] if len(loc) > 1 else RewardSpec
    return sorted(field.alias or name for name, field in model.model_fields.items())
