"""Models: where they are found, how they are loaded, named, fingerprinted and exported. torch only inside functions."""

from triune.models.digest import weight_digest

__all__ = ["weight_digest"]
