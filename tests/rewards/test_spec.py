"""A reward specification is strict, and its version is its resolved content."""

from pathlib import Path

import pytest

from rewards.config import RewardsConfig, spec_path
from rewards.spec import load_spec

OUTCOMES = """
[outcomes]
error = -1.0
invalid_tool_call = -1.0
empty = -1.0
truncated = -0.6
refusal = -0.4
clarification = -0.1
"""
THUMBS = '[metrics.thumbs]\nkind = "boolean"\nweight = 1.0\n'


def load(tmp_path: Path, text: str):
    path = tmp_path / "spec.toml"
    path.write_text(text)
    return load_spec(path)


def test_the_default_specification_loads_and_has_every_kind() -> None:
    spec = load_spec(spec_path(RewardsConfig(), Path("anywhere.toml")))
    kinds = {metric.kind for metric in spec.metrics.values()}
    assert kinds == {"boolean", "numeric", "categorical", "outcome", "demonstration", "comment"}
    assert spec.metrics["task_completion"].weight > spec.metrics["thumbs"].weight  # a late outcome outweighs a thumb
    assert spec.token_cost.weight == 0.0


def test_a_relative_path_starts_at_the_configuration_file() -> None:
    config = RewardsConfig(spec=Path("my_spec.toml"))
    assert spec_path(config, Path("/etc/headrace/production.toml")) == Path("/etc/headrace/my_spec.toml")


def test_the_version_depends_on_resolved_content_only(tmp_path: Path) -> None:
    written_out = THUMBS + 'reducer = "latest"\nmissing = "mask"\n# a remark\n' + OUTCOMES
    left_out = OUTCOMES + THUMBS
    assert load(tmp_path, written_out).version == load(tmp_path, left_out).version
    changed = THUMBS.replace("weight = 1.0", "weight = 0.9") + OUTCOMES
    assert load(tmp_path, changed).version != load(tmp_path, left_out).version


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            THUMBS.replace("boolean", "boolen") + OUTCOMES,
            r"\[metrics.thumbs\] kind = 'boolen' is not known; use 'boolean'",
        ),
        (THUMBS.replace("1.0", "0") + OUTCOMES, r"\[metrics.thumbs\] weight = 0: .*greater than 0"),
        (THUMBS + "wieght = 2\n" + OUTCOMES, r"\[metrics.thumbs\] wieght is not known here; known: .*weight"),
        (THUMBS + 'reducer = "median"\n' + OUTCOMES, r"\[metrics.thumbs\] reducer = 'median' .*use 'latest'"),
        (
            THUMBS + 'missing = "estimate"\n' + OUTCOMES,
            r"\[metrics.thumbs\] missing = 'estimate' .*'mask' or 'default'",
        ),
        (THUMBS + 'missing = "default"\n' + OUTCOMES, r"\[metrics.thumbs\]: .*needs default_value"),
        (THUMBS + "default_value = 0.5\n" + OUTCOMES, r'\[metrics.thumbs\]: default_value needs missing = "default"'),
        (THUMBS + "flip_to_positive = 0.6\nflip_to_negative = 0.4\n" + OUTCOMES, "must stay below 1"),
        (THUMBS + "values = { yes = 1.0 }\n" + OUTCOMES, r"\[metrics.thumbs\]: .*exactly the keys true and false"),
        (THUMBS.replace("boolean", "categorical") + OUTCOMES, r"\[metrics.thumbs\]: .*needs values"),
        (THUMBS.replace("boolean", "numeric") + "low = 5\nhigh = 1\n" + OUTCOMES, r"\[metrics.thumbs\]: .*low < high"),
        (THUMBS + "low = 1\n" + OUTCOMES, r"\[metrics.thumbs\]: low and high belong to numeric"),
        (THUMBS.replace("thumbs", "Thumbs") + OUTCOMES, r"\[metrics\] Thumbs = .*pattern"),
        (THUMBS.replace("thumbs", "token_cost") + OUTCOMES, "'token_cost' is taken by Headrace; rename it"),
        (THUMBS, r"\[outcomes\] is missing; add this table"),
        (THUMBS + OUTCOMES.replace("empty = -1.0", ""), r"\[outcomes\] empty is missing; set it"),
        (
            THUMBS + OUTCOMES.replace("error = -1.0", "error = -2"),
            r"\[outcomes\] error = -2: .*greater than or equal to -1",
        ),
        (THUMBS + OUTCOMES + "timeout = -1\n", r"\[outcomes\] timeout is not known here; known: clarification, empty"),
        (
            THUMBS + OUTCOMES + "[token_cost]\nlamda = 1\n",
            r"\[token_cost\] lamda is not known here; known: lambda, max_tok",
        ),
        (THUMBS + OUTCOMES + "[tokens]\n", r"\[tokens\] is not known here; known: metrics, outcomes, token_cost"),
        ("metrics = {}\n" + OUTCOMES, r"\[metrics\] = \{\}: .*at least 1"),
        ("metrics = ", "is not valid TOML"),
        (THUMBS + OUTCOMES.replace("error = -1.0", "error = nan"), r"\[outcomes\] error = nan"),
    ],
)
def test_an_error_names_table_key_and_fix(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said) as raised:
        load(tmp_path, text)
    assert str(tmp_path / "spec.toml") in str(raised.value)


def test_every_problem_is_listed_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as raised:
        load(tmp_path, THUMBS.replace("1.0", "99") + "colour = 1\n")
    assert len(str(raised.value).splitlines()) == 3
