"""Operators on experience; one brick a file."""
