"""Protocols between floors: what one room needs of another, wired by the launcher.

Data only goes right (explorer → buffer → trainer), weights only go left, by version number. Everything here is
asynchronous unless it says otherwise, and everything that waits can be cancelled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, runtime_checkable

import msgspec

from triune.records import Group, GroupId, Stop, Task
from triune.shapes import LogprobsT, TokensT, VersionsT

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


# ------------------------------------------------------------------------------------------------ compute


class Lane(Protocol):
    """The one thread of a device on which torch runs; decode steps and micro-batches alternate on it."""

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Run `work(*args)` on the lane, first come first served; its exception is raised here."""
        ...


# ------------------------------------------------------------------------------------------------- engine


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """How to choose tokens. `top_k` 0, `top_p` 1 and `min_p` 0 switch truncation off; `temperature` 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @property
    def is_truncated(self) -> bool:
        """Whether the distribution sampled from differs from the model's at this temperature."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One completion to sample.

    Attributes:
        id: For abort and messages: `rollout/turn`.
        prompt: int32[P], at least one token.
        sampling: How to choose tokens.
        seed: 64-bit key of the counter-based uniforms (seed, group, member, attempt, turn); position is the counter.
        prefix: Requests with the same non-empty prefix name and identical prompt share one prefill.
    """

    id: str
    prompt: TokensT
    sampling: Sampling = Sampling()
    seed: int = 0
    prefix: str = ""


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """What was sampled.

    Attributes:
        tokens: int32[n], the sampled stop token included.
        logprobs: float32[n], of the distribution sampled from, in nats.
        versions: int32[n], version of the weights that made each token's logits.
        raw_logprobs: float32[n], temperature applied, untruncated; None when equal to `logprobs`.
        stop: done (eos, stop id, stop string), length (max_tokens), context (positions used up), aborted.
    """

    tokens: TokensT
    logprobs: LogprobsT
    versions: VersionsT
    raw_logprobs: LogprobsT | None = None
    stop: Stop = Stop.DONE


class WeightUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """One published set of weights.

    Attributes:
        version: n-th publish; 0 = initial weights; never reused.
        step: Trainer step it was published after.
        digest: 64-bit hash (hex) over all name-sorted canonical Hugging Face tensors in the published dtype.
        dtype: `float32` or `bfloat16`.
        kind: `full` or `adapter`.
        base_digest: Digest of the base under an adapter, else "".
        policy: Name of the policy.
        epoch: Incarnation of the run that published it.
        location: Folder of the file channel; "" in process.
    """

    version: int
    step: int
    digest: str
    dtype: str
    kind: str = "full"
    base_digest: str = ""
    policy: str = "main"
    epoch: int = 0
    location: str = ""


class Engine(Protocol):
    """Samples tokens. Embedded torch engine, scripted engine, remote OpenAI-compatible endpoint, vLLM."""

    @property
    def version(self) -> int:
        """The last confirmed version; -1 before the first `swap`."""
        ...

    @property
    def max_context(self) -> int:
        """Positions of the model: prompt plus completion."""
        ...

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion; raises EngineError. Cancelling the caller frees the slot."""
        ...

    async def logprobs(self, ids: TokensT, *, temperature: float = 1.0) -> LogprobsT:
        """float32[T]: log p(ids[t] | ids[:t]); entry 0 is NaN."""
        ...

    async def swap(self, update: WeightUpdate, tensors: Mapping[str, Tensor]) -> None:
        """Take weights between two decode steps; running sequences are prefilled again and go on.

        Raises:
            StaleWeightsError: Digest or the 32-token probe do not agree; the version is not confirmed.
        """
        ...

    async def abort(self, ids: Sequence[str] | None = None) -> None:
        """End these requests (all, when None) with stop `aborted` and what they have."""
        ...

    async def pause(self) -> None:
        """Stop decoding; requests wait."""
        ...

    async def resume(self) -> None:
        """Undo `pause`."""
        ...

    def stats(self) -> Mapping[str, float]:
        """Counters since the last call: tokens, seconds busy, seconds idle, running, waiting."""
        ...

    async def close(self) -> None:
        """Free everything; running requests raise EngineError."""
        ...


