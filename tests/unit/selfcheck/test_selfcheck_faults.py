"""Every planted fault is found, and its cause is named."""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import Any

import pytest

from triune.selfcheck import Status, selfcheck
from triune.testing.faults import FAULTS, plant
from triune.testing.run_files import small_run


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the model and the tasks are."""
    folder = tmp_path_factory.mktemp("selfcheck")
    small_run(folder)
    return folder


def varied(task: Any, answer: str) -> float:
    """A reward that says something about any answer of a random model."""
    return float(zlib.crc32(answer.encode()) % 2)


def run_of(shared: Path, tmp_path: Path, **sections: Any) -> dict[str, Any]:
    """A run that every fault shows in."""
    own = {
        "algorithm": {"use": "grpo", "group_size": 4},
        "explorer": {"max_tokens": 8, "temperature": 0.8},
        "trainer": {"float32_matmul": "highest"},
    }
    for name, section in sections.items():
        own[name] = {**own.get(name, {}), **section}
    return small_run(shared, runs_dir=str(tmp_path), **own)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_its_cause_is_named(shared: Path, tmp_path: Path, name: str):
    fault = FAULTS[name]
    config = run_of(shared, tmp_path, **fault.sections)
    with plant(name):
        report = selfcheck(config, reward=varied, only=[fault.found_by])
    (finding,) = report.findings
    assert finding.status in (Status.FAILED, Status.WARNED), finding.found
    assert re.search(fault.says, finding.found), finding.found
    assert finding.fix


@pytest.mark.parametrize(
    ("name", "trainer"),
    [
        ("mean_of_micro_batches", {"precision": "bfloat16"}),
        ("sum_of_means", {"precision": "bfloat16"}),
        ("sum_of_means", {"float32_matmul": "medium"}),
    ],
)
def test_rounding_does_not_hide_a_wrong_denominator(shared: Path, tmp_path: Path, name: str, trainer: Any):
    config = run_of(shared, tmp_path, trainer=trainer)
    with plant(name):
        (wrong,) = selfcheck(config, reward=varied, only=["micro_batches"]).findings
    (right,) = selfcheck(config, reward=varied, only=["micro_batches"]).findings
    assert (wrong.status, right.status) == (Status.FAILED, Status.PASSED), (wrong.found, right.found)


def test_a_critic_that_warms_up_first_does_not_look_like_an_overflow(shared: Path, tmp_path: Path):
    config = run_of(shared, tmp_path, algorithm={"use": "ppo", "critic": {"use": "value_model", "warmup_steps": 2}})
    (finding,) = selfcheck(config, reward=varied, only=["first_update"]).findings
    assert finding.status is Status.PASSED, finding.found


@pytest.mark.parametrize("name", sorted({fault.found_by for fault in FAULTS.values()}))
def test_without_the_fault_the_check_passes(shared: Path, tmp_path: Path, name: str):
    config = run_of(shared, tmp_path, algorithm={"kl": {"use": "k3", "coefficient": 0.01}})
    (finding,) = selfcheck(config, reward=varied, only=[name]).findings
    assert finding.status is Status.PASSED, finding.found
