"""Which task comes next, and how an answer is scored."""

from triune.tasks.bricks import TaskBricks
from triune.tasks.config import ExpertSettings, TasksSettings, build_stream, open_tasksets
from triune.tasks.fields import truth_of
from triune.tasks.scoring import Scorer, as_reward, to_reward
from triune.tasks.stream import MixedTasks
from triune.tasks.taskset import OpenTaskset, Rows, Taskset

__all__ = [
    "ExpertSettings",
    "MixedTasks",
    "OpenTaskset",
    "Rows",
    "Scorer",
    "TaskBricks",
    "TasksSettings",
    "Taskset",
    "as_reward",
    "build_stream",
    "open_tasksets",
    "to_reward",
    "truth_of",
]
