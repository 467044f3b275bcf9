"""Planted faults: what goes wrong in reinforcement fine-tuning without a message, one switch each.

`with plant("mask_one_token_late"): …` changes one thing in Triune for the duration. Each fault names the check of
`triune selfcheck` that finds it and words of the cause it must name, so that whoever writes a check (or an engine, a
recorder, a loss of their own) can see it fail.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from triune.ports import Completion
from triune.records import Experience, Stop

LORA = {"model": {"lora": {"rank": 4}}}


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One way of going wrong.

    Attributes:
        name: Of the switch.
        breaks: What is wrong while it is planted.
        found_by: Name of the check that must find it.
        says: A regular expression that the cause must match.
        sections: Sections of a run file without which the fault has no effect.
        plant: Opens the fault.
    """

    name: str
    breaks: str
    found_by: str
    says: str
    sections: Mapping[str, Any] = field(default_factory=dict)
    plant: Callable[[], AbstractContextManager[None]]


FAULTS: dict[str, Fault] = {}
"""Every fault by name."""


def plant(name: str) -> AbstractContextManager[None]:
    """Inside, this fault is planted."""
    return FAULTS[name].plant()


def fault(found_by: str, says: str, **sections: Any) -> Callable[[Callable[[], Iterator[None]]], Any]:
    """Register a fault; its docstring says what it breaks."""

    def register(function: Callable[[], Iterator[None]]) -> Any:
        made = contextmanager(function)
        name: str = function.__name__
        FAULTS[name] = Fault(
            name=name,
            breaks=(function.__doc__ or "").strip(),
            found_by=found_by,
            says=says,
            sections=sections,
            plant=made,
        )
        return made

    return register


