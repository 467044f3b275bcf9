"""Where rows come from, and what is said when they are bad."""

from __future__ import annotations

import ast
import json
import operator

import pytest

from triune.errors import ConfigError, TaskError
from triune.tasks import OpenTaskset, TaskBricks, TasksSettings, open_tasksets


def open_one(raw, seed=0) -> OpenTaskset:
    return open_tasksets(TasksSettings.model_validate(raw), seed=seed)[0]


def write_lines(path, *lines):
    path.write_text("\n".join(lines) + "\n")
    return str(path)


# ------------------------------------------------------------------------------------------------ arithmetic


def calculate(expression: str) -> int:
    """A calculator of its own, to check the generator's answers."""
    ops = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}

    def value(node):
        if isinstance(node, ast.BinOp):
            return ops[type(node.op)](value(node.left), value(node.right))
        return node.value

    return value(ast.parse(expression, mode="eval").body)


def test_arithmetic_answers_are_right_for_every_mixture_of_operations():
    raw = {"use": "arithmetic", "operands": 5, "digits": 2, "ops": ["+", "-", "*"], "size": 500}
    for task in open_one(raw).all():
        assert calculate(task.data["expression"]) == int(task.data["answer"])
        assert task.data["question"] == task.data["expression"] + "="


def test_arithmetic_numbers_cover_their_range_and_stay_in_it():
    numbers = [
        int(n)
        for t in open_one({"use": "arithmetic", "max": 20, "size": 500}).all()
        for n in t.data["expression"].split("+")
    ]
    assert (min(numbers), max(numbers)) == (0, 20)
    assert len(set(numbers)) == 21


def test_arithmetic_rows_depend_on_seed_and_name_only():
    first = open_one({"use": "arithmetic"}).tasks(range(50))
    assert open_one({"use": "arithmetic"}).tasks([49, 0])[::-1] == [first[0], first[49]]
    assert open_one({"use": "arithmetic"}, seed=1).tasks(range(50)) != first
    assert [t.data for t in open_one({"use": "arithmetic", "name": "eval"}).tasks(range(50))] != [t.data for t in first]
    fixed = [
        [t.data for t in open_one({"use": "arithmetic", "seed": 3, "name": n}).tasks(range(9))] for n in ("a", "b")
    ]
    assert fixed[0] == fixed[1]


def test_arithmetic_asks_in_the_words_it_is_given():
    task = open_one({"use": "arithmetic", "prompt": "What is {expression}?"}).tasks([0])[0]
    assert task.data["question"] == f"What is {task.data['expression']}?"


# --------------------------------------------------------------------------------------------- files of rows


def test_fields_are_renamed_also_out_of_nested_rows(tmp_path):
    row = {"problem": "1+1", "truth": {"value": 2}, "level": 3}
    raw = {"use": "jsonl", "path": write_lines(tmp_path / "a.jsonl", json.dumps(row))}
    task = open_one({**raw, "fields": {"question": "problem", "answer": "truth.value"}}).tasks([0])[0]
    assert task.data == {"question": "1+1", "answer": 2, "truth": {"value": 2}, "level": 3}


def test_a_row_chooses_its_workflow_and_reward(tmp_path):
    rows = [
        {"q": "a", "answer": "1", "how": "format_only", "check": {"use": "last_number", "tolerance": 0.5}},
        {"q": "b", "answer": "1", "how": None, "check": ""},
    ]
    raw = {
        "use": "jsonl",
        "path": write_lines(tmp_path / "a.jsonl", *map(json.dumps, rows)),
        "fields": {"question": "q", "workflow": "how", "reward": "check"},
        "reward": "exact_match",
    }
    opened = open_one(raw)
    chosen, plain = opened.tasks([0, 1])
    assert chosen.workflow == {"use": "format_only"}
    assert plain.workflow is None
    bricks = TaskBricks([opened], default_workflow="the default")
    assert bricks.reward(chosen).function.tolerance == 0.5
    assert bricks.reward(plain).name == "exact_match"
    assert bricks.workflow(plain) == "the default"
    with pytest.raises(ConfigError, match="no workflow is called 'format_only'"):
        bricks.workflow(chosen)


