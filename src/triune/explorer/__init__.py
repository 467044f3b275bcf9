"""Makes experience: lets the agent act in its environment and records every token it sampled."""

from triune.explorer.binding import BoundWorkflow, bind_workflow
from triune.explorer.config import ExplorerSettings
from triune.explorer.model import Chat, Model
from triune.explorer.scheduler import Scheduler
from triune.explorer.session import Answer, Session

__all__ = ["Answer", "BoundWorkflow", "Chat", "ExplorerSettings", "Model", "Scheduler", "Session", "bind_workflow"]
