"""Run files: reading, overriding, validating, resolving."""

import json
import re

import pytest

from triune.config import check_same_run, config_hash, consumption, load_config, save_resolved
from triune.errors import CheckpointError, ConfigError

BASE = {
    "tasks": {"use": "arithmetic", "workflow": "single_turn"},
    "trainer": {"steps": 3, "tasks_per_step": 4},
}


def problem(*overrides, base=BASE):
    with pytest.raises(ConfigError) as caught:
        load_config(base, overrides)
    return str(caught.value)


# ---- the good


def test_a_run_file_of_two_sections_is_enough_and_the_file_names_the_run(tmp_path):
    file = tmp_path / "first.yaml"
    file.write_text("tasks: {use: arithmetic}\ntrainer: {steps: 3, tasks_per_step: 4}\n")
    config = load_config(file)
    assert (config.name, config.trainer.steps, config.algorithm.group_size) == ("first", 3, 8)


def test_overrides_are_typed_and_reach_into_lists_and_bricks():
    base = {**BASE, "tasks": [{"use": "arithmetic", "name": "a"}, {"use": "arithmetic", "name": "b"}]}
    config = load_config(
        base, ["tasks[1].digits=1", "tasks.0.weight=3", "trainer.learning_rate=1e-5", "deterministic=true", "name=x"]
    )
    first, second = config.tasks.sets
    assert (first.weight, second.digits, config.trainer.learning_rate) == (3.0, 1, 1e-5)
    assert (config.deterministic, config.name) == (True, "x")


def test_case_57_setting_one_argument_of_a_brick_keeps_the_defaults_of_the_others():
    config = load_config(BASE, ["algorithm.policy_loss.clip_high=0.28", "algorithm.advantage.std=population"])
    loss, advantage = config.algorithm.policy_loss, config.algorithm.advantage
    assert (loss.clip_high, loss.clip_low, loss.average) == (0.28, 0.2, "token")
    assert (advantage.std, advantage.scale) == ("population", "group")
    assert type(loss).__name__ == "PPOClip"


def test_case_57_a_brick_named_by_a_string_can_be_overridden_field_by_field():
    config = load_config({**BASE, "algorithm": "dr_grpo"}, ["algorithm.group_size=4"])
    assert (type(config.algorithm).__name__, config.algorithm.group_size) == ("DrGRPO", 4)


def test_interpolation_reads_other_keys_after_overrides():
    config = load_config({**BASE, "name": "seed-${seed}"}, ["seed=7"])
    assert config.name == "seed-7"


def test_case_58_every_value_has_its_origin_and_none_is_changed_behind_the_users_back(tmp_path):
    file = tmp_path / "first.yaml"
    file.write_text("tasks: {use: arithmetic, digits: 1}\ntrainer: {steps: 3, tasks_per_step: 4}\n")
    config = load_config(file, ["seed=5", "algorithm.policy_loss.clip_high=0.3"])
    origins = config.origins
    assert origins["tasks.sets.0.digits"] == "file"
    assert origins["tasks.sets.0.operands"] == "default"
    assert origins["seed"] == "override"
    assert origins["algorithm.policy_loss.clip_high"] == "override"
    assert origins["algorithm.policy_loss.clip_low"] == "default"
    assert origins["name"] == "derived"
    assert origins["explorer.min_group"] == "derived"
    written = {path: value for path, value in _leaves(config.to_plain()) if origins[path] in ("file", "override")}
    assert written == {
        "tasks.sets.0.use": "arithmetic",
        "tasks.sets.0.digits": 1,
        "trainer.steps": 3,
        "trainer.tasks_per_step": 4,
        "seed": 5,
        "algorithm.policy_loss.clip_high": 0.3,
    }


def _leaves(plain):
    from triune.config.plain import leaves

    return leaves(plain)


