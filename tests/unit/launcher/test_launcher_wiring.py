"""What the launcher joins: halves that only fit when both are there."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

import numpy as np
import pytest

from triune.config import load_config, save_resolved
from triune.errors import ConfigError, EngineError, StoreError, TaskError
from triune.explorer.engines.remote import ChatAnswer
from triune.launcher.beside import check_same_file
from triune.launcher.commands import export
from triune.launcher.explorer_side import _demonstrations, build_pipeline, load_tokenizer, question_of
from triune.launcher.measure import EndpointAnswerer, measure_checkpoints
from triune.launcher.session import Session
from triune.launcher.tasks import open_tasks
from triune.launcher.trainer_side import load_policy
from triune.models import max_positions, resolve_model, weight_digest
from triune.ports import GroupOutcome, Lease, Sampling
from triune.records import GroupId, Stop, Task
from triune.testing.groups import make_group
from triune.trainer import Checkpoints
from triune.trainer.batch import build_batch, prepare, stored_streams
from triune.trainer.checkpoint import TrainState


class HereAndNow:
    """A lane that runs work at once."""

    async def run(self, work, *args):
        """Call it."""
        return work(*args)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_case_27_every_scale_of_the_advantage_reaches_the_trainer_through_the_pipeline_of_a_run(scale):
    config = load_config(
        {"tasks": {"use": "arithmetic"}, "algorithm": {"use": "grpo", "advantage": {"use": "grpo", "scale": scale}}}
    )
    pipeline, algorithm = build_pipeline(config), config.algorithm
    rewards = ([0.0, 1.0], [0.0, 4.0])
    leases = []
    for number, some in enumerate(rewards):
        raw = make_group(GroupId("r", "train", f"t{number}", 0), rewards=some)
        shaped = pipeline.apply(raw).group
        assert shaped is not None
        leases.append(Lease(entry=str(raw.id), revision=1, use_no=1, group=shaped))
    streams = stored_streams(algorithm)
    batch = build_batch(leases, streams=streams, mini_batches=1, budget=4096, seed=(0, 0), device="cpu")
    ready = asyncio.run(prepare(batch, None, algorithm, HereAndNow(), recomputes_old=False))
    found = np.concatenate([micro.batch.advantages[micro.batch.action_mask].numpy() for micro in ready.micros])
    spread = {"group": {2**-0.5}, "none": {0.5, 2.0}, "batch": {0.5 / 1.8929694, 2.0 / 1.8929694}}[scale]
    assert sorted(set(np.abs(found).round(4))) == pytest.approx(sorted(spread), abs=1e-3)


def test_case_16_a_demonstration_longer_than_the_models_positions_is_refused_and_named():
    config = load_config({"tasks": {"use": "arithmetic"}, "algorithm": "sft"})
    tokenizer = load_tokenizer(config, resolve_model(config.model.path).location)
    tasks, nothing = open_tasks(config), None
    demonstrations = _demonstrations(config, tasks, tokenizer, nothing, nothing, nothing)  # type: ignore[arg-type]
    positions = max_positions(config.model)
    assert positions is not None
    for length, is_refused in ((positions // 2, False), (positions + 1, True)):
        task = Task(key="long", data={"question": "q", "answer": "a" * length})
        with pytest.raises(TaskError, match=f"at most {positions}") if is_refused else contextlib.nullcontext():
            (row,) = demonstrations.reader(GroupId("r", "train", "long", 0), task)
            assert len(row) > length


def test_an_explorer_with_other_settings_than_its_trainer_is_refused_with_both_values(tmp_path):
    raw = {"tasks": {"use": "arithmetic"}, "name": "r"}
    save_resolved(load_config(raw), tmp_path)
    check_same_file(load_config({**raw, "explorer": {"max_rollouts": 512}}), tmp_path)
    with pytest.raises(ConfigError, match=r"(?s)sync\.max_staleness: was 0, now 2.*same file and overrides"):
        check_same_file(load_config({**raw, "sync": {"max_staleness": 2}}), tmp_path)


def test_demonstrations_of_an_agents_tasks_are_refused_with_what_to_write():
    async def agent(task, model):
        return 1.0

    config = load_config({"tasks": {"use": "arithmetic"}, "algorithm": "sft"})
    with pytest.raises(ConfigError, match="has no single question; expected single_turn or math"):
        question_of(open_tasks(config, workflow=agent), Task(key="0", data={"answer": "1"}))


def test_an_export_never_replaces_a_folder_that_holds_something(tmp_path):
    config = load_config({"tasks": {"use": "arithmetic"}})
    precious = tmp_path / "thesis" / "chapter.tex"
    precious.parent.mkdir()
    precious.write_text("all of it")
    for out in (precious.parent, precious):
        with pytest.raises(ConfigError, match=r"--out: .*exists and is not empty; expected a new folder"):
            export(config, tmp_path / "run", step=None, out=out)
    assert precious.read_text() == "all of it"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_case_51_checkpoints_are_measured_in_the_dtype_in_which_the_run_measured_itself(tmp_path, monkeypatch, dtype):
    config = load_config(
        {"tasks": {"use": "arithmetic"}, "eval": {"every": 1, "tasks": {"use": "arithmetic", "size": 1}},
         "sync": {"channel": {"use": "memory", "dtype": dtype}}}
    )  # fmt: skip
    served = []

    class Engine:
        async def swap(self, update, tensors):
            served.append((update.dtype, {str(value.dtype) for value in tensors.values()}))
            assert weight_digest(tensors) == update.digest

        async def close(self):
            pass

    def build(given, tokenizer, lane):
        served.append(given.explorer.engine.dtype)
        return Engine()

    class Rollouts:
        async def run(self, group, task, **more):
            return GroupOutcome(group=None)

        async def close(self):
            pass

    policy = load_policy(config)
    Checkpoints(tmp_path / "checkpoints").save(TrainState(step=1), policy.trainable, {})
    monkeypatch.setattr("triune.launcher.measure.build_engine", build)
    monkeypatch.setattr("triune.launcher.measure.build_scheduler", lambda *given: Rollouts())
    measured = measure_checkpoints(config, tmp_path, open_tasks(config), None, HereAndNow(), None)  # type: ignore[arg-type]
    assert [row["step"] for row in asyncio.run(measured)] == [1]
    assert served == [dtype, (dtype, {f"torch.{dtype}"})]


def test_case_47_an_answer_that_an_endpoint_broke_off_is_none():
    class Client:
        async def chat(self, messages, sampling):
            return ChatAnswer(text="4", stop=Stop.ABORTED if sampling.max_tokens == 1 else Stop.DONE)

    config = load_config({"tasks": {"use": "arithmetic"}})
    tasks, task = open_tasks(config), Task(key="0", data={"question": "2+2=", "answer": "4"}, taskset="train")
    answerer = EndpointAnswerer(Client(), tasks)
    assert asyncio.run(answerer.answer(task, Sampling())) == "4"
    with pytest.raises(EngineError, match="task train/0: the endpoint broke its answer off"):
        asyncio.run(answerer.answer(task, Sampling(max_tokens=1)))


def test_a_store_that_fails_once_does_not_end_the_answers_to_stop_and_pause(monkeypatch):
    monkeypatch.setattr("triune.launcher.session.STEER_S", 0.001)
    asked, notes, stopped = [], [], []

    class Buffer:
        async def control(self):
            asked.append(1)
            if len(asked) < 3:
                raise StoreError("store", "the server is gone")
            return [{"id": 1, "action": "stop", "by": "ann"}]

        async def ack_control(self, row, *, by, outcome):
            steered.trainer = None

    loop = SimpleNamespace(stop=stopped.append)
    steered = SimpleNamespace(trainer=SimpleNamespace(loop=loop), monitor=SimpleNamespace(note=notes.append))
    asyncio.run(asyncio.wait_for(Session._steer(steered, Buffer()), 10))
    assert stopped == ["stopped by ann"]
    assert notes == ["stop, pause and resume wait until the store answers: store: the server is gone"]
