"""The whole configuration is validated at once."""

from pathlib import Path

import pytest

from deploy.config import load_all, own_ports

ROOT = Path(__file__).parents[2]
MINIMAL = '[run]\nmodel = "some/model"\n'


def load(tmp_path: Path, text: str):
    path = tmp_path / "headrace.toml"
    path.write_text(MINIMAL + text)
    return load_all(path)


@pytest.mark.parametrize("name", ["local.toml", "production.toml"])
def test_shipped_profiles_are_valid(name: str) -> None:
    assert load_all(ROOT / "deploy" / name).run.model


def test_defaults_name_every_port_once(tmp_path: Path) -> None:
    ports = own_ports(load(tmp_path, ""))
    assert sorted(ports.values()) == [5000, 8100, 8101, 8102, 8110, 9092]


def test_attached_engines_and_outer_parts_need_no_port_of_ours(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        '[serving]\nattach = { blue = "http://gpu:8000", green = "http://gpu:8001" }\n'
        '[deploy]\nbroker = "external"\nmlflow = "off"\n',
    )
    assert own_ports(config) == {"serving.port": 8100, "serving.admin_port": 8110}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[nonsense]\na = 1\n", "unknown table [nonsense]; known tables: [run]"),
        ("[deploy]\nbrokers = 1\n", "unknown key deploy.brokers; known keys of [deploy]: broker,"),
        ('[deploy]\nbroker = "rabbit"\n', "deploy.broker = 'rabbit'"),
        ("[serving]\nport = 70000\n", "serving.port = 70000"),
        ("[serving.gate]\ndelta = 2\n", "serving.gate.delta = 2"),
        ("[ingest]\nobservation_window_s = -1\n", "ingest.observation_window_s = -1"),
        ('[kafka]\nbootstrap_servers = "kafka-1:9092"\n', 'set deploy.broker = "external" to use it'),
        ('[kafka]\nbootstrap_servers = "nowhere"\n', "is not host:port, such as 127.0.0.1:9092"),
        ('[mlflow]\ntracking_uri = "https://mlflow.example.com"\n', 'set deploy.mlflow = "external" to use it'),
        ("[serving]\nport = 9092\n", "both use port 9092; give each its own"),
        ('[serving]\nattach = { red = "http://gpu:1" }\n', "serving.attach names red; known engines: blue, green"),
    ],
)
def test_bad_configuration_says_what_where_and_how_to_fix(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(ValueError) as error:
        load(tmp_path, text)
    assert expected in str(error.value)
    assert "headrace.toml" in str(error.value)


def test_every_problem_is_listed_not_only_the_first(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        load(tmp_path, "[ingest]\nx = 1\n[serving]\ny = 1\n[deploy]\nz = 1\n")
    assert [word in str(error.value) for word in ("ingest.x", "serving.y", "deploy.z")] == [True, True, True]


def test_missing_file_and_broken_toml_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        load_all(tmp_path / "absent.toml")
    (tmp_path / "broken.toml").write_text("[run\n")
    with pytest.raises(ValueError, match="is not valid TOML"):
        load_all(tmp_path / "broken.toml")
