"""How sequences are laid out, split and ordered changes no loss and no gradient: one suite over every loss brick.

A new brick is covered on arrival: the suite takes its names from the registry. `OPTIONS` adds settings of a brick.
"""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from triune import registry
from triune.algorithms import Algorithm, Constant, Divider, Progress, Term
from triune.testing.batches import Leaf, random_rows

NUM = 9
ROWS = random_rows(NUM, seed=11)
OPTIONS = {
    ("policy_loss", "ppo_clip"): [
        {"average": "sequence"},
        {"average": "sequence_sum"},
        {"average": "constant", "length": 16},
        {"dual_clip": 1.5, "clip_high": 0.28},
        {"missing_behaviour": "use_old"},
    ],
    ("policy_loss", "reinforce"): [{"average": "sequence"}],
    ("policy_loss", "sft"): [{"average": "sequence"}, {"sources": ["expert"]}],
    ("kl", "k3"): [{"gradient": "forward"}, {"on_flat_groups": False}],
}
SURROGATE = {"k1": "k2", "k3": "k2"}
"""Bricks that show one value and descend another: whose value has their gradient."""


@dataclass(frozen=True)
class PerRollout:
    """A term per rollout and one with a constant, which no built-in brick has yet."""

    needs = frozenset()

    def __call__(self, batch, state, progress):
        square = batch.logprobs.square()
        return [
            Term("rollout", square, batch.action_mask, per="rollout"),
            Term("constant", square, batch.action_mask, weight=0.3, per=Constant(9)),
        ]


def algorithm_with(kind, name, options):
    brick = registry.build(kind, {"use": name, **options}, kind)
    silent = registry.build("policy_loss", {"use": "sft", "sources": ["human"]}, "policy_loss")  # has no token here
    return Algorithm(**({"policy_loss": silent} | {kind: brick}))


CASES = {
    f"{kind}-{name}-{number}": (kind, name, options)
    for kind in ("policy_loss", "kl", "entropy")
    for name in registry.names(kind)
    for number, options in enumerate([{}, *OPTIONS.get((kind, name), [])])
}
ALGORITHMS = {name: algorithm_with(*case) for name, case in CASES.items()}
ALGORITHMS["per-rollout"] = Algorithm(policy_loss=PerRollout())
every_brick = pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)


def update(algorithm, layout, dtype=torch.float32):
    """Loss, gradient by the log-probs, gradient by the entropies and metrics of one update."""
    leaf = Leaf(ROWS, dtype)
    batches = layout(leaf)
    divider = Divider(algorithm, batches, state=algorithm.state0(), progress=Progress())
    total = 0.0
    for batch in batches:
        loss = divider.loss(batch)
        if loss.requires_grad:
            loss.backward(retain_graph=True)
        total += loss.item()
    assert all(end.grad is None or end.grad.item() == 0.0 for end in leaf.padding)
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in (leaf.logprobs, leaf.entropy)]
    return total, torch.cat(gradients), divider.metrics()


def agree(one, other, exact=True):
    assert one[0] == pytest.approx(other[0], rel=1e-6, abs=1e-9)
    assert torch.equal(one[1], other[1]) if exact else torch.allclose(one[1], other[1], rtol=1e-5, atol=1e-9)
    assert one[2] == pytest.approx(other[2], rel=1e-6, abs=1e-9)


def split(size):
    return lambda leaf: [leaf.padded(range(i, min(i + size, NUM))) for i in range(0, NUM, size)]


def whole(leaf):
    return [leaf.padded(range(NUM))]


@every_brick
@pytest.mark.parametrize("size", [1, 2, 8])
def test_case_18_19_22_micro_batches_add_up_to_the_whole_batch_bit_for_bit(algorithm, size):
    agree(update(algorithm, split(size)), update(algorithm, whole))