def test_the_default_reward_of_a_set_gives_way_to_a_workflow_that_brings_its_own():
    def asks(task, model, reward):
        return None

    def brings(task, model):
        return 1.0

    plain, chosen = open_one({"use": "arithmetic"}), open_one({"use": "arithmetic", "reward": "last_number"})
    task = plain.tasks([0])[0]
    assert TaskBricks([plain], workflow=asks).reward(task).name == "exact_match"
    assert TaskBricks([plain], workflow=brings).reward(task) is None
    assert TaskBricks([plain]).reward(task).name == "exact_match"
    assert (
        TaskBricks([chosen], workflow=brings).reward(task).name == "last_number"
    )  # written, so never dropped silently
    assert TaskBricks([plain], workflow=brings, reward=lambda task, answer: 0).reward(task) is not None


def test_training_and_evaluation_sets_must_not_share_a_name():
    with pytest.raises(ConfigError, match="two task sets, for training or evaluation, are called 'x'"):
        TaskBricks([open_one({"use": "arithmetic", "name": "x"}), open_one({"use": "arithmetic", "name": "x"})])


@pytest.mark.parametrize(
    ("lines", "place"),
    [
        (['{"a": 1}', "", '{"a": '], "bad.jsonl:3"),
        (["[1, 2]"], "bad.jsonl:1"),
        (['{"a": 1}', "not json"], "bad.jsonl:2"),
    ],
)
def test_bad_data_a_malformed_line_is_named_with_its_number(tmp_path, lines, place):
    raw = {"use": "jsonl", "path": write_lines(tmp_path / "bad.jsonl", *lines)}
    with pytest.raises(TaskError, match=f"{place}: .*expected one JSON object a line"):
        open_one(raw)


def test_bad_data_a_missing_field_is_named_with_its_line_and_the_nearest_name(tmp_path):
    lines = ['{"problem": "x", "solution": "1"}', '{"problm": "x", "solution": "1"}']
    raw = {"use": "jsonl", "path": write_lines(tmp_path / "a.jsonl", *lines), "fields": {"question": "problem"}}
    with pytest.raises(TaskError, match=r"a\.jsonl:2: the row has no field 'problem'; did you mean 'problm'"):
        open_one(raw)


def test_bad_data_a_missing_file_proposes_its_neighbour(tmp_path):
    write_lines(tmp_path / "train.jsonl", "{}")
    with pytest.raises(TaskError, match=r"tasks\.path: no file .*did you mean .*train\.jsonl"):
        open_one({"use": "jsonl", "path": str(tmp_path / "trian.jsonl")})
    with pytest.raises(TaskError, match="there is no folder"):
        open_one({"use": "parquet", "path": str(tmp_path / "nowhere" / "*.parquet")})


def test_bad_data_an_empty_data_set_is_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(TaskError, match=r"tasks \(train\): the task set is empty; expected at least one row"):
        open_one({"use": "jsonl", "path": str(tmp_path / "empty.jsonl")})


def test_bad_data_two_rows_with_one_id_are_refused(tmp_path):
    raw = {"use": "jsonl", "path": write_lines(tmp_path / "a.jsonl", '{"id": 1}', '{"id": 2}', '{"id": 1}')}
    with pytest.raises(TaskError, match=r"a\.jsonl:3: id 1 is already that of .*a\.jsonl:1"):
        open_one(raw)


def test_jsonl_reads_several_files_and_names_places_in_each(tmp_path):
    write_lines(tmp_path / "1.jsonl", '{"n": 0}', "", '{"n": 1}')
    write_lines(tmp_path / "2.jsonl", '{"n": 2}')
    opened = open_one({"use": "jsonl", "path": str(tmp_path / "*.jsonl"), "limit": 2})
    assert [task.data["n"] for task in opened.all()] == [0, 1]
    places = [opened._rows.place(number).rpartition("/")[2] for number in range(3)]
    assert places == ["1.jsonl:1", "1.jsonl:3", "2.jsonl:1"]


def write_parquet(path, rows):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def test_parquet_rows_are_read_in_any_order_and_from_several_files(tmp_path):
    write_parquet(tmp_path / "0.parquet", [{"id": f"a{i}", "problem": f"p{i}", "meta": {"n": i}} for i in range(3)])
    write_parquet(tmp_path / "1.parquet", [{"id": "b", "problem": "last", "meta": {"n": 9}}])
    opened = open_one(
        {"use": "parquet", "path": str(tmp_path / "*.parquet"), "fields": {"question": "problem", "n": "meta.n"}}
    )
    assert opened.size == 4
    assert [(t.key, t.data["question"], t.data["n"]) for t in opened.tasks([3, 0])] == [
        ("b", "last", 9),
        ("a0", "p0", 0),
    ]
    assert opened.find("a2").data["n"] == 2


