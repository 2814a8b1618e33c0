import pytest
import torch

from sidestream.training.optimization import build_optimizer, learning_rate


def test_rate_rises_to_its_peak_and_falls_to_a_tenth():
    rates = [learning_rate(step, total_steps=100, peak=2.0) for step in range(1, 101)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == max(rates) == 2.0
    assert rates[-1] == pytest.approx(0.2)
    assert rates[:10] == sorted(rates[:10])
    assert rates[9:] == sorted(rates[9:], reverse=True)


@pytest.mark.parametrize("total_steps", [1, 2, 5], ids=str)
def test_short_runs_have_rates_too(total_steps):
    rates = [learning_rate(s, total_steps=total_steps, peak=1.0) for s in range(1, total_steps + 1)]
    assert all(0 < rate <= 1 for rate in rates)


def test_only_matrices_decay():
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    decayed, others = build_optimizer(module.parameters(), lr=0.1).param_groups
    assert [parameter.dim() for parameter in decayed["params"]] == [2]
    assert decayed["weight_decay"] > 0
    assert [parameter.dim() for parameter in others["params"]] == [1, 1, 1]
    assert others["weight_decay"] == 0
