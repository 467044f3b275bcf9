"""One metric stream for all roles, with the step as its axis: rows, waits, alarms, summary and curve.

Everyone logs through the `Monitor` port of `triune.ports`; what becomes of a row is decided by sinks and alarms,
which are bricks. Adding one adds a file to `monitor/sinks/` or `monitor/alarms/`.
"""

from triune.monitor.config import MonitorSettings
from triune.monitor.lines import cut_torn_line
from triune.monitor.monitor import RunMonitor
from triune.monitor.sink import OpenSink, Row, RunInfo

__all__ = ["MonitorSettings", "OpenSink", "Row", "RunInfo", "RunMonitor", "cut_torn_line"]
