"""Models: where they are found, how they are loaded, named, fingerprinted and exported. torch only inside functions."""

from triune.models.config import EndpointSettings, LoraSettings, ModelSettings
from triune.models.digest import weight_digest
from triune.models.export import export_model
from triune.models.load import load_model, switch_off_dropout
from triune.models.source import ModelSource, resolve_model
from triune.models.state import canonical_state

__all__ = [
    "EndpointSettings",
    "LoraSettings",
    "ModelSettings",
    "ModelSource",
    "canonical_state",
    "export_model",
    "load_model",
    "resolve_model",
    "switch_off_dropout",
    "weight_digest",
]
