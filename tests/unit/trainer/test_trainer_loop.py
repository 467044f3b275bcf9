"""The loop over a real buffer in memory, with scripted experience."""

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from triune import registry
from triune.algorithms import metric
from triune.algorithms.policy_losses.reinforce import Reinforce
from triune.errors import CheckpointError, FencedError, TrainingError
from triune.failpoints import FailpointReached, arm_failpoints
from triune.models import LoraSettings, ModelSettings, load_model, weight_digest
from triune.records import Group
from triune.testing.lanes import InlineLane, ThreadLane
from triune.testing.tiny_models import save_tiny_llama, tiny_llama
from triune.testing.training import RecordingMonitor, filled_buffer, sampled_group
from triune.trainer import Checkpoints, Policy, RunIdentity, Trainer, TrainerSettings


@pytest.fixture(autouse=True)
def disarm():
    yield
    arm_failpoints("")


def build(
    buffer: Any,
    folder: Path,
    *,
    algorithm: Any = "grpo",
    model: Any = None,
    every: int = 1,
    identity: RunIdentity | None = None,
    resume: bool = False,
    max_staleness: int = 100,
    lane: Any = None,
    channel: Any = "memory",
    **settings: Any,
) -> Trainer:
    lane = lane or InlineLane()
    options = {"steps": 3, "tasks_per_step": 2, "learning_rate": 1e-2, "save_every": 0, **settings}
    checkpoints = Checkpoints(folder / "checkpoints", keep=options.get("keep_checkpoints", 3))
    made = registry.build("channel", channel, "sync.channel")
    return Trainer(
        TrainerSettings(**options),
        Policy(model if model is not None else tiny_llama(), float32_matmul="highest"),
        registry.build("algorithm", algorithm, "algorithm"),
        buffer=buffer,
        channel=made(ledger=buffer, lane=lane, folder=folder / "weights"),
        lane=lane,
        monitor=RecordingMonitor(),
        checkpoints=checkpoints,
        every=every,
        max_staleness=max_staleness,
        identity=identity,
        resume_from=checkpoints.latest() if resume else None,
    )


class Remembering:
    """A channel that keeps what was published."""

    def __init__(self, channel: Any) -> None:
        self.channel, self.published = channel, []

    async def publish(self, state: Any, *, step: int) -> Any:
        self.published.append(await self.channel.publish(state, step=step))
        return self.published[-1]


def groups_of(num: int, **options: Any) -> list[Group]:
    model = tiny_llama()
    return [sampled_group(f"t{n:03d}", model=model, **options) for n in range(num)]


def masked(group: Group) -> Group:
    def hide(row: Any) -> Any:
        nothing = np.full(len(row), np.nan, np.float32)
        return row.replace(
            action_mask=np.zeros(len(row), bool), logprobs=nothing, versions=np.full(len(row), -1, np.int32)
        )

    return group.map(hide)


def weights_of(trainer: Trainer) -> str:
    return weight_digest({name: value.detach() for name, value in trainer.policy.trainable.items()})


def test_a_run_leases_trains_publishes_saves_and_finishes(tmp_path: Path):
    async def go() -> None:
        buffer = await filled_buffer(tmp_path, groups_of(7))
        trainer = build(buffer, tmp_path, every=2, save_every=2)
        before = weights_of(trainer)
        await trainer.run()
        assert trainer.step == 3
        assert trainer.exit_reason == "3 steps done"
        assert weights_of(trainer) != before
        assert trainer.line == [(0, 0), (1, 2)]
        assert trainer.checkpoints.steps() == [2, 3]
        stats = await buffer.stats()
        assert (stats["uses/acked"], stats["uses/leased"], stats["entries/ready"]) == (6, 0, 1)
        monitor = trainer.monitor
        assert [step for step, _, metrics in monitor.rows if "loss" in metrics] == [1, 2, 3]
        assert set(monitor.stages) == {"trainer/" + s for s in ("lease", "prepare", "update", "publish", "save")}
        assert monitor.waits == ["trainer waits for a full batch"] * 3
        update = await buffer.latest_version()
        tensors = await trainer.channel.fetch(update)
        assert weight_digest(tensors) == update.digest
        await buffer.close()

    asyncio.run(go())


