"""Policy losses: terms that move the policy; one brick a file.

Beside its formula a loss declares what is provable about it, as class attributes (or properties, where it depends on a
field). A generated suite holds every loss to its words, a plug-in's too:

* `expected_gradient` (required), on fresh samples of the current policy with exact advantages:
    `policy_gradient` = that of the expected reward. `imitation` = that of the data's mean log-prob.
    `improves_reward` = biased, but going along it raises the expected reward; the docstring says what it equals.
    `improves_likelihood` = each answer raises its own log-prob, with a weight that depends on the policy; over pairs,
    the chosen answers' log-prob rises. `bradley_terry` = that of a loss over pairs which vanishes where the policy is
    the reference times exp(reward / beta). `nothing` = there is no term.
* `gradient_scale` (default 1): how many times the claimed gradient it is, at the first step.
* `expert_gradient`, `expert_scale`: the same two for tokens of source `expert`, when they are treated differently.
* `off_policy`: `exact` when the claim also holds on samples of another policy; `inside_clip` when it does while every
  ratio is near 1. Without it nothing is claimed.
* `surrogate`, when the value shown has another slope than the gradient: `stop_gradient` = what the loss detaches is a
  constant; else the name of the loss whose value has this gradient.
* `unit = "pair"`, when it compares the halves of pairs.
* `variants`: settings to prove beside the defaults, e.g. `({"dual_clip": 1.5},)`. Every value of a `Literal` or `bool`
  field is proven without being named.
"""
