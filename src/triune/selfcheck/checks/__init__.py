"""The checks, a small group a file, in the order in which a run does these things."""

from triune.selfcheck.checks.advantages import advantages, direction
from triune.selfcheck.checks.checkpoints import checkpoint
from triune.selfcheck.checks.exports import export
from triune.selfcheck.checks.groups import groups
from triune.selfcheck.checks.layouts import layout, repeatable
from triune.selfcheck.checks.logprobs import logprobs
from triune.selfcheck.checks.masks import mask
from triune.selfcheck.checks.optimiser import optimiser
from triune.selfcheck.checks.reference import reference
from triune.selfcheck.checks.rewards import reward_order, reward_speed, reward_spread, reward_validity
from triune.selfcheck.checks.rollouts import rollouts
from triune.selfcheck.checks.stops import stops
from triune.selfcheck.checks.turns import turns
from triune.selfcheck.checks.updates import first_update, micro_batches
from triune.selfcheck.checks.weights import versions, weight_swap
from triune.selfcheck.report import Check

CHECKS: tuple[Check, ...] = (
    rollouts,
    mask,
    turns,
    stops,
    versions,
    groups,
    reward_validity,
    reward_spread,
    reward_order,
    reward_speed,
    logprobs,
    repeatable,
    layout,
    advantages,
    first_update,
    micro_batches,
    direction,
    optimiser,
    reference,
    weight_swap,
    checkpoint,
    export,
)
"""Every check."""

__all__ = ["CHECKS"]
