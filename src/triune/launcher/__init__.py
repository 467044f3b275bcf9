"""Builds the parts of a run and starts them. Everything here is imported by commands when they run."""

from triune.launcher.commands import bench, explore, export, run, train
from triune.launcher.folder import RunFolder, Start
from triune.launcher.lane import ThreadLane
from triune.launcher.local import launch
from triune.launcher.request import Request

__all__ = ["Request", "RunFolder", "Start", "ThreadLane", "bench", "explore", "export", "launch", "run", "train"]
