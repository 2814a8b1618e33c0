import pytest
import torch

from sidestream.training.optimization import build_optimizer
from sidestream.training.schedule_options import ScheduleOptions, schedule_of
from sidestream.training.schedules import OptimizerParamScheduler


def _rates(steps, peak):
    schedule = schedule_of(ScheduleOptions(steps=steps, lr=peak))
    return [schedule.at(step).lr for step in range(1, steps + 1)]


def test_rate_rises_to_its_peak_and_falls_to_a_tenth():
    rates = _rates(100, 2.0)
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == max(rates) == 2.0
    assert rates[-1] == pytest.approx(0.2)
    assert rates[:10] == sorted(rates[:10])
    assert rates[9:] == sorted(rates[9:], reverse=True)


@pytest.mark.parametrize("total_steps", [1, 2, 5], ids=str)
def test_short_runs_have_rates_too(total_steps):
    assert all(0 < rate <= 1 for rate in _rates(total_steps, 1.0))


def test_only_matrices_decay():
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    optimizer = build_optimizer(module.parameters(), lr=0.1)
    decayed, others = optimizer.param_groups
    assert [parameter.dim() for parameter in decayed["params"]] == [2]
    assert decayed["weight_decay"] > 0
    assert [parameter.dim() for parameter in others["params"]] == [1, 1, 1]
    assert others["weight_decay"] == 0
    schedule = schedule_of(ScheduleOptions(weight_decay=0.3))
    OptimizerParamScheduler.of(optimizer, schedule).step()
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.3, 0)
