"""What is frozen takes the memory of its own dtype: no FP32 master, nothing lost, no training."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sidestream as ss
from sidestream.sharding.fully_shard import runtime_of
from sidestream.tests.ranks import run_on_ranks
from sidestream.tests.sharding.test_memory import storage_bytes
from sidestream.tests.sharding.twins import LEVELS

WIDTH = 12
BF16 = torch.bfloat16


class Adapted(nn.Module):
    """A frozen layer with a small trainable one beside it, as LoRA has them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, dtype=dtype).requires_grad_(False)
        self.low = nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.low(x))


def make(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Adapted(dtype) for _ in range(2)), nn.Linear(WIDTH, 3, dtype=dtype))


def shard(
    model: nn.Module, zero: int, **policy: Any
) -> tuple[nn.Module, torch.optim.Optimizer | None]:
    return ss.fully_shard(
        model,
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1),
        fsdp_unit_modules=[Adapted],
        zero_dp_strategy=zero,
        mixed_precision_policy=ss.MixedPrecisionPolicy(**policy),
    )


# The dtype of the model, the policy, and what its frozen part and its trainable one are kept in.
KEPT: dict[str, tuple[torch.dtype, dict[str, Any], torch.dtype, torch.dtype]] = {
    "bf16 model": (BF16, {}, BF16, torch.float32),
    "fp16 model, bf16 compute": (
        torch.float16,
        {"param_dtype": BF16},
        torch.float16,
        torch.float32,
    ),
    "fp32 model, bf16 compute": (
        torch.float32,
        {"param_dtype": BF16},
        torch.float32,
        torch.float32,
    ),
    "fp32 model, all bf16": (
        torch.float32,
        {"param_dtype": BF16, "main_params_dtype": BF16},
        BF16,
        BF16,
    ),
}


def takes_its_own_dtype(rank: int, world_size: int, kind: str) -> None:
    dtype, policy, frozen_dtype, trained_dtype = KEPT[kind]
    for zero in LEVELS[world_size]:
        model = make(dtype)
        base = {name: value.clone() for name, value in model.state_dict().items() if "base" in name}
        shard(model, zero, **policy)
        x = torch.ones(2, WIDTH, dtype=policy.get("param_dtype", dtype))
        model(x).sum().backward()
        planned = ss.summary(model)
        assert planned.bytes_at_rest == storage_bytes(model), zero
        assert planned.bytes_at_rest == runtime_of(model).pool.live_bytes, zero
        for name, param in model.named_parameters():
            assert param.dtype == (frozen_dtype if "base" in name else trained_dtype), name
        frozen = [row for row in planned.units if row.grad_bytes == 0]
        layouts = [u.spec.layout for u in runtime_of(model).units if not u.reduction.is_needed]
        assert len(frozen) == len(layouts) == 2
        for row, layout in zip(frozen, layouts, strict=True):
            numel = layout.numel if zero == 0 else layout.shard_numel
            assert row.main_bytes == numel * frozen_dtype.itemsize
        state = ss.full_state_dict(model)
        for name, value in base.items():
            assert torch.equal(state[name].to(dtype), value.to(frozen_dtype).to(dtype)), name


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("kind", KEPT)
def test_frozen_parameters_are_kept_in_their_own_dtype(kind: str, world_size: int) -> None:
    run_on_ranks(takes_its_own_dtype, world_size, kind)


def trains_the_same(rank: int, world_size: int) -> None:
    """Frozen after `fully_shard`, the base has a master: not a bit is another."""
    for zero in LEVELS[world_size]:
        results = []
        for freeze_first in (True, False):
            model = make(BF16)
            bases = [module.base for module in model.modules() if isinstance(module, Adapted)]
            for base in bases:
                base.requires_grad_(not freeze_first)
            groups = [{"params": [param]} for param in model.parameters() if param.requires_grad]
            optimizer = torch.optim.AdamW(groups, lr=0.1)
            ss.fully_shard(model, optimizer, fsdp_unit_modules=[Adapted], zero_dp_strategy=zero)
            for base in bases:
                base.requires_grad_(False)
            for step in range(3):
                torch.manual_seed(10 * step + rank)
                model(torch.randn(2, WIDTH, dtype=BF16)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append(ss.full_state_dict(model))
        for name, value in results[0].items():
            assert torch.equal(value.float(), results[1][name].float()), (zero, name)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_frozen_base_computes_the_same_bits_without_a_master(world_size: int) -> None:
    run_on_ranks(trains_the_same, world_size)


def moves_between_policies(rank: int, world_size: int, folder: str) -> None:
    for zero in LEVELS[world_size]:
        for target in ("all trainable", "fp32", "bf16"):
            model = make(BF16)
            shard(model, zero)
            expected = ss.full_state_dict(model)
            path = Path(folder) / f"{zero}-{target}"
            ss.save_checkpoint(path, model)
            other = make(torch.float32 if target == "fp32" else BF16)
            with torch.no_grad():
                for param in other.parameters():
                    param.zero_()
            if target == "all trainable":
                other.requires_grad_(True)
            shard(other, 3 - zero)
            ss.load_checkpoint(path, other)
            for name, value in ss.full_state_dict(other).items():
                assert torch.equal(value.float(), expected[name].float()), (zero, target, name)


def test_checkpoints_load_between_frozen_and_trainable_models(tmp_path: Path) -> None:
    run_on_ranks(moves_between_policies, 2, str(tmp_path))


def unfreezes(rank: int, world_size: int) -> None:
    for zero in LEVELS[world_size]:
        model = make(BF16)
        shard(model, zero)
        x = torch.ones(2, WIDTH, dtype=BF16)
        expected = model(x)
        model.requires_grad_(True)
        message = (
            r"unit '0': expected what was frozen at fully_shard to stay so, since it is kept in "
            r"torch.bfloat16, .* got \['0.base.weight', '0.base.bias'\] unfrozen; freeze them after"
        )
        for _ in range(2):
            with pytest.raises(RuntimeError, match=message):
                model(x)
        for module in model.modules():
            if isinstance(module, Adapted):
                module.base.requires_grad_(False)
        assert torch.equal(model(x), expected), "and mended by freezing it again"
        for policy in ({"main_params_dtype": None}, {"main_params_dtype": BF16}):
            model = make(BF16)
            shard(model, zero, **policy)
            model.requires_grad_(True)
            model(x).sum().backward()
            assert model[0].base.weight.grad is not None
        model = make(torch.float32)
        shard(model, zero)
        model.requires_grad_(True)
        model(x.float()).sum().backward()
        assert model[0].base.weight.grad is not None


@pytest.mark.parametrize("world_size", [1, 2])
def test_unfreezing_what_has_no_master_is_refused_by_name(world_size: int) -> None:
    run_on_ranks(unfreezes, world_size)
