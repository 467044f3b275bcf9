"""Rewards, one a file: `reward(task, answer)` gives a number or a `Reward`."""
