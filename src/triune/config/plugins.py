"""Plug-in files: one Python file that marks bricks, loaded under a name that holds its content's hash."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
import traceback
import types
from collections.abc import Sequence
from pathlib import Path

import msgspec

from triune.errors import PluginError

PACKAGE = "triune_plugins"


class Plugin(msgspec.Struct, frozen=True, kw_only=True):
    """One loaded plug-in file.

    Attributes:
        file: Where it was read from.
        module: `triune_plugins.<name>_<hash>`, the same in every process.
    """

    file: Path
    module: str

    @property
    def file_name(self) -> str:
        """Its name inside `runs/<name>/plugins/`."""
        return f"{self.module.rpartition('.')[2]}.py"


def load_plugins(files: Sequence[str], folder: Path) -> tuple[Plugin, ...]:
    """Import plug-in files; relative paths start at `folder`, else at the current one.

    Raises:
        PluginError: No such file, or it does not import; names file and line. Never a warning.
    """
    return tuple(_load(name, index, folder) for index, name in enumerate(files))


def copy_plugins(plugins: Sequence[Plugin], run_folder: Path) -> Path:
    """Copy plug-ins into a run's folder, where other processes and later resumes import them from."""
    target = run_folder / "plugins"
    if plugins:
        target.mkdir(parents=True, exist_ok=True)
    for plugin in plugins:
        copied = target / plugin.file_name
        if not copied.exists():
            copied.write_bytes(plugin.file.read_bytes())
    use_plugins_of(run_folder)
    return target


def use_plugins_of(run_folder: Path) -> None:
    """Let `import triune_plugins.<name>_<hash>` find the copies in a run's folder (workers, resumed runs)."""
    paths = _package().__path__
    folder = str((run_folder / "plugins").resolve())
    if folder not in paths:
        paths.append(folder)
    importlib.invalidate_caches()


def _package() -> types.ModuleType:
    if PACKAGE not in sys.modules:
        package = types.ModuleType(PACKAGE, "Plug-in files of this process's runs.")
        package.__path__ = []
        sys.modules[PACKAGE] = package
    return sys.modules[PACKAGE]


def _load(name: str, index: int, folder: Path) -> Plugin:
    where = f"plugins.{index}"
    file = next((path for path in (folder / name, Path(name)) if path.is_file()), None)
    if file is None:
        raise PluginError(where, f"no file {name!r} in {folder} or here", "a Python file", "correct the path")
    if file.suffix != ".py":
        raise PluginError(where, f"found {name!r}", "a file that ends in .py")
    content = file.read_bytes()
    stem = re.sub(r"\W", "_", file.stem)
    if re.fullmatch(r".*_[0-9a-f]{8}", stem) and stem.endswith(_hash(content)):
        short = stem  # a copy in a run's folder
    else:
        short = f"{stem}_{_hash(content)}"
    plugin = Plugin(file=file.resolve(), module=f"{PACKAGE}.{short}")
    if plugin.module not in sys.modules:
        _import(plugin, where)
    return plugin


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:8]


def _import(plugin: Plugin, where: str) -> None:
    _package()
    spec = importlib.util.spec_from_file_location(plugin.module, plugin.file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[plugin.module] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[plugin.module]
        raise PluginError(
            f"{where} ({plugin.file}:{_line(error, plugin.file)})",
            f"{type(error).__name__}: {error}",
            "a file that imports",
        ) from error


def _line(error: Exception, file: Path) -> int:
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return error.lineno
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == file]
    return (frames[-1].lineno or 0) if frames else 0
