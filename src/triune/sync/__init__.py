"""Weights travel from the trainer to engines, by version."""

from triune.sync.config import SyncSettings
from triune.sync.ledger import VersionLedger

__all__ = ["SyncSettings", "VersionLedger"]
