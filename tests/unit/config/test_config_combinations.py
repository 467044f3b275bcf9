"""Bricks that do not fit each other are refused when the run file is read, with the key and what to write instead."""

import pytest

from triune.config import load_config
from triune.errors import ConfigError

BASE = {"tasks": {"use": "arithmetic"}, "trainer": {"steps": 20, "tasks_per_step": 8}}
EXPERT = {"use": "jsonl", "path": "answers.jsonl"}

WRONG = {
    "a group method with groups of one": (
        {"algorithm": {"use": "grpo", "group_size": 1}},
        ("algorithm.group_size", "compares the rollouts of a task", "write `group_size: 8`"),
    ),
    "leave-one-out with nobody else": (
        {"algorithm": {"use": "rloo", "min_group": 1}},
        ("algorithm.min_group", "rloo compares the rollouts", "write `min_group: 8`"),
    ),
    "values without a critic": (
        {"algorithm": {"use": "grpo", "advantage": "gae"}},
        ("algorithm.critic", "gae needs values", "write `critic: value_model`"),
    ),
    "a critic that nobody reads": (
        {"algorithm": {"use": "grpo", "critic": "value_model"}},
        ("algorithm.critic", "nothing reads its values", "write `critic: none`"),
    ),
    "a warm-up longer than the run": (
        {"algorithm": {"use": "ppo", "critic": {"use": "value_model", "warmup_steps": 20}}},
        ("algorithm.critic.warmup_steps", "would never be updated", "lower it"),
    ),
    "distillation without a teacher": (
        {"algorithm": "on_policy_distill"},
        ("teacher", "needs teacher_logprobs", "write `teacher: {path: …}`"),
    ),
    "a teacher that nobody asks": (
        {"algorithm": "grpo", "teacher": {"path": "triune/nano"}},
        ("teacher", "grpo asks no teacher", "leave it out"),
    ),
    "KL in the reward of a method that takes no rewards of tokens": (
        {"algorithm": {"use": "grpo", "kl": {"use": "k1", "place": "reward"}}},
        ("algorithm.kl.place", "grpo takes no rewards of tokens", "write `place: loss`"),
    ),
    "a policy gradient without advantages": (
        {"algorithm": {"use": "grpo", "advantage": "none"}},
        ("algorithm.advantage", "needs advantages", "write `advantage: grpo`"),
    ),
    "advantages for a loss over pairs": (
        {"algorithm": {"use": "dpo", "advantage": "grpo", "group_size": 8}},
        ("algorithm.advantage", "dpo learns from pairs, not rewards", "write `advantage: none`"),
    ),
    "old log-probs never, for a decoupled loss": (
        {"algorithm": {"use": "grpo", "policy_loss": "decoupled_ppo", "old_logprobs": "never"}},
        ("algorithm.old_logprobs", "decoupled_ppo needs them", "write `old_logprobs: auto`"),
    ),
    "flat groups dropped where they teach": (
        {"algorithm": "asymre", "pipeline": ["drop_flat_groups"]},
        ("pipeline.0", "asymre learns from flat groups", "leave it out"),
    ),
    "dynamic sampling where flat groups teach": (
        {"algorithm": {"use": "asymre", "sampling": "dynamic"}},
        ("algorithm.sampling", "asymre learns from flat groups", "leave it out"),
    ),
    "flat groups dropped where a greedy answer is the baseline": (
        {"algorithm": {"use": "remax", "group_size": 8, "sampling": "dynamic"}},
        ("algorithm.sampling", "remax learns from flat groups", "leave it out"),
    ),
    "flat groups dropped where every group is one rollout": (
        {"algorithm": "reinforce", "pipeline": ["drop_flat_groups"]},
        ("pipeline.0", "every group of one is flat", "leave it out"),
    ),
    "expert answers for a method that takes none": (
        {"algorithm": "grpo", "expert": EXPERT},
        ("expert", "grpo takes nothing from the buffer `expert`", "write `algorithm: mix`"),
    ),
    "a mix without expert answers": (
        {"algorithm": "mix"},
        ("expert", "mix takes answers from the buffer `expert`", "write e.g. `expert:"),
    ),
    "a share of a step that rounds to zero": (
        {"algorithm": {"use": "mix", "sampling": {"use": "mix", "shares": {"main": 0.95, "expert": 0.05}}},
         "expert": EXPERT},
        ("algorithm.sampling.shares.expert", "would get none", "write at least"),
    ),
    "more replay than there are uses": (
        {"algorithm": {"use": "grpo", "sampling": {"use": "replay", "ratio": 0.8, "max_uses": 2}}},
        ("algorithm.sampling.ratio", "never be enough to replay", "write `ratio: 0.5`"),
    ),
    "a batch in tasks for a loss over pairs": (
        {"algorithm": "dpo"},
        ("trainer.tasks_per_step", "dpo does not consume that unit", "write `trainer.pairs_per_step: 8`"),
    ),
    "a constant average without its length": (
        {"algorithm": {"use": "grpo", "policy_loss": {"use": "ppo_clip", "average": "constant"}}},
        ("algorithm.policy_loss.length", "found None", "write the longest response"),
    ),
    "a priority in a run that is to be repeatable": (
        {"algorithm": "grpo", "deterministic": True, "buffer": {"priority": "novelty"}},
        ("buffer.priority", "depends on the clock", "leave it out"),
    ),
    "a capacity in a run that is to be repeatable": (
        {"algorithm": "grpo", "deterministic": True, "buffer": {"capacity": 100}},
        ("buffer.capacity", "depends on the clock", "leave it out"),
    ),
    "a priority beside a sampling with an order of its own": (
        {"algorithm": {"use": "grpo", "sampling": "freshest"}, "buffer": {"priority": "novelty"}},
        ("buffer.priority", "freshest asks for an order of its own", "write `algorithm.sampling: priority`"),
    ),
    "a capacity below a step": (
        {"algorithm": "grpo", "buffer": {"capacity": 1}},
        ("buffer.capacity", "it would wait for ever", "write `buffer.capacity: "),
    ),
    "a controller of nothing": (
        {"algorithm": {"use": "grpo", "kl": {"use": "k2", "coefficient": 0, "target": 0.1}}},
        ("algorithm.kl.coefficient", "found 0", "write a first one, e.g. `coefficient: 0.001`"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("sections", "says"), WRONG.values(), ids=WRONG)
def test_a_wrong_combination_is_refused_with_its_key_and_what_to_write(sections, says):
    with pytest.raises(ConfigError) as caught:
        load_config({**BASE, **sections})
    where, why, instead = says
    message = str(caught.value)
    assert f"{where}: " in message
    assert why in message
    assert instead in message
