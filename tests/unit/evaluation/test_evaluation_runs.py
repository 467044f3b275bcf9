"""Which versions are measured, on what, and what is written down."""

from __future__ import annotations

import asyncio
import json

import pytest

from triune.errors import ConfigError, EngineError
from triune.evaluation import EvalSettings, Evaluation, bench, bench_endpoint
from triune.ports import GroupOutcome, Reward, Sampling, WeightUpdate
from triune.records import Stop
from triune.tasks import TaskBricks, open_tasksets
from triune.testing.rollouts import ScriptedRollouts

TRAINING = Sampling(temperature=1.0, top_p=0.9, max_tokens=64, stop=("\n",))


class Log:
    def __init__(self):
        self.rows = []

    def log(self, metrics, *, role, step):
        self.rows.append((role, step, dict(metrics)))


def version(number: int, step: int | None = None) -> WeightUpdate:
    return WeightUpdate(version=number, step=number if step is None else step, digest=f"d{number}", dtype="float32")


def make(rollouts, *, tasks=None, **settings) -> Evaluation:
    more = {key: settings.pop(key) for key in ("monitor", "folder", "start_step", "serve") if key in settings}
    raw = {"every": 1, "tasks": tasks or {"use": "arithmetic", "size": 5}, **settings}
    chosen = EvalSettings.model_validate(raw)
    opened = open_tasksets(chosen.tasks, seed=0, default="eval", where="eval.tasks")
    return Evaluation(chosen, opened, rollouts, run="run", sampling=TRAINING, **more)


def measure(evaluation: Evaluation, update: WeightUpdate):
    return asyncio.run(evaluation.evaluate(update))


def table(*rows):
    """Reward of task i, member j, from a table."""
    return lambda task, member: rows[int(task.key)][member]


# ------------------------------------------------------------------------------------------------------- what


def test_metrics_are_means_over_tasks_worked_out_by_hand():
    rollouts = ScriptedRollouts(table([1, 0, 0, 0], [1, 1, 0, 1], [0, 0, 0, 0]), num_tokens=5)
    found = measure(make(rollouts, tasks={"use": "arithmetic", "size": 3}, samples=4), version(0))
    assert found["eval/eval/mean@4"] == pytest.approx((1 / 4 + 3 / 4 + 0) / 3)
    assert found["eval/eval/pass@1"] == pytest.approx(1 / 3)
    assert found["eval/eval/pass@2"] == pytest.approx((1 / 2 + 1 + 0) / 3)  # draws of 2 without the one right: 3 of 6
    assert found["eval/eval/pass@4"] == found["eval/eval/best@4"] == pytest.approx(2 / 3)
    assert found["eval/reward"] == found["eval/eval/mean@4"]
    assert (found["eval/eval/num_tasks"], found["eval/eval/response_length"]) == (3, 5)
    assert found["eval/eval/mean@4/low"] < found["eval/eval/mean@4"] < found["eval/eval/mean@4/high"]


def test_case_51_every_task_is_measured_once_and_two_runs_agree():
    def run():
        rollouts = ScriptedRollouts(lambda task, member: float(hash((task.key, member)) % 7))
        found = measure(make(rollouts, tasks={"use": "arithmetic", "size": 300}, samples=2, max_rollouts=9), version(0))
        return found, rollouts

    (first, rollouts), (second, _) = run(), run()
    assert first == second
    assert [str(group) for group, *_ in rollouts.asked] == [f"run/eval/{i}/0" for i in range(300)]
    assert all((num, training) == (2, False) for _, num, _, training in rollouts.asked)
    assert rollouts.most_at_once == 4


def test_case_51_equal_rows_are_measured_each_once_under_groups_of_their_own(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "1+1", "answer": "2"}\n' * 3 + '{"question": "1+2", "answer": "3"}\n')
    rollouts = ScriptedRollouts(lambda task, member: 1.0)
    evaluation = make(rollouts, tasks={"use": "jsonl", "path": str(path)})
    for number in (0, 1):
        rollouts.version = number
        assert measure(evaluation, version(number))["eval/eval/num_tasks"] == 4
    groups = [group for group, *_ in rollouts.asked]
    assert len(set(groups[:4])) == 4
    assert groups[:4] == groups[4:]


