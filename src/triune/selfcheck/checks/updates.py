"""The first update: nothing has changed yet, and how it is cut into micro-batches does not matter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from triune.selfcheck.probe import Trained, compare
from triune.selfcheck.report import Verdict, check, failed, passed, skipped, warned
from triune.selfcheck.rig import Rig

EXACT = 1e-5
"""Bound where old and new log-probs come from the same kernels."""

EXACT_GRADIENT = 5e-3
"""How far gradients of the same step may be apart in float32, as a share of their norm."""

_PRECISE: Mapping[str, Any] = {"precision": "float32", "float32_matmul": "highest"}


@check("first_update", "on the unmodified policy ratios are 1, nothing is clipped, and the KL to the reference is 0")
async def first_update(rig: Rig) -> Verdict:
    """Read the metrics of a real step from the initial weights."""
    if not await rig.trainable():
        return skipped("no group passed the pipeline, so there is nothing to train on")
    step = await rig.trained("plain")
    metrics = step.metrics
    if not step.is_finite:
        return failed(
            f"loss {step.loss}, gradient norm {metrics.get('grad_norm', math.nan)} in the first update: something "
            "overflows or divides by 0",
            "look at the dtype (float16 overflows above 65504), the rewards and the log-probs of the batch",
        )
    exact = step.config.algorithm.old_logprobs == "always"
    ratio, clipped, kl = (metrics.get(name) for name in ("ratio_mean", "clip_ratio", "kl"))
    bound = EXACT if exact else rig.tolerance.ratio
    if ratio is not None and not abs(ratio - 1) <= bound:
        return failed(
            f"the mean probability ratio is {ratio:.4g} on an unmodified policy, 1 ± {bound:g} expected",
            "sampler and trainer do not compute the same distribution: see `logprobs` and `repeatable`",
            ratio_mean=ratio,
        )
    if clipped is not None and not clipped <= (0.0 if exact else rig.tolerance.clip):
        cause = f"{clipped:.1%} of the tokens are clipped on an unmodified policy"
        gap = metrics.get("logprob_gap", math.inf)
        if not exact and gap <= rig.tolerance.logprob:
            return warned(
                f"{cause}: the clip is narrower than the rounding between sampler and trainer ({gap:.2g} nats)",
                "write `algorithm.old_logprobs: always`, so that ratios are those of the trainer alone",
                clip_ratio=clipped,
            )
        return failed(
            cause,
            "sampler and trainer do not compute the same distribution: see `logprobs` and `repeatable`",
            clip_ratio=clipped,
        )
    if kl is not None and not abs(kl) <= EXACT:
        return failed(
            f"the KL to the reference is {kl:.3g} before anything was trained",
            "the reference must be the initial policy, computed by the same kernels at the same temperature",
            kl=kl,
        )
    said = [f"loss {step.loss:.4g}", f"gradient norm {metrics['grad_norm']:.3g}"]
    for name, value in (("ratio_mean", ratio), ("clip_ratio", clipped), ("kl", kl)):
        if value is not None:
            said.append(f"{name} {value:.4g}")
    numbers = {"loss": step.loss, "grad_norm": metrics["grad_norm"]}
    numbers |= {name: metrics[name] for name in ("ratio_mean", "clip_ratio", "kl", "logprob_gap") if name in metrics}
    return passed(", ".join(said), **numbers)


@check("micro_batches", "loss and gradient do not depend on micro-batches or on the order of the groups")
async def micro_batches(rig: Rig) -> Verdict:
    """Make the same step with the smallest micro-batches, and with the groups the other way round."""
    if not await rig.trainable():
        return skipped("no group passed the pipeline, so there is nothing to train on")
    precise: Mapping[str, Any] = _PRECISE if rig.can_be_exact else {}
    whole = await (rig.trained("whole", **precise) if precise else rig.trained("plain"))
    if not whole.is_finite:
        return skipped("the first update is not finite; see `first_update`")
    said, bound = [], EXACT_GRADIENT if rig.can_be_exact else rig.tolerance.gradient
    for kind, what, changes in (
        ("cut", "cut into the smallest micro-batches", {"tokens_per_micro_batch": 1}),
        ("reversed", "with the groups the other way round", {}),
    ):
        other = await rig.trained(kind, **precise, **changes)
        problem, difference = _differ(whole, other, bound, what)
        if problem is not None:
            return problem
        said.append(f"{difference:.1g} {what}")
    return passed(f"gradients differ by {' and '.join(said)}, as shares of their norm")


def _differ(whole: Trained, other: Trained, bound: float, what: str) -> tuple[Verdict | None, float]:
    fix = "divide by counts of the whole update, never by those of a micro-batch; sum over micro-batches, never average"
    size = max(abs(whole.loss), whole.metrics["grad_norm"] * 1e-2, 1e-3)
    if not abs(whole.loss - other.loss) <= bound * size:
        cause = f"the loss is {other.loss:.6g} {what}, and {whole.loss:.6g} in one piece"
        return failed(f"{cause}: a mean of means weighs short micro-batches more", fix), math.inf
    found = compare(whole.whole_gradient, other.whole_gradient)
    if not found.relative <= bound:
        return (
            failed(
                f"the gradient differs by {found.relative:.2g} of its norm {what}, most in {found.worst}: a mean of "
                "means weighs short micro-batches more",
                fix,
                gradient=found.relative,
            ),
            math.inf,
        )
    return None, found.relative
