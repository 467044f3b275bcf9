"""Critics: value models beside the policy; one brick a file.

Every brick declares `expected_gradient`: `mean_return` when its loss is least where the value is the mean return,
`nothing` when there is no term. `surrogate` and `variants` as for policy losses (see that package).
"""