def test_case_51_ids_do_not_depend_on_the_version_so_versions_share_their_random_numbers():
    rollouts = ScriptedRollouts(lambda task, member: 1.0)
    evaluation = make(rollouts)
    for number in (0, 1):
        rollouts.version = number
        measure(evaluation, version(number))
    asked = [group for group, *_ in rollouts.asked]
    assert asked[:5] == asked[5:]


def test_case_34_invalid_rollouts_are_counted_and_leave_every_mean():
    rollouts = ScriptedRollouts(table([1, None], [None, None], [0, 1]))
    found = measure(make(rollouts, tasks={"use": "arithmetic", "size": 3}, samples=2), version(0))
    assert found["eval/eval/mean@2"] == pytest.approx((1 + 0.5) / 2)
    assert found["eval/eval/pass@2"] == 1.0  # only the last task has two valid samples
    assert found["eval/eval/invalid_ratio"] == pytest.approx(3 / 6)


def test_case_44_a_group_that_came_back_empty_or_short_counts_as_invalid():
    class Failing(ScriptedRollouts):
        async def run(self, group, task, *, num, sampling=None, training=True):
            if task.key == "0":
                return GroupOutcome(group=None)
            return await super().run(group, task, num=num - 1, sampling=sampling, training=training)

    found = measure(make(Failing(lambda task, member: 1.0), samples=2), version(0))
    assert found["eval/eval/invalid_ratio"] == pytest.approx((2 + 4) / 10)
    assert found["eval/eval/mean@2"] == 1.0
    assert "eval/eval/pass@2" not in found
    nothing = measure(make(ScriptedRollouts(lambda task, member: None)), version(0))
    assert nothing == {"eval/eval/num_tasks": 5, "eval/eval/invalid_ratio": 1.0}


def test_case_36_a_shaped_reward_does_not_hide_correctness():
    rollouts = ScriptedRollouts(lambda task, member: Reward(total=0.9, parts={"correct": 0.0, "form": 1.0}))
    assert measure(make(rollouts), version(0))["eval/eval/part/correct"] == 0.0
    assert measure(make(rollouts, part="correct"), version(0))["eval/eval/mean@1"] == 0.0
    with pytest.raises(ConfigError, match=r"eval\.part: .*no part 'corect'; expected one of correct, form"):
        measure(make(rollouts, part="corect"), version(0))


def test_case_26_a_group_of_another_task_is_refused():
    class Swapping(ScriptedRollouts):
        async def run(self, group, task, *, num, sampling=None, training=True):
            other = type(group)(group.run, group.taskset, "99", group.visit)
            return await super().run(other, task, num=num, sampling=sampling, training=training)

    with pytest.raises(EngineError, match="got the group run/eval/99/0; expected run/eval/"):
        measure(make(Swapping(lambda task, member: 1.0)), version(0))


def test_tokens_of_other_weights_than_those_measured_are_refused():
    with pytest.raises(EngineError, match=r"evaluation of version 4: .*sampled by versions \[3\]"):
        measure(make(ScriptedRollouts(lambda task, member: 1.0, version=3)), version(4))


def test_truncated_answers_are_counted():
    found = measure(make(ScriptedRollouts(lambda task, member: 0.0, stop=Stop.LENGTH)), version(0))
    assert found["eval/eval/truncated_ratio"] == 1.0


def test_sampling_is_that_of_training_but_for_what_is_set():
    rollouts = ScriptedRollouts(lambda task, member: 1.0)
    measure(make(rollouts, temperature=0.0, max_tokens=8), version(0))
    assert rollouts.asked[0][2] == Sampling(temperature=0.0, top_p=0.9, max_tokens=8, stop=("\n",))


def test_several_sets_are_reported_each_and_together_by_weight():
    tasks = [
        {"use": "arithmetic", "size": 2, "name": "easy", "weight": 3},
        {"use": "arithmetic", "size": 4, "name": "hard"},
    ]
    rollouts = ScriptedRollouts(lambda task, member: float(task.taskset == "easy"))
    found = measure(make(rollouts, tasks=tasks), version(0))
    assert (found["eval/easy/mean@1"], found["eval/hard/mean@1"], found["eval/reward"]) == (1.0, 0.0, 0.75)


