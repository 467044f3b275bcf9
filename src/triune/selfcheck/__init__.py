"""Proves on the user's own model, template, engine, workflow and reward that what a run would compute is right."""

from triune.selfcheck.report import Finding, Report, Status
from triune.selfcheck.running import selfcheck

__all__ = ["Finding", "Report", "Status", "selfcheck"]