def test_a_resolved_run_loads_again_as_the_same_configuration(tmp_path):
    base = {**BASE, "eval": {"every": 2, "tasks": {"use": "arithmetic", "size": 4}}}
    config = load_config(base, ["algorithm.policy_loss.clip_high=0.3", "monitor.alarms=[{use: logprob_gap, limit: 1}]"])
    save_resolved(config, tmp_path / "run")
    again = load_config(tmp_path / "run")
    assert again.to_plain() == config.to_plain()
    assert again.origins == config.origins
    smaller = load_config(tmp_path / "run", ["algorithm.group_size=4"])
    assert smaller.explorer.min_group == 4, "derived again"
    assert config_hash(again) == config_hash(config)
    saved = json.loads((tmp_path / "run" / "run.resolved.json").read_text())
    assert saved["origins"].keys() == dict(_leaves(saved["config"])).keys()


def test_a_configuration_is_frozen():
    config = load_config(BASE)
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 3


# ---- the bad: each message names key, what was found, what to write


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.stepz=3", r"trainer\.stepz: trainer has no key 'stepz' \(value 3\); did you mean 'steps'\?"),
        ("steps=3", r"steps: a run file has no key 'steps' .*did you mean `trainer\.steps`\?"),
        ("trainer.lr=3", r"trainer\.lr: .*in Triune this is `trainer\.learning_rate`"),
        ("algorithm.num_generations=3", r"algorithm\.num_generations: .*`algorithm\.group_size`"),
        ("algorithm.policy_loss.clip_hi=3", r"algorithm\.policy_loss\.clip_hi: PPOClip has no such .*'clip_high'\?"),
        ("algorithm.policy_loss.clip_high=-1", r"algorithm\.policy_loss\.clip_high: found -1; expected greater than 0"),
        ("algorithm.use=grop", r"algorithm: no algorithm is called 'grop'; .*did you mean 'grpo'\?"),
        ("tasks.operands=x", r"tasks\.sets\.0\.operands: found 'x'; expected a valid integer"),
        ("tasks.epocs=1", r"tasks\.sets\.0\.epocs: .*did you mean `tasks\.epochs`\?"),
        ("trainer.steps=many", r"trainer\.steps: found 'many'; expected a valid integer"),
        ("sync.style=drian", r"sync\.style: found 'drian'; expected 'drain' or 'inflight'; did you mean 'drain'\?"),
        ("monitor.sinks=[consol]", r"monitor\.sinks\.0: no sink is called 'consol'.*did you mean 'console'\?"),
        ("name=${nme}", r"name: Interpolation key 'nme' not found"),
        ("tasks=null", r"tasks: found None; .*tasks: \{use: arithmetic\}"),
        ("tasks.0.x.y=[", r"override tasks\.0\.x\.y: found '\['; expected a YAML value"),
        ("tasks.0.x.y=${", r"override tasks\.0\.x\.y: found '\$\{'; expected a YAML value"),
        ("name=${seed", r"override name: found '\$\{seed'; expected a YAML value"),
        ("seed", r"override 'seed': no key=value"),
        ("seed.x=1", r"override seed\.x: seed is 3; expected a section"),
        ("models.judge.url=x", r"models\.judge\.model: missing; expected name of the model there; write `model: …`"),
    ],
)
def test_a_mistake_is_answered_with_its_key_and_what_to_write(override, message):
    assert re.search(message, problem(override, base={**BASE, "seed": 3}))


@pytest.mark.parametrize(
    ("word", "ours"),
    [
        ("num_generations", "algorithm.group_size"),
        ("rollout.n", "algorithm.group_size"),
        ("n_samples_per_prompt", "algorithm.group_size"),
        ("repeat_times", "algorithm.group_size"),
        ("max_new_tokens", "explorer.max_tokens"),
        ("lr", "trainer.learning_rate"),
        ("batch_size", "trainer.tasks_per_step"),
        ("kl_coef", "algorithm.kl"),
    ],
)
def test_words_of_other_frameworks_are_answered_with_ours(word, ours):
    assert f"in Triune this is `{ours}`" in problem(f"trainer.{word.partition('.')[2] or word}=1")