@contextmanager
def swapped(home: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, `home.name` is what `make` makes of it."""
    original = getattr(home, name)
    setattr(home, name, make(original))
    try:
        yield
    finally:
        setattr(home, name, original)


# ------------------------------------------------------------------------------------------------ the recorder


def _recorded(change: Callable[[Experience], Experience]) -> AbstractContextManager[None]:
    """Change every experience on its way into its group."""
    from triune.explorer import group_run

    return swapped(group_run, "build_experiences", lambda build: lambda members: list(map(change, build(members))))


def _masked(row: Experience, mask: np.ndarray) -> Experience:
    """Copy with another mask, and everything else so that the buffer takes it."""
    return row.replace(
        action_mask=mask,
        logprobs=np.where(mask, np.nan_to_num(row.logprobs, nan=-1.0), np.nan).astype(np.float32),
        versions=np.where(mask, np.maximum(row.versions, 0), -1).astype(np.int32),
        turns=(),
    )


@fault("mask", "shifted by one token")
def mask_one_token_late() -> Iterator[None]:
    """The action mask stands one token to the right of what was sampled."""
    with _recorded(lambda row: _masked(row, np.roll(row.action_mask, 1))):
        yield


@fault("mask", "prompt tokens are trained")
def prompt_trained() -> Iterator[None]:
    """The prompt is trained as if it had been sampled."""
    with _recorded(lambda row: _masked(row, np.ones_like(row.action_mask))):
        yield


@fault("mask", "end tokens of answers .* are not trained", explorer={"max_tokens": 48, "stop": ["a", "e", "1"]})
def end_token_untrained() -> Iterator[None]:
    """The sampled stop token is left out of the mask."""

    def change(row: Experience) -> Experience:
        mask = row.action_mask.copy()
        mask[-1] = mask[-1] and row.stop is not Stop.DONE
        return _masked(row, mask)

    with _recorded(change):
        yield


@fault("mask", "log-probs are not those that the engine gave.*shifted by one token")
def logprobs_one_token_late() -> Iterator[None]:
    """Log-probs stand one sampled token to the right of the tokens they speak of."""

    def change(row: Experience) -> Experience:
        logprobs = row.logprobs.copy()
        logprobs[row.action_mask] = np.roll(logprobs[row.action_mask], 1)
        return row.replace(logprobs=logprobs)

    with _recorded(change):
        yield


@fault("turns", "tokenised again")
def turns_tokenised_again() -> Iterator[None]:
    """The prompt of a later turn is encoded from text, past answers included."""
    from triune.explorer.session import Session

    def make(sample: Any) -> Any:
        def again(self: Any, ids: Any, text: Any, branch: Any, *rest: Any) -> Any:
            ids = self.shared.tokenizer.encode(text) if branch is not None and text is not None else ids
            return sample(self, ids, text, branch, *rest)

        return again

    with swapped(Session, "_sample", make):
        yield


@fault("turns", "between two turns the engine read")
def separator_dropped_between_turns() -> Iterator[None]:
    """What the chat template writes between two turns lacks its first token."""
    from triune.models import ChatTokenizer

    def make(extend: Any) -> Any:
        def short(self: Any, *given: Any) -> Any:
            added = extend(self, *given)
            return added if added is None else added[1:]

        return short

    with swapped(ChatTokenizer, "extend", make):
        yield


@fault("turns", "the engine read .*, and the chat template writes")
def generation_prompt_forgotten() -> Iterator[None]:
    """Prompts end before the template's opening of the assistant's turn."""
    from triune.models import ChatTokenizer

    def make(render: Any) -> Any:
        return lambda self, messages, tools=(), *, generate=True: render(self, messages, tools, generate=False)

    with swapped(ChatTokenizer, "render", make):
        yield


# ------------------------------------------------------------------------------------------------ the rollouts


@fault("rollouts", "no field 'question'")
def question_missing() -> Iterator[None]:
    """The workflow looks for a field that the tasks do not have."""
    from triune.explorer.workflows.single_turn import SingleTurn
    from triune.records import Task

    def make(messages: Any) -> Any:
        return lambda self, task: messages(self, Task(key=task.key, data={"q": 1}))

    with swapped(SingleTurn, "messages", make):
        yield


@fault("groups", "group ids are mixed")
def groups_mixed() -> Iterator[None]:
    """Every other member of a group is given another group's task."""
    from triune.explorer.model import Model
    from triune.explorer.scheduler import Scheduler

    def make(call: Any) -> Any:
        first: list[Any] = []

        def other(self: Any, rollout: Any) -> Any:
            run = rollout.run
            first.append(run.task)
            if rollout.member % 2 and run.task is not first[0]:
                return run.bound.call(first[0], Model(rollout.session), None)
            return call(self, rollout)

        return other

    with swapped(Scheduler, "_call", make):
        yield


@fault("groups", "same seed")
def one_seed_for_all_members() -> Iterator[None]:
    """All members of a group are sampled with the same random numbers."""
    from triune.explorer import session

    def make(seed: Any) -> Any:
        return lambda group, member, attempt, turn: seed(group, 0, attempt, turn)

    with swapped(session, "turn_seed", make):
        yield


@fault("groups", "sampling has no chance in it")
def sampling_without_chance() -> Iterator[None]:
    """The engine's random numbers are all the same."""
    from triune.explorer.engines import _batcher

    with swapped(_batcher, "uniforms", lambda draw: lambda seeds, places: np.full(len(seeds), 0.5)):
        yield


def _completed(change: Callable[[Any, Any], Any]) -> AbstractContextManager[None]:
    """Change every completion of the embedded engine: `change(request, completion)`."""
    from triune.explorer.engines.embedded import EmbeddedEngine

    def make(generate: Any) -> Any:
        async def changed(self: Any, request: Any) -> Any:
            done = change(request, await generate(self, request))
            return done if isinstance(done, Completion) else await done(self)

        return changed

    return swapped(EmbeddedEngine, "generate", make)


@fault("stops", "stop token is not among the tokens", explorer={"max_tokens": 200})
def stop_token_stripped() -> Iterator[None]:
    """The engine hands out answers without the stop token that ended them."""

    def change(request: Any, done: Any) -> Any:
        if done.stop is not Stop.DONE or len(done.tokens) < 2:
            return done
        parts = {name: getattr(done, name)[:-1] for name in ("tokens", "logprobs", "versions")}
        return msgspec.structs.replace(done, **parts, raw_logprobs=None)

    with _completed(change):
        yield


@fault("stops", "says it ended by itself and was cut", explorer={"max_tokens": 3})
def cut_answers_say_done() -> Iterator[None]:
    """Answers that ran into `max_tokens` say that they ended by themselves."""

    def change(request: Any, done: Any) -> Any:
        return msgspec.structs.replace(done, stop=Stop.DONE) if done.stop is Stop.LENGTH else done

    with _completed(change):
        yield


@fault("versions", "labelled with version 7")
def version_mislabelled() -> Iterator[None]:
    """Tokens carry another version than that of the weights that made them."""
    with _completed(
        lambda request, done: msgspec.structs.replace(done, versions=np.full(len(done.tokens), 7, dtype=np.int32))
    ):
        yield


# -------------------------------------------------------------------------------------------------- log-probs


@fault("logprobs", "recorded log-probs at temperature 1", explorer={"temperature": 0.6})
def temperature_ignored_by_recorder() -> Iterator[None]:
    """Log-probs are recorded at temperature 1, whatever was sampled at."""

    def change(request: Any, done: Any) -> Any:
        async def cold(engine: Any) -> Any:
            ids = np.concatenate([request.prompt, done.tokens])
            found = await engine.logprobs(ids, temperature=1.0)
            return msgspec.structs.replace(done, logprobs=found[len(request.prompt) :])

        return cold

    with _completed(change):
        yield


@fault("logprobs", "the trainer ignores the temperature", explorer={"temperature": 0.6})
def temperature_ignored_by_trainer() -> Iterator[None]:
    """The trainer computes log-probs at temperature 1."""
    from triune.trainer import layout

    with swapped(layout, "_temperature", lambda find: lambda *given: None):
        yield


@fault("logprobs", "log-probs of the truncated distribution", explorer={"top_k": 5, "record_truncation": True})
def truncated_logprobs_recorded() -> Iterator[None]:
    """Under top-k, only log-probs of the truncated distribution are recorded."""
    with _recorded(lambda row: row.replace(raw_logprobs=None)):
        yield


@fault("logprobs", "not finite: something overflows")
def float16_overflow() -> Iterator[None]:
    """The trainer's logits pass through float16 and overflow."""
    from triune.trainer import head

    with swapped(head, "_logits", lambda make: lambda *given: (make(*given) * 1e5).half().float()):
        yield


@fault("repeatable", "dropout or another random layer is on")
def dropout_left_on() -> Iterator[None]:
    """The model drops a tenth of its activations in every pass."""
    from triune.launcher import trainer_side

    def make(load: Any) -> Any:
        def with_dropout(*given: Any, **named: Any) -> Any:
            import torch

            model = load(*given, **named)
            for name, module in model.named_modules():
                if name.endswith("mlp"):
                    module.register_forward_hook(
                        lambda _, __, output: torch.nn.functional.dropout(output, 0.1, training=True)
                    )
            return model

        return with_dropout

    with swapped(trainer_side, "load_model", make):
        yield


# ----------------------------------------------------------------------------------------------- the layout


@fault("layout", "tokens see other answers of their group, or have wrong positions")
def answers_see_each_other() -> Iterator[None]:
    """Answers that share a prompt in the trainer's layout see each other."""
    from triune.trainer import layout

    def make(mask: Any) -> Any:
        def leaky(segments: Any) -> Any:
            shape = (*segments.shape, segments.shape[1])
            return segments.new_ones(shape).tril().bool()

        return leaky

    with swapped(layout, "_tree_mask", make):
        yield


@fault("layout", "tokens see other answers of their group, or have wrong positions")
def positions_off_by_one() -> Iterator[None]:
    """From the third token on, positions in shared layouts are one too large."""
    from dataclasses import replace

    from triune.trainer import layout

    def make(grow: Any) -> Any:
        def shifted(*given: Any) -> Any:
            micro = grow(*given)
            return replace(micro, positions=micro.positions + (micro.positions > 2))

        return shifted

    with swapped(layout, "grow_trees", make):
        yield


@fault("layout", "padding or other rows leak into the attention")
def padding_leaks() -> Iterator[None]:
    """Rows are padded on the left, and what stands there is attended to."""
    from dataclasses import replace

    from triune.trainer import layout

    def make(pad: Any) -> Any:
        def left(*given: Any) -> Any:
            micro = pad(*given)
            width = micro.inputs.shape[1]
            moved = width - micro.inside.sum(1)
            inputs = micro.inputs.clone()
            for row, step in enumerate(moved.tolist()):
                inputs[row] = micro.inputs[row].roll(step)
                inputs[row, :step] = 0
            before = micro.before + moved[micro.before // width]
            return replace(micro, inputs=inputs, before=before, inside=micro.inside | True)

        return left

    with swapped(layout, "pad_rows", make):
        yield


@fault("micro_batches", "mean of means")
def mean_of_micro_batches() -> Iterator[None]:
    """Every micro-batch is divided by its own count, and the results are averaged."""
    from triune.trainer import updates

    def make(divider: Any) -> Any:
        class MeanOfMeans(divider):
            def __init__(self, algorithm: Any, batches: Any, **named: Any) -> None:
                super().__init__(algorithm, batches, **named)
                self._own, self._share = named, 1.0 / max(len(batches), 1)

            def loss(self, batch: Any) -> Any:
                super().loss(batch)
                return divider(self.algorithm, [batch], **self._own).loss(batch) * self._share

        return MeanOfMeans

    with swapped(updates, "Divider", make):
        yield


@fault("micro_batches", "the gradient differs")
def sum_of_means() -> Iterator[None]:
    """The loss of an update grows with the number of its micro-batches; clipping makes the step look the same."""
    from triune.trainer import updates

    def make(divider: Any) -> Any:
        class SumOfMeans(divider):
            def __init__(self, algorithm: Any, batches: Any, **named: Any) -> None:
                super().__init__(algorithm, batches, **named)
                self._factor = float(len(batches))

            def loss(self, batch: Any) -> Any:
                return super().loss(batch) * self._factor

        return SumOfMeans

    with swapped(updates, "Divider", make):
        yield


# ------------------------------------------------------------------------------------------------ the reward


def _rewarded(change: Callable[[int, Any], Any]) -> AbstractContextManager[None]:
    """Change every reward of a single answer: `change(number of the call, reward)`."""
    from triune.tasks import Scorer

    def make(score: Any) -> Any:
        calls: list[None] = []

        async def changed(self: Any, *given: Any, **named: Any) -> Any:
            reward = await score(self, *given, **named)
            calls.append(None)
            return change(len(calls), reward)

        return changed

    return swapped(Scorer, "score", make)


@fault("reward_order", "scored in another order|when it was scored again")
def reward_depends_on_order() -> Iterator[None]:
    """The reward of an answer depends on how many were scored before it."""
    with _rewarded(lambda number, reward: msgspec.structs.replace(reward, total=reward.total + number * 1e-3)):
        yield


@fault("reward_validity", "returned nan")
def reward_not_a_number() -> Iterator[None]:
    """The reward function returns NaN now and then."""
    from triune.tasks import Scorer

    def make(call: Any) -> Any:
        calls: list[None] = []

        async def nan(self: Any, *given: Any) -> Any:
            calls.append(None)
            value = await call(self, *given)
            return float("nan") if len(calls) % 3 == 0 else value

        return nan

    with swapped(Scorer, "_call", make):
        yield


@fault("reward_spread", "every rollout got 1")
def reward_constant() -> Iterator[None]:
    """The reward is the same for every answer."""
    with _rewarded(lambda number, reward: msgspec.structs.replace(reward, total=1.0)):
        yield


@fault("reward_speed", "the run would wait for its reward")
def reward_slow() -> Iterator[None]:
    """The reward takes a fifth of a second."""
    from triune.tasks import Scorer

    def make(score: Any) -> Any:
        async def slow(self: Any, *given: Any, **named: Any) -> Any:
            await asyncio.sleep(0.2)
            return await score(self, *given, **named)

        return slow

    with swapped(Scorer, "score", make):
        yield


# ------------------------------------------------------------------------------------- advantage, loss, reference


def _credited(change: Callable[[np.ndarray, Experience], np.ndarray]) -> AbstractContextManager[None]:
    """Change GRPO's advantages."""
    from triune.algorithms.advantages.grpo import GRPOAdvantage

    def make(call: Any) -> Any:
        def changed(self: Any, group: Any) -> Any:
            return call(self, group).map(
                lambda row: row.with_streams(advantages=change(row.advantages, row).astype(np.float32))
            )

        return changed

    return swapped(GRPOAdvantage, "__call__", make)


@fault("advantages", "the sign is flipped")
def advantage_sign_flipped() -> Iterator[None]:
    """Worse rollouts are credited."""
    with _credited(lambda values, row: -values):
        yield


@fault("advantages", "they are not centred")
def advantages_not_centred() -> Iterator[None]:
    """The group's mean is not subtracted, so that groups without a difference teach something."""
    with _credited(lambda values, row: values + row.action_mask):
        yield


@fault("advantages", "tokens that were not sampled")
def advantages_on_the_prompt() -> Iterator[None]:
    """Advantages stand on the prompt as well."""
    with _credited(lambda values, row: np.full_like(values, values.sum())):
        yield


@fault("direction", "points away from better answers")
def loss_sign_flipped() -> Iterator[None]:
    """The loss is maximised."""
    from dataclasses import replace

    from triune.algorithms.policy_losses.ppo_clip import PPOClip

    def make(call: Any) -> Any:
        def flipped(self: Any, *given: Any) -> Any:
            first, *others = call(self, *given)
            return [replace(first, value=-first.value), *others]

        return flipped

    with swapped(PPOClip, "__call__", make):
        yield


@fault("first_update", "the mean probability ratio is")
def ratio_of_other_tokens() -> Iterator[None]:
    """The trainer compares log-probs of a token with those that were recorded for the one before."""
    from triune.trainer import rows

    def make(gather: Any) -> Any:
        def rolled(*given: Any) -> Any:
            found = gather(*given)
            found.streams["behaviour_logprobs"] = np.roll(found.streams["behaviour_logprobs"], 1)
            return found

        return rolled

    from triune.trainer import batch

    with swapped(rows, "build_rows", make), swapped(batch, "build_rows", make):
        yield


@fault("reference", "it is the policy itself", algorithm={"kl": {"use": "k3", "coefficient": 0.01}})
def reference_is_the_policy() -> Iterator[None]:
    """The reference is no copy, so that the KL is 0 for ever."""
    from triune.trainer.policy import Policy

    def make(keep: Any) -> Any:
        def share(self: Any) -> None:
            self._reference = self

        return share

    with swapped(Policy, "keep_reference", make):
        yield


@fault("first_update", "the KL to the reference is", algorithm={"kl": {"use": "k3", "coefficient": 0.01}})
def reference_is_another_model() -> Iterator[None]:
    """The reference is not the initial policy."""
    from triune.trainer.policy import Policy

    def make(keep: Any) -> Any:
        def moved(self: Any) -> None:
            keep(self)
            for value in self._reference.model.parameters():
                value.data.mul_(1.05)

        return moved

    with swapped(Policy, "keep_reference", make):
        yield


# ---------------------------------------------------------------------------------------------- the optimiser


@fault("optimiser", "the optimiser leaves them out")
def optimiser_skips_a_group() -> Iterator[None]:
    """Norms and biases are in no group of the optimiser."""
    from triune.trainer.optimiser import Optimiser

    def make(init: Any) -> Any:
        def short(self: Any, *given: Any) -> None:
            init(self, *given)
            self._adamw.param_groups[:] = [g for g in self._adamw.param_groups if g["params"][0].ndim >= 2]

        return short

    with swapped(Optimiser, "__init__", make):
        yield


@fault("optimiser", "frozen parameters changed", **LORA)
def frozen_base_changed() -> Iterator[None]:
    """Under an adapter, the base moves too."""
    from triune.trainer.updates import Updater

    def make(apply: Any) -> Any:
        def moved(self: Any, *given: Any) -> Any:
            found = apply(self, *given)
            frozen = next(value for value in self.policy.model.parameters() if not value.requires_grad)
            frozen.data.add_(1e-3)
            return found

        return moved

    with swapped(Updater, "_apply", make):
        yield


@fault("optimiser", "clipping goes wrong", trainer={"max_grad_norm": 1e-3})
def gradient_clipped_to_zero() -> Iterator[None]:
    """Gradients above the bound are set to 0 instead of scaled."""
    from triune.trainer import optimiser

    def make(clip: Any) -> Any:
        def zero(parameters: Any, *given: Any, **named: Any) -> None:
            for value in parameters:
                value.grad.zero_()

        return zero

    with swapped(optimiser, "clip_grads_with_norm_", make):
        yield


# -------------------------------------------------------------------------------------------------- weights


def _swaps(change: Callable[[Any, Any, Any, Mapping[str, Any]], None]) -> AbstractContextManager[None]:
    """Change every swap of the embedded engine but the first: `change(swap, batcher, update, tensors)`."""
    from triune.explorer.engines._batcher import Batcher

    def make(swap: Any) -> Any:
        def changed(self: Any, update: Any, tensors: Any) -> None:
            if self.version < 0:
                swap(self, update, tensors)
                self.first = {name: value.clone() for name, value in tensors.items()}
            else:
                change(swap, self, update, tensors)

        return changed

    return swapped(Batcher, "swap", make)


@fault("weight_swap", "the swap is ignored")
def swap_ignored() -> Iterator[None]:
    """The engine confirms new weights and goes on with the old ones."""

    def change(swap: Any, batcher: Any, update: Any, tensors: Any) -> None:
        batcher.version = update.version

    with _swaps(change):
        yield


@fault("weight_swap", "the engine serves other weights")
def swap_half_done() -> Iterator[None]:
    """The engine takes every other tensor and keeps the rest of an older version."""
    from triune.models import weight_digest

    def change(swap: Any, batcher: Any, update: Any, tensors: Any) -> None:
        mixed = {name: batcher.first[name] if n % 2 else value for n, (name, value) in enumerate(tensors.items())}
        swap(batcher, msgspec.structs.replace(update, digest=weight_digest(mixed)), mixed)

    with _swaps(change):
        yield


@fault("weight_swap", "says that it serves")
def swap_not_confirmed() -> Iterator[None]:
    """The engine takes new weights and goes on naming the old version."""

    def change(swap: Any, batcher: Any, update: Any, tensors: Any) -> None:
        before = batcher.version
        swap(batcher, update, tensors)
        batcher.version = before

    with _swaps(change):
        yield


def _snapshots(make: Callable[[Any], Any]) -> AbstractContextManager[None]:
    from triune.sync.channels import memory

    return swapped(memory, "snapshot", make)


@fault("weight_swap", "a stale copy was published")
def stale_copy_published() -> Iterator[None]:
    """Every version is the first one again."""

    def make(snapshot: Any) -> Any:
        first: list[Any] = []

        def stale(*given: Any) -> Any:
            if not first:
                first.append(snapshot(*given))
            return first[0]

        return stale

    with _snapshots(make):
        yield


@fault("weight_swap", "changed after it was published")
def live_weights_published() -> Iterator[None]:
    """A published version is a view of the weights that the optimiser goes on changing."""

    def make(snapshot: Any) -> Any:
        def live(state: Any, dtype: Any) -> Any:
            _, digest, name = snapshot(state, dtype)
            return state, digest, name

        return live

    with _snapshots(make):
        yield


# ---------------------------------------------------------------------------------------- checkpoint, export


def _saves(change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> AbstractContextManager[None]:
    """Change the weights on their way into a checkpoint."""
    from triune.trainer import Checkpoints

    def make(save: Any) -> Any:
        return lambda self, state, weights, *rest: save(self, state, change(weights), *rest)

    return swapped(Checkpoints, "save", make)


@fault("checkpoint", "its weights differ from the model's")
def checkpoint_loses_a_tensor() -> Iterator[None]:
    """A checkpoint lacks one tensor."""
    with _saves(lambda weights: dict(list(weights.items())[1:])):
        yield


@fault("checkpoint", "is not what was saved")
def checkpoint_rounds() -> Iterator[None]:
    """A checkpoint holds the weights in bfloat16."""
    with _saves(lambda weights: {name: value.bfloat16() for name, value in weights.items()}):
        yield


def _exports(change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> AbstractContextManager[None]:
    """Change the weights on their way into an exported folder."""
    from triune.models import export

    def make(save: Any) -> Any:
        return lambda base, weights, folder: save(base, change(weights), folder)

    return swapped(export, "_save_weights", make)


@fault("export", "differs in the exported model by")
def export_scaled() -> Iterator[None]:
    """Exported weights are one percent too large."""
    with _exports(lambda weights: {name: value * 1.01 for name, value in weights.items()}):
        yield


@fault("export", "a dtype that rounds")
def export_rounds() -> Iterator[None]:
    """Exported weights went through bfloat16."""
    with _exports(lambda weights: {name: value.bfloat16().float() for name, value in weights.items()}):
        yield


@fault("export", "a tied head must be tied again, or written")
def tied_head_lost_in_export() -> Iterator[None]:
    """The exported configuration says that the head is not tied, and the folder holds none."""
    from triune.models import export

    def make(save: Any) -> Any:
        def untied(base: Any, weights: Any, folder: Any) -> None:
            save(base, weights, folder)
            file = folder / "config.json"
            file.write_text(json.dumps({**json.loads(file.read_text()), "tie_word_embeddings": False}))

        return untied

    with swapped(export, "_save_weights", make):
        yield


@fault("export", "an adapter that was not merged", **LORA)
def adapter_not_merged() -> Iterator[None]:
    """The exported folder holds the base without the adapter."""
    from triune.models import export

    def make(canonical: Any) -> Any:
        def bare(model: Any) -> Any:
            layers = [layer for layer in model.modules() if hasattr(layer, "get_delta_weight")]
            for layer in layers:
                layer.get_delta_weight = lambda name, find=layer.get_delta_weight: find(name) * 0.0
            try:
                return canonical(model)
            finally:
                for layer in layers:
                    del layer.get_delta_weight

        return bare

    with swapped(export, "canonical_state", make):
        yield