@every_brick
@pytest.mark.parametrize("fill", [0.0, -7.5, math.nan, math.inf])
def test_case_20_padding_and_what_it_holds_change_nothing(algorithm, fill):
    layout = lambda leaf: [leaf.padded(range(NUM), width=40, extra_rows=3, fill=fill)]  # noqa: E731
    agree(update(algorithm, layout), update(algorithm, whole))


@every_brick
def test_case_18_packed_rows_agree_with_padded_ones(algorithm):
    layout = lambda leaf: [leaf.packed(range(5), tail=6, fill=math.nan), leaf.packed(range(5, NUM))]  # noqa: E731
    # a mean over a sequence is rounded after sums in another order: float32 rounding, no more
    agree(update(algorithm, layout), update(algorithm, whole), exact=False)


@every_brick
def test_the_order_of_sequences_changes_nothing(algorithm):
    order = [4, 8, 0, 3, 7, 1, 5, 2, 6]
    agree(update(algorithm, lambda leaf: [leaf.padded(order[:4]), leaf.padded(order[4:])]), update(algorithm, whole))


@every_brick
def test_case_18_ranks_add_up_to_one_rank(algorithm):
    expected = update(algorithm, whole)
    agree(in_turn(algorithm, [[0, 1, 2, 5, 6, 7, 8], [3, 4]]), expected)
    agree(in_turn(algorithm, [list(range(NUM)), []]), expected)


def in_turn(algorithm, ranks):
    """Two ranks with unequal tokens, played one after the other: first all count, then all divide."""
    leaf = Leaf(ROWS)
    tallies, num_rollouts = [], (NUM + 1) // 2

    def remember(vector):
        tallies.append(vector)
        return vector

    batches = [[leaf.padded(chosen)] if chosen else [] for chosen in ranks]
    start = {"state": algorithm.state0(), "progress": Progress(), "num_rollouts": num_rollouts}
    for of_rank in batches:
        Divider(algorithm, of_rank, all_sum=remember, **start)
    counted = torch.stack(tallies).sum(0)
    total, sums, last = 0.0, [], None
    for of_rank in batches:
        answers = [counted]
        last = Divider(algorithm, of_rank, all_sum=lambda vector, a=answers: a.pop() if a else vector, **start)
        for batch in of_rank:
            loss = last.loss(batch)
            if loss.requires_grad:
                loss.backward(retain_graph=True)
            total += loss.item()
        sums.append(torch.stack(list(last._sums.values())))
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in (leaf.logprobs, leaf.entropy)]
    last._all_sum = lambda _: torch.stack(sums).sum(0)
    return total, torch.cat(gradients), last.metrics()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_gradient_is_the_slope_of_the_value(case):
    kind, name, options = case
    valued = algorithm_with(*case)
    if name in SURROGATE and options.get("gradient") != "forward":
        kept = {key: value for key, value in options.items() if key != "gradient"}
        valued = algorithm_with(kind, SURROGATE[name], kept)
    _, gradient, _ = update(algorithm_with(*case), whole, torch.float64)
    step, width = 1e-6, len(gradient) // 2
    chosen = [t for t in np.flatnonzero(np.concatenate([row.action_mask for row in ROWS])) if t % 3 == 0]
    for t in (*chosen, *(t + width for t in chosen[:4])):
        values = []
        for side in (step, -step):
            leaf = Leaf(ROWS, torch.float64)
            with torch.no_grad():
                (leaf.logprobs if t < width else leaf.entropy)[t % width] += side
                # unknown behaviour follows the new log-prob by definition, so hold it where it was
                divider = Divider(valued, [b := held(leaf)], state=valued.state0(), progress=Progress())
                values.append(divider.loss(b).item())
        assert (values[0] - values[1]) / (2 * step) == pytest.approx(gradient[t].item(), abs=1e-7, rel=1e-5)


def held(leaf):
    batch = leaf.padded(range(NUM))
    still = Leaf(ROWS, torch.float64).padded(range(NUM))
    object.__setattr__(batch, "old_logprobs", still.old_logprobs.detach())
    return batch