def test_every_step_reports_the_metrics_the_field_knows(tmp_path: Path):
    async def go() -> None:
        buffer = await filled_buffer(tmp_path, groups_of(6))
        trainer = build(buffer, tmp_path, max_staleness=100)
        await trainer.run()
        wanted = {
            "loss", "policy_loss", "entropy", "grad_norm", "learning_rate", "clip_ratio", "ratio_mean", "logprob_gap",
            "staleness", "tokens_per_s", "tokens_without_behaviour", "skipped", "bad_updates", "num_updates",
        }  # fmt: skip
        for _, _, metrics in trainer.monitor.rows[1:]:
            assert wanted <= metrics.keys()
            assert all(np.isfinite(list(metrics.values())))
        assert trainer.monitor.steps("staleness") == [0.0, 1.0, 2.0]
        assert trainer.monitor.steps("logprob_gap")[0] < 1e-5 < trainer.monitor.steps("logprob_gap")[2]
        facts = trainer.monitor.rows[0][2]
        assert facts["float32_matmul_medium"] == 0.0
        await buffer.close()

    asyncio.run(go())


@pytest.mark.parametrize("settings", [{}, {"epochs": 2, "mini_batches": 2, "save_every": 3}], ids=["one", "four"])
@pytest.mark.parametrize("lora", [None, LoraSettings(rank=2)], ids=["full", "lora"])
def test_case_42_six_steps_equal_three_a_resume_and_three_bit_for_bit(tmp_path: Path, settings: Any, lora: Any):
    folder = save_tiny_llama(tmp_path / "model")
    algorithm = {"use": "grpo", "kl": {"use": "k3", "coefficient": 0.1}}
    groups = groups_of(12)

    def fresh() -> Any:
        return load_model(ModelSettings(path=str(folder), lora=lora))

    async def straight() -> tuple[str, list[Any]]:
        buffer = await filled_buffer(tmp_path, groups)
        trainer = build(
            buffer, tmp_path / "straight", model=fresh(), steps=6, schedule="cosine", algorithm=algorithm, **settings
        )
        await trainer.run()
        await buffer.close()
        return weights_of(trainer), trainer.monitor.steps("loss")

    async def interrupted() -> tuple[str, list[Any]]:
        buffer = await filled_buffer(tmp_path, groups)
        run = {"schedule": "cosine", "algorithm": algorithm, **settings, "steps": 6, "save_every": 3}
        arm_failpoints("trainer.checkpoint.after_rename:1:raise")
        first = build(buffer, tmp_path / "cut", model=fresh(), **run)
        with pytest.raises(FailpointReached):
            await first.run()
        await buffer.open_run("run", config_hash="", data_hash="")
        second = build(buffer, tmp_path / "cut", model=fresh(), resume=True, identity=RunIdentity(epoch=1), **run)
        await second.run()
        stats = await buffer.stats()
        assert (stats["uses/acked"], stats["uses/leased"]) == (12, 0)
        await buffer.close()
        return weights_of(second), first.monitor.steps("loss") + second.monitor.steps("loss")

    whole, losses = asyncio.run(straight())
    pieces, same = asyncio.run(interrupted())
    assert whole == pieces
    assert losses == same


