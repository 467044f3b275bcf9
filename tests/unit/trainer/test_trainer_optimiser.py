import math

import pytest
import torch
from pydantic import ValidationError

from triune.errors import CheckpointError
from triune.trainer import TrainerSettings
from triune.trainer.optimiser import Optimiser


def parameters() -> dict[str, torch.nn.Parameter]:
    return {
        "weight": torch.nn.Parameter(torch.tensor([[1.0, -2.0]])),
        "norm": torch.nn.Parameter(torch.tensor([3.0])),
    }


def give(params, weight, norm):
    params["weight"].grad = torch.tensor([weight])
    params["norm"].grad = torch.tensor(norm)


def test_the_first_update_moves_every_weight_by_the_learning_rate_against_its_gradient():
    params = parameters()
    optimiser = Optimiser(params, TrainerSettings(learning_rate=0.1, max_grad_norm=100))
    give(params, [0.3, -4.0], [1.0])
    updated = optimiser.update(0)
    assert updated.grad_norm == pytest.approx(math.sqrt(0.09 + 16 + 1))
    torch.testing.assert_close(params["weight"].detach(), torch.tensor([[0.9, -1.9]]))
    torch.testing.assert_close(params["norm"].detach(), torch.tensor([2.9]))
    assert params["weight"].grad is None


def test_weight_decay_touches_matrices_only():
    params = parameters()
    optimiser = Optimiser(params, TrainerSettings(learning_rate=0.1, weight_decay=0.5))
    give(params, [1e-12, 1e-12], [1e-12])
    optimiser.update(0)
    assert params["weight"][0, 1].item() == pytest.approx(-2 * (1 - 0.1 * 0.5), abs=1e-3)
    assert params["norm"].item() == pytest.approx(3.0, abs=1e-3)


def test_a_large_gradient_is_scaled_to_the_limit_and_reported_before():
    params = parameters()
    optimiser = Optimiser(params, TrainerSettings(learning_rate=0.1, max_grad_norm=1.0, betas=(0.0, 0.0)))
    give(params, [3.0, 4.0], [0.0])
    assert optimiser.update(0).grad_norm == 5.0
    (average,) = (value for name, value in optimiser.state().items() if name == "exp_avg/weight")
    torch.testing.assert_close(average, torch.tensor([[0.6, 0.8]]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_gradients_that_are_not_finite_change_nothing(bad: float):
    params = parameters()
    optimiser = Optimiser(params, TrainerSettings(learning_rate=0.1))
    give(params, [bad, 0.0], [1.0])
    assert not optimiser.update(0).is_applied
    assert params["weight"].tolist() == [[1.0, -2.0]]
    assert optimiser.state() == {}


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [0.5, 1.0, 1.0, 0.5 + 0.5 * math.sqrt(0.5), 0.5, 0.5 - 0.5 * math.sqrt(0.5)]),
    ],
)
def test_the_learning_rate_warms_up_and_follows_its_schedule(schedule, rates):
    settings = TrainerSettings(steps=6, warmup_steps=2, schedule=schedule, learning_rate=1.0)
    optimiser = Optimiser(parameters(), settings)
    assert [optimiser.learning_rate(step) for step in range(6)] == pytest.approx(rates)


def test_the_state_of_another_model_is_refused():
    optimiser = Optimiser(parameters(), TrainerSettings())
    with pytest.raises(CheckpointError, match="another model"):
        optimiser.load({"exp_avg/other": torch.zeros(1, 2)})
    with pytest.raises(CheckpointError, match="another model"):
        optimiser.load({"exp_avg/weight": torch.zeros(2, 2)})


def test_two_batch_units_at_once_are_refused():
    with pytest.raises(ValidationError, match="not both"):
        TrainerSettings(tasks_per_step=4, sequences_per_step=4)
    assert TrainerSettings(sequences_per_step=4).entries_per_step == 4
    assert TrainerSettings(epochs=2, mini_batches=3).updates_per_step == 6
