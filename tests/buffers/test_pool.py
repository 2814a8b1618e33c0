"""Tests of flat buffers and of the pool: views, exact byte counts, and views that outlive their
storage.
"""

import pytest
import torch

from sidestream.buffers import BufferPool, FlatBuffer, Grid, Placement, cut, flat_layout

CPU = torch.device("cpu")


def test_views_and_shards_alias_the_flat_tensor() -> None:
    layout = flat_layout([(3, 4), (5,), (0, 2)], 2)
    flat = FlatBuffer(torch.arange(float(layout.numel)), layout)
    first, second, empty = flat.views()
    assert torch.equal(first, torch.arange(12.0).view(3, 4))
    assert torch.equal(second, torch.arange(128.0, 133.0)) and empty.shape == (0, 2)
    shards = cut(flat.data, 2)
    shards[1].zero_()
    assert second.eq(0).all() and not first.eq(0).all()
    start, stop = Grid((2,), (1,)).span(layout.numel, (Placement.SHARD,))
    assert flat.data[start:stop].data_ptr() == shards[1].data_ptr()


def test_counts_bytes_and_the_peak() -> None:
    pool = BufferPool(CPU)
    first = pool.lease(100, torch.float32)
    second = pool.lease(10, torch.bfloat16)
    assert pool.live_bytes == pool.peak_bytes == 420
    pool.release(first)
    assert pool.live_bytes == 420, "kept for the next lease of this size"
    pool.trim()
    assert (pool.live_bytes, pool.peak_bytes) == (20, 420)
    pool.reset_peak()
    pool.release(second)
    pool.trim()
    assert (pool.live_bytes, pool.peak_bytes) == (0, 20)


def test_released_memory_is_reused_for_its_size_and_freed_for_another() -> None:
    pool = BufferPool(CPU)
    first = pool.lease(8, torch.float32)
    pool.release(first)
    assert pool.lease(8, torch.float32) is first
    pool.release(first)
    other = pool.lease(8, torch.bfloat16)
    assert other is not first and pool.live_bytes == 16
    assert first.untyped_storage().nbytes() == 0, "memory of another size is not kept"


def test_trimmed_buffers_come_back_with_their_views_and_with_memory() -> None:
    pool = BufferPool(CPU)
    made = []

    def halves(tensor: torch.Tensor) -> list[torch.Tensor]:
        made.append(tensor)
        return [tensor[:4], tensor[4:]]

    first = pool.lease(8, torch.float32)
    views = pool.views(first, "halves", halves)
    pool.release(first)
    pool.trim()
    assert pool.live_bytes == 0
    again = pool.lease(8, torch.float32)
    assert again is first and pool.live_bytes == 32
    again.copy_(torch.arange(8.0))
    assert pool.views(again, "halves", halves) is views and len(made) == 1
    assert views[1].tolist() == [4, 5, 6, 7]
    second = pool.lease(8, torch.float32)
    assert pool.views(second, "halves", halves) is not views


def test_what_is_forgotten_does_not_count_and_never_comes_back() -> None:
    pool = BufferPool(CPU)
    made = pool.allocate(8, torch.float32)
    assert pool.live_bytes == 32
    pool.forget(made)
    assert (pool.live_bytes, pool.peak_bytes) == (0, 32)
    assert made.untyped_storage().nbytes() == 32, "whoever holds it may read it"
    assert pool.lease(8, torch.float32) is not made
    with pytest.raises(RuntimeError, match="forget: expected a tensor leased from this pool"):
        pool.forget(made)


def test_release_twice_is_refused() -> None:
    pool = BufferPool(CPU)
    lease = pool.lease(4, torch.float32)
    pool.release(lease)
    with pytest.raises(RuntimeError, match="not on lease"):
        pool.release(lease)


def test_views_survive_shrink_and_grow() -> None:
    pool = BufferPool(CPU)
    flat = pool.lease(8, torch.float32)
    view = flat[2:6]
    version = flat._version
    storage = flat.untyped_storage()
    pool.shrink(storage, 32)
    assert pool.live_bytes == 0 and storage.nbytes() == 0
    pool.grow(storage, 32)
    flat.data.copy_(torch.arange(8.0))
    assert view.tolist() == [2, 3, 4, 5] and pool.live_bytes == 32
    assert flat._version == version, "a refill must not look like a change to autograd"
