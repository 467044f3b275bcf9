"""Sampling strategies: what a step trains on; one brick a file."""
