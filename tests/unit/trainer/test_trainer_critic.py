"""The critic: what it estimates, that layouts do not change it, its warm-up, its checkpoint."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from triune import registry
from triune.algorithms import Progress
from triune.config import load_config
from triune.errors import CheckpointError, ConfigError, TrainingError
from triune.failpoints import FailpointReached, arm_failpoints
from triune.models import LoraSettings, ModelSettings, load_model, weight_digest
from triune.ports import Lease
from triune.records import Group, Stop, Turn
from triune.testing.lanes import InlineLane
from triune.testing.tiny_models import save_tiny_llama, tiny_llama
from triune.testing.training import RecordingMonitor, filled_buffer, sampled_group
from triune.trainer import Checkpoints, Policy, RunIdentity, Trainer, TrainerSettings
from triune.trainer.batch import build_batch, prepare, stored_streams
from triune.trainer.critic import Critic, copy_for_critic
from triune.trainer.derived import derived_streams
from triune.trainer.layout import lay_out, pad_rows
from triune.trainer.rows import build_rows

PPO = {"use": "grpo", "advantage": "gae", "critic": {"use": "value_model", "learning_rate": 1e-2}}


@pytest.fixture(autouse=True)
def disarm():
    yield
    arm_failpoints("")


def algorithm_of(**changes: Any) -> Any:
    critic = {**PPO["critic"], **changes.pop("critic", {})}
    return registry.build("algorithm", {**PPO, **changes, "critic": critic}, "algorithm")


def critic_of(model: Any = None, *, seed: int | None = 1, **brick: Any) -> Critic:
    """A critic over a tiny model, its head random so that its values say something."""
    torch.set_float32_matmul_precision("highest")
    model = tiny_llama() if model is None else model
    critic = Critic(model, algorithm_of(critic=brick).critic, TrainerSettings(steps=10))
    if seed is not None:
        with torch.no_grad():
            critic.trainable["head.weight"].normal_(generator=torch.Generator().manual_seed(seed))
            critic.trainable["head.bias"].fill_(0.3)
    return critic


def leases(groups: list[Group]) -> list[Lease]:
    return [Lease(entry=str(group.id), revision=1, use_no=0, group=group) for group in groups]


def groups_of(num: int) -> list[Group]:
    model = tiny_llama()
    return [sampled_group(f"t{n:03d}", model=model) for n in range(num)]


# ------------------------------------------------------------------------------------------------ what it estimates


def test_values_start_at_0_and_are_read_from_the_state_that_predicts_the_token():
    rows = build_rows(leases(groups_of(2)))
    micro = pad_rows(rows, np.arange(len(rows)))
    assert not critic_of(seed=None).values(micro).any()
    critic, plain = critic_of(), tiny_llama()
    values = critic.values(micro)
    weight = critic.trainable["head.weight"].detach()
    assert weight.dtype == torch.float32
    for number, row in enumerate(rows.experiences):
        ids = torch.from_numpy(row.tokens.astype(np.int64))[None]
        with torch.no_grad():
            states = plain(input_ids=ids, output_hidden_states=True).hidden_states[-1][0]
        for place in np.flatnonzero(row.action_mask):
            assert values[number, place].item() == pytest.approx((states[place - 1] @ weight).item() + 0.3, abs=1e-4)
    assert not values[~micro.batch.action_mask].any()


@pytest.mark.parametrize("layout", ["trees", "padded", "unpacked", "small"])
def test_values_and_gradients_are_the_same_in_every_layout_and_micro_batch(layout: str):
    lengths = ([(6, 3), (6, 1), (6, 5), (6, 2)], [(9, 4), (9, 4), (9, 1)], [(2, 7)])
    rows = build_rows(leases([sampled_group(f"t{n}", lengths=shape) for n, shape in enumerate(lengths)]))
    numbers = np.arange(len(rows))
    returns = torch.from_numpy(np.random.default_rng(0).normal(size=len(rows)).astype(np.float32))

    def update(micros: list[Any], packs: bool = True) -> tuple[dict[Any, float], dict[str, torch.Tensor], float]:
        critic = critic_of()
        critic._packs = packs
        ready = []
        for micro in micros:
            target = returns[owners(rows, micro)][:, None] * micro.batch.action_mask
            with torch.no_grad():
                ready.append(micro.with_streams(returns=target, values=critic.values(micro)))
        divider = critic.open(ready, Progress(), rows.num_rollouts)
        values = {}
        for micro in ready:
            critic.backward(divider, micro)
            for place, number in enumerate(owners(rows, micro)):
                values[number] = micro.batch.values[place][micro.batch.action_mask[place]].tolist()
        gradients = {name: value.grad for name, value in critic.trainable.items()}
        return values, gradients, divider.metrics()["value_loss"]

    want = update([pad_rows(rows, np.array([number])) for number in numbers])
    made = {
        "trees": lambda: lay_out(rows, numbers, 10**6),
        "padded": lambda: [pad_rows(rows, numbers)],
        "unpacked": lambda: [pad_rows(rows, numbers)],
        "small": lambda: lay_out(rows, numbers, 25),
    }[layout]()
    assert (made[0].allowed is not None) == (layout in ("trees", "small"))
    got = update(made, packs=layout != "unpacked")
    assert got[0].keys() == want[0].keys()
    for number, values in want[0].items():
        assert got[0][number] == pytest.approx(values, abs=1e-4)
    for name, gradient in want[1].items():
        torch.testing.assert_close(got[1][name], gradient, atol=1e-4, rtol=1e-4)
    assert got[2] == pytest.approx(want[2], rel=1e-5)


def owners(rows: Any, micro: Any) -> list[int]:
    """Number of the row at each place of a micro-batch."""
    found = []
    for place, tokens in enumerate(micro.batch.tokens.tolist()):
        found += [
            number
            for number, row in enumerate(rows.experiences)
            if rows.rollouts[number] == micro.batch.rollouts[place]
            and tokens[: rows.ends[number]] == row.tokens[: rows.ends[number]].tolist()
        ]
    return found


def test_under_an_adapter_the_critic_shares_the_frozen_base_and_trains_an_adapter_of_its_own(tmp_path: Path):
    save_tiny_llama(tmp_path)
    model = load_model(ModelSettings(path=str(tmp_path), lora=LoraSettings(rank=2)))
    critic = critic_of(copy_for_critic(model), seed=1)
    own = dict(critic.model.named_parameters())
    for name, value in model.named_parameters():
        assert (own[name] is value) == ("lora_" not in name), name
    assert {name.rpartition(".lora_")[1] for name in critic.trainable} == {".lora_", ""}
    assert sum("lora_" not in name for name in critic.trainable) == 2  # the head's weight and bias
    rows = build_rows(leases(groups_of(1)))
    micro = pad_rows(rows, np.arange(len(rows)))
    before = weight_digest(dict(model.named_parameters()))
    values = critic.values(micro)
    values.square().sum().backward()
    critic.optimiser.update(0)
    assert weight_digest(dict(model.named_parameters())) == before
    assert not torch.equal(critic.values(micro), values)
    assert all(value.grad is None for value in model.parameters())


def test_a_critic_of_a_model_with_an_untied_head_does_not_copy_that_head():
    model = tiny_llama(tied=False)
    critic = critic_of(copy_for_critic(model))
    assert critic.model.lm_head.weight is model.lm_head.weight
    assert critic.model.model.embed_tokens.weight is not model.model.embed_tokens.weight
    assert not any("lm_head" in name for name in critic.trainable)


# ----------------------------------------------------------------------------------------------------- preparation


def prepared(groups: list[Group], *, critic: Critic | None = None, **changes: Any) -> Any:
    algorithm = algorithm_of(**changes)
    policy = Policy(tiny_llama(), float32_matmul="highest")
    policy.keep_reference()
    with torch.no_grad():
        for value in policy.trainable.values():
            value += 0.02
    batch = build_batch(
        leases(groups),
        streams=stored_streams(algorithm),
        derived=derived_streams(algorithm),
        mini_batches=1,
        budget=60,
        seed=(0,),
        device="cpu",
    )
    options = {"recomputes_old": True, "critic": critic or critic_of(), "state": algorithm.state0()}
    return asyncio.run(prepare(batch, policy, algorithm, InlineLane(), **options))


def test_rewards_of_turns_come_earlier_and_change_no_total():
    (row,) = sampled_group("t", size=1, lengths=[(3, 6)]).experiences
    turns = (Turn(start=3, stop=5, reward=0.5), Turn(start=5, stop=8, reward=0.25), Turn(start=8, stop=9))
    group = sampled_group("t", size=1, lengths=[(3, 6)]).with_records([row.replace(reward=2.0, turns=turns)])
    zero = critic_of(seed=None)
    (micro,) = prepared([group], critic=zero, advantage={"use": "gae", "whiten": False}).micros
    assert micro.batch.streams["token_rewards"][0].tolist() == [0, 0, 0, 0, 0.5, 0, 0, 0.25, -0.75]
    assert micro.batch.returns[0].tolist() == [0, 0, 0, 2.0, 2.0, 1.5, 1.5, 1.5, 1.25]
    stored = np.linspace(0, 0.8, 9, dtype=np.float32)
    group = group.map(lambda row: row.replace(turns=()).with_streams(token_rewards=stored))
    (micro,) = prepared([group], critic=zero, advantage={"use": "gae", "whiten": False}).micros
    assert micro.batch.streams["token_rewards"][0].tolist() == [0, 0, 0, *stored[3:].tolist()]


def test_a_sequence_that_was_cut_off_is_known_to_be_where_that_matters():
    group = sampled_group("t", lengths=[(3, 2), (3, 4)])
    first = group.experiences[0].id
    group = group.map(lambda row: row.replace(stop=Stop.LENGTH) if row.id == first else row)
    for micro in prepared([group], advantage={"use": "gae", "truncated": "bootstrap"}).micros:
        for rollout, cut in zip(micro.batch.rollouts.tolist(), micro.batch.streams["truncated"], strict=True):
            assert cut.max() == (rollout == 0)
    assert "truncated" not in prepared([group]).micros[0].batch.streams


def test_a_kl_penalty_in_the_reward_reaches_the_returns():
    groups = groups_of(2)
    kl = {"use": "k1", "place": "reward", "coefficient": 0.3}
    plain = {"use": "gae", "whiten": False}
    with_kl = prepared(groups, advantage=plain, kl=kl).micros
    without = prepared(groups, advantage=plain).micros
    assert any(micro.batch.streams["token_rewards"].abs().max() > 1e-3 for micro in with_kl)
    for one, other in zip(with_kl, without, strict=True):
        log_ratio = one.batch.old_logprobs - one.batch.ref_logprobs
        torch.testing.assert_close(one.batch.streams["token_rewards"], -0.3 * log_ratio)
        still_to_come = log_ratio.flip(1).cumsum(1).flip(1) * one.batch.action_mask
        expected = other.batch.returns - 0.3 * still_to_come
        torch.testing.assert_close(one.batch.returns, expected, atol=1e-5, rtol=1e-5)


# -------------------------------------------------------------------------------------------------------- the loop


def build(buffer: Any, folder: Path, *, model: Any = None, critic: Any = None, resume: bool = False, **given: Any):
    checkpoints = Checkpoints(folder / "checkpoints")
    lane = InlineLane()
    identity = given.pop("identity", None)
    algorithm = given.pop("algorithm", None) or algorithm_of(critic=critic or {})
    options = {"steps": 3, "tasks_per_step": 2, "learning_rate": 1e-3, "save_every": 0, **given}
    return Trainer(
        TrainerSettings(**options),
        Policy(model if model is not None else tiny_llama(), float32_matmul="highest"),
        algorithm,
        buffer=buffer,
        channel=registry.build("channel", "memory", "x")(ledger=buffer, lane=lane, folder=folder / "weights"),
        lane=lane,
        monitor=RecordingMonitor(),
        checkpoints=checkpoints,
        max_staleness=100,
        identity=identity,
        resume_from=checkpoints.latest() if resume else None,
    )


def digests(trainer: Trainer) -> tuple[str, str]:
    """Of the policy and of the critic with its optimiser's state."""
    assert trainer.critic is not None
    return weight_digest(dict(trainer.policy.trainable)), weight_digest(trainer.critic.state())