# ---------------------------------------------------------------------------------------- workflow, reward


@runtime_checkable
class Workflow(Protocol):
    """`await workflow(task, model)` or a plain function; returns a reward, a `Reward`, or experiences."""

    def __call__(self, task: Task, model: Any) -> Any: ...


class Reward(msgspec.Struct, frozen=True, kw_only=True):
    """A total with its raw, unweighted parts; `is_valid` False when the verifier failed."""

    total: float
    parts: Mapping[str, float] = {}
    metrics: Mapping[str, float] = {}
    is_valid: bool = True


class RewardFn(Protocol):
    """Scores one answer: `reward(task, answer) -> float | Reward`, plain or async."""

    def __call__(self, task: Task, answer: str) -> Any: ...


class TaskStream(Protocol):
    """Tasks in training order, resumable: `cursor` is JSON-like and goes into the store with each admission."""

    @property
    def data_hash(self) -> str:
        """Hash over the rows and the mapping; a changed data set refuses to resume."""
        ...

    def next(self) -> tuple[Task, Any] | None:
        """The next task and the cursor after it; None at the end."""
        ...

    def seek(self, cursor: Any) -> None:
        """Go on after `cursor`; None = from the start."""
        ...

    def find(self, taskset: str, key: str) -> Task | None:
        """A task by identity, for open admissions to be dispatched again."""
        ...


class Refund(StrEnum):
    """Why an admitted group gave its slot back without being trained on."""

    DROPPED = "dropped"
    INVALID = "invalid"
    TOO_SMALL = "too_small"
    STALE = "stale"
    LOST = "lost"
    QUARANTINED = "quarantined"
    EVICTED = "evicted"


class GroupOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """How running a group ended.

    Attributes:
        group: Experiences of all finished rollouts, invalid ones included; None when nothing was recorded.
        refund: Why the group cannot be trained on (too few valid members, quarantined, stale); None = put it.
        num_failed: Attempts that failed, retries included.
        metrics: To the monitor.
        failures: Each failed attempt: member, attempt, boundary, stop, error.
    """

    group: Group | None
    refund: Refund | None = None
    num_failed: int = 0
    metrics: Mapping[str, float] = {}
    failures: tuple[Mapping[str, Any], ...] = ()


class Rollouts(Protocol):
    """Runs the rollouts of one task instance; implemented by the explorer's scheduler, used by evaluation."""

    async def run(
        self, group: GroupId, task: Task, *, num: int, sampling: Sampling | None = None, training: bool = True
    ) -> GroupOutcome:
        """Run `num` rollouts; never raises for a failed rollout, always ends within the rollout deadline."""
        ...


class Evaluator(Protocol):
    """Measures one version on the held-out task sets."""

    def is_due(self, step: int) -> bool:
        """Whether a version published after this step is to be measured."""
        ...

    async def evaluate(self, update: WeightUpdate) -> Mapping[str, float]:
        """Run the evaluation on an engine that serves `update` throughout, log it and return its metrics."""
        ...


class Operator(Protocol):
    """One stage of a pipeline on experience; pure. None drops the group (stored, with the operator's name)."""

    def __call__(self, group: Group) -> Group | None: ...


# ------------------------------------------------------------------------------------------------- buffer


class EntryState(StrEnum):
    """Where an entry is; only `ready` can be leased (CONTRACTS C3)."""

    WAITING = "waiting"
    RAW = "raw"
    SHAPING = "shaping"
    READY = "ready"
    SPENT = "spent"
    DROPPED = "dropped"
    EXPIRED = "expired"
    EVICTED = "evicted"


class AdmissionRule(msgspec.Struct, frozen=True, kw_only=True):
    """`admitted - refunded < (version + max_staleness + 1) x fresh`; `fresh` = every x fresh groups per step.

    `limit` bounds the run: no more groups are admitted than its steps can use (None = no bound).
    """

    max_staleness: int
    fresh: float
    limit: int | None = None


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """The right to train once on one revision of one entry.

    `staleness` counts published steps on the surviving line since the group's oldest version; 0 when this run did not
    sample it. `is_urgent`: it came on top of what was asked for.
    """

    entry: str
    revision: int
    use_no: int
    group: Group
    staleness: int = 0
    is_urgent: bool = False


