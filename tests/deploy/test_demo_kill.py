"""Kills and the planted NaN: only what the supervisor names is shot, only one tensor is spoilt."""

import asyncio
import json
import os
import struct
import subprocess
import sys
import threading
import time

import pytest

from deploy.demo_kill import kill_now, resolve, run_kills
from deploy.demo_stack import write_config
from deploy.plant import make_nan
from ingest.config import RunConfig, load_table
from ingest.status import write_status
from learner.candidate import Manifest, Probe, check_files, list_files, read_manifest, write_manifest
from serving.routes import Route, RouteTable


def supervised(tmp_path, **pids):
    write_status(
        tmp_path, "supervisor", {"processes": {name: {"pid": pid, "state": "ready"} for name, pid in pids.items()}}
    )


def test_a_killed_process_is_seen_to_come_back(tmp_path):
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    supervised(tmp_path, joiner=victim.pid)

    def restart():
        victim.wait()
        time.sleep(0.3)
        supervised(tmp_path, joiner=os.getpid())

    thread = threading.Thread(target=restart)
    thread.start()
    said = []
    (kill,) = asyncio.run(run_kills(tmp_path, ["joiner"], 0.0, lambda: None, said.append))
    thread.join()
    assert victim.returncode == -9
    assert (kill.process, kill.pid) == ("joiner", victim.pid)
    assert kill.back_after_s is not None and kill.back_after_s < 10
    assert said[0].startswith("killed joiner")


def test_a_process_that_the_supervisor_does_not_know_is_not_killed(tmp_path):
    supervised(tmp_path, joiner=1)
    with pytest.raises(ValueError, match="--kill lerner: not a running process; known: joiner"):
        kill_now(tmp_path, "lerner")


def test_the_canary_engine_is_the_one_without_the_champion():
    champion = Route(arm="champion", version="v000001", engine="green", url="", served_model="")
    table = RouteTable(revision=1, at=0.0, author="controller", champion=champion)
    assert resolve("canary-engine", table) == "engine-blue"
    assert resolve("champion-engine", table) == "engine-green"
    assert resolve("learner", table) == "learner"


def write_candidate(folder):
    """Write a parent with two BF16 tensors."""
    folder.mkdir()
    header = {
        "a.up_proj.weight": {"dtype": "BF16", "shape": [4], "data_offsets": [0, 8]},
        "a.down_proj.weight": {"dtype": "BF16", "shape": [4], "data_offsets": [8, 16]},
    }
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(range(16)))
    (folder / "config.json").write_text("{}")
    probe = Probe(prompt_ids=[1], completion_ids=[2], logprobs=[-0.5])
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


def test_the_nan_candidate_is_proper_but_for_one_tensor_of_nan(tmp_path):
    from safetensors.torch import load_file

    write_candidate(tmp_path / "v000003")
    sha256 = make_nan(tmp_path / "v000003", "v900001", tmp_path / "v900001")
    manifest, read_sha256 = read_manifest(tmp_path / "v900001")
    assert sha256 == read_sha256
    assert check_files(tmp_path / "v900001", manifest) == []
    assert (manifest.version, manifest.parent, manifest.step) == ("v900001", "v000003", 9)
    tensors = load_file(tmp_path / "v900001" / "model.safetensors")
    assert tensors["a.down_proj.weight"].isnan().all()
    assert not tensors["a.up_proj.weight"].isnan().any()
    assert load_file(tmp_path / "v000003" / "model.safetensors")["a.down_proj.weight"].isnan().sum() == 0


@pytest.mark.parametrize(
    "text",
    [
        '[run]\nstate_dir = ".headrace"\nmodel = "m"\n',
        '[run]\nmodel = "m"\n',
        '[kafka]\npartitions = 2\n\n[run]\nmodel = "m"\n',
    ],
)
def test_the_demo_configuration_differs_in_its_state_folder_only(tmp_path, text):
    template = tmp_path / "local.toml"
    template.write_text(text)
    path = write_config(template, tmp_path / "state")
    run = load_table(path, "run", RunConfig)
    assert (run.state_dir, run.model) == (tmp_path / "state", "m")