def test_every_row_names_its_version(tmp_path):
    log, rollouts = Log(), ScriptedRollouts(table([1, 0], [1, 1]))
    evaluation = make(rollouts, tasks={"use": "arithmetic", "size": 2}, samples=2, folder=tmp_path, monitor=log)
    for number in (0, 1):
        rollouts.version = number
        measure(evaluation, version(number, step=10 * number))
    rows = [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    assert [(row["kind"], row["version"], row["step"], row["digest"]) for row in rows] == [
        (kind, number, 10 * number, f"d{number}") for number in (0, 1) for kind in ("task", "task", "set")
    ]
    assert rows[0]["key"] == "0"
    assert rows[0]["rewards"] == [1, 0]
    assert rows[2]["mean@2"] == 0.75
    assert [(role, step) for role, step, _ in log.rows] == [("eval", 0), ("eval", 10)]
    assert log.rows[0][2]["eval/reward"] == 0.75


# ------------------------------------------------------------------------------------------------------- when


def due_steps(evaluation, steps):
    found = []
    for step in steps:
        if evaluation.is_due(step):
            found.append(step)
            measure(evaluation, version(0, step=step))
    return found


def fresh(**settings):
    return make(ScriptedRollouts(lambda task, member: 1.0), tasks={"use": "arithmetic", "size": 1}, **settings)


def test_versions_are_due_at_the_start_and_every_so_many_steps():
    assert due_steps(fresh(every=5), range(12)) == [0, 5, 10]
    assert due_steps(fresh(every=5, at_start=False), range(12)) == [5, 10]
    assert due_steps(fresh(every=0), range(12)) == []


def test_a_version_that_was_skipped_makes_the_next_one_due():
    assert due_steps(fresh(every=5), [0, 3, 7, 9, 11, 14, 26]) == [0, 7, 11, 26]


def test_after_a_resume_only_what_is_not_in_the_file_is_due(tmp_path):
    assert due_steps(fresh(every=5, folder=tmp_path), [0, 5]) == [0, 5]
    with (tmp_path / "eval.jsonl").open("a") as file:
        file.write('{"kind": "set", "step": 10, "ver')  # cut short by a crash
    assert not fresh(every=5, folder=tmp_path, start_step=5).is_due(5)
    assert fresh(every=5, folder=tmp_path, start_step=10).is_due(10)
    assert not fresh(every=5, folder=tmp_path, start_step=8).is_due(9)
    assert not fresh(every=5, folder=tmp_path).is_due(0)


def test_a_row_cut_short_by_a_crash_does_not_swallow_the_next_one(tmp_path):
    (tmp_path / "eval.jsonl").write_text('{"kind": "set", "step": 10, "ver')
    evaluation = make(ScriptedRollouts(lambda task, member: 1.0, version=0), folder=tmp_path)
    asyncio.run(evaluation.evaluate(version(0)))
    rows = [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows} == {0}


def test_with_copy_training_goes_on_while_the_second_engine_measures():
    async def run():
        served, rollouts = [], ScriptedRollouts(lambda task, member: 1.0, latency_s=0.02)

        async def serve(update):
            rollouts.version = update.version
            served.append(update.version)

        log = Log()
        evaluation = make(rollouts, during="copy", serve=serve, monitor=log)
        assert await evaluation.evaluate(version(0)) == {}
        assert log.rows == []
        assert evaluation.is_due(1)
        await evaluation.evaluate(version(1))  # waits for the first: its weights are still in use
        assert [step for _, step, _ in log.rows] == [0]
        await evaluation.finish()
        return served, [step for _, step, _ in log.rows]

    assert asyncio.run(run()) == ([0, 1], [0, 1])


def test_with_copy_a_failure_is_raised_at_the_next_evaluation_or_at_the_end():
    async def run():
        async def serve(update):
            pass

        evaluation = make(ScriptedRollouts(lambda task, member: 1.0, version=7), during="copy", serve=serve)
        await evaluation.evaluate(version(0))
        await evaluation.finish()

    with pytest.raises(EngineError, match="evaluation of version 0"):
        asyncio.run(run())


def test_with_checkpoint_nothing_is_due_during_the_run_and_the_right_checkpoints_afterwards():
    evaluation = fresh(every=10, during="checkpoint")
    assert not any(evaluation.is_due(step) for step in range(30))
    assert evaluation.due_checkpoints([0, 4, 8, 12, 16, 20, 24, 40]) == [0, 12, 20, 40]


# ------------------------------------------------------------------------------------------------------ config


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"every": 5}, "there are no `tasks`"),
        ({"tasks": {"use": "arithmetic"}, "samples": 4, "temperature": 0}, "gives the same answer every time"),
        ({"tasks": {"use": "arithmetic", "epochs": 2}}, r"`tasks\.epochs` has no meaning here"),
        ({"tasks": {"use": "arithmetic", "order": "shuffled"}}, r"`tasks\.order` has no meaning here"),
        ({"during": "sometimes"}, "hold"),
        ({"evry": 5}, "Extra inputs"),
    ],
)
def test_case_52_settings_that_would_do_nothing_are_refused(raw, message):
    with pytest.raises(ValueError, match=message):
        EvalSettings.model_validate(raw)