def test_bad_data_what_is_no_parquet_file_or_lacks_a_column_is_named(tmp_path):
    path = write_lines(tmp_path / "x.parquet", "text")
    with pytest.raises(TaskError, match=r"tasks\.path: .*x\.parquet.*expected Parquet files"):
        open_one({"use": "parquet", "path": path})
    good = write_parquet(tmp_path / "good.parquet", [{"problem": "p"}])
    with pytest.raises(
        TaskError, match=r"good\.parquet: row 0: the row has no field 'problme'; did you mean 'problem'"
    ):
        open_one({"use": "parquet", "path": good, "fields": {"question": "problme"}})


def test_hugging_face_datasets_are_read_from_a_folder_and_hashed_by_content(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = {"q": [f"q{i}" for i in range(5)], "answer": list(range(5))}
    made = datasets.Dataset.from_dict(rows)
    made.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"test": made.select(range(2))}).save_to_disk(str(tmp_path / "dict"))
    opened = open_one({"use": "datasets", "path": str(tmp_path / "one"), "fields": {"question": "q"}})
    assert [task.data for task in opened.all()] == [{"question": f"q{i}", "answer": i} for i in range(5)]
    assert open_one({"use": "datasets", "path": str(tmp_path / "dict"), "split": "test"}).size == 2
    made.select(range(3)).save_to_disk(str(tmp_path / "first"))
    datasets.concatenate_datasets([made.select(range(3)), made.select([3, 4])]).save_to_disk(str(tmp_path / "pieces"))
    hashes = {
        name: open_one({"use": "datasets", "path": str(tmp_path / name), "fields": {"question": "q"}}).data_hash
        for name in ("one", "first", "pieces")
    }
    assert hashes["one"] == hashes["pieces"] != hashes["first"]


def test_the_hash_of_a_table_is_of_its_cells_and_not_of_how_it_was_cut():
    import pyarrow

    from triune.tasks.arrow import hash_table

    rows = [{"a": i if i % 3 else None, "s": f"x{i}" if i % 4 else None, "l": [i] * (i % 3)} for i in range(11)]
    whole = pyarrow.Table.from_pylist(rows)
    for low, num in ((0, 3), (1, 5), (3, 8)):
        fresh = pyarrow.Table.from_pylist(rows[low : low + num], schema=whole.schema)
        pieces = pyarrow.concat_tables([whole.slice(low, 2), whole.slice(low + 2, num - 2)])
        assert hash_table(whole.slice(low, num)) == hash_table(pieces) == hash_table(fresh)
        assert hash_table(fresh) != hash_table(whole.slice(low + 1, num))


def test_bad_data_a_data_set_that_does_not_load_is_named(tmp_path):
    pytest.importorskip("datasets")
    (tmp_path / "folder").mkdir()
    with pytest.raises(TaskError, match=r"tasks\.path: .*does not load"):
        open_one({"use": "datasets", "path": str(tmp_path / "folder")})


# ---------------------------------------------------------------------------------------------- reasoning gym


def test_reasoning_gym_rows_are_those_of_the_generator_and_json_like():
    reasoning_gym = pytest.importorskip("reasoning_gym")
    raw = {"use": "reasoning_gym", "generator": "chain_sum", "options": {"max_terms": 3}, "size": 20, "seed": 5}
    opened = open_one(raw)
    task = opened.tasks([7])[0]
    direct = reasoning_gym.create_dataset("chain_sum", seed=task.data["recipe"]["seed"], size=20, max_terms=3)[7]
    assert (task.data["question"], task.data["answer"]) == (direct["question"], direct["answer"])
    assert json.loads(json.dumps(task.data)) == task.data
    assert opened.find("7") == task
    assert opened.find("20") is None


def test_reasoning_gym_a_wrong_generator_or_option_is_named():
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ConfigError, match=r"tasks\.generator: .*did you mean 'chain_sum'"):
        open_one({"use": "reasoning_gym", "generator": "chainsum"})
    with pytest.raises(ConfigError, match=r"tasks\.options: chain_sum refuses \{'terms': 3\}"):
        open_one({"use": "reasoning_gym", "generator": "chain_sum", "options": {"terms": 3}})


def test_case_52_an_unknown_field_of_a_task_set_is_refused():
    with pytest.raises(ValueError, match="did you mean 'operands'"):
        TasksSettings.model_validate({"use": "arithmetic", "operand": 3})
