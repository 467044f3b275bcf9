"""Makes experience: lets the agent act in its environment and records every token it sampled."""

from triune.explorer.binding import BoundWorkflow, bind_workflow
from triune.explorer.config import ExplorerSettings
from triune.explorer.explorer import Explorer
from triune.explorer.model import Chat, Model
from triune.explorer.scheduler import Scheduler
from triune.explorer.session import Answer, Session
from triune.explorer.wave_gate import WaveGate

__all__ = [
    "Answer",
    "BoundWorkflow",
    "Chat",
    "Explorer",
    "ExplorerSettings",
    "Model",
    "Scheduler",
    "Session",
    "WaveGate",
    "bind_workflow",
]