def test_case_45_an_endless_set_needs_a_limit():
    with pytest.raises(ConfigError, match=r"eval\.limit: the task set 'eval' is endless"):
        make(ScriptedRollouts(lambda task, member: 1.0), tasks={"use": "arithmetic"})
    rollouts = ScriptedRollouts(lambda task, member: 1.0)
    assert measure(make(rollouts, tasks={"use": "arithmetic"}, limit=7), version(0))["eval/eval/num_tasks"] == 7


# ------------------------------------------------------------------------------------------------------- bench


def test_bench_measures_every_version_in_turn():
    rollouts = ScriptedRollouts(lambda task, member: float(rollouts.version))

    async def serve(update):
        rollouts.version = update.version

    rows = asyncio.run(bench(make(rollouts), [version(0), version(1, step=20)], serve))
    assert [(row["version"], row["step"], row["taskset"], row["mean@1"]) for row in rows] == [
        (0, 0, "eval", 0),
        (1, 20, "eval", 1),
    ]


def test_bench_of_an_endpoint_scores_its_answers_with_the_tasks_reward(caplog):
    class Endpoint:
        async def answer(self, task, sampling):
            assert sampling.temperature == 0.5
            if task.key == "3":
                raise EngineError("endpoint", "refused")
            return task.data["answer"] if int(task.key) % 2 == 0 else "0"

    raw = {"tasks": {"use": "arithmetic", "size": 5}, "samples": 2, "temperature": 0.5}
    settings = EvalSettings.model_validate(raw)
    opened = open_tasksets(settings.tasks, seed=0, default="eval")

    def run(**kwargs):
        bricks = TaskBricks(opened, **kwargs)
        return asyncio.run(bench_endpoint(settings, opened, Endpoint(), bricks=bricks, sampling=TRAINING, model="m"))

    (row,) = run()
    assert (row["model"], row["taskset"], row["num_tasks"]) == ("m", "eval", 5)
    assert row["mean@2"] == pytest.approx(3 / 4)
    assert row["invalid_ratio"] == pytest.approx(2 / 10)
    assert "response_length" not in row
    assert "2 of 10 questions got no answer; the first: endpoint: refused" in caplog.text
    (ranked,) = run(reward=lambda task, answers: [float(i) for i, _ in enumerate(answers)])
    assert ranked["mean@2"] == 0.5
    (broken,) = run(reward=lambda task, answer: None)
    assert broken["invalid_ratio"] == 1.0


def test_bench_of_an_endpoint_that_never_answers_fails_with_its_reason():
    class Endpoint:
        async def answer(self, task, sampling):
            raise EngineError("endpoint", "401 wrong key")

    settings = EvalSettings.model_validate({"tasks": {"use": "arithmetic", "size": 3}})
    opened = open_tasksets(settings.tasks, seed=0, default="eval")
    bricks = TaskBricks(opened)
    with pytest.raises(EngineError, match="401 wrong key"):
        asyncio.run(bench_endpoint(settings, opened, Endpoint(), bricks=bricks, sampling=TRAINING, model="m"))