def test_after_a_resume_the_last_version_is_offered_again_under_its_own_number(tmp_path: Path):
    async def go() -> None:
        buffer = await filled_buffer(tmp_path, groups_of(10))
        arm_failpoints("trainer.publish.after:4:raise")  # versions 0, 1, 2 and then 3, which no checkpoint holds
        first = build(buffer, tmp_path, save_every=2, steps=5)
        with pytest.raises(FailpointReached):
            await first.run()
        await buffer.open_run("run", config_hash="", data_hash="")
        second = build(buffer, tmp_path, resume=True, save_every=2, steps=5)
        await second.begin()
        latest = await buffer.latest_version()
        assert (second.step, latest.version, latest.step) == (2, 2, 2)
        assert weight_digest(await second.channel.fetch(latest)) == latest.digest
        await second.run()
        assert second.line[:3] == [(0, 0), (1, 1), (2, 2)]
        assert [version for version, _ in second.line[3:]] == [4, 5, 6]  # 3 was lost and is never used again
        await buffer.check_conservation()
        await buffer.close()

    asyncio.run(go())


def test_a_checkpoint_between_two_publishes_offers_the_version_that_was_published_again(tmp_path: Path):
    async def go() -> None:
        buffer = await filled_buffer(tmp_path, groups_of(10))
        first = build(buffer, tmp_path, steps=3, every=2)
        await first.run()
        await buffer.open_run("run", config_hash="", data_hash="")
        second = build(buffer, tmp_path, resume=True, steps=5, every=2)
        await second.begin()
        latest = await buffer.latest_version()
        assert (latest.version, latest.step) == (1, 2)
        assert weight_digest(await second.channel.fetch(latest)) == latest.digest
        assert weights_of(second) == weights_of(first)
        await buffer.close()

    asyncio.run(go())


def test_leases_are_secured_on_the_disk_before_a_checkpoint_refers_to_them(tmp_path: Path):
    async def scenario() -> None:
        buffer = await filled_buffer(tmp_path, groups_of(4))
        trainer = build(buffer, tmp_path, steps=2, save_every=1)
        order: list[str] = []
        secure, save = buffer.secure, trainer.checkpoints.save

        async def noted() -> None:
            order.append("secured")
            await secure()

        def saved(*parts: Any) -> Path:
            order.append("saved")
            return save(*parts)

        buffer.secure, trainer.checkpoints.save = noted, saved
        await trainer.run()
        assert order == ["secured", "saved"] * 2

    asyncio.run(scenario())


def test_a_trainer_whose_run_was_taken_over_leaves_no_checkpoint(tmp_path: Path):
    async def go() -> None:
        buffer = await filled_buffer(tmp_path, groups_of(4))
        trainer = build(buffer, tmp_path, steps=1)
        await trainer.run()
        assert trainer.checkpoints.steps() == [1]
        trainer.step = 2
        await buffer._writer.submit(lambda: buffer.store.runs.open("run", "somebody else", "", ""))
        with pytest.raises(FencedError, match="another one has taken over"):
            await trainer.save()
        assert trainer.checkpoints.steps() == [1]
        buffer.abandon()

    asyncio.run(go())


def test_a_run_that_died_before_its_first_checkpoint_starts_anew_and_trains_everything(tmp_path: Path):
    async def go() -> None:
        stored = groups_of(6, version=-1)  # nothing that a lost version sampled
        buffer = await filled_buffer(tmp_path, stored, deterministic=False)
        arm_failpoints("trainer.checkpoint.before_rename:1:raise")
        with pytest.raises(FailpointReached):
            await build(buffer, tmp_path, steps=3).run()
        epoch = await buffer.open_run("run", config_hash="", data_hash="")
        trainer = build(buffer, tmp_path, steps=3, resume=True, identity=RunIdentity(epoch=epoch))
        assert trainer.resume_from is None
        await trainer.run()
        stats = await buffer.stats()
        assert (trainer.step, stats["uses/acked"], stats["uses/leased"]) == (3, 6, 0)
        await buffer.check_conservation()
        await buffer.close()

    asyncio.run(go())


