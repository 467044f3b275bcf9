"""Order, mixing and resuming of task sets."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice

import pytest

from triune.errors import ConfigError, TaskError
from triune.tasks import MixedTasks, TasksSettings, build_stream, open_tasksets


def make_stream(raw, seed=0) -> MixedTasks:
    settings = TasksSettings.model_validate(raw)
    return build_stream(settings, open_tasksets(settings, seed=seed), seed=seed)


def draw(stream: MixedTasks, num: int | None = None) -> list[str]:
    drawn = iter(stream.next, None)
    return [f"{task.taskset}/{task.key}" for task, _ in islice(drawn, num)]


def write_rows(path, num, **fields):
    path.write_text(
        "".join(json.dumps({"id": f"r{i}", "question": f"q{i}", "answer": i, **fields}) + "\n" for i in range(num))
    )
    return str(path)


def test_sequential_order_is_that_of_the_file(tmp_path):
    stream = make_stream(
        {"use": "jsonl", "path": write_rows(tmp_path / "a.jsonl", 4), "order": "sequential", "epochs": 2}
    )
    assert draw(stream) == [f"train/r{i}" for i in (0, 1, 2, 3, 0, 1, 2, 3)]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 65, 1000, 3000])
def test_shuffled_epochs_hold_every_row_once_and_differ(tmp_path, size):
    stream = make_stream({"use": "jsonl", "path": write_rows(tmp_path / "a.jsonl", size), "epochs": 3})
    drawn = draw(stream)
    epochs = [drawn[i * size : (i + 1) * size] for i in range(3)]
    assert len(drawn) == 3 * size
    assert all(sorted(epoch) == sorted(f"train/r{i}" for i in range(size)) for epoch in epochs)
    if size > 5:
        assert epochs[0] != epochs[1] != epochs[2]


def test_shuffling_reaches_every_permutation_of_three_rows_about_equally_often(tmp_path):
    stream = make_stream({"use": "jsonl", "path": write_rows(tmp_path / "a.jsonl", 3), "epochs": 1200})
    drawn = draw(stream)
    seen = Counter(tuple(drawn[i : i + 3]) for i in range(0, len(drawn), 3))
    assert len(seen) == 6
    assert all(140 < count < 260 for count in seen.values()), seen


def test_another_seed_shuffles_otherwise(tmp_path):
    raw = {"use": "jsonl", "path": write_rows(tmp_path / "a.jsonl", 50), "epochs": 1}
    assert draw(make_stream(raw)) == draw(make_stream(raw))
    assert draw(make_stream(raw)) != draw(make_stream(raw, seed=1))


def test_case_39_resume_goes_on_in_the_same_order_from_every_position(tmp_path):
    raw = [
        {"use": "jsonl", "path": write_rows(tmp_path / "a.jsonl", 7), "name": "a", "weight": 2},
        {"use": "arithmetic", "name": "b"},
    ]
    whole, cursors = make_stream(raw), [None]
    expected = []
    for _ in range(60):
        task, cursor = whole.next()
        expected.append(f"{task.taskset}/{task.key}")
        cursors.append(json.loads(json.dumps(cursor)))
    for position, cursor in enumerate(cursors):
        resumed = make_stream(raw)
        draw(resumed, 5)  # whatever was prepared before must not leak into what follows
        resumed.seek(cursor)
        assert draw(resumed, 60 - position) == expected[position:]


def test_case_39_a_cursor_of_other_task_sets_is_refused(tmp_path):
    stream = make_stream({"use": "arithmetic", "name": "a"})
    with pytest.raises(TaskError, match=r"'b': 3.*the task sets a.*new run"):
        stream.seek({"b": 3})


def test_sets_are_mixed_by_weight_at_every_point():
    raw = [{"use": "arithmetic", "name": name, "weight": weight} for name, weight in (("a", 5), ("b", 3), ("c", 0.5))]
    counts = Counter()
    stream = make_stream(raw)
    for drawn in range(1, 500):
        task, cursor = stream.next()
        counts[task.taskset] += 1
        assert cursor == {name: counts[name] for name in "abc"}
        for name, weight in (("a", 5), ("b", 3), ("c", 0.5)):
            assert abs(counts[name] - drawn * weight / 8.5) <= 1.01


def test_case_45_the_end_comes_when_every_set_is_over(tmp_path):
    raw = {
        "sets": [
            {"use": "jsonl", "path": write_rows(tmp_path / "a.jsonl", 3), "name": "short", "weight": 10},
            {"use": "arithmetic", "size": 5, "name": "long"},
        ],
        "epochs": 2,
    }
    stream = make_stream(raw)
    assert Counter(name.partition("/")[0] for name in draw(stream)) == {"short": 6, "long": 10}
    assert stream.next() is None
    assert stream.next() is None


def test_case_40_the_data_hash_changes_with_a_row_the_mapping_and_the_limit(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", 10)
    raw = {"use": "jsonl", "path": path}
    first = make_stream(raw).data_hash
    assert make_stream(raw).data_hash == first
    assert make_stream({**raw, "fields": {"question": "answer"}}).data_hash != first
    assert make_stream({**raw, "limit": 9}).data_hash != first
    assert make_stream({"use": "jsonl", "path": write_rows(tmp_path / "moved.jsonl", 10)}).data_hash == first
    write_rows(tmp_path / "a.jsonl", 10, note="edited")
    assert make_stream(raw).data_hash != first


def test_a_task_is_found_by_its_identity(tmp_path):
    raw = [
        {"use": "jsonl", "path": write_rows(tmp_path / "a.jsonl", 100), "name": "a"},
        {"use": "arithmetic", "name": "b"},
    ]
    stream = make_stream(raw)
    for _ in range(30):
        task, _ = stream.next()
        assert stream.find(task.taskset, task.key) == task
    assert stream.find("a", "r100") is None
    assert stream.find("b", "no number") is None
    assert stream.find("c", "r1") is None


def test_rows_without_id_are_found_by_their_content(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"question": "a"}\n\n{"question": "b"}\n{"question": "a"}\n')
    stream = make_stream({"use": "jsonl", "path": str(path), "order": "sequential", "epochs": 1})
    keys = [task.key for task, _ in iter(stream.next, None)]
    assert keys[0] == keys[2] != keys[1]
    assert stream.find("train", keys[1]).data == {"question": "b"}


def test_drawing_a_task_costs_microseconds(tmp_path):
    import time

    stream = make_stream({"use": "arithmetic"})
    draw(stream, 1)
    best = 1.0
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(2000):
            stream.next()
        best = min(best, (time.perf_counter() - start) / 2000)
    assert best < 30e-6  # about 4 on an idle machine; the bound only catches a change of kind


def test_one_mapping_a_list_and_the_long_form_mean_the_same():
    short = TasksSettings.model_validate({"use": "arithmetic", "size": 3, "epochs": 2, "order": "sequential"})
    listed = TasksSettings.model_validate([{"use": "arithmetic", "size": 3}])
    long = TasksSettings.model_validate(
        {"sets": [{"use": "arithmetic", "size": 3}], "epochs": 2, "order": "sequential"}
    )
    assert short == long
    assert listed.sets == long.sets
    assert (listed.epochs, long.epochs) == (None, 2)


def test_names_are_given_numbered_and_must_differ():
    settings = TasksSettings.model_validate([{"use": "arithmetic"}, {"use": "arithmetic", "name": "mine"}])
    assert settings.names("train") == ["train_1", "mine"]
    twice = TasksSettings.model_validate([{"use": "arithmetic", "name": "x"}, {"use": "arithmetic", "name": "x"}])
    with pytest.raises(ConfigError, match="several task sets are called 'x'"):
        twice.names("train")


@pytest.mark.parametrize("raw", [[], {"sets": []}])
def test_no_task_set_at_all_is_refused(raw):
    with pytest.raises(ValueError, match="at least one"):
        TasksSettings.model_validate(raw)