def test_case_52_an_option_that_would_do_nothing_is_an_error():
    assert "has no key" in problem("trainer.colour=blue")
    assert "has no such field" in problem("algorithm.colour=blue")


def test_case_52_operators_and_staleness_are_refused_where_nothing_is_sampled():
    imitates = {"tasks": {"use": "arithmetic"}, "algorithm": "sft"}
    assert load_config(imitates).algorithm.group_size == 1
    assert "pipeline: found 1 operators, and sft reads answers" in problem("pipeline=[drop_invalid]", base=imitates)
    assert problem("sync.max_staleness=1", base=imitates).startswith("sync.max_staleness: found 1")


def test_case_52_checkpoints_that_are_measured_at_the_end_must_still_be_there():
    late = {**BASE, "eval": {"every": 10, "during": "checkpoint", "tasks": {"use": "arithmetic", "size": 4}}}
    late["trainer"] = {"steps": 100, "save_every": 10}
    assert "trainer.keep_checkpoints: found 3 with `eval.during: checkpoint`" in problem(base=late)
    for trainer in ({"keep_checkpoints": None}, {"keep_checkpoints": 10}, {"save_every": 50}):
        load_config({**late, "trainer": {**late["trainer"], **trainer}})


def test_all_problems_are_told_at_once():
    text = problem("seed=-1", "trainer.stepz=3", "algorithm.policy_loss.clip_hi=1")
    assert "3 problems" in text
    assert all(key in text for key in ("seed: found -1", "trainer.stepz", "algorithm.policy_loss.clip_hi"))


def test_a_missing_file_is_answered_with_the_nearest_name(tmp_path):
    (tmp_path / "quickstart.yaml").write_text("x: 1")
    with pytest.raises(ConfigError, match=r"quikstart.yaml: no such file; .*did you mean '.*quickstart.yaml'"):
        load_config(tmp_path / "quikstart.yaml")


def test_malformed_yaml_is_answered_with_its_line(tmp_path):
    (tmp_path / "bad.yaml").write_text("seed: 1\ntasks: [\nname: x: y\n")
    with pytest.raises(ConfigError, match=r"bad.yaml:[23]: "):
        load_config(tmp_path / "bad.yaml")


def test_a_duplicate_key_is_refused(tmp_path):
    (tmp_path / "twice.yaml").write_text("seed: 1\nseed: 2\n")
    with pytest.raises(ConfigError, match="duplicate key seed"):
        load_config(tmp_path / "twice.yaml")


# ---- settings of two rooms that must fit


def test_case_07_temperature_0_for_training_is_refused_when_the_config_is_read():
    text = problem("explorer.temperature=0")
    assert "explorer.temperature: found 0" in text
    assert "write `temperature: 1.0`" in text


@pytest.mark.parametrize("override", ["explorer.top_p=0.9", "explorer.top_k=20", "explorer.min_p=0.05"])
def test_case_02_truncated_sampling_without_recorded_truncation_is_refused(override):
    assert "explorer.record_truncation: true" in problem(override)
    assert load_config(BASE, [override, "explorer.record_truncation=true"]).explorer.record_truncation


def test_case_24_a_group_of_one_is_refused_for_group_methods_when_the_config_is_read():
    assert "algorithm.group_size: found 1" in problem("algorithm.group_size=1")
    assert "min_group" in problem("explorer.min_group=1")
    assert load_config(BASE, ["algorithm.use=reinforce", "algorithm.group_size=1"]).algorithm.group_size == 1


