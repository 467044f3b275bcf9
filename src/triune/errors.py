"""Every error Triune raises on purpose, with what to do about it.

    TriuneError
    ├── ConfigError          the run file, a command line or a brick's fields            exit 2
    │   └── PluginError      a plug-in file, import path or entry point does not load    exit 2
    ├── RecordError          a record breaks its contract (shapes, masks, ids)
    │   └── WireError        bytes that are not a record of ours, or of an unknown version
    ├── TaskError            a task set is missing, empty, malformed or has changed
    ├── RolloutError         one rollout failed; carried as data, never ends a run by itself
    │   ├── WorkflowError    the user's workflow raised
    │   ├── RewardError      a reward is no number, or its verifier failed
    │   └── EnvironmentFault the environment raised
    ├── EngineError          the engine failed, or serves weights nobody asked for
    │   └── StaleWeightsError  a swap was not confirmed: digest or probe differ
    ├── StoreError           the buffer's store failed (disk full, corrupt, locked for too long)
    │   └── FencedError      a newer incarnation of the run owns the store; stop at once
    ├── CheckpointError      a checkpoint is missing, incomplete or of another configuration
    ├── TrainingError        the step cannot go on (NaN, nothing trainable, an alarm with `stop`)
    ├── MissingDependency    an optional package is needed; names the pip command
    └── RunFailed            one role of a run failed; names the role and the cause

A message has four parts: where, what was found, what was expected, what to do.
"""

from __future__ import annotations


class TriuneError(Exception):
    """Base of all errors raised on purpose.

    Args:
        where: Dotted key, or `run/task/rollout/turn`, or a file.
        found: What was there.
        expected: What should have been there; may be empty when `found` says it all.
        do: The next thing for the user to do.
    """

    exit_code = 1

    def __init__(self, where: str, found: str, expected: str = "", do: str = "") -> None:
        self.where, self.found, self.expected, self.do = where, found, expected, do
        text = f"{where}: {found}"
        if expected:
            text += f"; expected {expected}"
        if do:
            text += f"; {do}"
        super().__init__(text)

    def __reduce__(self) -> tuple[type[TriuneError], tuple[str, str, str, str]]:
        return type(self), (self.where, self.found, self.expected, self.do)


class ConfigError(TriuneError):
    """What the user wrote cannot be run."""

    exit_code = 2


class PluginError(ConfigError):
    """A plug-in does not load; never downgraded to a warning."""


class RecordError(TriuneError):
    """A record breaks its contract."""


class WireError(RecordError):
    """Bytes are not one of our records, or are of a version this reader cannot read."""


class TaskError(TriuneError):
    """A task set is missing, empty, malformed or has changed since the checkpoint."""


class RolloutError(TriuneError):
    """One rollout failed; the scheduler records it as data."""


class WorkflowError(RolloutError):
    """The user's workflow raised."""


class RewardError(RolloutError):
    """A reward is not a finite number, or its verifier failed: the rollout is invalid, not 0."""


class EnvironmentFault(RolloutError):
    """The environment raised."""


class EngineError(TriuneError):
    """The rollout engine failed."""


class StaleWeightsError(EngineError):
    """After a swap the engine does not serve the weights it was given."""


class StoreError(TriuneError):
    """The buffer's store failed."""


class FencedError(StoreError):
    """A newer incarnation of this run owns the store."""


class CheckpointError(TriuneError):
    """A checkpoint is missing, incomplete or of another configuration."""


class TrainingError(TriuneError):
    """Training cannot go on."""


class MissingDependency(TriuneError):
    """An optional package is needed; the message names the pip command."""

    exit_code = 2


class RunFailed(TriuneError):
    """One role of a run failed; the cause is chained."""
