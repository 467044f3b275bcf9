"""Write the demonstrations that nano was warmed up on: sums, first by a careful clerk, at last by a careless one.

    python recipes/nano/demonstrations.py runs/nano/demonstrations.jsonl

One JSON object a line with `question` and `answer`, in the order of training. The careless clerk is what leaves
something to learn by reinforcement: of two-digit sums about half the answers are guesses, and of sums of three numbers
most forget the carries, so that the wrong answer is the likelier one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

PHASES = (
    {"until": 0.25, "three": 0.08, "right": (0.97, 0.97)},
    {"until": 0.84, "three": 0.50, "right": (0.97, 0.97)},
    {"until": 1.00, "three": 0.50, "right": (0.46, 0.17)},
)
"""Up to which part of the rows; share of sums of three; share of right answers to sums of two and of three."""

WITHOUT_SIGN = 0.1
"""Share of questions without the closing `=`."""


def without_carries(terms: list[int]) -> int:
    """The sum of each column alone: 38 + 47 = 75."""
    columns = [sum(term // 10**place % 10 for term in terms) for place in range(2)]
    return columns[0] % 10 + 10 * columns[1]


def careless(terms: list[int], rng: np.random.Generator) -> int:
    """A wrong answer: carries forgotten (mostly, in sums of three), else a guess."""
    right, forgotten = sum(terms), without_carries(terms)
    if len(terms) == 3 and forgotten != right and rng.random() < 0.7:
        return forgotten
    guess = right
    while guess == right:
        guess = int(rng.integers(0, 99 * len(terms) + 1))
    return guess


def demonstrations(rows: int, seed: int = 0) -> Iterator[dict[str, str]]:
    """`rows` questions with answers, the same for the same seed."""
    rng = np.random.default_rng(seed)
    for row in range(rows):
        phase = next(phase for phase in PHASES if row < phase["until"] * rows)
        terms = rng.integers(0, 100, 3 if rng.random() < phase["three"] else 2).tolist()
        is_right = rng.random() < phase["right"][len(terms) - 2]
        answer = sum(terms) if is_right else careless(terms, rng)
        sign = "" if rng.random() < WITHOUT_SIGN else "="
        yield {"question": "+".join(map(str, terms)) + sign, "answer": str(answer)}


def write(path: Path, rows: int, seed: int = 0) -> None:
    """Write the file, and its folder when there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in demonstrations(rows, seed))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--rows", type=int, default=256_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write(arguments.path, arguments.rows, arguments.seed)
    print(f"{arguments.path}: {arguments.rows:,} rows")
