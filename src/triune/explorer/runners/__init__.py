"""Processes that run user code, so that code which hangs can be killed without taking the run with it."""

from triune.explorer.runners.pool import RunnerPool

__all__ = ["RunnerPool"]
