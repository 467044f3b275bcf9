"""The command line starts at once and loads nothing heavy."""

from __future__ import annotations

import json
import subprocess
import sys
import time

HEAVY = ("torch", "transformers", "peft", "pyarrow", "matplotlib", "datasets", "math_verify", "httpx")


def test_importing_the_command_line_loads_no_torch():
    code = f"import sys, json, triune.cli; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_importing_the_command_line_takes_under_four_tenths_of_a_second():
    best = 99.0
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import triune.cli"], check=True)
        best = min(best, time.perf_counter() - start)
        if best < 0.4:
            break
    assert best < 0.4, f"{best:.2f} s, the interpreter included"