@pytest.mark.parametrize(
    ("lora", "settings"),
    [(None, {}), (LoraSettings(rank=2), {"epochs": 2, "mini_batches": 2})],
    ids=["full", "adapters and four updates"],
)
def test_case_42_a_resumed_run_with_a_critic_ends_with_the_weights_of_one_that_was_not_interrupted(
    tmp_path: Path, lora: Any, settings: Any
):
    folder, groups = save_tiny_llama(tmp_path / "model"), groups_of(8)

    def fresh() -> Any:
        return load_model(ModelSettings(path=str(folder), lora=lora))

    async def go(name: str, cut: bool) -> Any:
        buffer = await filled_buffer(tmp_path, groups)
        run = {"steps": 4, "save_every": 2, "schedule": "cosine", "critic": {"value_clip": 0.2}, **settings}
        trainer = build(buffer, tmp_path / name, model=fresh(), **run)
        if cut:
            arm_failpoints("trainer.checkpoint.after_rename:1:raise")
            with pytest.raises(FailpointReached):
                await trainer.run()
            await buffer.open_run("run", config_hash="", data_hash="")
            trainer = build(buffer, tmp_path / name, model=fresh(), resume=True, identity=RunIdentity(epoch=1), **run)
        await trainer.run()
        await buffer.close()
        return digests(trainer), trainer.monitor.steps("value_loss")[-2:]

    whole = asyncio.run(go("whole", cut=False))
    assert asyncio.run(go("cut", cut=True)) == whole


