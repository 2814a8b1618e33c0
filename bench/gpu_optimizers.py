"""Owns the cases of the flat optimizers and the norm in `make gpu-check`.

`torch._fused_adamw_` writes no compute shard, so what it is compared with writes none either; the
other case has the copy that it would need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from ..kernels import flat_adamw_, flat_sgd_, l2_norm_, registry
from .gpu_case import OURS, Case, same

CHECKED_NUMEL = 10_000
LR = 1e-3


def cases(device: torch.device, tensors: Sequence[tuple[int, ...]], numel: int) -> Iterator[Case]:
    """One at a time: steps of `numel` parameters, and the norm of gradients of these shapes."""
    for grad_dtype, compute_dtype in (
        (torch.float32, None),
        (torch.bfloat16, torch.bfloat16),
    ):
        yield _adamw_case(device, numel, grad_dtype, compute_dtype)
    yield _sgd_case(device, numel)
    yield _norm_case(device, tensors)


def _shards(device: torch.device, numel: int, grad_dtype: torch.dtype) -> list[torch.Tensor]:
    """Parameter, gradient, two moments."""
    made = [torch.randn(numel, device=device) for _ in range(4)]
    made[1] = made[1].to(grad_dtype)
    made[3].square_()
    return made


def _agrees(
    shards: Sequence[torch.Tensor | None], step: Callable[[list[torch.Tensor | None]], object]
) -> bool:
    """Whether a step of the first elements makes the bits that the CPU makes."""
    few = [None if shard is None else shard[:CHECKED_NUMEL].clone() for shard in shards]
    expected = [None if shard is None else shard.cpu() for shard in few]
    step(few)
    step(expected)
    return same(
        [shard for shard in few if shard is not None],
        [shard for shard in expected if shard is not None],
    )


def _adamw_case(
    device: torch.device, numel: int, grad_dtype: torch.dtype, compute_dtype: torch.dtype | None
) -> Case:
    main = _shards(device, numel, grad_dtype)
    compute = None
    if compute_dtype is not None:
        compute = torch.empty(numel, device=device, dtype=compute_dtype)
    lr, count = torch.tensor(LR, device=device), torch.ones((), device=device)

    def step(shards: list[torch.Tensor | None]) -> None:
        p, g, m, v, c = shards
        assert p is not None
        assert g is not None
        assert m is not None
        assert v is not None
        flat_adamw_(p, g, m, v, lr.to(p.device), count.to(p.device), compute=c)

    candidates: dict[str, Callable[[], object]] = {OURS: lambda: step([*main, compute])}
    if grad_dtype is torch.float32:
        candidates["_fused_adamw_"] = lambda: _fused_adamw(main, lr, count)
    extra = 0 if compute_dtype is None else compute_dtype.itemsize
    names = {torch.float32: "fp32", torch.bfloat16: "bf16", None: "none"}
    return Case(
        name=f"adamw {names[grad_dtype]} -> {names[compute_dtype]}",
        num_bytes=numel * (24 + grad_dtype.itemsize + extra),
        candidates=candidates,
        agrees=lambda: _agrees([*main, compute], step),
        target=registry.target_share("flat_adamw_"),
    )


def _fused_adamw(main: list[torch.Tensor], lr: torch.Tensor, count: torch.Tensor) -> None:
    param, grad, first, second = main
    torch._fused_adamw_(
        [param], [grad], [first], [second], [], [count],
        lr=lr, beta1=0.9, beta2=0.999, weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip


def _sgd_case(device: torch.device, numel: int) -> Case:
    param, grad, first, _ = _shards(device, numel, torch.bfloat16)
    compute = torch.empty(numel, device=device, dtype=torch.bfloat16)
    lr, count = torch.tensor(LR, device=device), torch.full((), 2.0, device=device)

    def step(shards: list[torch.Tensor | None]) -> None:
        p, g, m, c = shards
        assert p is not None
        assert g is not None
        scalars = lr.to(p.device), count.to(p.device)
        flat_sgd_(p, g, m, *scalars, momentum=0.9, compute=c)

    return Case(
        name="sgd momentum bf16 -> bf16",
        num_bytes=numel * 20,
        candidates={OURS: lambda: step([param, grad, first, compute])},
        agrees=lambda: _agrees([param, grad, first, compute], step),
        target=registry.target_share("flat_sgd_"),
    )


def _norm_case(device: torch.device, shapes: Sequence[tuple[int, ...]]) -> Case:
    tensors = [torch.randn(shape, device=device) for shape in shapes]
    flat = torch.cat([tensor.view(-1) for tensor in tensors])
    norm, flag = torch.zeros((), device=device), torch.zeros((), device=device)

    def agrees() -> bool:
        few = [tensor[:1] for tensor in tensors]
        found, expected = torch.zeros_like(norm), torch.zeros(())
        l2_norm_(found, few)
        l2_norm_(expected, [tensor.cpu() for tensor in few])
        return same((found,), (expected,))

    return Case(
        name="l2_norm fp32",
        num_bytes=flat.numel() * 4,
        candidates={
            OURS: lambda: l2_norm_(norm, tensors, found_inf=flag),
            "_foreach_norm": lambda: torch._foreach_norm(tensors),
            "torch.sum": lambda: torch.sum(flat),
        },
        agrees=agrees,
        target=registry.target_share("l2_norm_"),
    )
