import json
import math
import resource
from pathlib import Path

import pytest
import torch

from triune.errors import CheckpointError, FencedError, StoreError
from triune.failpoints import FailpointReached, arm_failpoints
from triune.trainer import Checkpoints, TrainState, read_state

WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
OPTIMISER = {"step/a": torch.tensor(3.0), "exp_avg/a": torch.randn(2, 3)}


@pytest.fixture(autouse=True)
def disarm():
    yield
    arm_failpoints("")


def state_of(step: int) -> TrainState:
    return TrainState(
        step=step, line=[(0, 0), (3, step)], consumed=[("run/t/1/0", 0)], bricks={"kl": {"beta": 0.1}}, rng="00ff"
    )


def test_what_is_saved_comes_back_bit_for_bit(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    path = checkpoints.save(state_of(5), WEIGHTS, OPTIMISER)
    assert checkpoints.latest() == str(path)
    state, weights, optimiser = checkpoints.load(path)
    assert (state.step, state.line, state.consumed, state.bricks, state.rng) == (
        5,
        [(0, 0), (3, 5)],
        [("run/t/1/0", 0)],
        {"kl": {"beta": 0.1}},
        "00ff",
    )
    for saved, loaded in ((WEIGHTS, weights), (OPTIMISER, optimiser)):
        assert saved.keys() == loaded.keys()
        assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    assert read_state(path).step == 5


def test_states_of_bricks_that_json_cannot_tell_come_back_as_they_were(tmp_path: Path):
    bricks = {"policy_loss": {"threshold": -math.inf, "seen": b"\x01\x02", "counts": {3: 1, 4: 2}, "none": None}}
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(TrainState(step=1, bricks=bricks, rng="00"), WEIGHTS, OPTIMISER)
    assert checkpoints.load(path)[0].bricks == bricks


def test_a_checkpoint_whose_bricks_were_written_as_json_is_still_read(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path)
    path = checkpoints.save(TrainState(step=1, rng="00"), WEIGHTS, OPTIMISER)
    written = json.loads((path / "state.json").read_text())
    del written["packed"]
    (path / "state.json").write_text(json.dumps({**written, "bricks": {"kl": {"coefficient": 0.25}}}))
    assert checkpoints.load(path)[0].bricks == {"kl": {"coefficient": 0.25}}


def test_a_disk_that_fills_up_says_what_to_do_and_keeps_nothing_half_written(tmp_path: Path):
    checkpoints, limits = Checkpoints(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    checkpoints.save(state_of(1), WEIGHTS, OPTIMISER)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
    try:
        with pytest.raises(StoreError, match=r"step 2 cannot be written .*free disk space, then resume"):
            checkpoints.save(state_of(2), {"a": torch.zeros(100_000)}, OPTIMISER)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_case_42_a_checkpoint_that_is_half_written_is_never_chosen(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, keep=None)
    for step in (1, 2, 3, 4, 5):
        checkpoints.save(state_of(step), WEIGHTS, OPTIMISER)
    (tmp_path / ".step-00000009.1.partial").mkdir()
    (tmp_path / "step-00000006").mkdir()
    damage = checkpoints.path(5) / "weights.safetensors"
    damage.write_bytes(damage.read_bytes()[:-1])
    (checkpoints.path(4) / "state.json").write_text('{"step": 4, "li')
    (checkpoints.path(3) / "optimiser.safetensors").unlink()
    assert checkpoints.steps() == [1, 2]
    assert checkpoints.latest() == str(checkpoints.path(2))
    with pytest.raises(CheckpointError, match="incomplete"):
        checkpoints.load(checkpoints.path(5))


def test_a_process_that_dies_before_the_rename_leaves_the_older_checkpoint(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state_of(1), WEIGHTS, OPTIMISER)
    arm_failpoints("trainer.checkpoint.before_rename:1:raise")
    with pytest.raises(FailpointReached):
        checkpoints.save(state_of(2), WEIGHTS, OPTIMISER)
    assert checkpoints.steps() == [1]
    arm_failpoints("trainer.checkpoint.after_rename:1:raise")
    with pytest.raises(FailpointReached):
        checkpoints.save(state_of(2), WEIGHTS, OPTIMISER)
    assert checkpoints.steps() == [1, 2]
    assert [entry.name for entry in tmp_path.glob(".*")] == []


@pytest.mark.parametrize("num_held", [0, 1])
def test_a_checkpoint_is_renamed_only_while_the_fence_holds(tmp_path: Path, num_held: int):
    checkpoints, asked = Checkpoints(tmp_path), []
    checkpoints.save(state_of(1), WEIGHTS, OPTIMISER)
    others = tmp_path / ".step-00000002.99.partial"
    others.mkdir()

    def fence() -> None:
        asked.append(others.exists())
        if len(asked) > num_held:
            raise FencedError("run 'r'", "epoch 0 writes")

    for step in (1, 2):
        asked.clear()
        with pytest.raises(FencedError, match="epoch 0"):
            checkpoints.save(state_of(step), {"a": torch.zeros(1)}, {}, None, None, fence)
        assert checkpoints.load(checkpoints.path(1))[1].keys() == WEIGHTS.keys()
    assert checkpoints.steps() == [1]
    assert others.exists() == (num_held == 0), "nothing of others is touched by who was fenced before it began"
    assert len(list(tmp_path.glob(".*"))) == 1 - num_held


def test_only_the_newest_are_kept(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3, 4):
        checkpoints.save(state_of(step), WEIGHTS, OPTIMISER)
    assert checkpoints.steps() == [3, 4]


def test_saving_a_step_again_replaces_it(tmp_path: Path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(state_of(1), WEIGHTS, OPTIMISER)
    checkpoints.save(state_of(1), {"a": torch.zeros(1)}, {})
    assert checkpoints.load(checkpoints.path(1))[1].keys() == {"a"}


def test_a_folder_that_cannot_be_written_says_what_is_not_lost(tmp_path: Path):
    (tmp_path / "taken").write_text("")
    with pytest.raises(StoreError, match=r"cannot be written.*nothing that was consumed"):
        Checkpoints(tmp_path / "taken").save(state_of(1), WEIGHTS, OPTIMISER)


def test_there_is_no_latest_checkpoint_in_a_folder_that_does_not_exist(tmp_path: Path):
    assert Checkpoints(tmp_path / "no").latest() is None
    with pytest.raises(CheckpointError, match="step-N"):
        read_state(tmp_path)
