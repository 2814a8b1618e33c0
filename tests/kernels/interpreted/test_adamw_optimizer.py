"""`sidestream.AdamW` steps flat shards by the kernel as by its definition, bit for bit."""

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import sidestream as ss
from sidestream.kernels.op import launching_on_cpu
from sidestream.kernels.optim import op, reference


def model_and_optimizer(zero: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 8))
    matrices, vectors = (
        [p for p in model.parameters() if (p.dim() > 1) is is_matrix] for is_matrix in (True, False)
    )
    optimizer = ss.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=0.02)
    policy = ss.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    return ss.fully_shard(
        model,
        optimizer,
        zero_dp_strategy=zero,
        fsdp_unit_modules=[nn.Linear],
        mixed_precision_policy=policy,
    )


@pytest.mark.parametrize("zero", [1, 3])
def test_a_sharded_step_by_the_kernel_is_one_by_its_definition(zero):
    found = []
    for implementation in (op._FLAT_ADAMW.by_device["cuda"], reference.flat_adamw_):
        model, optimizer = model_and_optimizer(zero)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        with mock.patch.dict(op._FLAT_ADAMW.by_device, {"cuda": implementation}):
            losses = []
            for step in range(3):
                x = torch.randn(4, 40, generator=torch.Generator().manual_seed(step))
                loss = model(x).float().square().mean()
                scaler.scale(loss).backward()
                with launching_on_cpu(), torch.no_grad():
                    scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                losses.append(loss.item())
        state = copy.deepcopy(optimizer.state_dict()["state"])
        found.append((losses, ss.full_state_dict(model), state))
    (losses, params, state), (expected_losses, expected, expected_state) = found
    assert losses == expected_losses
    for name, value in expected.items():
        assert torch.equal(params[name], value), name
    for index, entries in expected_state.items():
        assert entries["step"] == 3
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[index][key].local, entries[key].local), (index, key)
