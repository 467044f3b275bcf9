"""The command line: `triune run FILE`, and what surrounds it. Loads no torch before a command needs it."""

from triune.cli.boundary import main

__all__ = ["main"]
