"""The algorithm names bricks; combinations that cannot work are refused with what to write instead."""

import subprocess
import sys

import pytest

from triune import registry
from triune.algorithms import Algorithm, Progress
from triune.algorithms.zoo.grpo import GRPO
from triune.errors import ConfigError


def built(**fields):
    algorithm = registry.build("algorithm", fields, "algorithm")
    algorithm.check()
    return algorithm


@pytest.mark.parametrize("name", registry.names("algorithm"))
def test_every_algorithm_of_the_zoo_is_built_by_its_name_alone(name):
    assert isinstance(built(use=name), Algorithm)


WRONG = [
    ({"use": "grpo", "group_size": 1}, "algorithm.group_size: found 1, but grpo compares .* write `group_size: 8`"),
    ({"use": "dr_grpo", "group_size": 4, "min_group": 1}, "algorithm.min_group: found 1, but dr_grpo"),
    ({"use": "grpo", "group_size": 4, "min_group": 5}, "algorithm.min_group: found 5 with `group_size: 4`"),
    ({"use": "grpo", "group_size": 0}, "algorithm.group_size: found 0"),
    ({"use": "grpo", "advantage": "none"}, "algorithm.advantage: policy_loss ppo_clip needs advantages"),
    ({"use": "sft", "kl": {"use": "k2", "on_flat_groups": False}}, "algorithm.advantage: kl k2 needs advantages"),
    ({"use": "grpo", "policy_loss": {"clip_hi": 0.3}}, "PPOClip has no such field; did you mean 'clip_high'"),
    ({"use": "grpo", "policy_loss": {"clip_low": -0.1}}, "algorithm.policy_loss.clip_low: found -0.1"),
    ({"use": "grpo", "policy_loss": {"dual_clip": 0.5}}, "algorithm.policy_loss.dual_clip: found 0.5"),
    ({"use": "grpo", "policy_loss": {"average": "constant"}}, "algorithm.policy_loss.length: found None"),
    ({"use": "grpo", "policy_loss": {"length": 7}}, "algorithm.policy_loss.length: found 7 with `average: token`"),
    ({"use": "grpo", "policy_loss": {"average": "mean"}}, "algorithm.policy_loss.average: found 'mean'"),
    ({"use": "grpo", "kl": {"use": "k4"}}, "no kl is called 'k4'"),
    ({"use": "grpo", "kl": {"use": "k3", "coefficient": -1}}, "algorithm.kl.coefficient: found -1"),
    ({"use": "grpo", "old_logprobs": "sometimes"}, "algorithm.old_logprobs: found 'sometimes'"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG, ids=lambda value: str(value)[:60])
def test_case_24_wrong_combinations_are_refused_with_what_to_write(fields, message):
    with pytest.raises(ConfigError, match=message):
        built(**fields)


def test_old_logprobs_never_is_refused_when_a_brick_needs_them():
    class Needy:
        needs = frozenset({"old_logprobs"})

    with pytest.raises(ConfigError, match=r"algorithm.old_logprobs: found 'never'"):
        Algorithm(policy_loss=Needy(), old_logprobs="never", group_size=1).check()


def test_case_57_setting_one_argument_keeps_the_defaults_of_the_others():
    algorithm = built(use="dr_grpo", policy_loss={"clip_high": 0.28}, kl={"use": "k2"})
    assert algorithm.policy_loss.clip_high == 0.28
    assert algorithm.policy_loss.average == "constant"
    assert algorithm.policy_loss.length == 1024
    assert algorithm.kl.coefficient == 0.001


def test_group_sizes_and_needs_are_derived_from_the_bricks():
    algorithm = built(use="grpo", group_size=6, min_group=3, kl="k3", entropy="bonus")
    assert algorithm.smallest_group == 3
    assert algorithm.needs == {"advantages", "ref_logprobs", "entropy"}
    assert GRPO().smallest_group == 8
    assert built(use="sft").needs == frozenset()


def test_auto_recomputes_old_logprobs_only_where_they_differ_from_the_behaviour():
    class Decoupled:
        needs, is_decoupled = frozenset(), True

    class Needy:
        needs = frozenset({"old_logprobs"})

    assert not GRPO().recomputes_old(num_updates=1, max_staleness=3)
    assert GRPO().recomputes_old(num_updates=2, max_staleness=0)
    assert Algorithm(policy_loss=Needy()).recomputes_old(num_updates=1, max_staleness=0)
    assert Algorithm(policy_loss=Decoupled()).recomputes_old(num_updates=1, max_staleness=1)
    assert not Algorithm(policy_loss=Decoupled()).recomputes_old(num_updates=1, max_staleness=0)
    for sampling in ("fifo", "replay"):  # stale by `sync.every`, by reuse, or made by another run, whatever the bound
        decoupled = built(use="grpo", policy_loss="decoupled_ppo", sampling=sampling)
        assert decoupled.recomputes_old(num_updates=1, max_staleness=0)
    assert GRPO(old_logprobs="always").recomputes_old(num_updates=1, max_staleness=0)
    assert not GRPO(old_logprobs="never").recomputes_old(num_updates=4, max_staleness=0)


def test_progress_ends_at_one():
    assert [Progress(step, 4).fraction for step in (0, 2, 9)] == [0.0, 0.5, 1.0]


def test_naming_an_algorithm_loads_no_torch():
    code = "import sys, triune.registry as r; r.build('algorithm', 'grpo', ''); print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert answer.stdout.strip() == "False"
