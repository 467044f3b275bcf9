"""Run files: composed of the rooms' settings, read, overridden, validated, checked, frozen."""

from triune.config.consumption import Consumption, consumption
from triune.config.loading import check_same_run, load_config, save_resolved
from triune.config.plugins import Plugin, copy_plugins, use_plugins_of
from triune.config.run_config import RunConfig, config_hash
from triune.config.stages import StagedConfig, check_same_stages, load_run_file, save_staged, stage_name

__all__ = [
    "Consumption",
    "Plugin",
    "RunConfig",
    "StagedConfig",
    "check_same_run",
    "check_same_stages",
    "config_hash",
    "consumption",
    "copy_plugins",
    "load_config",
    "load_run_file",
    "save_resolved",
    "save_staged",
    "stage_name",
    "use_plugins_of",
]
