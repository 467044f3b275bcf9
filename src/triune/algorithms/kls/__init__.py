"""KL terms: how far the policy is from the reference; one brick a file.

Every estimator declares, as a class attribute or property, what a generated suite then proves:

* `expected_gradient` (required), on samples of the current policy: `reverse_kl` = that of KL(policy || reference),
  `forward_kl` = that of KL(reference || policy), `total_variation` = that of the sum of |policy - reference|, `zero`,
  or `nothing` when there is no term.
* `off_policy`, `surrogate`, `variants`: as for policy losses (see that package).
"""