def test_case_61_the_batch_has_exactly_one_unit_and_it_is_the_algorithms():
    assert problem("trainer.sequences_per_step=4") == "trainer: give tasks_per_step or sequences_per_step, not both"
    text = problem("trainer.tasks_per_step=null", "trainer.sequences_per_step=32")
    assert "trainer.sequences_per_step: grpo does not consume that unit" in text
    assert "write `trainer.tasks_per_step: 32`" in text
    config = load_config({"tasks": "arithmetic"})
    assert (config.trainer.tasks_per_step, config.origins["trainer.tasks_per_step"]) == (16, "derived")


def test_case_61_what_a_step_consumes_is_worked_out_in_every_unit():
    config = load_config(
        BASE,
        [
            "algorithm.group_size=6",
            "trainer.mini_batches=2",
            "trainer.epochs=3",
            "sync.every=2",
            "sync.max_staleness=1",
        ],
    )
    step = consumption(config)
    assert (step.groups, step.sequences, step.updates, step.sequences_per_update) == (4, 24, 6, 12.0)
    assert (step.versions_per_step, step.ahead_groups, step.total_rollouts) == (0.5, 16, 72)
    assert "groups per step        4" in step.lines()[0]


def test_a_deterministic_run_is_synchronous_drains_and_saves_with_its_versions():
    text = problem("deterministic=true", "sync.max_staleness=1", "sync.style=inflight", "sync.every=3")
    assert "sync.max_staleness: found 1" in text
    assert "sync.style: found 'inflight'" in text
    assert "write `trainer.save_every: 51`" in text


def test_groups_smaller_than_possible_and_larger_than_the_group_are_refused():
    assert "explorer.min_group: found 9" in problem("explorer.min_group=9")
    assert "explorer.max_rollouts: found 4" in problem("explorer.max_rollouts=4")
    assert "a group has 9" in problem("explorer.max_rollouts=8", "algorithm={use: remax, group_size: 8}")


def test_a_missing_key_of_an_endpoint_is_asked_for_before_the_run_starts(monkeypatch):
    monkeypatch.delenv("SOME_KEY", raising=False)
    overrides = ["models.judge={url: 'http://x/v1', model: m, api_key_env: SOME_KEY}"]
    assert "environment variable SOME_KEY is not set" in problem(*overrides)


def test_more_threads_than_cores_are_refused(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    assert "OMP_NUM_THREADS: found 4096" in problem()


# ---- resuming


def test_a_resume_may_change_how_long_and_where_but_not_what_is_computed(tmp_path):
    config = load_config(BASE)
    save_resolved(config, tmp_path)
    check_same_run(load_config(BASE, ["trainer.steps=9", "monitor.heartbeat_s=3"]), tmp_path)
    with pytest.raises(CheckpointError, match=r"(?s)algorithm\.group_size: was 8, now 4.*--allow-changes") as caught:
        check_same_run(load_config(BASE, ["algorithm.group_size=4", "explorer.min_group=4"]), tmp_path)
    assert "heartbeat" not in str(caught.value)


def test_the_hash_ignores_what_a_resume_may_change():
    base = config_hash(load_config(BASE))
    assert config_hash(load_config(BASE, ["trainer.steps=9", "runs_dir=elsewhere"])) == base
    assert config_hash(load_config(BASE, ["buffer.segments={min_bytes: 5}"])) == base
    assert config_hash(load_config(BASE, ["seed=9"])) != base


def test_what_a_step_consumes_counts_an_experts_answer_once_and_a_greedy_member_among_the_rollouts():
    mixed = consumption(load_config({**BASE, "algorithm": "mix", "expert": {"use": "arithmetic", "name": "answers"}}))
    assert (mixed.groups, mixed.rollouts, mixed.sequences) == (4, 8, 3 * 8 + 1)
    assert mixed.total_rollouts == 3 * 3 * 8
    greedy = consumption(load_config({**BASE, "algorithm": {"use": "remax", "group_size": 8}}))
    assert (greedy.sequences, greedy.rollouts) == (4 * 8, 9)
    assert greedy.total_rollouts == 3 * 4 * 9
