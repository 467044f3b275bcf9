"""Run files of algorithms that learn from rows: what fits, and what is refused with what to write instead."""

import json
import re

import pyarrow
import pytest
from pyarrow import parquet

from triune.config import consumption, load_config
from triune.errors import ConfigError

PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.fixture
def rows(tmp_path):
    """Write a file of one row and name it as a task set."""

    def write(row=PAIR, **options):
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps(row) + "\n")
        return {"use": "jsonl", "path": str(path), **options}

    return write


def test_pairs_are_consumed_by_the_pair(rows):
    config = load_config({"tasks": rows(), "algorithm": "dpo", "trainer": {"steps": 5, "pairs_per_step": 8}})
    step = consumption(config)
    assert (step.pairs, step.sequences, step.groups, step.updates) == (8, 16, None, 1)
    assert config.trainer.entries_per_step == 8
    assert "pairs per step         8" in step.lines()[0]


@pytest.mark.parametrize("name", ["dpo", "ipo", "simpo", "orpo"])
def test_without_a_number_a_step_takes_sixteen_pairs(rows, name):
    config = load_config({"tasks": rows(), "algorithm": name})
    assert (config.trainer.pairs_per_step, config.trainer.sequences_per_step) == (16, None)
    assert config.origins["trainer.pairs_per_step"] == "derived"


def test_the_loss_decides_what_is_read(rows):
    config = load_config({"tasks": rows(), "algorithm": {"use": "sft", "policy_loss": "dpo"}})
    assert (config.algorithm.unit, config.algorithm.reads) == ("pair", "pairs")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"algorithm": "dpo", "trainer": {"tasks_per_step": 4}},
            r"trainer\.tasks_per_step: dpo does not consume that unit; .*write `trainer\.pairs_per_step: 4`",
        ),
        (
            {"algorithm": "kto", "tasks": {**PAIR, "label": True}, "trainer": {"pairs_per_step": 4}},
            r"trainer\.pairs_per_step: kto does not consume that unit; .*`trainer\.sequences_per_step: 4`",
        ),
        (
            {"algorithm": "grpo", "trainer": {"pairs_per_step": 4}},
            r"trainer\.pairs_per_step: grpo does not consume that unit; .*write `trainer\.tasks_per_step: 4`",
        ),
        (
            {"algorithm": "dpo", "trainer": {"pairs_per_step": 4, "sequences_per_step": 4}},
            "give sequences_per_step or pairs_per_step, not both",
        ),
        (
            {"algorithm": {"use": "dpo", "advantage": "grpo"}},
            r"algorithm\.\w+: found .*grpo",
        ),
        (
            {"algorithm": {"use": "dpo", "advantage": "reinforce"}},
            r"algorithm\.advantage: found reinforce, and dpo learns from pairs, not rewards; .*`advantage: none`",
        ),
        (
            {"algorithm": {"use": "grpo", "policy_loss": "simpo"}},
            r"algorithm\.advantage: found grpo, and simpo learns from pairs, not rewards",
        ),
        (
            {"algorithm": {"use": "dpo", "group_size": 8}},
            r"algorithm\.group_size: found 8, and dpo reads pairs from rows: nothing is sampled; .*leave it out",
        ),
        (
            {"algorithm": "dpo", "pipeline": ["drop_flat_groups"]},
            "pipeline: found 1 operators, and dpo reads pairs from rows: no group passes a pipeline",
        ),
        (
            {"algorithm": "dpo", "sync": {"max_staleness": 2}},
            r"sync\.max_staleness: found 2, and dpo reads pairs from rows: they have no version",
        ),
        (
            {"algorithm": "dpo", "tasks": {"prompt": "a", "chosen": "b"}},
            r"tasks\.sets\.0: rows have no 'rejected' \(they have chosen, prompt\), and dpo reads pairs; .*"
            r"map them: `fields: \{rejected: …\}`",
        ),
        (
            {"algorithm": "kto", "tasks": {"prompt": "a", "answer": "b"}},
            "rows have no 'label' .*, and kto reads labels; expected the fields label",
        ),
        ({"algorithm": "cpt"}, "rows have no 'text' .*, and cpt reads texts"),
        (
            {"algorithm": {"use": "dpo", "policy_loss": {"beta": 0}}},
            r"algorithm\.policy_loss\.beta: found 0",
        ),
        ({"algorithm": {"use": "dpo", "policy_loss": {"label_smoothing": 0.5}}}, "label_smoothing: found 0.5"),
    ],
)  # fmt: skip
def test_a_wrong_combination_is_refused_with_what_to_write(rows, sections, message):
    sections = {"tasks": rows(sections.get("tasks", PAIR)), **{k: v for k, v in sections.items() if k != "tasks"}}
    with pytest.raises(ConfigError) as caught:
        load_config(sections)
    assert re.search(message, str(caught.value)), str(caught.value)


@pytest.mark.parametrize("name", ["dpo", "kto", "cpt"])
def test_generators_of_questions_hold_no_rows_to_learn_from(name):
    with pytest.raises(ConfigError, match=rf"they have answer, expression, question\), and {name} reads"):
        load_config({"tasks": {"use": "arithmetic"}, "algorithm": name})


def test_fields_are_looked_for_after_they_were_mapped(rows):
    odd = rows({"q": "a", "best": "b", "worst": "c"}, fields={"prompt": "q", "chosen": "best", "rejected": "worst"})
    load_config({"tasks": odd, "algorithm": "dpo"})
    away = rows(PAIR, fields={"answer": "rejected"})
    with pytest.raises(ConfigError, match="no 'rejected'"):
        load_config({"tasks": away, "algorithm": "dpo"})


def test_the_columns_of_a_parquet_file_are_known_before_it_is_read(tmp_path):
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([PAIR]), path)
    tasks = {"use": "parquet", "path": str(path)}
    load_config({"tasks": tasks, "algorithm": "dpo"})
    with pytest.raises(ConfigError, match="no 'rejected'"):
        load_config({"tasks": {**tasks, "columns": ["prompt", "chosen"]}, "algorithm": "dpo"})


def test_a_file_that_is_not_there_or_malformed_is_an_error_when_it_is_opened(tmp_path):
    for content in (None, "not json\n", ""):
        path = tmp_path / "rows.jsonl"
        if content is not None:
            path.write_text(content)
        load_config({"tasks": {"use": "jsonl", "path": str(path)}, "algorithm": "dpo"})
