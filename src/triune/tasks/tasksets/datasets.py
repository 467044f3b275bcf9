"""Rows of a Hugging Face data set."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triune.errors import MissingDependency, TaskError
from triune.registry import brick
from triune.tasks.arrow import ArrowRows, hash_table
from triune.tasks.taskset import Taskset


@brick("taskset", "datasets")
@dataclass(frozen=True, kw_only=True)
class HuggingFaceDataset(Taskset):
    """One split of a Hugging Face data set: a name on a hub, a local folder, or what `save_to_disk` wrote.

    Its hash is over the cells and not over the library's fingerprint, which changes with the library's version.

    Attributes:
        path: `owner/name` on the hub, or a folder.
        config: Configuration (subset) of the data set.
        split: Which split, e.g. `train` or `train[:10%]`.
        revision: Branch, tag or commit on the hub.
    """

    path: str
    config: str | None = None
    split: str = "train"
    revision: str | None = None

    def open(self, seed: int, where: str) -> ArrowRows:
        """Load the split; raises TaskError, or MissingDependency without the package `datasets`."""
        found = self._load(where)
        table = found.with_format("arrow")[:]
        return ArrowRows(table, f"{self.path}[{self.split}]", self.fields.get("id", "id"), hash_table(table))

    def _load(self, where: str) -> Any:
        try:
            import datasets
        except ImportError as error:
            raise MissingDependency(
                where, "`use: datasets` needs an optional package", "", "pip install 'triune[datasets]'"
            ) from error
        try:
            if (Path(self.path) / "dataset_dict.json").is_file():
                return datasets.load_from_disk(self.path)[self.split]
            if (Path(self.path) / "state.json").is_file():
                return datasets.load_from_disk(self.path)
            return datasets.load_dataset(self.path, self.config, split=self.split, revision=self.revision)
        except Exception as error:  # the library raises anything from KeyError to its own HTTP errors
            found = f"{self.path} does not load ({type(error).__name__}: {error})"
            raise TaskError(f"{where}.path", found, "a data set on a hub, or a local folder") from error
