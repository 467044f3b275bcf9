"""Workflows of our own, one a file."""