def test_a_changed_configuration_or_data_set_refuses_to_resume_unless_told(tmp_path: Path):
    async def go() -> None:
        buffer = await filled_buffer(tmp_path, groups_of(8))
        await build(buffer, tmp_path, steps=2, identity=RunIdentity(config_hash="a", data_hash="d")).run()

        async def resume(**identity: Any) -> Trainer:
            await buffer.open_run("run", config_hash="", data_hash="")
            trainer = build(buffer, tmp_path, steps=3, resume=True, identity=RunIdentity(**identity))
            await trainer.begin()
            return trainer

        with pytest.raises(CheckpointError, match="another configuration"):
            await resume(config_hash="b", data_hash="d")
        with pytest.raises(CheckpointError, match="task sets with hash d"):
            await resume(config_hash="a", data_hash="e")
        assert (await resume(config_hash="b", data_hash="d", allow_changes=True)).step == 2
        await buffer.close()

    asyncio.run(go())


def test_a_brick_that_came_to_need_a_state_starts_with_its_own_where_the_checkpoint_has_none(tmp_path: Path):
    async def go() -> None:
        buffer = await filled_buffer(tmp_path, groups_of(8))
        await build(buffer, tmp_path, steps=2, algorithm={"use": "grpo", "kl": {"use": "k3", "coefficient": 0.1}}).run()
        await buffer.open_run("run", config_hash="", data_hash="")
        adaptive = {"use": "grpo", "kl": {"use": "k3", "coefficient": 0.1, "target": 0.01}}
        identity = RunIdentity(config_hash="b", allow_changes=True)
        trainer = build(buffer, tmp_path, steps=3, resume=True, algorithm=adaptive, identity=identity)
        await trainer.run()
        assert trainer.step == 3
        await buffer.close()

    asyncio.run(go())


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path):
    async def go() -> None:
        buffer = await filled_buffer(tmp_path, groups_of(4))
        await build(buffer, tmp_path, steps=1).run()
        await buffer.open_run("run", config_hash="", data_hash="")
        other = build(buffer, tmp_path, steps=2, resume=True, model=tiny_llama(layers=3))
        with pytest.raises(CheckpointError, match=r"e\.g\. model\.layers\.2"):
            await other.begin()
        await buffer.close()

    asyncio.run(go())


def test_case_45_a_short_last_batch_is_trained_and_the_end_of_data_ends_the_run(tmp_path: Path):
    async def go() -> None:
        buffer = await filled_buffer(tmp_path, groups_of(5))
        trainer = build(buffer, tmp_path, steps=50)
        await asyncio.wait_for(trainer.run(), 30)
        assert trainer.step == 3
        assert trainer.exit_reason == "the data ended after 3 steps"
        assert (await buffer.stats())["uses/acked"] == 5
        assert trainer.monitor.steps("num_sequences") == [8.0, 8.0, 4.0]
        await buffer.close()

    asyncio.run(go())


@pytest.mark.parametrize("kind", ["masked", "invalid"])
def test_case_21_a_batch_without_a_trainable_token_is_consumed_counted_and_moves_nothing(tmp_path: Path, kind: str):
    async def go() -> None:
        groups = groups_of(6)
        spoil = masked if kind == "masked" else lambda group: group.map(lambda row: row.replace(is_valid=False))
        groups[2:4] = [spoil(group) for group in groups[2:4]]
        buffer = await filled_buffer(tmp_path, groups)
        trainer = build(buffer, tmp_path, steps=3, schedule="linear")
        trainer.channel = Remembering(trainer.channel)
        await trainer.run()
        assert trainer.monitor.steps("skipped") == [0.0, 1.0, 0.0]
        assert trainer.monitor.steps("learning_rate") == pytest.approx([0.01, 0.01 * 2 / 3, 0.01 / 3])
        digests = [update.digest for update in trainer.channel.published]
        assert digests[1] == digests[2]
        assert len(set(digests)) == 3
        assert (await buffer.stats())["uses/acked"] == 6
        await buffer.close()

    asyncio.run(go())


