"""Entropy terms; one brick a file."""
