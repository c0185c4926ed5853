"""The planted nonsense candidate: trained on anything but the question, with honest probes."""

import math

import msgspec
import pytest

from deploy.plant import main, make_nan, make_nonsense, train_nonsense
from learner.candidate import Manifest, Probe, check_files, list_files, read_manifest, write_manifest
from tests.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny") / "v000003")
    probe = Probe(prompt_ids=[3, 4, 5], completion_ids=[6, 7], logprobs=[-1.0, -1.0])
    manifest = Manifest(
        version="v000003",
        parent="v000001",
        kind="lora",
        files=list_files(folder),
        created_at=1.0,
        step=9,
        probes=[probe],
    )
    write_manifest(folder, manifest)
    return folder


def test_training_brings_the_nonsense_closer(tiny, tmp_path):
    first = train_nonsense(tiny, tmp_path / "one", num_steps=1)
    last = train_nonsense(tiny, tmp_path / "many", num_steps=25)
    assert last < first - 0.2
    assert (tmp_path / "many" / "model.safetensors").stat().st_size == (tiny / "model.safetensors").stat().st_size


def test_the_nonsense_candidate_is_sound_and_its_probes_are_its_own(tiny, tmp_path):
    train_nonsense(tiny, tmp_path / "weights", num_steps=5)
    make_nonsense(tiny, tmp_path / "weights", "v900002", tmp_path / "v900002")
    manifest, _ = read_manifest(tmp_path / "v900002")
    assert check_files(tmp_path / "v900002", manifest) == []
    assert (manifest.version, manifest.parent) == ("v900002", "v000003")
    (probe,) = manifest.probes
    assert (probe.prompt_ids, probe.completion_ids) == ([3, 4, 5], [6, 7])
    assert len(probe.logprobs) == 2 and all(math.isfinite(value) and value < 0 for value in probe.logprobs)
    assert probe.logprobs != [-1.0, -1.0]


def test_the_command_prints_the_manifest_hash(tiny, tmp_path, capsys):
    assert main(["nan", "--parent", str(tiny), "--version", "v900001", "--out", str(tmp_path / "v900001")]) == 0
    printed = msgspec.json.decode(capsys.readouterr().out)
    assert printed == {"manifest_sha256": read_manifest(tmp_path / "v900001")[1]}


def test_candidates_can_be_planted_on_the_base_model_which_has_no_manifest(tmp_path):
    base = make_tiny_model(tmp_path / "base")
    make_nan(base, "v900001", tmp_path / "v900001")
    manifest, _ = read_manifest(tmp_path / "v900001")
    assert check_files(tmp_path / "v900001", manifest) == []
    assert (manifest.parent, manifest.kind) == ("v000000", "full")
    assert len(manifest.probes) == 4
    for probe in manifest.probes:
        assert len(probe.logprobs) == len(probe.completion_ids) > 5
        assert all(math.isfinite(value) for value in probe.logprobs)
