"""What an optimiser step changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from triune.selfcheck.probe import Trained, norm_of
from triune.selfcheck.report import Verdict, check, failed, passed, skipped
from triune.selfcheck.rig import Rig
from triune.selfcheck.scores import gradient_of


@check("optimiser", "a step changes the trained parameters, all of them, and no other")
async def optimiser(rig: Rig) -> Verdict:
    """Compare every parameter before and after a real step, and hold the applied gradient against its norm."""
    groups = await rig.trainable()
    if not groups:
        return skipped("no group passed the pipeline, so there is nothing to train on")
    if rig.config.trainer.learning_rate == 0:
        return skipped("trainer.learning_rate is 0")
    step = await rig.trained("plain")
    if not step.is_finite:
        return skipped("the first update is not finite; see `first_update`")
    if not step.metrics.get("grad_norm"):
        return skipped("the step has no gradient: there was nothing to learn in these rollouts")
    after = dict(step.side.policy.model.named_parameters())
    changed = await rig.lane.run(_changed, step.before, after)
    trained = set(step.side.policy.trainable)
    frozen = sorted(changed - trained)
    if frozen:
        return failed(
            f"{len(frozen)} frozen parameters changed, among them {frozen[0]}: the base must stay as it is",
            "only parameters with requires_grad may reach the optimiser; nothing else may write to the model",
        )
    problem = _clipping(step, rig)
    if problem is not None:
        return problem
    if rig.config.model.dtype != "bfloat16":  # there, small updates round away
        still = await _left_out(rig, step, trained - changed)
        if still:
            return failed(
                f"{len(still)} of {len(trained)} trained parameters did not change, among them {still[0]}: "
                "the optimiser leaves them out",
                "every trained parameter must be in one of its groups",
                num_unchanged=len(still),
            )
    if not changed:
        return failed(
            "the step changed no parameter", "look at the learning rate, the clip and the dtype of the weights"
        )
    num_frozen = len(after) - len(trained)
    rest = f"; {num_frozen} frozen ones did not" if num_frozen else ""
    return passed(f"{len(changed)} of {len(trained)} trained parameters changed{rest}", num_changed=len(changed))


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    return {name for name, value in after.items() if not bool((value.detach() == before[name]).all())}


async def _left_out(rig: Rig, step: Trained, still: set[str]) -> list[str]:
    """Those of the unchanged parameters that were pulled: by the step's gradient, or where it has none, by any."""
    found = {name for name in still if name in step.gradient and bool(step.gradient[name].any())}
    unseen = still - step.gradient.keys()
    if unseen:
        pulled = await rig.lane.run(gradient_of, rig.policy, await rig.few())
        found |= {name for name in unseen if name in pulled and bool(pulled[name].any())}
    return sorted(found)


def _clipping(step: Trained, rig: Rig) -> Verdict | None:
    """After clipping, the gradient's norm is the smaller of its own and the bound."""
    if not step.gradient:
        return None
    norm, bound = step.metrics["grad_norm"], rig.config.trainer.max_grad_norm
    applied, wanted = norm_of(step.gradient), min(norm, bound)
    if abs(applied - wanted) > 0.05 * wanted and step.gradient.keys() == step.side.policy.trainable.keys():
        return failed(
            f"the gradient's norm is {norm:.3g}, the bound trainer.max_grad_norm {bound:g}, and {applied:.3g} was "
            f"applied where {wanted:.3g} was due: clipping goes wrong",
            "scale gradients by bound / norm, and only where the norm is larger",
            applied=applied,
        )
    return None
