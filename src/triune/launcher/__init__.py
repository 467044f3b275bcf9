"""Builds the parts of a run and starts them. Everything here is imported by commands when they run."""

from triune.launcher.commands import bench, explore, export, run, train
from triune.launcher.compare import compare_variants
from triune.launcher.folder import RunFolder, Start
from triune.launcher.lane import ThreadLane
from triune.launcher.local import launch
from triune.launcher.request import Request
from triune.launcher.stages import run_stages

__all__ = [
    "Request",
    "RunFolder",
    "Start",
    "ThreadLane",
    "bench",
    "compare_variants",
    "explore",
    "export",
    "launch",
    "run",
    "run_stages",
    "train",
]