def test_before_its_warm_up_ends_the_critic_alone_is_trained(tmp_path: Path):
    async def go() -> None:
        buffer = await filled_buffer(tmp_path, groups_of(6))
        trainer = build(buffer, tmp_path, critic={"warmup_steps": 2})
        seen = [digests(trainer)]
        step = trainer._train

        async def watched(leases: Any) -> Any:
            found = await step(leases)
            seen.append(digests(trainer))
            return found

        trainer._train = watched  # type: ignore[method-assign]
        await trainer.run()
        policies, critics = zip(*seen, strict=True)
        assert policies[0] == policies[1] == policies[2] != policies[3]
        assert len(set(critics)) == 4
        rows = [row for _, _, row in trainer.monitor.rows if "value_loss" in row]
        assert ["loss" in row for row in rows] == [False, False, True]
        assert [row["num_updates"] for row in rows] == [0.0, 0.0, 1.0]
        assert [row["skipped"] for row in rows] == [0.0] * 3
        await buffer.close()

    asyncio.run(go())


def test_every_step_reports_the_critics_metrics_and_its_loss_falls(tmp_path: Path):
    async def go() -> None:
        group = sampled_group("t000", model=tiny_llama(), lengths=[(4, 5)] * 4)
        groups = [sampled_group(f"t{n:03d}", lengths=[(4, 5)] * 4) for n in range(24)]
        same = [one.with_records([row.replace(id=mine.id) for row, mine in
                                  zip(group.records, one.records, strict=True)]) for one in groups]  # fmt: skip
        buffer = await filled_buffer(tmp_path, same)
        trainer = build(buffer, tmp_path, steps=12, critic={"learning_rate": 1e-2})
        await trainer.run()
        rows = [row for _, _, row in trainer.monitor.rows if "loss" in row]
        wanted = {"value_loss", "explained_variance", "critic_grad_norm", "critic_learning_rate", "value_mean",
                  "return_mean", "policy_loss", "grad_norm"}  # fmt: skip
        for row in rows:
            assert wanted <= row.keys()
            assert np.isfinite(list(row.values())).all()
        assert rows[0]["value_mean"] == 0.0
        assert rows[-1]["value_loss"] < 0.5 * rows[0]["value_loss"]
        assert rows[0]["explained_variance"] == pytest.approx(0, abs=1e-6)
        assert rows[-1]["explained_variance"] > 0.1
        assert trainer.monitor.rows[0][2]["num_critic_parameters"] > 0
        await buffer.close()

    asyncio.run(go())


