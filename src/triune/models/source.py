"""Where a model is: the shipped one, a folder, an adapter over another model, a GGUF file, or the hub."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triune.errors import ConfigError, MissingDependency

SHIPPED = {"triune/nano": Path(__file__).parent / "nano"}
"""Models inside the package, by the name a run file uses."""


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """What `from_pretrained` needs to find a model.

    Attributes:
        name: What the user wrote.
        location: A folder, or a name on the hub.
        gguf_file: The file inside the folder when it holds GGUF.
        adapter: Folder of an adapter that `location` is the base of.
    """

    name: str
    location: str
    gguf_file: str | None = None
    adapter: str | None = None

    @property
    def is_local(self) -> bool:
        """Whether nothing is fetched from the hub."""
        return Path(self.location).is_dir()

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for `from_pretrained`; GGUF weights are de-quantised so that they train and save."""
        if self.gguf_file is None:
            return {}
        try:
            import gguf  # noqa: F401
        except ImportError:
            raise MissingDependency(
                self.location, "a GGUF model", "the package gguf", "pip install 'triune[gguf]'"
            ) from None
        from transformers import GgufConfig

        return {"gguf_file": self.gguf_file, "quantization_config": GgufConfig(dequantize=True)}


def resolve_model(path: str | Path, where: str = "model.path") -> ModelSource:
    """Find a model without loading it.

    Args:
        path: `triune/nano`, a folder, a `.gguf` file, or a name on the hub (`owner/name`).
        where: Dotted key for messages.

    Raises:
        ConfigError: It looks like a folder and is none, or the folder holds no model.
    """
    name = str(path)
    folder = SHIPPED.get(name) or Path(name).expanduser()
    if folder.is_file() and folder.suffix == ".gguf":
        return ModelSource(name=name, location=str(folder.parent), gguf_file=folder.name)
    if folder.is_dir():
        return _resolve_folder(name, folder, where)
    if name in SHIPPED:
        raise ConfigError(where, f"{name} is missing from this installation", "", "install triune again")
    looks_local = name.startswith((".", "/", "~")) or name.count("/") != 1
    if looks_local and not name.isidentifier():
        raise ConfigError(
            where, f"no folder {name}", "a model folder", "check the path, or write owner/name for the hub"
        )
    return ModelSource(name=name, location=name)


def _resolve_folder(name: str, folder: Path, where: str) -> ModelSource:
    location = str(folder)
    if (folder / "adapter_config.json").exists():
        base_name = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
        base = resolve_model(base_name, f"{location}/adapter_config.json: base_model_name_or_path")
        if base.adapter is not None:
            raise ConfigError(where, f"{name} is an adapter over an adapter", "an adapter over a full model")
        return ModelSource(name=name, location=base.location, gguf_file=base.gguf_file, adapter=location)
    if (folder / "config.json").exists():
        return ModelSource(name=name, location=location)
    files = sorted(file.name for file in folder.glob("*.gguf"))
    if len(files) == 1:
        return ModelSource(name=name, location=location, gguf_file=files[0])
    found = f"{len(files)} GGUF files in {name}" if files else f"{name} holds neither config.json nor a .gguf file"
    raise ConfigError(where, found, "one model", "name the file itself" if files else "point to the model's folder")