LeaseOrder = Literal["priority", "age", "newest", "reward"]
"""Which entries go first: highest stored priority, earliest admitted, sampled by the newest version, highest mean
reward. Ties go by age. A `buffer.priority` decides instead of `priority` and `age`, unless the run is deterministic.
Urgent entries (people's) come before all others in any order, at least one of them in every step."""


class Leases(list[Lease]):
    """Leases in the order in which they were granted, and what is to be said about them.

    Attributes:
        metrics: For the monitor, beside the step that trains on them.
    """

    def __init__(self, leases: Iterable[Lease] = (), metrics: Mapping[str, float] | None = None) -> None:
        super().__init__(leases)
        self.metrics: dict[str, float] = dict(metrics or {})


class EntryInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `browse`: everything about an entry but its arrays."""

    entry: str
    state: EntryState
    reason: str
    revision: int
    buffer: str
    source: str
    num_records: int
    reward: float | None
    oldest_version: int
    priority: float
    uses: int
    created_s: float


class Buffer(Protocol):
    """Where experience is kept, durable and prioritised, between explorer and trainer (CONTRACTS C3–C5, C7).

    A run opens the store and gets an epoch, one more than any before; calls of an older epoch raise FencedError.
    """

    async def open_run(self, run: str, *, config_hash: str, data_hash: str) -> int:
        """Register an incarnation of `run` and return its epoch. Fences all older ones of the same run.

        When the epoch is above 0, call `resume_at` (step 0, version -1 without a checkpoint) before anything is
        admitted or leased. An empty hash is not compared with the one the run was started with.
        """
        ...

    async def join_run(self, run: str, *, timeout_s: float) -> int:
        """Epoch of the running incarnation (for an explorer beside a trainer); waits until there is one.

        An incarnation of an earlier run can be joined once `resume_at` or `commit_version` was called.
        """
        ...

    # ---- admission and the ledger

    async def admit(self, task: Task, rule: AdmissionRule, *, cursor: Any = None) -> GroupId | None:
        """Wait for a slot, take it and advance the task cursor, in one transaction.

        Returns:
            The group's identity (with its visit), or None once the run was finished or its limit reached.
        """
        ...

    async def admit_next(
        self, tasks: Sequence[tuple[Task, Any]], rule: AdmissionRule, *, after: Any
    ) -> list[GroupId] | None:
        """Wait for a slot, then admit as many of these `(task, cursor)`, from the first on, as there are slots.

        They follow the cursor `after` in task order. Other live explorers keep their share of the slots.

        Returns:
            Their groups; none of them when something comes first: a group is due (`readmit`), or another explorer
            went on from `after` (`cursor`). None once the run was finished or its limit reached.
        """
        ...

    async def readmit(self, rule: AdmissionRule, *, max_retries: int) -> GroupId | None:
        """The earliest group that is to be made again, admitted as soon as a slot is free; None when none is due.

        Due are groups refunded as stale and, after `resume_at`, what was open or sampled by lost weights. Ask before
        every next task. A group that was stale more than `max_retries` times is quarantined instead.
        """
        ...

    async def open_admissions(self) -> list[GroupId]:
        """Groups admitted but neither put nor refunded that no other live process works on, in ledger order.

        An explorer that joins a run dispatches them again; the caller takes them over. After `resume_at` there are
        none: they are due (`readmit`).
        """
        ...

    async def free_slots(self, rule: AdmissionRule) -> int:
        """How many groups could be admitted now without waiting."""
        ...

    async def refund(self, group: GroupId, reason: Refund) -> None:
        """Give a slot back, once per group, of which nothing is to be stored; else `put(…, refund=reason)`.

        A group that another explorer makes, or made, is left to it.
        """
        ...

    async def cursor(self) -> Any:
        """Task cursor committed with the last admission; None at the start."""
        ...

    async def failures(self) -> Mapping[tuple[str, str], int]:
        """(task set, task key) → how many of its groups in a row failed until now; the others are left out.

        An explorer that goes on so learns which tasks were set aside before.
        """
        ...

    # ---- entries

    async def put(
        self,
        raw: Group,
        shaped: Group | None = None,
        *,
        dropped_by: str = "",
        refund: Refund | None = None,
        buffer: str = "main",
        deadline_s: float | None = None,
    ) -> str:
        """Store a closed group: raw as revision 0 and, in the same transaction, `shaped` as revision 1.

        Without operators pass the group itself as `shaped`; without it the entry is `raw`, not leased, until revised.
        `dropped_by` stores it as dropped by that operator and refunds its slot. A group with an unknown reward is
        `waiting`, for `deadline_s`, then it expires; operators have no say before its last reward is there, so `shaped`
        and `dropped_by` are not looked at. `refund` stores a group that cannot be trained on for people to look at, and
        gives its slot back for that reason in the same transaction.

        Idempotent by (group, epoch, members' attempts). A group whose slot was given back in the meantime is dropped as
        `late`; one that another explorer makes or made by now is not stored, and only counted.

        Returns:
            The entry's id, `str(group.id)`.
        """
        ...

    async def put_many(
        self, groups: Sequence[tuple[Group, Group | None]], *, buffer: str = "main", deadline_s: float | None = None
    ) -> list[str]:
        """`put` of several (raw, shaped), in order and in one transaction: all of them are stored, or none.

        It costs much less than as many calls of `put`. Calls of `put` that run at the same time share a transaction
        too, but each stands for itself: one that is refused takes no other with it.

        Returns:
            The entries' ids, in the same order.
        """
        ...

    async def revise(self, entry: str, group: Group, *, operators: Sequence[str] = ()) -> int:
        """Add a revision, and return its number."""
        ...

    async def lease(
        self,
        num: int,
        *,
        buffer: str = "main",
        min_version: int = 0,
        max_staleness: int | None = None,
        ahead: int | None = None,
        wait: bool = True,
        order: LeaseOrder = "priority",
        step: int | None = None,
        max_uses: int = 1,
        again: bool = False,
        cooldown: int = 0,
    ) -> Leases:
        """Take up to `num` ready entries, those first that come first in `order`; over-stale ones are refunded.

        Over-stale is older than `min_version`, or more than `max_staleness` published steps behind the newest version
        (version numbers have gaps after a resume, staleness has none: prefer it). `ahead`: only entries with at most
        this many groups admitted before them still open. Urgent entries (people's) come first and on top of `num`, at
        most a quarter of it, at least one; with `step`, those that earlier calls took for the same step count.

        Waits until `num` are there; returns fewer only when `end` was declared (then what is left, at last []), or
        at once with `wait` False or where nobody fills that buffer.

        `step` is how many steps are done: the use is one of the step after. `max_uses` says how often what is leased
        now may be used. `again` takes only entries that were used before, fewer than `max_uses` times and not in the
        last `cooldown` steps nor in this one; they hold no slot any more, over-stale ones are passed over, and nobody
        waits for them.

        Returns:
            The leases. Their metrics count `num_stale_dropped`, and `num_damaged_dropped` (entries whose bytes cannot
            be read), where there were any.
        """
        ...

    async def renew(self) -> None:
        """Heartbeat: this epoch's leases live on."""
        ...

    async def secure(self) -> None:
        """What was committed until now outlives a power cut once this returns.

        Called before a checkpoint is written: a checkpoint must not refer to leases that the disk may still forget.
        """
        ...

    async def ack(self, uses: Sequence[tuple[str, int]], *, checkpoint: str, step: int) -> None:
        """The checkpoint on disk contains these (entry, use_no); idempotent."""
        ...

    async def give_back(self, uses: Sequence[tuple[str, int]] | None = None, *, dropped_by: str = "") -> int:
        """Return own leases untrained (all of this consumer, when None); the number returned.

        With `dropped_by` entries of this run that are not used otherwise, nor amended since they were leased, are
        dropped in the same transaction, for that reason, and their slots refunded: the explorer makes others.
        """
        ...

    async def amend(self, entry: str, patch: Mapping[str, Any], *, by: str, key: str) -> str:
        """Change what is not yet trained: `applied`, `deferred`, `reissued` or `expired`; idempotent by key.

        Deferred is what is leased, and what this process has not the pipeline for: it is carried out when the lease
        ends, or when a process of the entry's run leases or waits for a slot.

        Raises:
            RecordError: No entry can be patched so, it holds pairs or texts, or the key was used for another patch.
        """
        ...

    async def end(self, reason: str) -> None:
        """No more groups will come: every waiting reader wakes."""
        ...

    async def finish(self, reason: str) -> None:
        """The trainer wants no more: every waiting explorer wakes."""
        ...

    async def browse(self, *, buffer: str | None = None, state: str | None = None, limit: int = 100) -> list[EntryInfo]:
        """Newest first."""
        ...

    async def read(self, entry: str, *, revision: int | None = None) -> Group:
        """One entry, its newest revision by default."""
        ...

    async def stats(self) -> Mapping[str, float]:
        """Depth per state, uses per state, admitted, refunded, age."""
        ...

    # ---- versions

    async def begin_version(self, step: int) -> int:
        """Reserve the next version number (never reused, also after a crash)."""
        ...

    async def commit_version(self, update: WeightUpdate) -> None:
        """The weights are there to be fetched: admission counts with them from now on."""
        ...

    async def latest_version(self) -> WeightUpdate | None:
        """The newest committed version on the surviving line."""
        ...

    async def wait_version(self, newer_than: int) -> WeightUpdate | None:
        """Wait for a newer one; None once the run was finished."""
        ...

    async def floor_version(self, max_staleness: int) -> int:
        """The oldest version at most `max_staleness` published steps behind the newest, on the surviving line."""
        ...

    async def resume_at(
        self, *, step: int, version: int, consumed: Sequence[tuple[str, int]], checkpoint: str, strict: bool
    ) -> None:
        """Bring the store to a checkpoint: re-acknowledge `consumed`, return other leases, mark later versions lost.

        Open groups and, with `strict` (max_staleness 0), groups sampled by lost versions give their slots back and are
        due again under the same names (`readmit`). Without `strict` the latter stay, as old as `version`.
        """
        ...

    # ---- steering

    async def control(self) -> list[Mapping[str, Any]]:
        """Unacknowledged rows, oldest first: `id`, `action` (pause, resume, stop, set), `fields`, `by`."""
        ...

    async def ack_control(self, row: int, *, by: str, outcome: str = "done") -> None:
        """Say that a row was carried out, or why not."""
        ...

    async def close(self) -> None:
        """Flush and close."""
        ...


# ------------------------------------------------------------------------------------------- sync, monitor


class WeightChannel(Protocol):
    """Moves weights from trainer to engines, by version."""

    async def publish(self, state: Mapping[str, Tensor], *, step: int) -> WeightUpdate:
        """Make a consistent copy available under a new version."""
        ...

    async def fetch(self, update: WeightUpdate) -> Mapping[str, Tensor]:
        """The tensors of a version; never half-updated, never changed afterwards."""
        ...

    async def restore(self, update: WeightUpdate, state: Mapping[str, Tensor]) -> None:
        """Offer a committed version again after a resume; raises EngineError when the state is not that version's."""
        ...

    def release(self, version: int) -> None:
        """The engine of this process has taken the version; what only it needed may be freed."""
        ...

    def pin(self, version: int) -> None:
        """Keep a version until `unpin` (evaluation reads it for longer than the channel keeps others)."""
        ...

    def unpin(self, version: int) -> None:
        """Undo one `pin`."""
        ...


class Monitor(Protocol):
    """One metric stream for all roles, with the step as its axis."""

    def log(self, metrics: Mapping[str, float], *, role: str, step: int) -> None:
        """Write one row to every sink; cheap, never raises for a full disk without naming the sink."""
        ...

    def timed(self, stage: str) -> AbstractContextManager[None]:
        """Count the wall-clock time of a stage; summed into the next `log` as `time/<stage>_s`."""
        ...

    def waiting(self, role: str, for_what: str) -> AbstractContextManager[None]:
        """Inside, `role` waits; the console says for what and since when."""
        ...


class CheckpointStore(Protocol):
    """Atomic folders `checkpoints/step-N/`."""

    def latest(self) -> str | None:
        """The newest complete checkpoint, or None."""
        ...
