"""Two real gloo ranks with unequal tokens give the loss and gradient of one: all bricks in one spawned pair."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from test_algorithms_invariance import OVER_BATCH, SUBJECTS, agree_in_streams, of_rank, over_batch

from triune.testing import layouts
from triune.testing.layouts import RANKS, Update, agree


def all_sum(vector):
    vector = vector.clone()
    dist.all_reduce(vector)
    return vector


def one_rank(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    found = {}
    for number, shares in enumerate(RANKS):
        for name, subject in SUBJECTS.items():
            part = layouts.on_rank(subject.algorithm, subject.rows, shares[rank], all_sum, state=subject.state)
            found[f"{name}:{number}"] = np.concatenate(
                [[part.loss, part.metrics["loss"]], part.gradient.double().numpy()]
            )
        for name, case in OVER_BATCH.items():
            for stream, value in over_batch(case, of_rank(shares[rank]), all_sum).items():
                found[f"{name}:{number}:{stream}"] = value.numpy()
    np.savez(f"{folder}/rank{rank}.npz", **found)
    dist.destroy_process_group()


@pytest.mark.slow
def test_case_18_two_gloo_ranks_agree_with_one(tmp_path):
    mp.spawn(one_rank, args=(str(tmp_path),), nprocs=2)
    with np.load(tmp_path / "rank0.npz") as first, np.load(tmp_path / "rank1.npz") as second:
        parts = dict(first), dict(second)
    for number in range(len(RANKS)):
        for name, subject in SUBJECTS.items():
            both = [part[f"{name}:{number}"] for part in parts]
            assert both[0][1] == both[1][1]
            summed = torch.tensor(both[0] + both[1])
            found = Update(float(summed[0]), summed[2:].to(torch.float32), {"loss": both[0][1]})
            expected = subject.expected
            agree(found, Update(expected.loss, expected.gradient, {"loss": expected.metrics["loss"]}))
        for name, case in OVER_BATCH.items():
            expected = over_batch(case, layouts.whole)
            for stream in expected:
                values = [part.get(f"{name}:{number}:{stream}", np.nan) for part in parts]
                joined = torch.tensor(np.where(np.isnan(values[0]), values[1], values[0]))
                agree_in_streams({stream: joined}, {stream: expected[stream]})
