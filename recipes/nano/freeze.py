"""Turn the exported warm-up into the folder that ships: bfloat16 weights beside the untrained folder's other files.

python recipes/nano/freeze.py runs/nano/export runs/nano-untrained src/triune/models/nano
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

COPIED = ("tokenizer.json", "chat_template.jinja", "generation_config.json")


def freeze(trained: Path, untrained: Path, target: Path) -> None:
    """Write config and weights of `trained`, and tokenizer and template of `untrained`, into `target`."""
    model = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.bfloat16)
    model.save_pretrained(target)
    (target / "model.safetensors").chmod(0o644)
    for name in COPIED:
        shutil.copyfile(untrained / name, target / name)
    settings = json.loads((untrained / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # the name that every release of transformers 5 knows
    (target / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trained", type=Path)
    parser.add_argument("untrained", type=Path)
    parser.add_argument("target", type=Path)
    arguments = parser.parse_args()
    freeze(arguments.trained, arguments.untrained, arguments.target)
    print(f"{arguments.target}: {(arguments.target / 'model.safetensors').stat().st_size:,} bytes of weights")
