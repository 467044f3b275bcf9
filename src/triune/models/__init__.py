"""Models: where they are found, how they are loaded, named, fingerprinted and exported. torch only inside functions."""

from triune.models.chat import ChatTokenizer, Prompt
from triune.models.config import EndpointSettings, LoraSettings, ModelSettings
from triune.models.device import default_device, has_fast_bfloat16, return_freed_memory, set_float32_matmul, set_threads
from triune.models.digest import weight_digest
from triune.models.export import export_model
from triune.models.load import load_model, max_positions, switch_off_dropout
from triune.models.source import ModelSource, resolve_model
from triune.models.state import canonical_state
from triune.models.vocabulary import check_same_vocabulary

__all__ = [
    "ChatTokenizer",
    "EndpointSettings",
    "LoraSettings",
    "ModelSettings",
    "ModelSource",
    "Prompt",
    "canonical_state",
    "check_same_vocabulary",
    "default_device",
    "export_model",
    "has_fast_bfloat16",
    "load_model",
    "max_positions",
    "resolve_model",
    "return_freed_memory",
    "set_float32_matmul",
    "set_threads",
    "switch_off_dropout",
    "weight_digest",
]
