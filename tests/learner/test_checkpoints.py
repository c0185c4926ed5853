"""Checkpoints are whole or not there."""

from pathlib import Path

import pytest

from learner.checkpoints import Checkpoints, LearnerState, find_problems, read_state


def write_weights(value: str):
    def write(folder: Path) -> None:
        (folder / "engine").mkdir()
        (folder / "engine" / "weights").write_text(value)

    return write


def test_the_newest_checkpoint_is_resumed_with_its_state(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in range(3):
        checkpoints.save(LearnerState(step=step, offsets={"0": step}), write_weights(str(step)), set())
    folder = Checkpoints(tmp_path, keep=3).newest_sound()
    assert folder is not None and folder.name == "00000003"
    assert read_state(folder).offsets == {"0": 2}
    assert (folder / "engine" / "weights").read_text() == "2"


@pytest.mark.parametrize("damage", ["flip", "remove", "hashes"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path, damage):
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step in range(2):
        checkpoints.save(LearnerState(step=step), write_weights(str(step)), set())
    newest = tmp_path / "00000002"
    if damage == "flip":
        (newest / "engine" / "weights").write_text("X")
    elif damage == "remove":
        (newest / "engine" / "weights").unlink()
    else:
        (newest / "hashes.json").write_text("{")
    assert find_problems(newest)
    folder = Checkpoints(tmp_path, keep=3).newest_sound()
    assert folder is not None and read_state(folder).step == 0
    assert (tmp_path / "CURRENT").read_text() == "00000001"


@pytest.mark.parametrize("point", ["write", "rename", "pointer"])
def test_a_save_that_is_cut_leaves_the_previous_checkpoint_current(tmp_path, point, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep=3)
    checkpoints.save(LearnerState(step=1), write_weights("1"), set())

    def fail(*_):
        raise KeyboardInterrupt

    write = write_weights("2")
    if point == "write":
        write = fail
    elif point == "rename":
        monkeypatch.setattr(Path, "rename", fail)
    else:
        monkeypatch.setattr(checkpoints, "_point_to", fail)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(LearnerState(step=2), write, set())
    monkeypatch.undo()
    folder = Checkpoints(tmp_path, keep=3).newest_sound()
    assert folder is not None and read_state(folder).step == 1
    again = Checkpoints(tmp_path, keep=3)
    again.save(LearnerState(step=2), write_weights("2"), set())
    folder = again.newest_sound()
    assert folder is not None and read_state(folder).step == 2


def test_retention_is_bounded_and_keeps_what_is_needed(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in range(1, 7):
        checkpoints.save(LearnerState(step=step), write_weights(str(step)), {1, 3})
    assert checkpoints.serials() == [1, 3, 5, 6]
