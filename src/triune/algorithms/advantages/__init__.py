"""Advantages: how much better a rollout was than what was expected; one brick a file."""
