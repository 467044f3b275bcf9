"""What the proof suite runs over: every loss, KL, entropy and critic brick that is registered, in every setting."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from triune import registry
from triune.algorithms import Algorithm, MicroBatch, Progress, Term
from triune.errors import ConfigError

KINDS = ("policy_loss", "kl", "entropy", "critic")
"""Kinds whose bricks yield terms."""

CLAIMS = {
    "policy_loss": (
        "policy_gradient", "imitation", "improves_reward", "improves_likelihood", "bradley_terry", "nothing",
    ),
    "kl": ("reverse_kl", "forward_kl", "total_variation", "zero", "nothing"),
    "entropy": ("entropy", "nothing"),
    "critic": ("mean_return", "nothing"),
}  # fmt: skip
"""Kind → what `expected_gradient` may say; the packages of the kinds explain the words."""

HOMES = {kind: f"{registry.HOMES[kind].replace('.', '/')}/__init__.py" for kind in KINDS}
GIVEN = frozenset({"advantages", "behaviour_logprobs", "ref_logprobs", "entropy"})
"""What every made-up batch holds; other streams are added when a brick needs them."""


@dataclass(frozen=True, eq=False)
class Case:
    """A brick in one setting."""

    kind: str
    name: str
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        settings = ",".join(f"{key}={value}" for key, value in self.options)
        return f"{self.kind}-{self.name}" + (f"-{settings}" if settings else "")

    @cached_property
    def brick(self) -> Any:
        """The brick, as a run file would make it."""
        return registry.build(self.kind, {"use": self.name, **dict(self.options)}, self.kind)

    @cached_property
    def algorithm(self) -> Any:
        """An algorithm of nothing else."""
        return algorithm_of(self.kind, self.brick)

    @property
    def is_paired(self) -> bool:
        """Whether the brick compares the halves of pairs."""
        return getattr(self.brick, "unit", "") == "pair"

    @property
    def streams(self) -> frozenset[str]:
        """Streams that a batch must hold beyond those that every one has."""
        old = {"old_logprobs"} if getattr(self.brick, "is_decoupled", False) else set()
        return frozenset(getattr(self.brick, "needs", ())) - GIVEN | old

    @property
    def claim(self) -> str:
        """What the brick says of its expected gradient.

        Raises:
            AssertionError: It says nothing, or a word that this kind does not know.
        """
        found = getattr(self.brick, "expected_gradient", None)
        if found not in CLAIMS[self.kind]:
            words = ", ".join(CLAIMS[self.kind])
            raise AssertionError(
                f"{self}: expected_gradient is {found!r}; expected one of {words}. Write, in the class, e.g. "
                f"`expected_gradient: ClassVar[str] = {CLAIMS[self.kind][0]!r}` ({HOMES[self.kind]} explains the words)"
            )
        return str(found)

    def says(self, name: str, otherwise: Any) -> Any:
        """Another declaration of the brick."""
        return getattr(self.brick, name, otherwise)


def cases(*kinds: str) -> list[Case]:
    """Every brick of these kinds (default: all) that is registered now, in each of its settings.

    Settings are the defaults, every other value of each `Literal` and `bool` field, and the brick's own `variants`;
    what the brick's `check` refuses is left out. A plug-in is here as soon as its file was imported.
    """
    return [case for kind in kinds or KINDS for name in registry.names(kind) for case in settings_of(kind, name)]


def settings_of(kind: str, name: str) -> list[Case]:
    """One brick in each of its settings."""
    target = registry.find(kind, name, kind)
    wanted: list[Mapping[str, Any]] = [{}, *_alternatives(target), *getattr(target, "variants", ())]
    found: dict[str, Case] = {}
    for options in wanted:
        case = Case(kind, name, tuple(options.items()))
        if options.get("average") == "constant":
            case = Case(kind, name, (*case.options, ("length", 16)))
        if _is_valid(case):
            found[str(case)] = case
    return list(found.values())


def _is_valid(case: Case) -> bool:
    check = getattr(case.brick, "check", None)
    try:
        if check is not None:
            check(case.kind)
    except ConfigError:
        if not case.options:
            raise
        return False
    return True


def _alternatives(target: Any) -> list[Mapping[str, Any]]:
    """Every value other than the default of each field whose values can be listed."""
    if not dataclasses.is_dataclass(target):
        return []
    hints = typing.get_type_hints(target)
    fields = [field for field in dataclasses.fields(target) if field.init]
    return [{field.name: value} for field in fields for value in _values(hints[field.name]) if value != field.default]


def _values(hint: Any) -> list[Any]:
    if hint is bool:
        return [False, True]
    if typing.get_origin(hint) is Literal:
        return list(typing.get_args(hint))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [value for part in typing.get_args(hint) for value in _values(part)]
    return []


def algorithm_of(kind: str, brick: Any) -> Any:
    """An algorithm whose only terms are those of one brick."""
    if kind == "critic":
        return CriticAlone(brick)
    return Algorithm(**{"policy_loss": Silent(), kind: brick})


@dataclass(frozen=True, kw_only=True)
class Silent:
    """A policy loss without terms."""

    expected_gradient = "nothing"

    def __call__(self, batch: MicroBatch, state: Mapping[str, Any], progress: Progress) -> list[Term]:
        """Yield nothing."""
        return []


@dataclass(frozen=True)
class CriticAlone:
    """What a divider asks of an algorithm, over a critic's terms."""

    critic: Any

    @property
    def needs(self) -> frozenset[str]:
        """Streams that the critic reads."""
        return frozenset(getattr(self.critic, "needs", ()))

    def state0(self) -> dict[str, Any]:
        """A critic keeps its state in its weights."""
        return {}

    def update(self, state: Mapping[str, Any], stats: Mapping[str, float]) -> dict[str, Any]:
        """Nothing to update."""
        return dict(state)

    def terms(self, batch: MicroBatch, state: Mapping[str, Any], progress: Progress) -> list[Term]:
        """The critic's terms."""
        found: Any = self.critic(batch, state, progress) if callable(self.critic) else []
        return found
