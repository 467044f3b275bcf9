"""The reference policy stays where it was."""

from __future__ import annotations

from triune.selfcheck.checks.layouts import _gap
from triune.selfcheck.perturb import perturb, restored
from triune.selfcheck.report import Verdict, check, failed, passed, skipped
from triune.selfcheck.rig import Rig, experiences_of
from triune.selfcheck.scores import Key, score


@check("reference", "the reference is the initial policy, and does not move when the policy does")
async def reference(rig: Rig) -> Verdict:
    """Score the rollouts with the reference before and after the policy is moved."""
    if "ref_logprobs" not in rig.algorithm.needs:
        return skipped("the algorithm has no KL term (`algorithm.kl: none`)")
    groups = await rig.few()
    if not any(experiences_of(group) for group in groups):
        return skipped("the groups hold no experience to score")
    policy = rig.policy

    def referred() -> dict[Key, object]:
        with policy.reference() as frozen:
            return score(frozen, groups)  # type: ignore[return-value]

    def look() -> tuple[float, float, float]:
        own, before = score(policy, groups), referred()
        with restored(policy):
            perturb(policy)
            moved, after = score(policy, groups), referred()
        return _gap(own, before), _gap(before, after), _gap(own, moved)  # type: ignore[arg-type]

    at_start, drift, move = await rig.lane.run(look)
    if not at_start <= 1e-4:
        return failed(
            f"the reference is {at_start:.3g} nats from the initial policy: the KL begins above 0",
            "the reference must be a copy of the initial weights (under LoRA, the base with the adapter off)",
            start=at_start,
        )
    if not drift <= 1e-6:
        return failed(
            f"when the policy moved by {move:.3g} nats, the reference moved by {drift:.3g}: it is the policy itself",
            "freeze a copy of the initial weights (under LoRA, switch the adapter off)",
            drift=drift,
        )
    return passed(
        f"the policy was moved by {move:.2g} nats and the reference by {drift:.1g}", start=at_start, drift=drift
    )
