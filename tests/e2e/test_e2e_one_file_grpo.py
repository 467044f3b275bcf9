"""The page a newcomer reads first runs, and its sampler and its trainer agree."""

import importlib.util
import re
from pathlib import Path

from triune.tasks.rewards.exact_match import ExactMatch

PAGE = Path(__file__).parents[2] / "examples" / "one_file_grpo.py"


def load_page():
    spec = importlib.util.spec_from_file_location("one_file_grpo", PAGE)
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    return page


def test_the_one_file_example_trains_on_what_it_sampled(capsys, monkeypatch):
    monkeypatch.setattr(ExactMatch, "__call__", lambda self, task, answer: float(sum(map(ord, answer)) % 2))
    rewards = load_page().main(["--steps", "2", "--tasks-per-step", "3", "--set", "kl=k3", "--set", "group_size=4"])
    assert len(rewards) == 2
    printed = capsys.readouterr().out
    gaps = [float(gap) for gap in re.findall(r"logprob_gap (\S+)", printed)]
    assert gaps
    assert max(gaps) < 1e-4
    assert re.search(r"step   0 .* kl 0\.0000 ", printed)


def test_the_one_file_example_fits_on_a_page_or_five():
    assert len(PAGE.read_text(encoding="utf-8").splitlines()) <= 260