def test_case_49_when_nothing_trainable_arrives_the_run_fails_fast_and_shows_one_rollout(tmp_path: Path):
    async def go() -> None:
        buffer = await filled_buffer(tmp_path, [masked(group) for group in groups_of(12)])
        trainer = build(buffer, tmp_path, steps=6, max_untrainable_batches=3)
        with pytest.raises(TrainingError) as caught:
            await trainer.run()
        text = str(caught.value)
        assert "3 batches in a row held no token to train on" in text
        assert "rollout run/train/t004/0/0.0 stopped with 'done'" in text
        assert "0 sampled" in text
        assert trainer.step == 2
        await buffer.close()

    asyncio.run(go())


def test_a_decoupled_clip_is_centred_on_the_policy_that_began_the_step_where_a_version_serves_several(tmp_path: Path):
    async def go() -> None:
        buffer = await filled_buffer(tmp_path, groups_of(8))
        algorithm = {"use": "grpo", "policy_loss": "decoupled_ppo"}
        trainer = build(buffer, tmp_path, algorithm=algorithm, steps=4, every=4, max_staleness=0)
        await trainer.run()
        assert trainer.monitor.steps("ratio_mean") == pytest.approx([1.0] * 4, abs=1e-4)
        first, *later = trainer.monitor.steps("behaviour_weight")
        assert first == pytest.approx(1.0, abs=1e-4)
        assert all(abs(weight - 1) > 1e-3 for weight in later)
        await buffer.close()

    asyncio.run(go())


@pytest.mark.parametrize("algorithm", [{"use": "gpg"}, {"use": "grpo", "kl": {"use": "k3", "on_flat_groups": False}}])
def test_case_30_when_every_group_is_flat_the_run_goes_on_whatever_its_loss_counts(tmp_path: Path, algorithm: Any):
    def flat(row: Any) -> Any:
        return row.replace(reward=1.0).with_streams(advantages=np.zeros(len(row), np.float32))

    async def go() -> None:
        buffer = await filled_buffer(tmp_path, [group.map(flat) for group in groups_of(10)])
        trainer = build(buffer, tmp_path, algorithm=algorithm, steps=5, max_untrainable_batches=2)
        await trainer.run()
        assert trainer.step == 5
        assert trainer.monitor.steps("skipped") == [1.0] * 5
        await buffer.close()

    asyncio.run(go())


def test_a_metric_that_is_not_finite_stops_no_update_and_enters_no_state(tmp_path: Path):
    @dataclass(frozen=True, kw_only=True)
    class Watching(Reinforce):
        def __call__(self, batch: Any, state: Any, progress: Any) -> Any:
            odd = metric("odd", batch.advantages / 0.0, batch.action_mask)
            return [*super().__call__(batch, state, progress), odd]

        def state0(self) -> dict[str, float]:
            return {"seen": 0.0}

        def update(self, state: Any, stats: Any) -> dict[str, float]:
            return {"seen": stats.get("odd", state["seen"])}

    async def go() -> None:
        buffer = await filled_buffer(tmp_path, groups_of(8))
        trainer = build(buffer, tmp_path, steps=4, max_bad_updates=2)
        watching = replace(trainer.algorithm, policy_loss=Watching())
        trainer.algorithm = trainer._updater.algorithm = watching
        trainer._updater.bricks = watching.state0()
        await trainer.run()
        assert trainer.step == 4
        assert trainer.monitor.steps("bad_updates") == [0.0] * 4
        assert np.isfinite(trainer.monitor.steps("loss")).all()
        assert trainer._updater.bricks["policy_loss"] == {"seen": 0.0}
        await buffer.close()

    asyncio.run(go())


def test_case_23_masters_in_low_precision_are_reported_and_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    async def go() -> None:
        buffer = await filled_buffer(tmp_path, groups_of(2))
        trainer = build(buffer, tmp_path, steps=1, model=tiny_llama().bfloat16())
        await trainer.run()
        assert trainer.monitor.rows[0][2]["rounded_masters"] == 1.0
        await buffer.close()

    with caplog.at_level("WARNING", logger="triune.trainer"):
        asyncio.run(go())
    assert "small updates round away" in caplog.text


