"""Entropy terms; one brick a file.

Every brick declares `expected_gradient`: `entropy` when the unweighted term is the policy's entropy, `nothing` when
there is no term. `surrogate` and `variants` as for policy losses (see that package).
"""
