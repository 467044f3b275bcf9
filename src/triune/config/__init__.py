"""Run files: composed of the rooms' settings, read, overridden, validated, checked, frozen."""

from triune.config.consumption import Consumption, consumption
from triune.config.loading import check_same_run, load_config, save_resolved
from triune.config.plugins import Plugin, copy_plugins, use_plugins_of
from triune.config.run_config import RunConfig, config_hash

__all__ = [
    "Consumption",
    "Plugin",
    "RunConfig",
    "check_same_run",
    "config_hash",
    "consumption",
    "copy_plugins",
    "load_config",
    "save_resolved",
    "use_plugins_of",
]