def test_a_critic_that_is_not_finite_moves_nothing_of_its_own_and_ends_the_run(tmp_path: Path):
    async def go() -> None:
        buffer = await filled_buffer(tmp_path, groups_of(6))
        trainer = build(buffer, tmp_path, max_bad_updates=2, algorithm=algorithm_of(advantage=Endless()))
        before = digests(trainer)[1]
        with pytest.raises(TrainingError, match=r"value_loss.*2 updates in a row"):
            await trainer.run()
        assert digests(trainer)[1] == before
        await buffer.close()

    asyncio.run(go())


class Endless:
    """An advantage whose returns are infinite."""

    where, needs, takes_token_rewards = "trainer", frozenset({"values"}), False

    def over_batch(self, batches: Any, all_sum: Any, num_rollouts: int) -> Any:
        return [{"advantages": b.values + 1.0, "returns": torch.full_like(b.values, torch.inf)} for b in batches]


def test_a_checkpoint_without_a_critic_is_refused(tmp_path: Path):
    async def go() -> None:
        buffer = await filled_buffer(tmp_path, groups_of(4))
        await build(buffer, tmp_path, steps=1, algorithm=registry.build("algorithm", "grpo", "x")).run()
        await buffer.open_run("run", config_hash="", data_hash="")
        with pytest.raises(CheckpointError, match="holds no critic"):
            await build(buffer, tmp_path, steps=2, resume=True).begin()
        await buffer.close()

    asyncio.run(go())


# -------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"critic": "none"},
            r"critic: found none, and advantage gae needs values.*write `critic: value_model`",
        ),
        ({"advantage": "grpo"}, r"algorithm\.critic: found value_model, and nothing reads its values.*`critic: none`"),
        ({"critic": {"use": "value_model", "warmup_steps": 9}}, r"warmup_steps: found 9 with `trainer\.steps: 5`"),
        ({"critic": {"use": "value_model", "learning_rate": 0}}, r"algorithm\.critic\.learning_rate: found 0"),
    ],
)
def test_a_critic_that_does_not_fit_is_refused_with_what_to_write(changes: Any, text: str):
    config = {"tasks": {"use": "arithmetic"}, "trainer": {"steps": 5}, "algorithm": {**PPO, **changes}}
    with pytest.raises(ConfigError, match=text):
        load_config(config)


def test_a_trainer_refuses_values_without_a_critic_too():
    with pytest.raises(ConfigError, match="write `critic: value_model`"):
        stored_streams(registry.build("algorithm", {"use": "grpo", "advantage": "gae"}, "algorithm"))
