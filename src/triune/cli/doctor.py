"""`triune doctor`: what this machine can run."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
from pathlib import Path
from typing import Any

import typer

from triune.cli.screen import table

EXTRAS = {"datasets": "datasets", "reasoning-gym": "reasoning-gym", "tensorboard": "tensorboard", "gguf": "gguf"}
"""Extra → distribution it installs."""

CORE = ("torch", "transformers", "safetensors", "peft", "pydantic", "msgspec", "numpy", "math-verify", "pyarrow")


def doctor(as_json: bool) -> None:
    """Print facts about the machine and advice where something is missing."""
    facts, advice = examine()
    if as_json:
        typer.echo(json.dumps({"facts": facts, "advice": advice}, indent=2))
        return
    table("this machine", ("", ""), [(name, str(value)) for name, value in facts.items()])
    typer.echo("\n".join(f"- {line}" for line in advice) or "Nothing is missing for the quick start.")


def examine() -> tuple[dict[str, Any], list[str]]:
    """Facts by name, and advice."""
    facts: dict[str, Any] = {
        "triune": importlib.metadata.version("triune"),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    advice = []
    for name in CORE:
        facts[name] = version = _version(name)
        if version is None:
            advice.append(f"{name} is not installed: pip install triune")
    for extra, distribution in EXTRAS.items():
        version = _version(distribution)
        facts[f"extra {extra}"] = version or f"absent (pip install 'triune[{extra}]')"
    facts |= _compute(advice)
    facts |= _space(advice)
    return facts, advice


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _compute(advice: list[str]) -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    facts: dict[str, Any] = {"cores": cores}
    if _version("torch") is None:
        return facts
    import torch

    facts["torch threads"] = torch.get_num_threads()
    facts["cpu"] = torch.backends.cpu.get_cpu_capability()
    facts["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or "none"
    if torch.get_num_threads() > cores:
        advice.append(f"torch uses {torch.get_num_threads()} threads on {cores} cores: set OMP_NUM_THREADS={cores}")
    return facts


def _space(advice: list[str]) -> dict[str, Any]:
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    facts: dict[str, Any] = {"disk free here": f"{free:.1f} GiB"}
    if free < 2:
        advice.append("less than 2 GiB of disk are free here: set runs_dir to another disk")
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        facts["memory"] = f"{int(lines['MemTotal'].split()[0]) / 2**20:.1f} GiB"
        available = int(lines.get("MemAvailable", "0 kB").split()[0]) / 2**20
        facts["memory available"] = f"{available:.1f} GiB"
        if available < 1:
            advice.append("less than 1 GiB of memory is available: close other programs")
    return facts
