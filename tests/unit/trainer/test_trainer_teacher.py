"""The teacher: asked the student's question, of the same vocabulary, and there exactly when something reads it."""

import asyncio
import json
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from triune import registry
from triune.algorithms.samplings.fifo import Fifo
from triune.config import load_config
from triune.errors import ConfigError, TrainingError
from triune.launcher.trainer_side import load_critic_model, load_teacher
from triune.models import ModelSettings, check_same_vocabulary, load_model
from triune.ports import Lease
from triune.registry import brick
from triune.testing.lanes import InlineLane
from triune.testing.run_files import save_tiny_policy
from triune.testing.tiny_models import save_tiny_llama, tiny_llama
from triune.testing.training import sampled_group
from triune.trainer import Policy
from triune.trainer.batch import build_batch, prepare, stored_streams

DISTIL = {"use": "grpo", "advantage": "on_policy_distill"}
TASKS = {"tasks": {"use": "arithmetic"}, "trainer": {"steps": 5}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student, a wider teacher with its tokenizer, and one that numbers its tokens differently."""
    folder = tmp_path_factory.mktemp("models")
    save_tiny_policy(folder / "student")
    save_tiny_policy(folder / "teacher", hidden=48, seed=7)
    shutil.copytree(folder / "student", folder / "stranger")
    file = folder / "stranger" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    words = tokenizer["model"]["vocab"]
    first, second = sorted(words, key=words.get)[40:42]
    words[first], words[second] = words[second], words[first]
    file.write_text(json.dumps(tokenizer))
    return folder


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_teacher_log_probs_are_its_own_at_the_temperature_and_on_the_ids_the_student_sampled(temperature: float):
    algorithm = registry.build("algorithm", DISTIL, "algorithm")
    group = sampled_group("t", model=tiny_llama(), temperature=temperature, lengths=[(4, 6), (4, 3), (4, 1)])
    judge = tiny_llama(hidden=48, seed=5)
    student = Policy(tiny_llama(), float32_matmul="highest")
    teacher = Policy(tiny_llama(hidden=48, seed=5).requires_grad_(False), float32_matmul="highest")
    batch = build_batch(
        [Lease(entry="e", revision=1, use_no=0, group=group)],
        streams=stored_streams(algorithm, has_teacher=True),
        mini_batches=1,
        budget=12,
        seed=(0,),
        device="cpu",
    )
    made = prepare(batch, student, algorithm, InlineLane(), recomputes_old=True, teacher=teacher)
    found = {}
    for micro in asyncio.run(made).micros:
        for number, ids in enumerate(micro.batch.tokens):
            mask = micro.batch.action_mask[number]
            found[tuple(ids[: mask.nonzero().max() + 1].tolist())] = micro.batch.teacher_logprobs[number][mask]
    assert len(found) == 3
    for row in group.experiences:
        ids = torch.from_numpy(row.tokens.astype(np.int64))
        with torch.no_grad():
            scores = (judge(input_ids=ids[None]).logits[0, :-1].double() / temperature).log_softmax(-1)
        expected = scores.gather(1, ids[1:, None])[:, 0].numpy()[row.action_mask[1:]]
        np.testing.assert_allclose(found[tuple(ids.tolist())].numpy(), expected, atol=1e-4)


def test_stored_teacher_log_probs_need_no_teacher_and_missing_ones_are_named():
    algorithm = registry.build("algorithm", DISTIL, "algorithm")
    assert "teacher_logprobs" in stored_streams(algorithm)
    assert "teacher_logprobs" not in stored_streams(algorithm, has_teacher=True)

    def batch_of(group: Any) -> Any:
        lease = Lease(entry="e", revision=1, use_no=0, group=group)
        streams = stored_streams(algorithm)
        return build_batch([lease], streams=streams, mini_batches=1, budget=99, seed=(0,), device="cpu")

    group = sampled_group("t", lengths=[(4, 6), (4, 3)])
    with pytest.raises(TrainingError, match="has no stream 'teacher_logprobs'"):
        batch_of(group)
    stored = group.map(lambda row: row.with_streams(teacher_logprobs=np.full(len(row), -0.5, np.float32)))
    student = Policy(tiny_llama(), float32_matmul="highest")
    (micro,) = asyncio.run(prepare(batch_of(stored), student, algorithm, InlineLane(), recomputes_old=True)).micros
    expected = (-0.5 - micro.batch.old_logprobs) * micro.batch.action_mask
    torch.testing.assert_close(micro.batch.advantages, expected + group_part(stored, micro))


def group_part(group: Any, micro: Any) -> torch.Tensor:
    """What the group had as advantages before: the fake's centred rewards."""
    found = torch.zeros(micro.batch.tokens.shape)
    for number, rollout in enumerate(micro.batch.rollouts.tolist()):
        row = group.experiences[rollout]
        found[number, : len(row)] = torch.from_numpy(np.array(row.advantages))
    return found


def test_a_teacher_is_loaded_frozen_beside_the_student(models: Path):
    run = {**TASKS, "algorithm": DISTIL, "model": {"path": str(models / "student")}}
    teacher = load_teacher(load_config({**run, "teacher": {"path": str(models / "teacher")}}))
    assert teacher is not None
    assert not teacher.trainable
    assert teacher.model.config.hidden_size == 48


def test_a_teacher_of_another_vocabulary_is_refused_with_an_example(models: Path, tmp_path: Path):
    student = {"path": str(models / "student")}
    run = {**TASKS, "algorithm": DISTIL, "model": student}
    text = (
        r"teacher\.path: 2 of \d+ tokens differ from .*student's, e\.g\. '.+' is \d+ and is \d+ there; expected a model"
    )
    with pytest.raises(ConfigError, match=text):
        load_teacher(load_config({**run, "teacher": {"path": str(models / "stranger")}}))
    save_tiny_llama(tmp_path / "mute")
    with pytest.raises(ConfigError, match=r"teacher\.path: .*mute has no tokenizer that loads"):
        load_teacher(load_config({**run, "teacher": {"path": str(tmp_path / "mute")}}))
    with pytest.raises(ConfigError, match=r"teacher\.path: no folder"):
        load_teacher(load_config({**run, "teacher": {"path": "./nowhere"}}))
    check_same_vocabulary(ModelSettings(**student), ModelSettings(path=str(models / "teacher")), "teacher")


def test_a_critic_from_another_model_must_have_the_policys_vocabulary_too(models: Path):
    def config(path: str) -> Any:
        critic = {"use": "value_model", "path": str(models / path)}
        algorithm = {"use": "grpo", "advantage": "gae", "critic": critic}
        return load_config({**TASKS, "algorithm": algorithm, "model": {"path": str(models / "student")}})

    assert load_critic_model(config("teacher")).config.hidden_size == 48
    with pytest.raises(ConfigError, match=r"algorithm\.critic\.path: 2 of"):
        load_critic_model(config("stranger"))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"algorithm": DISTIL}, r"teacher: found none, and grpo needs teacher_logprobs.*write `teacher: \{path"),
        ({"teacher": {}}, r"teacher: found triune/nano, and grpo asks no teacher; expected none; leave it out"),
        ({"algorithm": DISTIL, "teacher": {"lora": {}}}, r"teacher\.lora: .*leave it out: it is not trained"),
        ({"algorithm": DISTIL, "teacher": {"gradient_checkpointing": True}}, r"gradient_checkpointing: found True"),
        ({"algorithm": DISTIL, "teacher": {"chat_template": "{{ x }}"}}, r"teacher\.chat_template: found"),
    ],
)  # fmt: skip
def test_a_teacher_that_does_not_fit_is_refused_when_the_file_is_read(changes: Any, text: str):
    with pytest.raises(ConfigError, match=text):
        load_config({**TASKS, **changes})


@brick("operator")
@dataclass(frozen=True, kw_only=True)
class AskAround:
    """Stores teacher log-probs, from wherever."""

    makes: ClassVar[frozenset[str]] = frozenset({"teacher_logprobs"})

    def __call__(self, group: Any) -> Any:
        return group


@brick("sampling")
@dataclass(frozen=True, kw_only=True)
class Stored(Fifo):
    """Takes nothing that is sampled now."""

    fresh_ratio: ClassVar[float] = 0.0


def test_no_teacher_is_needed_where_an_operator_makes_its_log_probs_or_nothing_is_sampled():
    load_config({**TASKS, "algorithm": DISTIL, "pipeline": [{"use": "ask_around"}]})
    load_config({**TASKS, "algorithm": {**DISTIL, "sampling": {"use": "stored"}}})


def test_checkpointed_activations_do_not_warn_of_a_name_that_goes_away(tmp_path: Path):
    save_tiny_llama(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        load_model(ModelSettings(path=str(tmp_path), gradient_checkpointing=True))