def test_supervised_training_consumes_single_sequences_and_lowers_their_loss(tmp_path: Path):
    async def go() -> None:
        one = sampled_group("t", size=1, lengths=[(4, 8)])
        groups = [sampled_group(f"t{n:03d}", size=1, lengths=[(4, 8)]) for n in range(80)]
        groups = [group.map(lambda row: row.replace(tokens=one.experiences[0].tokens)) for group in groups]
        buffer = await filled_buffer(tmp_path, groups)
        trainer = build(
            buffer, tmp_path, algorithm="sft", steps=20, tasks_per_step=None, sequences_per_step=4, learning_rate=1e-2
        )
        await trainer.run()
        losses = trainer.monitor.steps("loss")
        assert len(losses) == 20
        assert losses[-1] < 0.2 * losses[0]
        await buffer.close()

    asyncio.run(go())


def test_stop_ends_the_run_after_the_step_with_a_checkpoint(tmp_path: Path):
    async def go() -> None:
        buffer = await filled_buffer(tmp_path, groups_of(6))
        trainer = build(buffer, tmp_path)
        await trainer.begin()
        trainer.stop("asked by a person")
        await trainer.run()
        assert trainer.exit_reason == "asked by a person"
        assert trainer.checkpoints.steps() == [0]
        await buffer.close()

    asyncio.run(go())


def test_an_alarm_that_stops_the_run_leaves_a_checkpoint_of_the_step_it_rang_at(tmp_path: Path):
    class Alarmed(RecordingMonitor):
        def log(self, metrics, *, role, step):
            super().log(metrics, role=role, step=step)
            if step == 2:
                raise TrainingError("step 2", "alarm entropy_collapse")

    async def body():
        buffer = await filled_buffer(tmp_path, [sampled_group(f"t{n}") for n in range(6)])
        trainer = build(buffer, tmp_path)
        trainer.monitor = Alarmed()
        with pytest.raises(TrainingError, match="entropy_collapse"):
            await trainer.run()
        assert trainer.checkpoints.steps() == [2]
        assert (await buffer.stats())["uses/acked"] == 4
        await buffer.close()

    asyncio.run(body())


def test_all_torch_runs_on_the_lane_one_job_per_micro_batch(tmp_path: Path):
    async def go() -> None:
        with ThreadLane() as lane:
            buffer = await filled_buffer(tmp_path, groups_of(2))
            trainer = build(buffer, tmp_path, steps=1, lane=lane, tokens_per_micro_batch=30)
            threads: set[str] = set()
            forward = trainer.policy.logprobs

            def watched(*args: Any, **more: Any) -> Any:
                import threading

                threads.add(threading.current_thread().name)
                return forward(*args, **more)

            trainer.policy.logprobs = watched  # type: ignore[method-assign]
            await trainer.run()
            assert threads == {"lane_0"}
            assert lane.num_jobs > 6
            await buffer.close()

    asyncio.run(go())


def test_a_learned_bandit_prefers_what_was_rewarded(tmp_path: Path):
    """End to end: tokens with positive advantage become likelier, those with negative ones less likely."""

    async def go() -> None:
        groups = groups_of(2, lengths=[(3, 3)] * 4)
        buffer = await filled_buffer(tmp_path, groups)
        trainer = build(buffer, tmp_path, steps=1, learning_rate=3e-3)
        batch = [(row, row.advantages[row.action_mask][0]) for group in groups for row in group.experiences]

        def total(row: Any) -> float:
            ids = torch.from_numpy(row.tokens.astype(np.int64))[None]
            with torch.no_grad():
                scores = trainer.policy.model(input_ids=ids).logits[0, :-1].log_softmax(-1)
            return float(scores.gather(1, ids[0, 1:, None])[row.action_mask[1:], 0].sum())

        before = [total(row) for row, _ in batch]
        await trainer.run()
        moved = [(total(row) - old) * credit for (row, credit), old in zip(batch, before, strict=True) if credit]
        assert moved
        assert sum(moved) > 0
        await buffer.close()

    asyncio.run(go())
