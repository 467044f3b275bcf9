"""Two real gloo ranks with unequal tokens give the loss and gradient of one: all bricks in one spawned pair."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from test_algorithms_invariance import ALGORITHMS, NUM, ROWS, agree, update, whole

from triune.algorithms import Divider, Progress
from triune.testing.batches import Leaf


def all_sum(vector):
    vector = vector.clone()
    dist.all_reduce(vector)
    return vector


def one_rank(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    found = {}
    for name, algorithm in ALGORITHMS.items():
        for case, shares in enumerate(([[0, 1, 2, 5, 6, 7, 8], [3, 4]], [list(range(NUM)), []])):
            leaf = Leaf(ROWS)
            batches = [leaf.padded(shares[rank])] if shares[rank] else []
            start = {"state": algorithm.state0(), "progress": Progress(), "num_rollouts": (NUM + 1) // 2}
            divider = Divider(algorithm, batches, all_sum=all_sum, **start)
            total = sum((divider.loss(batch) for batch in batches), torch.zeros(()))
            if total.requires_grad:
                total.backward()
            gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in (leaf.logprobs, leaf.entropy)]
            metrics = divider.metrics()
            found[f"{name}:{case}"] = np.concatenate([all_sum(torch.cat(gradients)).numpy(), [metrics["loss"]]])
            assert all_sum(torch.tensor(total.item(), dtype=torch.float64)).item() == pytest.approx(metrics["loss"])
    if rank == 0:
        np.savez(f"{folder}/found.npz", **found)
    dist.destroy_process_group()


@pytest.mark.slow
def test_case_18_two_gloo_ranks_agree_with_one(tmp_path):
    mp.spawn(one_rank, args=(str(tmp_path),), nprocs=2)
    with np.load(tmp_path / "found.npz") as found:
        assert len(found.files) == 2 * len(ALGORITHMS)
        for name in found.files:
            loss, gradient, metrics = update(ALGORITHMS[name.rpartition(":")[0]], whole)
            *of_ranks, loss_of_ranks = found[name]
            answer = loss_of_ranks, torch.tensor(np.array(of_ranks), dtype=torch.float32), metrics
            agree(answer, (loss, gradient, metrics))
