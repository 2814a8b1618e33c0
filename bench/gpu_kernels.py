"""Owns the kernel table of `make gpu-check`: ours and rivals on one Llama 3 8B block, and a copy.

The bytes of a case are what any implementation must move: every input read once, every output
written once, and read once where it accumulates. A candidate's rate is those bytes by its median
time, so that passes a rival makes too many show as a lower rate. The roof is `copy_` in this run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..kernels import pack_, reduce_, registry, unpack_
from . import gpu_casts, gpu_messages, gpu_optimizers
from .gpu_case import ALIGNMENT_NUMEL, OURS, Case, offsets_of
from .timing import alternating_order, estimate_median

# Meta, Llama 3 8B: hidden size 4096, 8 key/value heads of 128, intermediate size 14336.
_SQUARE, _GROUPED, _WIDE = (4096, 4096), (1024, 4096), (14336, 4096)
LLAMA_BLOCK: tuple[tuple[int, ...], ...] = (
    *(_SQUARE, _GROUPED, _GROUPED, _SQUARE),
    *(_WIDE, _WIDE, _WIDE[::-1]),
    *((4096,), (4096,)),
)
TINY_BLOCK: tuple[tuple[int, ...], ...] = tuple(
    tuple(max(1, size // 64) for size in shape) for shape in LLAMA_BLOCK
)
FLUSH_BYTES = 256 * 1024 * 1024  # more than the second-level cache of any GPU we know
COPY = "copy"


@dataclass(frozen=True)
class Timing:
    """One candidate of one case. `percent_of_copy` is its rate by that of `copy_` in this run, and
    `target_percent` what that is to be, `None` where it is not ours or nobody said."""

    case: str
    candidate: str
    median_ms: float
    low_ms: float
    high_ms: float
    gb_per_s: float
    percent_of_copy: float
    target_percent: float | None


def measure_all(device: torch.device, *, rounds: int, tiny: bool) -> tuple[list[Timing], list[str]]:
    """Time every case; the second list names cases with wrong results, which get no times."""
    clock = _Clock(device)
    timings: list[Timing] = []
    wrong: list[str] = []
    copy_rate = math.nan
    for case in _cases(device, TINY_BLOCK if tiny else LLAMA_BLOCK):
        if not case.agrees():
            wrong.append(case.name)
            continue
        samples = clock.samples(case.candidates, rounds)
        if case.name == COPY:
            copy_rate = case.num_bytes / estimate_median(samples[COPY]).median
        timings += [_timing(case, name, times, copy_rate) for name, times in samples.items()]
    return timings, wrong


def host_microseconds(device: torch.device, *, calls: int) -> float:
    """Host time of one pack_ of nine tiny tensors, no waiting for the device, in microseconds."""
    tensors = [torch.ones(8, 8, device=device) for _ in range(9)]
    offsets = [ALIGNMENT_NUMEL * index for index in range(len(tensors))]
    flat = torch.empty(ALIGNMENT_NUMEL * len(tensors), device=device)
    for _ in range(calls // 10 + 1):
        pack_(flat, tensors, offsets)
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        pack_(flat, tensors, offsets)
    elapsed = time.perf_counter() - start
    _synchronize(device)
    return elapsed / calls * 1e6


def as_rows(timings: Sequence[Timing]) -> list[dict[str, Any]]:
    """The timings for a result file."""
    return [asdict(timing) for timing in timings]


class _Clock:
    """Times calls one by one, with a cold second-level cache on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flush = None
        if device.type == "cuda":
            self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)

    def samples(
        self, candidates: dict[str, Callable[[], object]], rounds: int
    ) -> dict[str, list[float]]:
        """Seconds of every call, candidates in turn, after each has run twice."""
        for run in candidates.values():
            run()
            run()
        times: dict[str, list[float]] = {name: [] for name in candidates}
        for name in alternating_order(list(candidates), rounds):
            times[name].append(self._seconds(candidates[name]))
        return times

    def _seconds(self, run: Callable[[], object]) -> float:
        if self._flush is None:
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        self._flush.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def _timing(case: Case, name: str, times: Sequence[float], copy_rate: float) -> Timing:
    found = estimate_median(times)
    rate = case.num_bytes / found.median
    return Timing(
        case=case.name,
        candidate=name,
        median_ms=found.median * 1e3,
        low_ms=found.low * 1e3,
        high_ms=found.high * 1e3,
        gb_per_s=rate / 1e9,
        percent_of_copy=100.0 * rate / copy_rate,
        target_percent=100.0 * case.target if name == OURS and case.target else None,
    )


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _cases(device: torch.device, shapes: Sequence[tuple[int, ...]]) -> Iterator[Case]:
    """One at a time, so that only one case's tensors are alive."""
    numel = sum(math.prod(shape) for shape in shapes)
    yield _copy_case(device, numel)
    bf16, fp32 = torch.bfloat16, torch.float32
    for source, flat, accumulate in (
        (bf16, bf16, False),
        (bf16, fp32, False),
        (fp32, bf16, False),
        (bf16, fp32, True),
    ):
        yield _pack_case(device, shapes, (source, flat), accumulate=accumulate)
    yield _unpack_case(device, shapes, bf16)
    for world, part, accumulate in ((2, bf16, False), (8, bf16, False), (8, bf16, True)):
        yield _reduce_case(device, world, numel // 8 * 8 // world, part, accumulate=accumulate)
    yield from gpu_casts.cases(device, numel)
    yield from gpu_messages.cases(device, shapes, numel)
    yield from gpu_optimizers.cases(device, shapes, numel)


def _copy_case(device: torch.device, numel: int) -> Case:
    source = torch.randn(numel, device=device)
    destination = torch.empty_like(source)
    return Case(
        name=COPY,
        num_bytes=2 * numel * source.element_size(),
        candidates={COPY: lambda: destination.copy_(source)},
        agrees=lambda: torch.equal(destination.copy_(source), source),
    )


def _block(
    device: torch.device, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype
) -> tuple[list[torch.Tensor], list[int], int]:
    tensors = [torch.randn(shape, device=device, dtype=dtype) for shape in shapes]
    return tensors, *offsets_of(tensors)


def _views(
    flat: torch.Tensor, tensors: Sequence[torch.Tensor], offsets: Sequence[int]
) -> list[torch.Tensor]:
    return [
        flat[offset : offset + tensor.numel()].view_as(tensor)
        for tensor, offset in zip(tensors, offsets, strict=True)
    ]


def _pack_case(
    device: torch.device,
    shapes: Sequence[tuple[int, ...]],
    dtypes: tuple[torch.dtype, torch.dtype],
    *,
    accumulate: bool,
) -> Case:
    source_dtype, flat_dtype = dtypes
    tensors, offsets, end = _block(device, shapes, source_dtype)
    flat = torch.zeros(end, device=device, dtype=flat_dtype)
    views = _views(flat, tensors, offsets)
    candidates: dict[str, Callable[[], object]] = {
        OURS: lambda: pack_(flat, tensors, offsets, accumulate=accumulate)
    }
    if accumulate:
        candidates["_foreach_add_"] = lambda: torch._foreach_add_(views, tensors)
    else:
        candidates["_foreach_copy_"] = lambda: torch._foreach_copy_(views, tensors)
        if source_dtype is flat_dtype and end == sum(tensor.numel() for tensor in tensors):
            candidates["torch.cat"] = lambda: torch.cat([t.view(-1) for t in tensors], out=flat)
        if flat_dtype in {source_dtype, torch.float32}:
            chunks = torch.empty(1, sum(t.numel() for t in tensors), device=device).to(flat_dtype)
            flats = [tensor.view(1, -1) for tensor in tensors]
            candidates["_chunk_cat"] = lambda: _chunk_cat(flats, chunks)

    def agrees() -> bool:
        flat.fill_(0.5 if accumulate else 0.0)
        pack_(flat, tensors, offsets, accumulate=accumulate)
        start = 0.5 if accumulate else 0.0
        return all(
            torch.equal(view, (tensor.float() + start).to(flat_dtype))
            for view, tensor in zip(views, tensors, strict=True)
        )

    numel = sum(tensor.numel() for tensor in tensors)
    per_element = source_dtype.itemsize + flat_dtype.itemsize * (2 if accumulate else 1)
    name = f"pack {_short(source_dtype)} -> {_short(flat_dtype)}"
    name += " accumulate" if accumulate else ""
    target = registry.target_share("pack_")
    return Case(name, numel * per_element, candidates, agrees, target)


def _chunk_cat(flats: list[torch.Tensor], out: torch.Tensor) -> object:
    return torch._chunk_cat(flats, dim=1, num_chunks=1, out=out.view(1, 1, -1))


def _unpack_case(
    device: torch.device, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype
) -> Case:
    tensors, offsets, end = _block(device, shapes, dtype)
    flat = torch.randn(end, device=device, dtype=dtype)
    views = _views(flat, tensors, offsets)

    def agrees() -> bool:
        unpack_(tensors, flat, offsets)
        return all(map(torch.equal, tensors, views))

    return Case(
        name=f"unpack {_short(dtype)} -> {_short(dtype)}",
        num_bytes=2 * dtype.itemsize * sum(tensor.numel() for tensor in tensors),
        candidates={
            OURS: lambda: unpack_(tensors, flat, offsets),
            "_foreach_copy_": lambda: torch._foreach_copy_(tensors, views),
        },
        agrees=agrees,
        target=registry.target_share("unpack_"),
    )


def _reduce_case(
    device: torch.device, world: int, shard: int, dtype: torch.dtype, *, accumulate: bool
) -> Case:
    parts = torch.randn(world, shard, device=device).to(dtype)
    out = torch.zeros(shard, device=device)
    candidates: dict[str, Callable[[], object]] = {
        OURS: lambda: reduce_(out, parts, accumulate=accumulate)
    }
    if accumulate:
        candidates["torch.sum, add_"] = lambda: out.add_(parts.sum(0, dtype=torch.float32))
    else:
        candidates["torch.sum"] = lambda: torch.sum(parts, 0, dtype=torch.float32, out=out)

    def agrees() -> bool:
        out.zero_()
        reduce_(out, parts, accumulate=accumulate)
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        return torch.equal(out, total)

    per_element = world * dtype.itemsize + out.element_size() * (2 if accumulate else 1)
    name = f"reduce world {world} {_short(dtype)} -> fp32" + (" accumulate" if accumulate else "")
    target = registry.target_share("reduce_")
    return Case(name, shard * per_element, candidates, agrees, target)


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
