"""Settings of two rooms that must fit; every check reports, none stops the others."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from triune.buffer.entries import MAIN
from triune.config.consumption import UNITS, wanted_unit
from triune.errors import ConfigError

if TYPE_CHECKING:
    from triune.config.run_config import RunConfig

Check = Callable[["RunConfig"], Iterator[ConfigError]]


def check_config(config: RunConfig) -> list[ConfigError]:
    """All problems between settings that are each valid by themselves."""
    return [problem for check in CHECKS for problem in check(config)]


def _brick_name(brick: object) -> str:
    return getattr(brick, "__brick__", ("", ""))[1]


def _algorithm(config: RunConfig) -> Iterator[ConfigError]:
    """Bricks of the algorithm that do not fit each other; a group of one for a group method (case 24)."""
    try:
        config.algorithm.check("algorithm")
    except ConfigError as error:
        yield error


def _critic(config: RunConfig) -> Iterator[ConfigError]:
    """A critic is there exactly when something reads its values."""
    algorithm, steps = config.algorithm, config.trainer.steps
    critic, is_read = algorithm.critic, "values" in algorithm.needs
    if is_read and not critic.makes_values:
        yield ConfigError(
            "algorithm.critic", f"found {_brick_name(critic)}, and advantage {_brick_name(algorithm.advantage)} needs "
            "values", "a critic", "write `critic: value_model`, or `advantage: grpo`",
        )  # fmt: skip
    if critic.makes_values and not is_read:
        yield ConfigError(
            "algorithm.critic", f"found {_brick_name(critic)}, and nothing reads its values", "none",
            "write `critic: none`, or `advantage: gae`",
        )  # fmt: skip
    warmup = getattr(critic, "warmup_steps", 0)
    if warmup and warmup >= steps:
        yield ConfigError(
            "algorithm.critic.warmup_steps", f"found {warmup} with `trainer.steps: {steps}`: the policy would never be "
            "updated", f"fewer than {steps}", "lower it, or raise trainer.steps",
        )  # fmt: skip


def _teacher(config: RunConfig) -> Iterator[ConfigError]:
    """Distillation without a teacher; a teacher that nobody asks."""
    teacher, is_read = config.teacher, "teacher_logprobs" in config.algorithm.needs
    if is_read and teacher is None:
        is_made = any("teacher_logprobs" in getattr(operator, "makes", ()) for operator in config.pipeline)
        if not is_made and getattr(config.algorithm.sampling, "fresh_ratio", 1.0) > 0:
            yield ConfigError(
                "teacher", f"found none, and {_brick_name(config.algorithm)} needs teacher_logprobs, which answers "
                "that are sampled now do not have", "a model to distil from", "write `teacher: {path: …}`",
            )  # fmt: skip
    if teacher is None:
        return
    if not is_read:
        yield ConfigError(
            "teacher", f"found {teacher.path}, and {_brick_name(config.algorithm)} asks no teacher", "none",
            "leave it out, or write `algorithm: on_policy_distill`",
        )  # fmt: skip
    for key in ("lora", "gradient_checkpointing", "chat_template"):
        if getattr(teacher, key):
            yield ConfigError(
                f"teacher.{key}",
                f"found {getattr(teacher, key)!r}",
                "",
                "leave it out: it is not trained and writes nothing",
            )


def _pipeline(config: RunConfig) -> Iterator[ConfigError]:
    """Fields of one operator that do not fit each other."""
    for number, operator in enumerate(config.pipeline):
        try:
            getattr(operator, "check", lambda where: None)(f"pipeline.{number}")
        except ConfigError as error:
            yield error


def _flat_groups(config: RunConfig) -> Iterator[ConfigError]:
    """Dropping what is flat, where nothing else there is or where flat groups teach something."""
    algorithm = config.algorithm
    droppers = {f"pipeline.{number}": operator for number, operator in enumerate(config.pipeline)}
    for where, brick in {**droppers, "algorithm.sampling": algorithm.sampling}.items():
        if not getattr(brick, "drops_flat_groups", False):
            continue
        if algorithm.group_size == 1:
            yield ConfigError(
                where, f"found {_brick_name(brick)} with `algorithm.group_size: 1`: every group of one is flat",
                "groups of several", "leave it out, or write `algorithm.group_size: 8`",
            )  # fmt: skip
        elif not getattr(algorithm.advantage, "zero_on_flat", True):
            yield ConfigError(
                where, f"found {_brick_name(brick)}, and {_brick_name(algorithm.advantage)} learns from flat groups",
                "an advantage that is 0 on them", "leave it out",
            )  # fmt: skip


def _truncation(config: RunConfig) -> Iterator[ConfigError]:
    """Case 2: truncated sampling without the log-probs that correct for it."""
    explorer = config.explorer
    if explorer.record_truncation:
        return
    for key, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        value = getattr(explorer, key)
        if value != off:
            yield ConfigError(
                f"explorer.{key}",
                f"found {value} in training, where every ratio would be off by the probability mass that was cut",
                f"{key}: {off}, or recorded log-probs",
                f"write `explorer.record_truncation: true`, or leave {key} out (eval.{key} is free)",
            )


def _groups(config: RunConfig) -> Iterator[ConfigError]:
    size, least = config.algorithm.group_size, config.explorer.min_group
    own = getattr(config.algorithm, "min_group", None)
    if own is not None and least is not None and own != least:
        yield ConfigError(
            "explorer.min_group",
            f"found {least}, and algorithm.min_group is {own}",
            "one number",
            "write only one of them",
        )
    if least is not None and least > size:
        yield ConfigError(
            "explorer.min_group",
            f"found {least} with `algorithm.group_size: {size}`",
            "at most the group size",
            "lower it",
        )
    wanted = getattr(config.algorithm.advantage, "least_group", 1)
    if least is not None and least < wanted <= size:
        yield ConfigError(
            "explorer.min_group", f"found {least}, but the advantage compares the rollouts of a task",
            f"at least {wanted}", "raise it",
        )  # fmt: skip
    size = config.algorithm.num_members
    if config.explorer.max_rollouts < size:
        yield ConfigError(
            "explorer.max_rollouts",
            f"found {config.explorer.max_rollouts} and a group has {size}",
            "room for one group at least",
            f"write `explorer.max_rollouts: {size}` or more",
        )


def _batch_unit(config: RunConfig) -> Iterator[ConfigError]:
    """Case 61: the batch is measured in the unit that the algorithm consumes."""
    wanted = wanted_unit(config.algorithm)
    for unit in UNITS:
        given = getattr(config.trainer, unit, None)
        if given is not None and unit != wanted:
            yield ConfigError(
                f"trainer.{unit}",
                f"{_brick_name(config.algorithm)} does not consume that unit",
                wanted,
                f"write `trainer.{wanted}: {given}`",
            )


def _mini_batches(config: RunConfig) -> Iterator[ConfigError]:
    """A mini-batch without a rollout in it would be an empty update."""
    trainer = config.trainer
    given, is_groups = trainer.entries_per_step, wanted_unit(config.algorithm) == "tasks_per_step"
    rollouts = given * config.algorithm.group_size if is_groups else given
    if trainer.mini_batches > rollouts:
        yield ConfigError(
            "trainer.mini_batches", f"found {trainer.mini_batches} for {rollouts} rollouts a step",
            "at most one per rollout", "lower it",
        )  # fmt: skip


def _imitation(config: RunConfig) -> Iterator[ConfigError]:
    """Case 52: what samples, shapes or ages experience does nothing where answers are there already."""
    algorithm = config.algorithm
    if algorithm.reads == "groups":
        return
    why = f"{_brick_name(algorithm)} reads {algorithm.reads} from rows"
    if config.pipeline:
        yield ConfigError(
            "pipeline", f"found {len(config.pipeline)} operators, and {why}: no group passes a pipeline",
            "no operators", "leave it out, and filter the rows of the task set",
        )  # fmt: skip
    if config.sync.max_staleness:
        yield ConfigError(
            "sync.max_staleness", f"found {config.sync.max_staleness}, and {why}: they have no version",
            "0", "leave it out",
        )  # fmt: skip
    default = next(field.default for field in dataclasses.fields(algorithm) if field.name == "group_size")
    if algorithm.group_size not in (1, default):
        yield ConfigError(
            "algorithm.group_size", f"found {algorithm.group_size}, and {why}: nothing is sampled", "1", "leave it out"
        )


_READ = {"answers": (), "labels": ("label",), "pairs": ("chosen", "rejected"), "texts": ("text",)}
"""Fields that a row must have, by what an algorithm reads; answers come in two shapes."""


def _rows(config: RunConfig) -> Iterator[ConfigError]:
    """Rows that lack what the algorithm reads, as far as task sets know their fields before they are opened."""
    algorithm = config.algorithm
    if algorithm.reads == "groups" or MAIN not in getattr(algorithm.sampling, "buffers", (MAIN,)):
        return
    for number, taskset in enumerate(config.tasks.sets):
        known = taskset.known_fields()
        missing = [] if known is None else [name for name in _READ[algorithm.reads] if name not in known]
        if missing:
            yield ConfigError(
                f"tasks.sets.{number}",
                f"rows have no {' and no '.join(map(repr, missing))} (they have {', '.join(sorted(known or ()))}), and "
                f"{_brick_name(algorithm)} reads {algorithm.reads}",
                f"the fields {', '.join(_READ[algorithm.reads])}",
                f"map them: `fields: {{{missing[0]}: …}}`, or choose another task set or algorithm",
            )


def _sampling(config: RunConfig) -> Iterator[ConfigError]:
    """A share of a step that rounds to zero; answers that nobody takes, or that nobody gives; a choice by the clock."""
    sampling, expert = config.algorithm.sampling, config.expert
    try:
        check = getattr(sampling, "check_step", None)
        if check is not None:
            check("algorithm.sampling", config.trainer.entries_per_step)
    except ConfigError as error:
        yield error
    buffers = getattr(sampling, "buffers", None)
    if expert is not None and (config.algorithm.reads != "groups" or (buffers and "expert" not in buffers)):
        name = _brick_name(config.algorithm)
        yield ConfigError(
            "expert", f"found {len(expert.sets)} task sets, and {name} takes nothing from the buffer `expert`",
            "an algorithm that mixes answers in", "write `algorithm: mix`, or leave `expert` out",
        )  # fmt: skip
    if expert is None and buffers and "expert" in buffers and "main" in buffers:
        yield ConfigError(
            "expert", f"found none, and {_brick_name(config.algorithm)} takes answers from the buffer `expert`",
            "rows with answers", "write e.g. `expert: {use: jsonl, path: answers.jsonl}`",
        )  # fmt: skip
    if config.deterministic and getattr(sampling, "is_timed", False):
        yield ConfigError(
            "algorithm.sampling", f"found {_brick_name(sampling)} with `deterministic: true`: what there is to choose "
            "from depends on the clock", "fifo, or another that takes entries in order", "write `sampling: fifo`",
        )  # fmt: skip


def _choice_of_the_buffer(config: RunConfig) -> Iterator[ConfigError]:
    """Priority, shares and capacity: without effect, against a repeatable run, or too small for a step."""
    buffer, sampling = config.buffer, config.algorithm.sampling
    if config.deterministic:
        for name in ("priority", "shares", "capacity"):
            if getattr(buffer, name) is not None:
                yield ConfigError(
                    f"buffer.{name}", "found one with `deterministic: true`: what there is to choose from depends on "
                    "the clock", "none: entries are taken in the order in which they were admitted", "leave it out",
                )  # fmt: skip
    if buffer.priority is not None and getattr(sampling, "fixes_order", False):
        yield ConfigError(
            "buffer.priority", f"found one, and sampling {_brick_name(sampling)} asks for an order of its own",
            "one of both", "write `algorithm.sampling: priority`, or leave `buffer.priority` out",
        )  # fmt: skip
    least = config.trainer.entries_per_step
    if buffer.capacity is not None and buffer.capacity < least:
        yield ConfigError(
            "buffer.capacity", f"found {buffer.capacity}, and a step takes {least} entries: it would wait for ever",
            f"at least {least}", f"write `buffer.capacity: {8 * least}` or more",
        )  # fmt: skip


def _measured_checkpoints(config: RunConfig) -> Iterator[ConfigError]:
    """Checkpoints that are removed before the run ends would silently be missing from its evaluation."""
    trainer = config.trainer
    if not config.eval.every or config.eval.during != "checkpoint" or trainer.keep_checkpoints is None:
        return
    saved = -(-trainer.steps // trainer.save_every) if trainer.save_every else 1
    if saved > trainer.keep_checkpoints:
        yield ConfigError(
            "trainer.keep_checkpoints", f"found {trainer.keep_checkpoints} with `eval.during: checkpoint`, which "
            f"measures at the end, and {saved} checkpoints until then", "all of them kept",
            "write `trainer.keep_checkpoints: null`",
        )  # fmt: skip


def _deterministic(config: RunConfig) -> Iterator[ConfigError]:
    if not config.deterministic:
        return
    sync = config.sync
    if sync.max_staleness != 0:
        yield ConfigError(
            "sync.max_staleness", f"found {sync.max_staleness} with `deterministic: true`",
            "0: which version samples a rollout would depend on the clock", "write `sync.max_staleness: 0`",
        )  # fmt: skip
    if sync.style != "drain":
        yield ConfigError(
            "sync.style", f"found {sync.style!r} with `deterministic: true`", "drain", "write `sync.style: drain`"
        )
    save = config.trainer.save_every
    if save % sync.every:
        yield ConfigError(
            "trainer.save_every", f"found {save} with `deterministic: true` and `sync.every: {sync.every}`",
            f"a multiple of {sync.every}: a resume makes what a version is to sample as a whole",
            f"write `trainer.save_every: {save + sync.every - save % sync.every}`",
        )  # fmt: skip
    if config.explorer.runner == "process":
        yield ConfigError(
            "explorer.runner", "found 'process' with `deterministic: true`", "inline", "write `explorer.runner: inline`"
        )


def _lengths(config: RunConfig) -> Iterator[ConfigError]:
    budget = getattr(config.trainer, "tokens_per_micro_batch", None)
    if budget is not None and budget < config.explorer.max_tokens:
        yield ConfigError(
            "trainer.tokens_per_micro_batch",
            f"found {budget} with `explorer.max_tokens: {config.explorer.max_tokens}`",
            "room for the longest answer",
            "raise it, or lower explorer.max_tokens",
        )


def _endpoints(config: RunConfig) -> Iterator[ConfigError]:
    """A key that a run would miss after an hour is asked for now."""
    for name, endpoint in config.models.items():
        variable = endpoint.api_key_env
        if variable and variable not in os.environ:
            yield ConfigError(
                f"models.{name}.api_key_env", f"environment variable {variable} is not set", "the endpoint's key",
                f"export {variable}=…",
            )  # fmt: skip
        if not endpoint.url.startswith(("http://", "https://")):
            yield ConfigError(
                f"models.{name}.url", f"found {endpoint.url!r}", "http://… or https://…", "add the scheme"
            )


def _threads(config: RunConfig) -> Iterator[ConfigError]:
    """C9: all torch threads of a run's processes on one host fit its cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > cores:
        yield ConfigError(
            "OMP_NUM_THREADS", f"found {asked} on {cores} cores", f"at most {cores}", "lower it or unset it"
        )


def _extras(config: RunConfig) -> Iterator[ConfigError]:
    """Optional packages are asked for before anything starts."""
    needs = {"reasoning_gym": ("reasoning_gym", "reasoning-gym"), "datasets": ("datasets", "datasets")}
    sections = [("tasks", config.tasks), ("eval.tasks", config.eval.tasks)]
    for where, tasks in sections:
        for index, taskset in enumerate(tasks.sets if tasks is not None else ()):
            module, extra = needs.get(_brick_name(taskset), ("", ""))
            if module and importlib.util.find_spec(module) is None:
                yield ConfigError(
                    f"{where}.{index}.use", f"{module} is not installed", "", f"pip install 'triune[{extra}]'"
                )


CHECKS: tuple[Check, ...] = (
    _algorithm,
    _critic,
    _teacher,
    _pipeline,
    _flat_groups,
    _truncation,
    _groups,
    _batch_unit,
    _mini_batches,
    _imitation,
    _rows,
    _sampling,
    _choice_of_the_buffer,
    _measured_checkpoints,
    _deterministic,
    _lengths,
    _endpoints,
    _threads,
    _extras,
)
